"""``tfo.verify``: what it says of models that are right, wrong, wrong without us, rounded, random, not to be run."""

import copy
import dataclasses
import functools
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
from torch_fused_ops.lowerings import partition, saved_tensors
from torch_fused_ops.tools import verify
from torch_fused_ops.tools.verify import _apart


def mlp(s: Any, x: Tensor) -> Tensor:
    return x + s.dropout(s.down(F.gelu(s.up(s.norm(x)))))  # type: ignore[no-any-return]


def MLP(body: Callable[..., Any] = mlp, dropout: float = 0.0, **more: Any) -> Any:
    members = {"up": nn.Linear(16, 64), "down": nn.Linear(64, 16), "dropout": nn.Dropout(dropout)}
    return Net(body, **members, norm=nn.BatchNorm1d(16), **more)


def decayed(s: Any, x: Tensor) -> Tensor:
    s.b.mul_(0.5)
    return torch.tanh(x * s.b * s.w)


def Pointwise(body: Callable[..., Any] = decayed) -> nn.Module:
    """Plain torch.compile is wrong here."""
    return Net(body, w=nn.Parameter(torch.rand(16)), b=torch.rand(16))


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.covering(every=12)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input", {"": "fp8"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_right(dtype: torch.dtype, level: Any) -> None:
    found = tfo.verify(MLP().to(dtype), x_of(8, 16).to(dtype), policy=FusionPolicy(memory=level))
    assert found.ok, str(found)
    assert found.sites == (1, 1) and not found.failures
    assert found.dtypes == (str(dtype).removeprefix("torch."), "float64")
    names = {(one.kind, one.name) for one in found.comparisons}
    assert {("gradient", "up.weight"), ("buffer", "norm.running_mean"), ("output", "0"), ("loss", "")} <= names
    assert re.search(r"ok: nothing differs .*norm:\n  in \S+ output .*\n  in float64 .*gradient \S+e-", str(found))
    assert "1 of 1 MLP sites fused" in str(found)


def test_rounding_is_what_the_policy_asks_for_and_no_more() -> None:
    """In float64 nothing is rounded, and in the model's dtype gradients alone are."""
    found = tfo.verify(MLP(), x_of(8, 16), policy=FusionPolicy(memory="fp8"))
    by = {(one.kind, one.name, one.dtype): one for one in found.comparisons}
    assert 1e-3 < by["gradient", "up.weight", "float32"].fused < 0.1
    assert by["gradient", "up.weight", "float64"].fused < 1e-12
    assert by["output", "0", "float32"].allowed < 1e-5


@functools.cache
def pointwise() -> Any:
    return tfo.verify(Pointwise(), x_of(8, 16))


def test_where_plain_is_off_it_says_so() -> None:
    found = pointwise()
    assert found.ok and not found.differences
    assert [one.name for one in found.comparisons if not one.plain_ok] == ["w", "w"]
    assert "plain torch.compile differs, fused does not" in str(found)


