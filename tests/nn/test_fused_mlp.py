"""FusedMLP: its formula, the bytes that it saves for backward, and rejected arguments."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import GELU_TANH, Net, Ran, of_halves, quick_gelu, raises, step
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.nn.fused_mlp import FusedMLP

LEVELS = ("off", "free", "fp8", "input")
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": GELU_TANH,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": quick_gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def saved_bytes_and_gemms(fn: Callable[[Tensor], Tensor], x: Tensor, *known: Tensor) -> tuple[int, int]:
    """Return (bytes saved for backward except x, ``known`` and the result; GEMMs of a training step)."""
    with Ran() as ran:
        y = fn(x)
        alive = ran.alive(x, y, *known)
        y.sum().backward()
    return alive, sum(ran.counted[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm))


def plain(mlp: FusedMLP) -> Callable[[Tensor], Tensor]:
    act = ACTS[mlp.activation]
    act = of_halves(act) if mlp.gated else act
    return lambda x: mlp.fc2(act(mlp.fc1(x)))


def close(a: list[Tensor], b: list[Tensor], tolerance: float) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * float(y.abs().max()))


@pytest.mark.parametrize(
    "activation, gated, bias",
    [(name, name in ("silu", "gelu"), name != "silu") for name in ACTS] + [("relu", True, True)],
)
def test_results_equal_the_formula(activation, gated, bias):
    mlp = FusedMLP(24, 40, activation, gated, bias)
    assert [tuple(p.shape) for p in mlp.parameters()] == [
        shape for shape in ((40 * (1 + gated), 24), (40 * (1 + gated),), (24, 40), (24,)) if bias or len(shape) == 2
    ]
    x = torch.randn(3, 5, 24)
    expected = step(plain(mlp), mlp, x)
    for level in LEVELS:
        mlp.memory = level
        close(step(mlp, mlp, x), expected, 0.1 if level == "fp8" else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_level(dtype):
    mlp = FusedMLP(16, 32, "silu", gated=True, dtype=dtype)
    x = torch.randn(4, 16, dtype=dtype)
    results = [step(mlp, mlp, x) for mlp.memory in ("off", "free", "input")]
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    mlp.memory = "fp8"
    assert torch.equal(mlp(x), results[0][0])


def test_page_has_the_measured_bytes():
    """Compare the table of docs/modules.md with measured bytes."""
    text, rows, ffn = (Path(__file__).parents[2] / "docs" / "modules.md").read_text(), 16, 32
    notes = {"off": "", "free": "the same", "fp8": "rounded", "input": "the same"}
    for level, note in notes.items():
        cells = []
        for gated in (False, True):
            mlp = FusedMLP(8, ffn, "silu", gated, dtype=torch.bfloat16, memory=level)
            nbytes, gemms = saved_bytes_and_gemms(
                mlp, torch.randn(rows, 8, dtype=torch.bfloat16).requires_grad_(), *mlp.parameters()
            )
            units, scale = divmod(nbytes // rows, ffn)
            cells.append(
                " + ".join(
                    ([f"{units if units > 1 else ''}·f".lstrip("·")] if units else []) + [str(scale)] * (scale > 0)
                )
                or "0"
            )
        name = f'`"{level}"`' + ", the default" * (level == "free")
        assert f"| {name} | {cells[0]} | {cells[1]} | {gemms} | {note}".rstrip() in text


@pytest.mark.parametrize("level", LEVELS)
def test_dropout(level):
    mlp = FusedMLP(64, 64, "silu", gated=True, dropout=0.25, memory=level)
    x = torch.randn(128, 64, requires_grad=True)
    torch.manual_seed(3)
    y = mlp(x)
    undropped = plain(mlp)(x)
    kept_ones = y != 0
    assert 0.72 < kept_ones.float().mean() < 0.78
    torch.testing.assert_close(y[kept_ones], (undropped / 0.75)[kept_ones])
    torch.manual_seed(3)
    assert torch.equal(mlp(x), y)
    (grad,) = torch.autograd.grad(y.sum(), mlp.fc2.bias)
    torch.testing.assert_close(grad, kept_ones.float().sum(0) / 0.75)
    torch.testing.assert_close(mlp.eval()(x), undropped)


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_compiled(dropout):
    mlp = FusedMLP(16, 32, "gelu", dropout=dropout)
    x = torch.randn(6, 16)
    run = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    expected = step(mlp, mlp, x)
    torch.manual_seed(0)
    close(step(run, mlp, x), expected, 1e-5)


def test_autocast():
    mlp, x = FusedMLP(16, 32, "silu", gated=True), torch.randn(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(mlp)(x)
        y = mlp(x)
        assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.01)  # FusedMLP rounds fewer times
    y.float().sum().backward()
    assert mlp.fc1.weight.grad.dtype == torch.float32


def test_second_derivatives_are_those_at_the_saved_values() -> None:
    mlp, x = FusedMLP(16, 32, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    results = {}
    for mlp.memory in LEVELS:
        (gradient,) = torch.autograd.grad(mlp(x).square().sum(), x, create_graph=True)
        (results[mlp.memory],) = torch.autograd.grad(gradient.square().sum(), x)
    for level, tolerance in (("free", 1e-12), ("input", 1e-12), ("fp8", 0.1)):
        assert (results[level] - results["off"]).norm() <= tolerance * results["off"].norm(), level
    assert not torch.equal(results["fp8"], results["off"])


def doubled(inner: nn.Linear) -> nn.Module:
    """Wrap a linear, as adapters do."""
    return Net(lambda s, x: 2 * s.inner(x), inner=inner, weight=inner.weight, bias=inner.bias)


def test_wrapped_hooked_and_parametrized_linears_are_called():
    mlp, x = FusedMLP(16, 32, "silu", dropout=0.1, memory="input").eval(), torch.randn(6, 16)
    expected = mlp(x)
    calls = []
    hooks = [fc.register_forward_hook(lambda *_: calls.append(1)) for fc in (mlp.fc1, mlp.fc2)]
    torch.testing.assert_close(mlp(x.requires_grad_()), expected)
    mlp.train()(x).sum().backward()
    assert len(calls) == 4
    for hook in hooks:
        hook.remove()
    mlp.eval()
    wrapped = copy.deepcopy(mlp)
    wrapped.fc1, wrapped.fc2 = doubled(wrapped.fc1), doubled(wrapped.fc2)
    torch.testing.assert_close(wrapped(x), 2 * mlp.fc2(F.silu(2 * mlp.fc1(x))))
    nn.utils.parametrizations.weight_norm(mlp.fc1)
    torch.testing.assert_close(mlp(x), expected)
    assert set(mlp.state_dict()) >= {"fc1.parametrizations.weight.original0"}
    assert not any(mlp.load_state_dict(mlp.state_dict()))


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"activation": "swish"}, ValueError, "activation='swish'"),
        ({"activation": "swiglu"}, ValueError, "activation='swiglu' is not known; accepted: relu,"),
        ({"activation": F.tanhshrink}, TypeError, "gelu_tanh"),
        ({"memory": "tiled:4"}, ValueError, 'torch.nn.Linear in torch.compile(model, backend="fused"'),
        ({"memory": "least"}, ValueError, "memory='least' is not known; accepted: off, free, fp8, input"),
    ],
)
def test_constructor_rejects_wrong_arguments(arguments, error, words):
    raises(error, re.escape(words), FusedMLP, **{"hidden": 8, "ffn": 16, **arguments})


def test_one_graph_serves_any_number_of_tokens():
    mlp = FusedMLP(8, 16)
    dynamic = torch.compile(mlp, backend="eager", fullgraph=True, dynamic=True)
    for x in (torch.randn(3, 8), torch.randn(8), torch.randn(0, 8), torch.randn(2, 5, 8)):
        torch.testing.assert_close(dynamic(x), mlp(x))


def test_accepted_width_follows_the_weight_and_hooks():
    """A pruned weight is narrower, and a hook may widen the input, as ColwiseParallel may."""
    mlp, x = FusedMLP(8, 16), torch.randn(3, 8)
    y = mlp(x)
    mlp.fc1.register_forward_pre_hook(lambda _, args: (torch.cat([args[0], x[:, 4:]], -1),))
    torch.testing.assert_close(mlp(x[:, :4]), y)
    pruned = FusedMLP(8, 16)
    pruned.fc1.weight = nn.Parameter(pruned.fc1.weight[:, :6].detach())
    assert pruned(x[:, :6]).shape == (3, 8)


def test_names_of_activations():
    for activation, name in ((nn.GELU("tanh"), "gelu_tanh"), (F.silu, "silu"), ("relu2", "relu2")):
        assert FusedMLP(4, 8, activation).activation == name
    activations.register_activation("softsign_mlp", F.softsign)
    mlp, x = FusedMLP(4, 8, "softsign_mlp"), torch.randn(2, 4)
    torch.testing.assert_close(mlp(x), mlp.fc2(F.softsign(mlp.fc1(x))))
