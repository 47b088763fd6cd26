"""``record``: real compilations report what pick-up did, in this context only, and what it saves."""

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


# ---- what is recorded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["backend", "options", "enable", "enabled"])
def test_every_way_of_compiling(way: str) -> None:
    model, x = mlp(), batch()
    settings = {"backend": {"backend": "fused"}, "options": {"options": tfo.compile_options()}}.get(way, {})
    with tfo.record() as report, tfo.enabled() if way == "enabled" else contextlib.nullcontext():
        if way == "enable":
            tfo.enable()
        torch.compile(model, **settings)(x).sum().backward()
    assert operators(report) == GELU and report.graphs == 1
    assert report.title == "Sequential"
    assert "1 of 1 MLP sites fused" in str(report)


def test_what_is_compiled_before_and_after_the_block_is_not_in_it() -> None:
    before, after, x = mlp(), mlp(nn.SiLU()), batch()
    compiled = torch.compile(before, backend="fused")
    compiled(x)
    with tfo.record() as report:
        compiled(x)
    torch.compile(after, backend="fused")(x)
    assert report.sites == () and report.graphs == 0
    assert "Nothing was compiled." in str(report) and "first call" in str(report)


def test_a_block_without_pick_up_says_so() -> None:
    with tfo.record() as report:
        torch.compile(mlp(), backend="eager")(batch())
    assert report.graphs == 0
    assert "No model was compiled with fusion" in str(report) and "Dynamo captured 1 graph:" in str(report)


def test_nested_blocks_each_get_everything_inside() -> None:
    with tfo.record() as outer:
        torch.compile(mlp(nn.SiLU()), backend="fused")(batch())
        with tfo.record() as inner:
            torch.compile(mlp(), backend="fused")(batch())
    assert operators(inner) == GELU
    assert operators(outer) == [("fused::bias_act", "silu"), *GELU]
    assert (inner.graphs, outer.graphs) == (1, 2)


def test_an_exception_propagates_and_the_report_keeps_what_it_saw() -> None:
    with pytest.raises(KeyError, match="mine"), tfo.record(figures=True) as report:
        torch.compile(mlp(), backend="fused")(batch())
        raise KeyError("mine")
    assert operators(report) == GELU


def test_strict_raises_and_the_refusal_is_recorded() -> None:
    options = {"policy": tfo.FusionPolicy(strict=True)}
    with pytest.raises(BackendCompilerFailed, match="strict=True") as error, tfo.record() as report:
        torch.compile(mlp(nn.Mish()), backend="fused", options=options)(batch())
    assert isinstance(error.value.inner_exception, tfo.UnfusedError)
    assert operators(report) == [(None, None)]


def test_patterns_that_match_no_site_are_noted() -> None:
    """Of each policy by itself, once; what another graph of the same policy has is matched."""
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


def test_sites_and_what_is_saved_are_in_torchs_structured_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_TRACE and tlparse read what a handler of this logger is given."""

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


def test_two_threads_do_not_mix() -> None:
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
    with tfo.record() as mine:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert operators(reports["gelu"]) == GELU and operators(reports["silu"]) == [("fused::bias_act", "silu")]
    assert mine.sites == ()


@pytest.mark.slow
@pytest.mark.codegen_is_slow(False)
def test_code_out_of_the_caches_is_recorded() -> None:
    model, x, hits, found = mlp(nn.Tanh()), batch(ROWS + 1), [], []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with tfo.record() as report:
            torch.compile(model, backend="fused")(x).sum().backward()
        found.append(operators(report))
        hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1], "the second compilation comes out of AOTAutograd's cache"
    assert found == [[("fused::bias_act", "tanh")]] * 2


def test_dynamic_sizes_and_recompilations() -> None:
    compiled = torch.compile(mlp(), backend="fused")
    with tfo.record() as report:
        for rows in (3, 5, 7):
            compiled(batch(rows))
    assert (report.graphs, report.recompilations) == (1, 1), "static, then dynamic, which holds for the third size"
    assert operators(report) == GELU and "(1 graph, recompiled 1 time)" in str(report)


@pytest.mark.slow
def test_layers_that_share_their_code_are_no_recompilation() -> None:
    """Where Dynamo captures each layer by itself, its second one is the first one's code with other parameters."""
    numbered = enumerate((nn.GELU(), nn.GELU(), nn.SiLU()))  # a number makes each instance's code another
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


def test_an_attempt_that_dynamo_gives_up_is_not_counted() -> None:
    with tfo.record() as report:
        torch.compile(normed(), backend="fused", dynamic=True)(batch())  # takes eps for dynamic first
    assert report.graphs == 1 and operators(report) == GELU


# ---- figures ---------------------------------------------------------------------------------------------------------

triton = pytest.importorskip("triton", reason="figures need Triton")


def by_hand() -> tuple[int, int]:
    """Bytes that the GELU MLP keeps: the input, what the activation reads, and, before, what it gives."""
    x, h = ROWS * WIDTH * FLOAT, ROWS * FFN * FLOAT
    return x + 2 * h, x + h


def test_saved_bytes_are_those_by_hand() -> None:
    with tfo.record(figures=True) as report:
        torch.compile(mlp(), backend="fused")(batch(grad=True)).sum().backward()
    found = report.figures
    assert found is not None, report.figures_missing
    assert (found.before.saved, found.after.saved) == by_hand()
    assert found.training and found.target == "NVIDIA H200" and found.skipped == ()
    assert str(found) == repr(found) and str(found) in str(report) and "saved for backward" in str(found)
    assert report.measure() is found, "they are kept"
    for nonsense in ("H300", 3):
        raises(ValueError, f"gpu={nonsense!r} is not known; accepted: A100", report.measure, nonsense)
    other = report.measure("A100")
    assert other is not None and other.target.startswith("NVIDIA A100")


