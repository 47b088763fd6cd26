"""``tfo.verify`` on correct and faulty models, with rounding, random numbers and errors."""

import copy
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, raises
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings import partition
from torch_fused_ops.tools import verify
from torch_fused_ops.tools.verify import _distance


def mlp(s: Any, x: Tensor) -> Tensor:
    return x + s.dropout(s.down(F.gelu(s.up(s.norm(x)))))  # type: ignore[no-any-return]


def MLP(body: Callable[..., Any] = mlp, dropout: float = 0.0, **modules: Any) -> Any:
    members = {"up": nn.Linear(16, 64), "down": nn.Linear(64, 16), "dropout": nn.Dropout(dropout)}
    return Net(body, **members, norm=nn.BatchNorm1d(16), **modules)


def decayed(s: Any, x: Tensor) -> Tensor:
    s.b.mul_(0.5)
    return torch.tanh(x * s.b * s.w)


def Pointwise(body: Callable[..., Any] = decayed) -> nn.Module:
    """Return a model for which plain torch.compile computes wrong gradients."""
    return Net(body, w=nn.Parameter(torch.rand(16)), b=torch.rand(16))


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@functools.cache
def verified(dtype: torch.dtype, level: str) -> tuple[Any, list[Any]]:
    """Return a verification, and its steps: eager, eager in float64, plain, fused, and the last two in float64."""
    steps: list[Any] = []
    run_step = verify._step

    def step(*args: Any, **kwargs: Any) -> Any:
        steps.append(run_step(*args, **kwargs))
        return steps[-1]

    with mock.patch.object(verify, "_step", step):
        return tfo.verify(MLP().to(dtype), x_of(8, 16).to(dtype), policy=FusionPolicy(memory=level)), steps


BY_DEFAULT = (torch.bfloat16, "fp8")
CASES = itertools.product([torch.float32, torch.bfloat16], ["off", "free", "fp8", "input"])


@pytest.mark.parametrize(
    ("dtype", "level"), [pytest.param(*case, marks=() if case == BY_DEFAULT else pytest.mark.slow) for case in CASES]
)
def test_correct_models_are_ok(dtype: torch.dtype, level: str) -> None:
    result, _ = verified(dtype, level)
    assert result.ok, str(result)
    assert result.summary == "1 of 1 MLP sites fused (1 graph)" and not result.failures
    assert result.dtypes == (str(dtype).removeprefix("torch."), "float64")
    names = {(row.kind, row.name) for row in result.comparisons}
    assert {("gradient", "up.weight"), ("buffer", "norm.running_mean"), ("output", "0"), ("loss", "")} <= names
    assert re.search(
        r"ok: nothing differs .*\n  allowed in \S+, .*: output .*\n  allowed in float64, .*gradient \S+e-", str(result)
    )
    assert result.summary in str(result)


def test_fp8_rounds_gradients_in_the_models_dtype_only() -> None:
    result, _ = verified(torch.bfloat16, "fp8")
    by = {(row.kind, row.name, row.dtype): row for row in result.comparisons}
    assert 1e-2 < by["gradient", "up.weight", "bfloat16"].fused < 0.1
    assert by["gradient", "up.weight", "float64"].fused < 1e-12
    assert by["output", "0", "bfloat16"].allowed < 0.02


@functools.cache
def pointwise() -> Any:
    return tfo.verify(Pointwise(), x_of(8, 16))


def test_faults_of_plain_are_reported() -> None:
    result = pointwise()
    assert result.ok and not result.differences
    assert [row.name for row in result.comparisons if not row.plain_ok] == ["w", "w"]
    assert "plain torch.compile differs, fused does not" in str(result)


def test_a_derivative_off_by_a_thousandth_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale_derivative(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = divide(gm, *args, **kwargs)
        (node,) = graphs[1].graph.find_nodes(op="call_function", target=torch.ops.fused.bias_act_backward.default)
        with graphs[1].graph.inserting_before(node):
            scaled = graphs[1].graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 1.001))
        scaled.meta = dict(node.args[0].meta)
        node.replace_input_with(node.args[0], scaled)
        graphs[1].recompile()
        return graphs

    divide = partition.partition_like_pytorch
    monkeypatch.setattr(partition, "partition_like_pytorch", scale_derivative)
    result = tfo.verify(MLP(), x_of(8, 16))
    assert not result.ok and {row.name for row in result.differences} >= {"up.weight", "up.bias"}
    assert all(row.plain_ok for row in result.differences)
    assert "plain torch.compile does not" in str(result)


