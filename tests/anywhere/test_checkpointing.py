"""Checkpoints, offloaders and other users of saved tensors around every operator: what runs again, what is kept."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import Net, Ran
from torch import Tensor
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops import megatron
from torch_fused_ops.nn import FusedMLP

fused = torch.ops.fused
ROWS, WIDTH = 6, 16
Fn = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """A function of one tensor (ROWS, WIDTH), its operator, and how many bytes that keeps of it, result aside."""

    run: Fn
    operator: Any
    keeps: int


H = ROWS * WIDTH * 4
FP8 = ROWS * (WIDTH + 4)
BIAS = torch.linspace(-1, 1, WIDTH).requires_grad_()
SCALE = torch.linspace(0.5, 1, ROWS).requires_grad_()
SEED = torch.tensor([3])
CASES = {
    "bias_act": Case(lambda h: FF.bias_gelu(h, BIAS), fused.bias_act, H),
    "relu": Case(lambda h: FF.bias_relu(h), fused.bias_act, 0),  # it keeps its result
    "glu": Case(lambda h: FF.swiglu(h, h.detach(), SCALE), fused.glu, H),
    "bias_glu": Case(lambda h: FF.bias_geglu(h, BIAS, clamp=0.5), fused.bias_glu, H),
    "dropout_add": Case(lambda h: FF.dropout_add(h, BIAS, h, seed=SEED, p=0.5), fused.dropout_add, 0),
    "softmax": Case(lambda h: FF.scaled_masked_softmax(h, scale=0.3, causal=True), fused.scaled_masked_softmax, 0),
    "bias_act fp8": Case(lambda h: FF.bias_gelu(h, BIAS, memory="fp8"), fused.bias_act, FP8),
    "bias and relu": Case(lambda h: FF.bias_relu(h, BIAS), fused.bias_act, 0),
    "relu fp8": Case(lambda h: FF.bias_relu(h, memory="fp8"), fused.bias_act, 0),
    "glu fp8": Case(lambda h: FF.swiglu(h, h, memory="fp8"), fused.glu, 2 * FP8),
    "bias_glu fp8": Case(lambda h: FF.bias_geglu(h, BIAS, memory="fp8"), fused.bias_glu, FP8),
    "megatron swiglu": Case(lambda h: megatron.bias_swiglu_impl(h, BIAS), fused.bias_glu, H),
    "megatron weighted": Case(lambda h: megatron.weighted_bias_swiglu_impl(h, None, SCALE[:, None]), fused.bias_glu, H),
    "megatron dropout": Case(
        lambda h: megatron.get_bias_dropout_add(True, True)((h, BIAS), h, 0.5), fused.dropout_add, 8
    ),
    "megatron softmax": Case(
        lambda h: megatron.ScaledUpperTriangMaskedSoftmax.apply(h[None, :, :ROWS], 0.3)[0],
        fused.scaled_masked_softmax,
        0,
    ),
}


def around(run: Fn) -> Fn:
    """``run`` between two functions that keep their argument: x, which is ours, and run's result."""
    return lambda x: run(x.sin()).cos()


