"""``record`` reports the sites and figures of real compilations in its context."""

import contextlib
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness import Net, Stack, raises
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.reports import figures as figures_module
from torch_fused_ops.reports.figures import layers_of

pytestmark = pytest.mark.codegen_is_slow

ROWS, WIDTH, FFN = 32, 64, 256
FLOAT = 4


def mlp(act: nn.Module | None = None, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, FFN, bias), act or nn.GELU(), nn.Linear(FFN, WIDTH, bias))


def batch(rows: int = ROWS, grad: bool = False) -> Tensor:
    return torch.randn(rows, WIDTH, requires_grad=grad)


def normed() -> nn.Module:
    return Net(lambda s, x: x + s.mlp(s.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=mlp())


def stack(layers: int) -> nn.Module:
    return Stack((normed() for _ in range(layers)), end=nn.Linear(WIDTH, 8))


def operators(report: tfo.Report) -> list[tuple[str | None, str | None]]:
    return [(site.op, site.activation) for site in report.sites]


GELU = [("fused::bias_act", "gelu")]


# ---- sites -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry_point", ["backend", "options", "enable", "enabled"])
def test_every_entry_point_is_recorded(entry_point: str) -> None:
    model, x = mlp(), batch()
    settings = {"backend": {"backend": "fused"}, "options": {"options": tfo.compile_options()}}.get(entry_point, {})
    with tfo.record() as report, tfo.enabled() if entry_point == "enabled" else contextlib.nullcontext():
        if entry_point == "enable":
            tfo.enable()
        torch.compile(model, **settings)(x).sum().backward()
    assert operators(report) == GELU and report.graphs == 1
    assert report.title == "Sequential"
    assert "1 of 1 MLP sites fused" in str(report)


def test_compilations_outside_of_the_block_are_not_recorded() -> None:
    before, after, x = mlp(), mlp(nn.SiLU()), batch()
    compiled = torch.compile(before, backend="fused")
    compiled(x)
    with tfo.record() as report:
        compiled(x)
    torch.compile(after, backend="fused")(x)
    assert report.sites == () and report.graphs == 0
    assert "Nothing was compiled." in str(report) and "first call" in str(report)


def test_compilations_without_fusion_are_noted() -> None:
    with tfo.record() as report:
        torch.compile(mlp(), backend="eager")(batch())
    assert report.graphs == 0
    assert "No model was compiled with fusion" in str(report) and "Dynamo captured 1 graph:" in str(report)


def test_nested_blocks_record_all_compilations_inside() -> None:
    with tfo.record() as outer:
        torch.compile(mlp(nn.SiLU()), backend="fused")(batch())
        with tfo.record() as inner:
            torch.compile(mlp(), backend="fused")(batch())
    assert operators(inner) == GELU
    assert operators(outer) == [("fused::bias_act", "silu"), *GELU]
    assert (inner.graphs, outer.graphs) == (1, 2)


def test_reports_survive_exceptions() -> None:
    with pytest.raises(KeyError, match="mine"), tfo.record(figures=True) as report:
        torch.compile(mlp(), backend="fused")(batch())
        raise KeyError("mine")
    assert operators(report) == GELU


def test_strict_raises_and_the_site_is_recorded() -> None:
    options = {"policy": tfo.FusionPolicy(strict=True)}
    with pytest.raises(BackendCompilerFailed, match="strict=True") as error, tfo.record() as report:
        torch.compile(mlp(nn.Mish()), backend="fused", options=options)(batch())
    assert isinstance(error.value.inner_exception, tfo.UnfusedError)
    assert operators(report) == [(None, None)]


def test_patterns_that_match_no_site_are_noted_once_per_policy() -> None:
    """A pattern counts as matched if any graph with the same policy has such a site."""
    policies = [tfo.FusionPolicy(memory={"1": "fp8", "typo": "input"}), tfo.FusionPolicy(exclude=("3.*",))]
    with tfo.record() as report:
        for policy in policies:
            model = nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH))
            torch.compile(model, backend="fused", options={"policy": policy})(batch())
        torch.compile(nn.Sequential(nn.Identity(), mlp()), backend="fused", options={"policy": policies[0]})(batch())
    assert [note.partition(";")[0] for note in report.notes] == [
        "memory='typo' matches no site's modules",
        "exclude='3.*' matches no site's modules",
    ]