def test_a_fault_of_ours_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With our partitioner as it was: a buffer is read in backward after forward has updated it."""
    monkeypatch.setattr(partition, "_copies_of_written", lambda *args: [])
    monkeypatch.setattr(saved_tensors.SavedTensors, "check", lambda self: None)
    found = tfo.verify(Pointwise(), x_of(8, 16))
    assert not found.ok
    assert {(one.kind, one.name) for one in found.differences} == {("gradient", "w")}
    assert "plain torch.compile is off as well in 2 of these 2" in str(found) and "not ok" in str(found)


def test_a_fault_of_one_activation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A derivative that is a tenth of a percent off."""

    def wrong(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = divide(gm, *args, **kwargs)
        (node,) = graphs[1].graph.find_nodes(op="call_function", target=torch.ops.fused.bias_act_backward.default)
        with graphs[1].graph.inserting_before(node):
            scaled = graphs[1].graph.call_function(torch.ops.aten.mul.Tensor, (node.args[0], 1.001))
        scaled.meta = dict(node.args[0].meta)
        node.replace_input_with(node.args[0], scaled)
        graphs[1].recompile()
        return graphs

    divide = partition.upstream
    monkeypatch.setattr(partition, "upstream", wrong)
    found = tfo.verify(MLP(), x_of(8, 16))
    assert not found.ok and {one.name for one in found.differences} >= {"up.weight", "up.bias"}
    assert all(one.plain_ok for one in found.differences)
    assert "plain torch.compile is not" in str(found)


def faulty(dtype: torch.dtype, fault: Callable[[Tensor], Any], policy: FusionPolicy, monkeypatch: Any) -> Any:
    """Verify an MLP whose fused gradient of up.weight has a fault in the model's dtype alone."""

    def step(*args: Any, **kwargs: Any) -> Any:
        values = run_step(*args, **kwargs)
        steps.append(values)
        if len(steps) == 4:  # after eager, eager in float64, and plain
            fault(values["gradient", "up.weight"])
        return values

    steps: list[Any] = []
    run_step = verify._step
    monkeypatch.setattr(verify, "_step", step)
    return tfo.verify(MLP().to(dtype), x_of(8, 16).to(dtype), policy=policy)


@pytest.mark.parametrize("level, percent", [("free", 1), ("fp8", 20)])
def test_a_fault_in_the_model_s_dtype_alone_is_found(level: Any, percent: int, monkeypatch: Any) -> None:
    off = lambda t: t.mul_(1 + percent / 100)  # noqa: E731
    found = faulty(torch.bfloat16, off, FusionPolicy(memory=level), monkeypatch)
    (one,) = found.differences
    assert (one.name, one.dtype, one.measure) == ("up.weight", "bfloat16", "norm") and one.plain_ok
    assert "not ok" in str(found)


@pytest.mark.parametrize("level", ["free", "fp8"])
def test_one_element_that_is_doubled_is_found(level: Any, monkeypatch: Any) -> None:
    def doubled(t: Tensor) -> None:
        t.view(-1)[t.abs().argmax()] *= 2

    found = faulty(torch.bfloat16, doubled, FusionPolicy(memory=level), monkeypatch)
    (one,) = found.differences
    assert (one.name, one.measure) == ("up.weight", "largest element") or level == "free"


def test_it_changes_nothing() -> None:
    model, x = MLP(dropout=0.5), x_of(8, 16).requires_grad_()
    model.up.weight.grad = torch.ones_like(model.up.weight)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with tfo.record() as report:
        tfo.verify(model, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.up.weight.grad.eq(1).all() and x.grad is None
    assert not report.graphs, "these are not the user's compilations"


@pytest.mark.slow
def test_dropouts_are_compared_as_pytorch_s_own() -> None:
    found = tfo.verify(MLP(dropout=0.5), x_of(8, 16))
    assert found.ok, str(found)
    assert any("random numbers" in note for note in found.notes)
    assert not any("random numbers" in note for note in tfo.verify(MLP(dropout=0.5).eval(), x_of(8, 16)).notes)


def test_the_loss_is_the_model_s_own() -> None:
    def with_loss(x: Tensor, w: Tensor) -> dict[str, Tensor]:
        y = F.silu(x @ w)
        return {"loss": y.mean(), "logits": y}

    w = torch.rand(16, 4, requires_grad=True)
    found = tfo.verify(with_loss, x_of(8, 16), w)
    assert found.ok and found.title == "with_loss"
    assert ("gradient", "argument 1") in {(one.kind, one.name) for one in found.comparisons}


def test_shared_and_written_arguments() -> None:
    def written(x: Tensor, same: Tensor) -> Tensor:
        x.add_(1.0)
        return same * 2.0

    x = torch.zeros(3)
    found = tfo.verify(written, x, x)
    assert found.ok and x.eq(0).all()
    assert any("nothing that the model returned needs a gradient" in note for note in found.notes)


@pytest.mark.slow
def test_without_float64_it_takes_float32() -> None:
    """As with grouped products, which have no kernels in float64."""

    def no_double(s: Any, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            raise NotImplementedError("no kernel for Double")
        return mlp(s, x)

    found = tfo.verify(MLP(no_double).bfloat16(), x_of(8, 16).bfloat16())
    assert found.ok and found.dtypes == ("bfloat16", "float32")
    assert any("float64, where eager raises NotImplementedError" in note for note in found.notes)
    found = tfo.verify(MLP(no_double), x_of(8, 16), policy=FusionPolicy(memory="fp8"))
    assert found.ok, str(found)
    assert found.dtypes == ("float32", "float32 unrounded")


@pytest.mark.slow
def test_sparse_gradients() -> None:
    embedded = Net(lambda s, i: s.mlp(s.table(i)), table=nn.Embedding(20, 16, sparse=True), mlp=MLP())
    found = tfo.verify(embedded, torch.tensor([1, 7, 7, 3, 0, 19]))
    assert found.ok, str(found)
    assert ("gradient", "table.weight") in {(one.kind, one.name) for one in found.comparisons}


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("one", [INF, -INF, NAN])
@pytest.mark.parametrize("other", [INF, -INF, NAN, 1.0])
def test_what_is_not_finite_is_compared(one: float, other: float) -> None:
    distance, _ = _apart(torch.tensor([1.0, one]), torch.tensor([1.0, other]), True)
    assert distance == (0.0 if one == other or (one != one and other != other) else INF)


def test_a_loss_that_is_not_finite_is_not_ok() -> None:
    """Nothing can be said of gradients then; a single infinity in an output is compared."""

    def overflows(x: Tensor, w: Tensor, by: float) -> Tensor:
        y = F.relu(x @ w) / by
        return torch.cat([y, torch.full_like(y, -float("inf")).detach()]) if by else y

    w = torch.rand(16, 4, requires_grad=True)
    found = tfo.verify(overflows, x_of(8, 16), w, 0.0)
    assert not found.ok and "gradients cannot be compared" in found.failures["eager"]


@pytest.mark.slow
def test_what_is_nothing_but_rounding() -> None:
    """The mean of what a norm gives is 0: no two ways of summing agree."""

    def means(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.layer_norm(mlp(s, x))
        with torch.no_grad():
            s.mean.lerp_(h.mean(-1), 0.1)
        return h, s.layer_norm(h * 1e-4).mean()

    found = tfo.verify(MLP(means, layer_norm=nn.LayerNorm(16), mean=torch.zeros(8)), x_of(8, 16))
    assert found.ok, str(found)


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: dict[str, Tensor]


@pytest.mark.slow
def test_results_in_objects() -> None:
    def in_object(s: Any, x: Tensor) -> Any:
        y = decayed(s, x)
        return Result(y, {"twice": y * 2})

    found = tfo.verify(Pointwise(in_object), x_of(8, 16))
    assert [one.name for one in found.comparisons if not one.plain_ok] == ["w", "w"]
    assert sum(one.kind == "output" for one in found.comparisons) == 4
    raises(ValueError, "returned a NoneType without tensors", tfo.verify, lambda x: None, x_of(8, 16))


@pytest.mark.slow
def test_what_was_not_compared_is_said() -> None:
    def cut(s: Any, x: Tensor) -> Tensor:
        h = F.gelu(s.up(x))
        torch._dynamo.graph_break()
        return s.down(h)  # type: ignore[no-any-return]

    notes = " ".join(tfo.verify(MLP(cut), x_of(8, 16)).notes)
    assert "2 graphs were captured" in notes and "no MLP was fused" in notes
    model = MLP()
    notes = " ".join(tfo.verify(lambda x: model(x), x_of(8, 16)).notes)
    assert "closes over" in notes
    notes = " ".join(tfo.verify(MLP(), x_of(8, 16), policy=FusionPolicy(gemm="fp8")).notes)
    assert "1 of 1 MLP sites have GEMMs without float8" in notes and "(64, 16): not multiples of 128" in notes


@pytest.mark.slow
def test_generated_code_can_be_compared_too() -> None:
    found = tfo.verify(MLP(), x_of(8, 16), compiled=True)
    assert found.ok, str(found)


def test_json() -> None:
    found = pointwise()
    data = json.loads(found.to_json())
    assert data["ok"] is True and data["policy"]["memory"] == "free"
    assert len(data["comparisons"]) == len(found.comparisons)
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
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    raises(error, message, call)


@pytest.mark.slow
def test_what_a_way_raises_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fused_ops.lowerings import recognize

    monkeypatch.setattr(recognize, "rewrite", mock.Mock(side_effect=RuntimeError("on purpose")))
    found = tfo.verify(MLP(), x_of(8, 16), policy=FusionPolicy(strict=True))
    assert not found.ok and "on purpose" in found.failures["fused, float32"]
    assert "fused, float32: raised " in str(found)
    found = tfo.verify(MLP(), x_of(8, 16))
    assert found.ok and any("fusion failed" in note for note in found.notes), "the graph was left as it was"
