"""``record`` reports the sites of real compilations in its context."""

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch.nn as nn
from harness import Net, raises
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import recognize

pytestmark = pytest.mark.codegen_is_slow("captured")

ROWS, WIDTH, FFN = 32, 64, 256


def mlp(act: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, FFN), act or nn.GELU(), nn.Linear(FFN, WIDTH))


def batch(rows: int = ROWS, grad: bool = False) -> Tensor:
    return torch.randn(rows, WIDTH, requires_grad=grad)


def normed() -> nn.Module:
    return Net(lambda s, x: x + s.mlp(s.norm(x)), norm=nn.LayerNorm(WIDTH), mlp=mlp())


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
    assert report.title == "Sequential" and report.policies == (tfo.FusionPolicy(),)
    assert "1 of 1 MLP sites fused" in str(report)
    raises(ValueError, "record keeps no graphs: read torch_fused_ops.explain", getattr, report, "saved")


def test_compilations_outside_of_the_block_are_not_recorded() -> None:
    before, after, x = mlp(), mlp(nn.SiLU()), batch()
    compiled = torch.compile(before, backend="fused")
    compiled(x)
    with tfo.record() as report:
        compiled(x)
    torch.compile(after, backend="fused")(x)
    assert report.sites == () and report.graphs == 0
    assert "No model was compiled with fusion here." in str(report) and "its first call" in str(report)


def test_nested_blocks_record_all_compilations_inside() -> None:
    with tfo.record() as outer:
        torch.compile(mlp(nn.SiLU()), backend="fused")(batch())
        with tfo.record() as inner:
            torch.compile(mlp(), backend="fused")(batch())
    assert operators(inner) == GELU
    assert operators(outer) == [("fused::bias_act", "silu"), *GELU]
    assert (inner.graphs, outer.graphs) == (1, 2)


def test_strict_raises_and_the_site_is_recorded() -> None:
    options = {"policy": tfo.FusionPolicy(strict=True)}
    with pytest.raises(BackendCompilerFailed, match="strict=True") as error, tfo.record() as report:
        torch.compile(mlp(nn.Tanhshrink()), backend="fused", options=options)(batch())
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