@pytest.mark.slow
def test_float8_is_counted_where_the_gpu_has_it() -> None:
    """The model is nowhere; what is asked of its device is asked of the GPU that figures are for."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).bfloat16(), torch.empty(128, 128)
    given = x.bfloat16().requires_grad_()
    report, plain = (tfo.explain(model, given, policy=tfo.FusionPolicy(gemm=gemm)) for gemm in ("fp8", "bf16"))
    assert report.sites[0].gemm == "fp8"
    without, measured = report.measure("A100"), report.measure("H200")
    assert without.after == plain.measure("A100").after and "sm_80" in "".join(without.notes)
    assert measured.after != plain.measure("H200").after and "not measured" in "".join(measured.notes)
    assert all(note in str(figures) for figures in (without, measured) for note in figures.notes)
    assert plain.measure("H200").notes == ()


@pytest.mark.slow
def test_explain_measures_the_same() -> None:
    model, x = mlp(), batch(grad=True)
    report = tfo.explain(model, x)
    assert report.figures is None and "torch.compile" not in str(report)
    found = report.measure()
    assert found is not None, report.figures_missing
    assert (found.before.saved, found.after.saved) == by_hand()
    off = tfo.explain(model, x, policy=tfo.FusionPolicy(memory="off")).measure()
    assert off is not None and off.after.saved == off.before.saved == found.before.saved


def test_enabled_pick_up_is_not_in_the_figures_before() -> None:
    tfo.enable()
    with tfo.record(figures=True) as report:
        torch.compile(mlp())(batch(grad=True))
    assert report.figures is not None and (report.figures.before.saved, report.figures.after.saved) == by_hand()
    assert report.graphs == 1, "measuring is not recorded"


def test_inference_has_bytes_and_kernels_by_hand_and_nothing_saved() -> None:
    with torch.no_grad(), tfo.record(figures=True) as report:
        torch.compile(mlp(bias=False), backend="fused")(batch())
    found = report.figures
    assert found is not None, report.figures_missing
    x, h, weight = ROWS * WIDTH, ROWS * FFN, WIDTH * FFN
    gemms = 2 * (x + weight + h)
    for cost in (found.before, found.after):
        assert (cost.forward_bytes, cost.forward_kernels) == ((gemms + 2 * h) * FLOAT, 3)
        assert (cost.saved, cost.backward_bytes, cost.backward_kernels) == (0, 0, 0)
    assert not found.training and "saved for backward" not in str(report) and "backward" not in str(report)


@pytest.mark.slow
def test_layers_add_up_and_each_has_its_bar(tmp_path: Path) -> None:
    report = tfo.explain(stack(2), batch(grad=True))
    found = report.measure()
    assert found is not None, report.figures_missing
    layers = {layer.name: layer for layer in found.layers}
    assert {"layers.0", "layers.1", "end"} <= set(layers)
    for name in ("layers.0", "layers.1"):
        h = ROWS * FFN * FLOAT
        assert layers[name].before.saved - layers[name].after.saved >= h, "the activation's value is kept no more"
        assert layers[name].before.forward_kernels >= 4  # two GEMMs, a norm, an activation
    whole = report.to_html(tmp_path / "report.html").read_text(encoding="utf-8")
    saved = sum(bool(layer.before.saved or layer.after.saved) for layer in found.layers)
    moved = sum(bool(layer.before.bytes_moved or layer.after.bytes_moved) for layer in found.layers)
    assert whole.count('<li title="') == saved + moved
    for name in ("layers.0", "layers.1"):
        assert whole.count(f'<span class="name">{name}</span>') == 2
    figures = json.loads(report.to_json())["figures"]
    for side in ("before", "after"):
        for key, value in figures[side].items():
            assert value == sum(layer[side][key] for layer in figures["layers"])


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
def test_which_layer_a_module_is_in(path: str, layer: str) -> None:
    others = ["model.layers.3.mlp.up", "mlp.0", "mlp.1"]
    assert layers_of([path, *others])[path] == layer


def test_a_failure_in_measuring_loses_no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
def test_a_graph_that_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_once = [RuntimeError("not this one"), mock.DEFAULT, mock.DEFAULT]
    monkeypatch.setattr(figures_module, "on_paper", mock.Mock(wraps=figures_module.on_paper, side_effect=fails_once))
    with tfo.record(figures=True) as report:
        for _ in range(2):
            torch.compile(mlp(), backend="fused")(batch(grad=True))
            torch._dynamo.reset()
    assert report.figures is not None and report.figures.skipped == ("RuntimeError: not this one",)
    assert (report.figures.before.saved, report.figures.after.saved) == by_hand()
    assert "a graph is missing from the figures: RuntimeError: not this one" in str(report)


def test_without_triton_it_says_what_to_get(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    report = tfo.explain(mlp(), batch())
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING, "torch_fused_ops"):
        assert report.measure() is None and "pip install" in str(report)
    assert [r.getMessage() for r in caplog.records] == [f"figures are not available: {report.figures_missing}"]
    assert operators(report) == GELU


def test_compilations_go_on_as_before_after_measuring() -> None:
    model, x = mlp(), batch(grad=True)
    with tfo.record(figures=True):
        compiled = torch.compile(model, backend="fused")
        first = compiled(x)
    assert torch.equal(compiled(x), first)
    fresh = torch.compile(mlp(nn.SiLU()), backend="fused")(x)
    assert fresh.device.type == "cpu"