def test_sites_and_saved_tensors_are_in_torchs_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_TRACE and tlparse read the records of this logger."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            metadata: dict[str, Any] = record.metadata  # type: ignore[attr-defined]
            name = metadata.get("artifact", {}).get("name", "")
            if name.startswith("torch_fused_ops"):
                assert metadata["artifact"]["encoding"] == "json" and metadata["frame_id"] is not None
                traced[name] = json.loads(record.payload)  # type: ignore[attr-defined]

    traced: dict[str, Any] = {}
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [Handler()])
    options = {"exclude": ("1.*",), "memory": "free"}
    model = nn.Sequential(mlp(), mlp())
    torch.compile(model, backend="fused", options=options)(batch(grad=True)).sum().backward()
    sites = traced["torch_fused_ops_sites"]
    assert sites["policy"] == repr(tfo.FusionPolicy(exclude=("1.*",)))
    fields = [(site["module"], site["op"], site["activation"], site["kind"], site["memory"]) for site in sites["sites"]]
    assert fields == [("0", "fused::bias_act", "gelu", None, "free"), ("1", None, None, "EXCLUDED", "")]
    saved = traced["torch_fused_ops_saved"]
    assert saved["bytes"] == sum(tensor["bytes"] for tensor in saved["tensors"]) > 0
    assert {"node", "module", "dtype", "shape", "bytes"} == set(saved["tensors"][0])
    assert {tensor["module"].partition(".")[0] for tensor in saved["tensors"]} >= {"0", "1"}
    monkeypatch.setattr(recognize, "rewrite", mock.Mock(side_effect=RuntimeError("no")))
    torch._dynamo.reset()
    torch.compile(mlp(), backend="fused")(batch())
    assert traced["torch_fused_ops_failure"] == {"reason": "pre-grad pass: RuntimeError: no"}


def test_a_failing_pass_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognize, "rewrite", mock.Mock(side_effect=RuntimeError("broken <recognizer>")))
    with tfo.record() as report:
        torch.compile(mlp(), backend="fused")(batch())
    assert report.sites == () and report.graphs == 1
    assert "note: fusion failed on a graph and left it unchanged: pre-grad pass: RuntimeError: broken" in str(report)


def test_threads_record_separately() -> None:
    reports: dict[str, tfo.Report] = {}
    errors: list[BaseException] = []
    barrier = threading.Barrier(2, timeout=60)

    def work(name: str, act: nn.Module) -> None:
        try:
            with tfo.record() as report:
                barrier.wait()
                torch.compile(mlp(act), backend="fused")(batch())
                barrier.wait()
            reports[name] = report
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=args) for args in (("gelu", nn.GELU()), ("silu", nn.SiLU()))]
    with tfo.record() as outer:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert operators(reports["gelu"]) == GELU and operators(reports["silu"]) == [("fused::bias_act", "silu")]
    assert outer.sites == ()


@pytest.mark.slow
@pytest.mark.codegen_is_slow(False)
def test_code_from_caches_is_recorded() -> None:
    model, x, hits, recorded = mlp(nn.Tanh()), batch(ROWS + 1), [], []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with tfo.record() as report:
            torch.compile(model, backend="fused")(x).sum().backward()
        recorded.append(operators(report))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1], "the second compilation hits AOTAutograd's cache"
    assert recorded == [[("fused::bias_act", "tanh")]] * 2


def test_recompilations_add_no_sites() -> None:
    compiled = torch.compile(mlp(), backend="fused")
    with tfo.record() as report:
        for rows in (3, 5, 7):
            compiled(batch(rows))
    assert (report.graphs, report.recompilations) == (1, 1), "the second one is dynamic"
    assert operators(report) == GELU and "(1 graph, recompiled 1 time)" in str(report)