def faulty(level: str, fault: Callable[[Tensor], Any]) -> Any:
    """Verify an MLP whose fused gradient of up.weight has a fault only in the model's dtype."""
    steps = copy.deepcopy(verified(torch.bfloat16, level)[1])
    fault(steps[3]["gradient", "up.weight"])
    with mock.patch.object(verify, "_step", side_effect=steps):
        return tfo.verify(MLP().bfloat16(), x_of(8, 16).bfloat16(), policy=FusionPolicy(memory=level))


@pytest.mark.parametrize("level, percent", [("free", 1), ("fp8", 20)])
def test_a_fault_in_the_models_dtype_is_reported(level: str, percent: int) -> None:
    result = faulty(level, lambda t: t.mul_(1 + percent / 100))
    (row,) = result.differences
    assert (row.name, row.dtype, row.measure) == ("up.weight", "bfloat16", "norm") and row.plain_ok
    assert "not ok" in str(result)


@pytest.mark.parametrize("level", ["free", "fp8"])
def test_a_doubled_element_is_reported(level: str) -> None:
    def doubled(t: Tensor) -> None:
        t.view(-1)[t.abs().argmax()] *= 2

    (row,) = faulty(level, doubled).differences
    assert (row.name, row.measure) == ("up.weight", "largest element") or level == "free"


def test_verify_leaves_model_gradients_and_random_state_unchanged() -> None:
    model, x = MLP(dropout=0.5), x_of(8, 16).requires_grad_()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with tfo.record() as report:
        result = tfo.verify(model, x)
    assert result.ok, str(result)  # with PyTorch's masks
    assert result.summary.startswith("1 of 1 MLP sites fused, 0 of 1 dropouts")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.up.weight.grad.eq(1).all() and x.grad is None
    assert not report.graphs, "these are not the user's compilations"