def saves(operators: Sequence[Any]) -> dict[str, Any]:
    """Policies that save what these operators give, as a list and as a function."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return {"list": list(operators), "function": policy}


def ways(fn: Fn, operator: Any) -> dict[str, Fn]:
    by = {
        name: functools.partial(create_selective_checkpoint_contexts, policy)
        for name, policy in saves([operator.default]).items()
    }
    inner: Fn = lambda x: checkpoint(fn, x, use_reentrant=False)  # noqa: E731
    return {
        "none": fn,
        "reentrant": lambda x: checkpoint(fn, x, use_reentrant=True),
        "not reentrant": inner,
        "nested": lambda x: checkpoint(inner, x, use_reentrant=False),
        "reentrant around": lambda x: checkpoint(inner, x, use_reentrant=True),
        "selective, list": lambda x: checkpoint(fn, x, use_reentrant=False, context_fn=by["list"]),
        "selective, function": lambda x: checkpoint(fn, x, use_reentrant=False, context_fn=by["function"]),
    }


def gradient(y: Tensor, x: Tensor) -> Tensor:
    """By backward(), which alone reentrant checkpoints take."""
    x.grad = None
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad


# How often the operator runs in backward. Of nested checkpoints the outer one stops once it has the inner one's input.
AGAIN = {"none": 0, "reentrant": 1, "not reentrant": 1, "nested": 1, "reentrant around": 2}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", ways(torch.sin, fused.glu))
def test_operators_run_as_often_and_keep_as_much_as_asked(way: str, name: str) -> None:
    case = CASES[name]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    (wanted,) = torch.autograd.grad(around(case.run)(x).square().sum(), x)
    torch.manual_seed(1)
    with Ran() as ran:
        y = ways(around(case.run), case.operator)[way](x)
        result = y.untyped_storage().nbytes()
        assert ran.counted[case.operator] == 1
        kept = {"none": result + case.keeps}.get(way, result if "selective" in way else 0)
        assert ran.alive(y) == kept
        ran.counted.clear()
        grad = gradient(y, x)
    assert ran.counted[case.operator] == AGAIN.get(way, 0)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_mode_around_one_pass_alone(use_reentrant: bool, name: str) -> None:
    """Forward and its repetition may take different ways to the kernel; they save the same."""
    run = around(CASES[name].run)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    found = []
    for forward, backward in ((False, False), (False, True), (True, False)):
        torch.manual_seed(1)
        with Ran() if forward else saved_tensors_hooks(lambda t: t, lambda t: t):
            y = checkpoint(run, x, use_reentrant=use_reentrant)
        with Ran() if backward else saved_tensors_hooks(lambda t: t, lambda t: t):
            found.append(gradient(y, x))
    torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize("level", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("way", ways(torch.sin, fused.glu))
def test_fused_mlp(way: str, level: str) -> None:
    mlp = FusedMLP(WIDTH, 64, "silu", gated=True, memory=level, dropout=0.5)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    if "selective" in way:  # the policy decides, not the level
        mlp.memory = "off"
    torch.manual_seed(1)
    wanted = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    mlp.memory = level
    torch.manual_seed(1)
    with Ran() as ran:
        y = ways(mlp, fused.bias_glu)[way](x)
        ran.counted.clear()
        if way in ("reentrant", "not reentrant", "nested", "reentrant around"):
            assert ran.alive(y) == 0
        mlp.zero_grad()
        grads = [gradient(y, x), *(p.grad for p in mlp.parameters())]
    if way != "none":  # by itself a level may run it again
        assert ran.counted[fused.bias_glu] >= AGAIN.get(way, 0)
    torch.testing.assert_close(grads, list(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters, reason="torch before 2.15"
)
@pytest.mark.parametrize("level", ["off", "free", "fp8", "input"])
@pytest.mark.parametrize("respects", [True, False, None])
def test_fused_mlp_where_policies_respect_hooks(respects: bool | None, level: str) -> None:
    mlp = FusedMLP(WIDTH, 64, "silu", gated=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    mlp.memory = level
    by = functools.partial(create_selective_checkpoint_contexts, [fused.bias_glu.default])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = checkpoint(mlp, x, use_reentrant=False, context_fn=by, respect_saved_tensors_hooks=respects)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()]), wanted)


def dropped_twice(x: Tensor) -> Tensor:
    y = FF.bias_dropout_add(x.sin(), None, None, 0.5)
    return FF.bias_dropout_add(y * y, None, None, 0.25)


@pytest.mark.parametrize(
    ("backend", "use_reentrant"),
    [
        (None, True),
        (None, False),
        pytest.param("fused", False, marks=pytest.mark.slow),
        pytest.param("fused", True, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
    ],
)
def test_the_same_elements_are_dropped_again(backend: str | None, use_reentrant: bool) -> None:
    """The result shows which were dropped in forward; the gradient, which backward drops."""

    def compiled(fn: Fn) -> Fn:
        return fn if backend is None else torch.compile(fn, backend=backend, fullgraph=True)

    if use_reentrant:  # around what is compiled: Dynamo captures no such checkpoint
        again = compiled(dropped_twice)
        call: Fn = lambda x: checkpoint(again, x, use_reentrant=True)  # noqa: E731
    else:
        call = compiled(lambda x: checkpoint(dropped_twice, x, use_reentrant=False))
    x = torch.linspace(0.1, 1.4, 512).view(8, 64).requires_grad_()
    masks = []
    for _ in range(2):
        y = call(x)
        torch.randint(0, 9, (3,))  # the generator goes on between forward and backward
        x.grad = None
        y.sum().backward()
        grad = x.grad
        assert grad is not None and torch.equal(grad != 0, y != 0)
        torch.testing.assert_close(grad, torch.where(y != 0, 2 * x.sin() * x.cos() * 4 / 0.75, 0.0), rtol=1e-4, atol=0)
        masks.append(y != 0)
    assert 0.25 < masks[0].float().mean() < 0.5 and not torch.equal(*masks)


def test_without_preserved_generators_a_seed_from_outside_still_decides() -> None:
    x = torch.linspace(0.1, 1.4, 512).view(8, 64).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return FF.dropout_add(x.sin(), seed=SEED, p=0.5)

    y = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    torch.randint(0, 9, (3,))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0] != 0, y != 0)


def mlp_of(w: Tensor, v: Tensor) -> Fn:
    return lambda x: F.gelu(x @ w) @ v


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    ("way", "backend"),
    [
        ("not reentrant", "fused"),
        ("selective, list", "fused"),
        *(
            pytest.param(way, backend, marks=pytest.mark.slow)
            for way in ("none", "not reentrant", "nested", "selective, list", "selective, function")
            for backend in ("fused", "inductor")
            if (way, backend) not in {("not reentrant", "fused"), ("selective, list", "fused")}
        ),
    ],
)
def test_compiled_what_is_kept(way: str, backend: str) -> None:
    """Picked up ("fused"), or by our operators ("inductor"): the bytes handed from forward to backward."""
    w, v = torch.randn(WIDTH, 64) / 4, (torch.randn(64, WIDTH) / 8).requires_grad_()
    spelled, called = mlp_of(w, v), lambda x: FF.bias_gelu(x @ w) @ v
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    fn = ways(spelled if backend == "fused" else called, fused.bias_act)[way]
    options = {"policy": tfo.FusionPolicy(strict=True, memory="off")} if backend == "fused" else None
    compiled = torch.compile(fn, backend=backend, fullgraph=True, options=options)
    with saved_tensors_hooks(keep, lambda t: t):
        y = compiled(x)
    for given in (x, w, v):
        kept.pop(given.untyped_storage()._cdata, None)
    middle = ROWS * 64 * 4
    # Without a checkpoint what the activation reads and what it gives, which is read for v's gradient.
    assert sum(kept.values()) == {"none": 2 * middle, "not reentrant": 0, "nested": 0}.get(way, middle)
    wanted = torch.autograd.grad(spelled(x).square().sum(), [x, v])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), [x, v]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*CASES, "FusedMLP free", "FusedMLP fp8", "FusedMLP input"])
def test_hooks_of_a_users_own(name: str) -> None:
    """Everything that is kept goes through them, to bytes and back; and through ``save_on_cpu``."""
    run = FusedMLP(WIDTH, 64, memory=name.split()[1]) if name not in CASES else CASES[name].run
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    torch.manual_seed(1)
    (wanted,) = torch.autograd.grad(around(run)(x).square().sum(), x)
    packed: list[int] = []

    def pack(t: Tensor) -> tuple[bytes, torch.dtype, torch.Size]:
        packed.append(t.nbytes)
        flat = t.detach().contiguous().view(-1).view(torch.uint8)
        return bytes(flat.tolist()), t.dtype, t.shape

    def unpack(kept: tuple[bytes, torch.dtype, torch.Size]) -> Tensor:
        data, dtype, shape = kept
        return torch.tensor(list(data), dtype=torch.uint8).view(dtype).view(shape)

    for hooks in (saved_tensors_hooks(pack, unpack), save_on_cpu()):
        torch.manual_seed(1)
        with hooks:
            y = around(run)(x)
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], wanted)
    kept = {"FusedMLP free": ROWS * 64 * 4, "FusedMLP fp8": ROWS * 68, "FusedMLP input": 0}
    assert sum(packed) >= H + y.nbytes + (kept[name] if name in kept else CASES[name].keeps)


@pytest.mark.parametrize("name", [*CASES, "FusedMLP free", "FusedMLP fp8", "FusedMLP input"])
def test_where_hooks_are_disabled(name: str) -> None:
    """A memory level without hooks is none; what it computes stays."""
    run = FusedMLP(WIDTH, 64, memory=name.split()[1]) if name not in CASES else CASES[name].run
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with disable_saved_tensors_hooks("not here"):
        torch.manual_seed(1)
        y = around(run)(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.manual_seed(1)
    wanted = around(run)(x)
    torch.testing.assert_close(y, wanted)
    rtol = 0.5 if "FusedMLP fp8" in name else 1e-5
    torch.testing.assert_close(grad, torch.autograd.grad(wanted.square().sum(), x)[0], rtol=rtol, atol=rtol / 5)


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_may_be_mutated_where_that_is_allowed(name: str) -> None:
    """What happens elsewhere: test_hostile.py."""
    case = CASES[name]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step(mutate: bool) -> Tensor:
        torch.manual_seed(1)
        h = x * 1
        y = case.run(h) * 1
        if mutate:
            with torch.no_grad():
                h.mul_(3)
        return torch.autograd.grad(y.square().sum(), x)[0]

    wanted = step(False)
    with allow_mutation_on_saved_tensors():
        torch.testing.assert_close(step(True), wanted)


@pytest.mark.covering(every=4)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_around_a_compiled_model_drops_the_same_again(use_reentrant: bool) -> None:
    """A reentrant one runs forward without gradients, then again with them: two graphs, one mask."""
    up, down = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8, bias=False)
    # Linear in the last weight, so that its gradient times it is the result.
    model = Net(lambda s, x: F.dropout(s.down(F.dropout(F.gelu(s.up(x)), 0.5)), 0.25), up=up, down=down)
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(model, backend="fused")
    torch.manual_seed(1)
    with tfo.record() as report:
        y = checkpoint(compiled, x, use_reentrant=use_reentrant)
        y.sum().backward()
    assert {site.op for site in report.sites} == {"fused::bias_act", "fused::dropout_add"}
    assert down.weight.grad is not None
    torch.testing.assert_close((down.weight.grad * down.weight).sum(), y.sum())
