"""Eager memory levels under hooks and wrappers that write in place: gradients equal plain autograd, which finite
differences confirm, or the same error is raised."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Net, output
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from torch_fused_ops.nn import MLP, FusedMLP, MLPConfig

ROWS, WIDTH, FFN = 12, 4, 8
WRITTEN_OVER = "modified by an inplace operation"
LEVELS = ("free", "fp8", "input")


def core(activation: Any, gated: bool = False, bias: bool = True) -> Callable[[str], nn.Module]:
    def make(memory: str) -> nn.Module:
        config = MLPConfig(
            WIDTH, FFN, activation_func=activation, gated_linear_unit=gated, add_bias_linear=bias, memory=memory,
            params_dtype=torch.double,
        )  # fmt: skip
        return Net(lambda s, x: output(s.mlp, x), mlp=MLP(config))

    return make


def fused(activation: str, gated: bool = False, dropout: float = 0.0) -> Callable[[str], nn.Module]:
    return lambda memory: FusedMLP(WIDTH, FFN, activation, gated, dropout=dropout, memory=memory, dtype=torch.double)


MODULES = {
    "gelu": fused("gelu"),
    "relu": fused("relu"),
    "swiglu": fused("silu", gated=True),
    "core": core(F.gelu),
    "core swiglu": core(F.silu, gated=True),
}

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "multiplied": lambda t: t.mul_(3),
    "clamped": lambda t: t.clamp_(-0.2, 0.3),
    "a slice": lambda t: t[..., :2].zero_(),
    "another shape": lambda t: t.view(-1).add_(1),
    "detached": lambda t: t.detach().mul_(2),
    "dropped": lambda t: F.dropout(t, 0.5, inplace=True),
}


def hidden(value: Any) -> Tensor:
    """Return a linear's result without the bias that Megatron's linears also return."""
    return value[0] if isinstance(value, tuple) else value


def attach(module: Any, place: str, in_place: Callable[[Tensor], Any]) -> None:
    """Register a hook that modifies the tensor at ``place`` in place."""
    mlp, seen = getattr(module, "mlp", module), list[Tensor]()
    fc1, fc2 = (mlp.fc1, mlp.fc2) if mlp is module else (mlp.linear_fc1, mlp.linear_fc2)

    def write(t: Tensor) -> None:  # returns None, so the hook does not replace the tensor
        in_place(t)

    if place == "fc1's input":
        fc1.register_forward_pre_hook(lambda _, args: write(args[0]))
    elif place == "h":
        fc1.register_forward_hook(lambda _, args, out: write(hidden(out)))
    elif place == "a":
        fc2.register_forward_pre_hook(lambda _, args: write(args[0]))
    elif place == "a in a wrapper" and isinstance(module, FusedMLP):
        module.fc2 = nn.Sequential(Net(lambda _, t: (write(t), t)[1]), module.fc2)
    elif place == "another value of a":
        fc2.register_forward_pre_hook(lambda _, args: args[0] * 2)
        fc2.register_forward_pre_hook(lambda _, args: write(args[0]))
    elif place == "h before fc2":
        fc1.register_forward_hook(lambda _, args, out: seen.append(hidden(out)))
        fc2.register_forward_pre_hook(lambda _, args: write(seen[-1]))
    elif place == "a after fc2":
        fc2.register_forward_hook(lambda _, args, out: write(args[0]))
    elif place == "x before fc2":
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        fc2.register_forward_pre_hook(lambda _, args: write(seen[-1]))


PLACES = (
    "fc1's input", "h", "a", "a in a wrapper", "another value of a", "h before fc2", "a after fc2", "x before fc2",
)  # fmt: skip
LATE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "nothing": lambda module, x: None,
    "x": lambda module, x: x.detach().mul_(2),
    **{
        name: lambda module, x, name=name: [p.mul_(2) for n, p in module.named_parameters() if n.endswith(name)]
        for name in ("1.weight", "1.bias", "2.weight")
    },
}


def step(
    kind: str, memory: str, writes: list[tuple[str, str]], late: str, truth: bool = False, shift: float = 0.0
) -> list[Tensor]:
    """Return the result and all gradients. If ``truth``, use plain autograd on copies of saved tensors.

    The input and all parameters are shifted by ``shift`` along a fixed direction.
    """
    torch.manual_seed(0)
    module: Any = MODULES[kind](memory)
    leaf = torch.randn(ROWS, WIDTH, dtype=torch.double, requires_grad=True)
    parameters = list(module.parameters())
    with torch.no_grad():
        for t in (leaf, *parameters):
            t.add_(direction(t), alpha=shift)
    for place, write in writes:
        attach(module, place, WRITES[write])
    with allow_mutation_on_saved_tensors() if truth else contextlib.nullcontext():
        torch.manual_seed(1)
        x = leaf * 1
        y = module(x)
        result = y.detach().clone()
        with torch.no_grad():
            LATE[late](module, x)
        return [result, *torch.autograd.grad(loss(y), [leaf, *parameters], materialize_grads=True)]


def loss(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()


def direction(t: Tensor) -> Tensor:
    return torch.linspace(-1, 2, t.numel(), dtype=t.dtype).cos().view_as(t)


def confirm(expected: list[Tensor], kind: str, writes: list[tuple[str, str]]) -> None:
    """Compare gradients with a finite difference, except after writes that autograd does not see."""
    if not any(write == "detached" for _, write in writes):
        loss_above, loss_below = (
            loss(step(kind, "off", writes, "nothing", truth=True, shift=by)[0]) for by in (1e-6, -1e-6)
        )
        slope = sum((gradient * direction(gradient)).sum() for gradient in expected[1:])
        torch.testing.assert_close(slope, (loss_above - loss_below) / 2e-6, rtol=1e-5, atol=1e-7)


def check(kind: str, memory: str, writes: list[tuple[str, str]], late: str) -> None:
    expected = step(kind, "off", writes, late, truth=True)
    confirm(expected, kind, writes)
    raises = False
    try:
        step(kind, "off", writes, late)
    except RuntimeError as error:
        assert WRITTEN_OVER in str(error)
        raises = True
    try:
        got = step(kind, memory, writes, late)
    except RuntimeError as error:
        assert WRITTEN_OVER in str(error) or "has been modified inplace" in str(error)  # raised for a tile, a view
        assert raises or late != "nothing" or any(place == "x before fc2" for place, _ in writes)
        return
    for a, b in zip(got, expected, strict=True):
        tolerance = 0.2 if memory == "fp8" else 1e-9
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12, (a, b)


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize(
    "kind, place, write",
    [
        ("gelu", "a in a wrapper", "dropped"),
        ("swiglu", "a", "multiplied"),
        ("core", "a", "clamped"),
        ("gelu", "h before fc2", "multiplied"),
        ("core", "fc1's input", "multiplied"),
        ("core", "x before fc2", "multiplied"),
    ],
)
def test_overwritten_values_are_not_recomputed(kind: str, memory: str, place: str, write: str) -> None:
    check(kind, memory, [(place, write)], "nothing")


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("kind", MODULES)
def test_writes_before_backward_give_right_gradients_or_raise(kind: str, late: str, memory: str) -> None:
    check(kind, memory, [], late)


@pytest.mark.parametrize(
    "kind, name", [("gelu", "fc1.bias"), ("core", "linear_fc1.bias"), ("core", "linear_fc1.weight")]
)
@pytest.mark.parametrize("memory", LEVELS)
def test_error_names_the_written_parameter(kind: str, name: str, memory: str) -> None:
    module = MODULES[kind](memory)
    y = module(torch.randn(ROWS, WIDTH, dtype=torch.double))
    with torch.no_grad():
        getattr(module, "mlp", module).get_parameter(name).add_(1)
    with pytest.raises(
        RuntimeError, match=rf"{WRITTEN_OVER}: {name}, \[torch.DoubleTensor \[8.*write it after backward"
    ):
        y.sum().backward()


def test_a_written_scale_raises() -> None:
    mlp = MLP(MLPConfig(WIDTH, FFN, activation_func=F.gelu, add_bias_linear=False, params_dtype=torch.double))
    scale = torch.ones(ROWS, dtype=torch.double)
    y, _ = mlp(torch.randn(ROWS, WIDTH, dtype=torch.double), scale)
    scale.add_(1)
    with pytest.raises(RuntimeError, match=f"{WRITTEN_OVER}: per_token_scale, "):
        y.sum().backward()


@pytest.mark.parametrize("memory", LEVELS)
def test_a_bias_that_backward_does_not_read_may_be_written(memory: str) -> None:
    module, x = MODULES["swiglu"](memory), torch.randn(ROWS, WIDTH, dtype=torch.double)
    expected = torch.autograd.grad(loss(module(x)), [*module.parameters()])
    y = module(x)
    with torch.no_grad():
        module.get_parameter("fc2.bias").add_(1)
    assert all(map(torch.equal, torch.autograd.grad(loss(y), [*module.parameters()]), expected))


@pytest.mark.slow
def test_every_module_has_right_gradients_under_every_write() -> None:
    for kind, memory, place, write in itertools.product(MODULES, LEVELS, PLACES, WRITES):
        check(kind, memory, [(place, write)], "nothing")