def test_a_returned_loss_is_used() -> None:
    def with_loss(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        y = F.silu(x @ w)
        return {"loss": y.mean(), "logits": y}

    w = torch.rand(16, 4, requires_grad=True)
    result = tfo.verify(with_loss, x_of(8, 16), w)
    assert result.ok and result.title == "with_loss"
    assert ("gradient", "argument 1") in {(row.kind, row.name) for row in result.comparisons}


def test_shared_arguments_may_be_modified() -> None:
    def modify(x: Tensor, alias: Tensor) -> Tensor:
        x.add_(1.0)
        return alias * 2.0

    x = torch.zeros(3)
    result = tfo.verify(modify, x, x)
    assert result.ok and x.eq(0).all()
    assert any("no result of the model requires a gradient" in note for note in result.notes)


@pytest.mark.slow
def test_models_without_float64_kernels_use_float32() -> None:
    """Grouped GEMMs, for example, have no float64 kernels."""

    def no_double(s: Any, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("no kernel for Double")
        return mlp(s, x)

    result = tfo.verify(MLP(no_double).bfloat16(), x_of(8, 16).bfloat16())
    assert result.ok and result.dtypes == ("bfloat16", "float32")
    assert any("float64, where eager raises NotImplementedError" in note for note in result.notes)
    result = tfo.verify(MLP(no_double), x_of(8, 16), policy=FusionPolicy(memory="fp8"))
    assert result.ok, str(result)
    assert result.dtypes == ("float32", "float32 unrounded")


@pytest.mark.slow
def test_sparse_gradients_are_compared() -> None:
    embedded = Net(lambda s, i: s.mlp(s.table(i)), table=nn.Embedding(20, 16, sparse=True), mlp=MLP())
    result = tfo.verify(embedded, torch.tensor([1, 7, 7, 3, 0, 19]))
    assert result.ok, str(result)
    assert ("gradient", "table.weight") in {(row.kind, row.name) for row in result.comparisons}


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("expected", [INF, -INF, NAN])
@pytest.mark.parametrize("actual", [INF, -INF, NAN, 1.0])
def test_non_finite_values_must_be_equal(expected: float, actual: float) -> None:
    distance, _ = _distance(torch.tensor([1.0, expected]), torch.tensor([1.0, actual]), True)
    both_nan = expected != expected and actual != actual
    assert distance == (0.0 if expected == actual or both_nan else INF)


def test_a_non_finite_loss_is_not_ok() -> None:
    """The gradients of such a loss cannot be compared. An infinity in an output can."""

    def overflows(x: Tensor, w: Tensor, by: float) -> Tensor:
        y = F.relu(x @ w) / by
        return torch.cat([y, torch.full_like(y, -float("inf")).detach()]) if by else y

    w = torch.rand(16, 4, requires_grad=True)
    result = tfo.verify(overflows, x_of(8, 16), w, 0.0)
    assert not result.ok and "gradients cannot be compared" in result.failures["eager"]


@pytest.mark.slow
def test_pure_rounding_errors_are_ok() -> None:
    """The mean of a norm's result is 0 except for rounding, so every order of summation gives another value."""

    def means(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.layer_norm(mlp(s, x))
        with torch.no_grad():
            s.mean.lerp_(h.mean(-1), 0.1)
        return h, s.layer_norm(h * 1e-4).mean()

    result = tfo.verify(MLP(means, layer_norm=nn.LayerNorm(16), mean=torch.zeros(8)), x_of(8, 16))
    assert result.ok, str(result)


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: dict[str, Tensor]


@pytest.mark.slow
def test_tensors_in_result_objects_are_compared() -> None:
    def in_object(s: Any, x: Tensor) -> Any:
        y = decayed(s, x)
        return Result(y, {"twice": y * 2})

    result = tfo.verify(Pointwise(in_object), x_of(8, 16))
    assert [row.name for row in result.comparisons if not row.plain_ok] == ["w", "w"]
    assert sum(row.kind == "output" for row in result.comparisons) == 4
    raises(ValueError, "returned a NoneType without tensors", tfo.verify, lambda x: None, x_of(8, 16))


@pytest.mark.slow
def test_the_summary_counts_sites_and_graphs() -> None:
    def cut(s: Any, x: Tensor) -> Tensor:
        h = F.gelu(s.up(x))
        torch._dynamo.graph_break()
        return s.down(h)  # type: ignore[no-any-return]

    assert tfo.verify(MLP(cut), x_of(8, 16)).summary == "0 of 0 MLP sites fused (2 graphs)"
    model = MLP()
    result = tfo.verify(lambda x: model(x), x_of(8, 16), policy=FusionPolicy(gemm="fp8"))
    assert "in a function's closure" in " ".join(result.notes) and "1 of these without float8 GEMMs" in result.summary


@pytest.mark.slow
def test_generated_code_is_ok() -> None:
    result = tfo.verify(MLP(), x_of(8, 16), compiled=True)
    assert result.ok, str(result)


def test_json_has_every_comparison() -> None:
    result = pointwise()
    data = json.loads(result.to_json())
    assert data["ok"] is True and data["policy"]["memory"] == "free"
    assert len(data["comparisons"]) == len(result.comparisons)
    assert {"kind", "name", "dtype", "fused", "plain", "eager", "allowed", "ok", "plain_ok"} <= set(
        data["comparisons"][0]
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tfo.verify(3), TypeError, "model=3 is not callable"),  # type: ignore[arg-type]
        (lambda: tfo.verify(MLP(), x_of(8, 16), policy="fp8"), TypeError, "policy='fp8' is not accepted"),  # type: ignore[arg-type]
        (lambda: tfo.verify(MLP().to("meta"), x_of(8, 16)), ValueError, "meta device"),
        (lambda: tfo.verify(MLP(), x_of(8, 15)), RuntimeError, "16"),
    ],
)
def test_invalid_arguments_raise(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    raises(error, message, call)


@pytest.mark.slow
def test_an_error_in_a_variant_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fused_ops.lowerings import recognize

    monkeypatch.setattr(recognize, "rewrite", mock.Mock(side_effect=RuntimeError("on purpose")))
    result = tfo.verify(MLP(), x_of(8, 16), policy=FusionPolicy(strict=True))
    assert not result.ok and "on purpose" in result.failures["fused, float32"]
    assert "fused, float32: raised " in str(result)
    result = tfo.verify(MLP(), x_of(8, 16))
    assert result.ok and "fusion failed" in result.summary, "the graph was left as it was"