@pytest.mark.slow
def test_layers_that_share_their_code_are_not_recompilations() -> None:
    """If Dynamo captures each layer alone, the layers have the same code with other parameters."""
    numbered = enumerate((nn.GELU(), nn.GELU(), nn.SiLU()))  # the number makes Dynamo recompile for each layer
    layers = nn.ModuleList(Net(lambda s, x: s.mlp(x) + s.number, mlp=mlp(act), number=i) for i, act in numbered)

    def model(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x

    with tfo.record() as report:
        for rows in (3, 5):
            torch.compile(model, backend="fused")(batch(rows))
    assert (report.graphs, report.recompilations) == (3, 3)
    assert [site.activation for site in report.sites] == ["gelu", "gelu", "silu"]


def test_restarted_attempts_are_not_counted() -> None:
    with tfo.record() as report:
        torch.compile(normed(), backend="fused", dynamic=True)(batch())  # Dynamo first treats eps as dynamic
    assert report.graphs == 1 and operators(report) == GELU


# ---- figures ---------------------------------------------------------------------------------------------------------

triton = pytest.importorskip("triton", reason="figures need Triton")


def by_hand() -> tuple[int, int]:
    """Return the bytes that a GELU MLP saves without and with fusion: input, preactivation, activation."""
    x, h = ROWS * WIDTH * FLOAT, ROWS * FFN * FLOAT
    return x + 2 * h, x + h


def test_saved_bytes_match_figures_by_hand() -> None:
    with tfo.record(figures=True) as report:
        torch.compile(mlp(), backend="fused")(batch(grad=True)).sum().backward()
    figures = report.figures
    assert figures is not None, report.figures_missing
    assert (figures.before.saved, figures.after.saved) == by_hand()
    assert figures.training and figures.target == "NVIDIA H200" and figures.skipped == ()
    assert str(figures) == repr(figures) and str(figures) in str(report) and "saved for backward" in str(figures)
    assert report.measure() is figures, "the figures are cached"
    for nonsense in ("H300", 3):
        raises(ValueError, f"gpu={nonsense!r} is not known; accepted: A100", report.measure, nonsense)
    other = report.measure("A100")
    assert other is not None and other.target.startswith("NVIDIA A100")


@pytest.mark.slow
def test_float8_counts_only_on_gpus_that_support_it() -> None:
    """The model is on meta. Checks of its device apply to the GPU of the figures."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16(), torch.empty(128, 128)
    batch_input = x.bfloat16().requires_grad_()
    report, plain = (tfo.explain(model, batch_input, policy=tfo.FusionPolicy(gemm=gemm)) for gemm in ("fp8", "bf16"))
    assert report.sites[0].gemm == "fp8"
    without, measured = report.measure("A100"), report.measure("H200")
    assert without.after == plain.measure("A100").after and "sm_80" in "".join(without.notes)
    assert measured.after != plain.measure("H200").after and measured.notes == ()
    assert all(note in str(without) for note in without.notes)


@pytest.mark.slow
def test_explain_and_record_measure_the_same() -> None:
    model, x = mlp(), batch(grad=True)
    report = tfo.explain(model, x)
    assert report.figures is None and "torch.compile" not in str(report)
    figures = report.measure()
    assert figures is not None, report.figures_missing
    assert (figures.before.saved, figures.after.saved) == by_hand()
    off = tfo.explain(model, x, policy=tfo.FusionPolicy(memory="off")).measure()
    assert off is not None and off.after.saved == off.before.saved == figures.before.saved


def test_figures_before_fusion_ignore_enable() -> None:
    tfo.enable()
    with tfo.record(figures=True) as report:
        torch.compile(mlp())(batch(grad=True))
    assert report.figures is not None and (report.figures.before.saved, report.figures.after.saved) == by_hand()
    assert report.graphs == 1, "measuring is not recorded"


def test_inference_saves_no_bytes() -> None:
    with torch.no_grad(), tfo.record(figures=True) as report:
        torch.compile(mlp(bias=False), backend="fused")(batch())
    figures = report.figures
    assert figures is not None, report.figures_missing
    x, h, weight = ROWS * WIDTH, ROWS * FFN, WIDTH * FFN
    gemms = 2 * (x + weight + h)
    for cost in (figures.before, figures.after):
        assert (cost.forward_bytes, cost.forward_kernels) == ((gemms + 2 * h) * FLOAT, 3)
        assert (cost.saved, cost.backward_bytes, cost.backward_kernels) == (0, 0, 0)
    assert not figures.training and "saved for backward" not in str(report) and "backward" not in str(report)


@pytest.mark.slow
def test_layers_add_up_and_have_bars(tmp_path: Path) -> None:
    report = tfo.explain(stack(2), batch(grad=True))
    figures = report.measure()
    assert figures is not None, report.figures_missing
    layers = {layer.name: layer for layer in figures.layers}
    assert {"layers.0", "layers.1", "end"} <= set(layers)
    for name in ("layers.0", "layers.1"):
        h = ROWS * FFN * FLOAT
        assert layers[name].before.saved - layers[name].after.saved >= h, "the activation is not saved"
        assert layers[name].before.forward_kernels >= 4  # two GEMMs, a norm, an activation
    page = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    saved = sum(bool(layer.before.saved or layer.after.saved) for layer in figures.layers)
    moving = sum(bool(layer.before.bytes_moved or layer.after.bytes_moved) for layer in figures.layers)
    assert page.count('<li title="') == saved + moving
    for name in ("layers.0", "layers.1"):
        assert page.count(f'<span class="name">{name}</span>') == 2
    parsed = json.loads(report.to_json())["figures"]
    for side in ("before", "after"):
        for key, value in parsed[side].items():
            assert value == sum(layer[side][key] for layer in parsed["layers"])


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("model.layers.3", "model.layers.3"),
        ("model.norm", "model.norm"),
        ("encoder.norm.inner.weight", "encoder.norm"),
        ("mlp.0", "mlp"),
        ("0", "(other)"),
        ("", "(other)"),
    ],
)
def test_modules_map_to_layers(path: str, layer: str) -> None:
    paths = ["model.layers.3.mlp.up", "mlp.0", "mlp.1"]
    assert layers_of([path, *paths])[path] == layer


def test_a_failure_in_measuring_leaves_the_sites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails = mock.Mock(side_effect=RuntimeError("no <paper> left\nand pages of advice"))
    monkeypatch.setattr(figures_module, "on_paper", fails)
    with tfo.record(figures=True) as report:
        torch.compile(mlp(), backend="fused")(batch())
    assert operators(report) == GELU and report.figures is None
    assert str(report).endswith("figures are not available: RuntimeError: no <paper> left")
    assert json.loads(report.to_json())["figures"] is None
    page = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    assert "no &lt;paper&gt; left" in page and "<paper>" not in page


@pytest.mark.slow
def test_graphs_that_cannot_be_measured_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_once = [RuntimeError("not this one"), mock.DEFAULT, mock.DEFAULT]
    monkeypatch.setattr(figures_module, "on_paper", mock.Mock(wraps=figures_module.on_paper, side_effect=fails_once))
    with tfo.record(figures=True) as report:
        for _ in range(2):
            torch.compile(mlp(), backend="fused")(batch(grad=True))
            torch._dynamo.reset()
    assert report.figures is not None and report.figures.skipped == ("RuntimeError: not this one",)
    assert (report.figures.before.saved, report.figures.after.saved) == by_hand()
    assert "a graph is missing from the figures: RuntimeError: not this one" in str(report)


def test_measuring_without_triton_names_the_install_command(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    report = tfo.explain(mlp(), batch())
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "torch_fused_ops"):
        assert report.measure() is None and "pip install" in str(report)
    assert [r.getMessage() for r in caplog.records] == [f"figures are not available: {report.figures_missing}"]
    assert operators(report) == GELU


def test_measuring_does_not_affect_compilations() -> None:
    model, x = mlp(), batch(grad=True)
    with tfo.record(figures=True):
        compiled = torch.compile(model, backend="fused")
        first = compiled(x)
    assert torch.equal(compiled(x), first)
    fresh = torch.compile(mlp(nn.SiLU()), backend="fused")(x)
    assert fresh.device.type == "cpu"
