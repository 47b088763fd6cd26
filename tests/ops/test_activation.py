"""``fused::bias_act``, ``fused::glu``, ``fused::bias_glu`` in eager mode; every operator's registration."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import Calls
from torch import Tensor
from torch.func import grad, hessian, jvp

from torch_fused_ops import activations
from torch_fused_ops.kernels import compiled, cpu
from torch_fused_ops.operators.activation import FAMILY
from torch_fused_ops.operators.autograd import REGISTERED
from torch_fused_ops.testing.check import run_opcheck
from torch_fused_ops.testing.samples import ACTIVATION_OPERATORS, OPERATORS, backward_samples, samples

fused = torch.ops.fused
NAMES = activations.names()
DEFAULTS = {op.name: op.defaults[1:] for op in FAMILY}  # the schemas' defaults after the activation


def differentiable():
    """Yield calls that cover activations, optional tensors, layouts, offset and clamp."""
    for op in ACTIVATION_OPERATORS:
        for name in NAMES:
            yield op, (name, *DEFAULTS[op]), (True, True, True)
        for has in ((True, False, False), (True, True, False), (True, False, True)):
            if op != "glu" or has[1]:
                yield op, ("gelu", *DEFAULTS[op]), has
    yield "glu", ("quick_gelu", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("quick_gelu", "halves", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("silu", "swapped", 1.0, 0.9), (True, True, True)
    yield "bias_glu", ("gelu_tanh", "interleaved", 0.5, 0.9), (True, True, True)


DIFFERENTIABLE = list(differentiable())


def tensors_for(op, has=(True, True, True), shape=(2, 4), dtype=torch.float64, batch=()):
    """Return tensor arguments away from kinks, or None. ``batch`` tells which arguments have a leading axis."""
    g = torch.Generator().manual_seed(3)
    shapes = shape, (shape if op == "glu" else shape[-1:]), shape[:-1]
    batch = batch or ((),) * 3
    return [
        torch.randn(*b, *s, generator=g, dtype=dtype) if h else None for h, s, b in zip(has, shapes, batch, strict=True)
    ]


def operator(op, scalars):
    return lambda *tensors: getattr(fused, op)(*tensors, *scalars)


def case_id(case):
    return "-".join(str(c) for c in (case[0], *case[1])) + "-" + "".join("01"[h] for h in case[2])


# ---- registration ----------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=28)
@pytest.mark.parametrize(
    "sample", [s for op in OPERATORS for make in (samples, backward_samples) for s in make(op)], ids=str
)
def test_opcheck(sample):
    assert run_opcheck(sample) is None


@pytest.mark.parametrize("op", OPERATORS)
def test_results_are_contiguous_and_have_the_first_dtype(op):
    """dropout_add's result has the residual's dtype, unless the residual is None."""
    for sample in samples(op):
        out, first = sample(), sample.tensors[0]
        residual = sample.tensors[2] if op == "dropout_add" else None
        assert out.is_contiguous() and out.dtype == (first if residual is None else residual).dtype, sample
        width = first.shape[-1] // 2 if op == "bias_glu" else first.shape[-1]
        assert out.shape == (*first.shape[:-1], width), sample


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=case_id)
def test_gradcheck(case):
    op, scalars, has = case
    tensors = [None if t is None else t.requires_grad_() for t in tensors_for(op, has)]
    fn = operator(op, scalars)
    assert torch.autograd.gradcheck(
        fn, tensors, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(fn, tensors, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("has", list(itertools.product((True, False), repeat=3))[:-1])
@pytest.mark.parametrize("op", ACTIVATION_OPERATORS)
def test_frozen_arguments_cost_nothing(op, has):
    """Arguments that do not require a gradient get None, and output_mask excludes them."""
    tensors = [t.requires_grad_(h) for t, h in zip(tensors_for(op), has, strict=True)]
    with Calls() as calls:
        operator(op, ("silu", *DEFAULTS[op]))(*tensors).sum().backward()
    backward = getattr(fused, f"{op}_backward")
    assert [tuple(args[-1]) for args in calls.arguments_of(backward.default)] == [has]
    assert tuple(t.grad is not None for t in tensors) == has
    grads = backward(torch.ones(2, 2 if op == "bias_glu" else 4), *tensors, "silu", *DEFAULTS[op], list(has))
    assert tuple(g is not None for g in grads) == has


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives_at_zero(name, dtype):
    slope = grad(activations.get(name).definition)
    first, second = (derivative(torch.zeros((), dtype=torch.float64)).item() for derivative in (slope, grad(slope)))
    x = torch.zeros(3, dtype=dtype, requires_grad=True)

    def fn(x):
        return fused.bias_act(x, None, None, name).sum()

    (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
    assert g.tolist() == pytest.approx([first] * 3, rel=1e-6)
    h = torch.autograd.grad(g.sum(), x)[0] if g.requires_grad else torch.zeros(3)
    assert h.tolist() == pytest.approx([second] * 3, rel=1e-6)
    x = x.detach()
    assert grad(fn)(x).tolist() == pytest.approx([first] * 3, rel=1e-6)
    assert hessian(fn)(x).diagonal().tolist() == pytest.approx([second] * 3, rel=1e-6)
    assert jvp(fn, (x,), (torch.ones_like(x),))[1].item() == pytest.approx(3 * first, rel=1e-6)


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ACTIVATION_OPERATORS)
def test_results_do_not_depend_on_blocks(op, monkeypatch):
    """Results and gradients do not depend on the number of rows that are computed at a time."""

    def results():
        for sample in samples(op):
            out = sample()
            yield out
            if leaves := [t for t in sample.tensors if t is not None and t.requires_grad]:
                yield from torch.autograd.grad(out, leaves, torch.full_like(out, 0.5))

    without_blocks = list(results())
    monkeypatch.setattr(cpu, "_FEWEST_BLOCKS", 0)
    monkeypatch.setattr(cpu, "block", lambda device: 100)
    for expected, actual in zip(without_blocks, results(), strict=True):
        assert actual.is_contiguous() and expected.is_contiguous() and actual.dtype == expected.dtype
        torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-2, atol=1e-3, equal_nan=True)


# ---- infinite and NaN inputs -----------------------------------------------------------------------------------------

SPECIAL = (torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1.0, -1.0)
IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "softplus": F.softplus,
    "mish": F.mish,
    "identity": lambda x: x * 1.0,
}
FORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # (fused, PyTorch's function)
    "alone": (
        lambda x, u, name: torch.ops.fused.bias_act(x, None, None, name),
        lambda x, u, name: IN_TORCH[name](x),
    ),
    "gated": (lambda x, u, name: torch.ops.fused.glu(x, u, None, name), lambda x, u, name: IN_TORCH[name](x) * u),
    "clamped": (
        lambda x, u, name: torch.ops.fused.glu(x, u, None, name, 1.0, 0.5),
        lambda x, u, name: IN_TORCH[name](x.clamp(max=0.5)) * (u.clamp(-0.5, 0.5) + 1.0),
    ),
}


def at_special_values(fn: Callable[..., Tensor], name: str, dtype: torch.dtype, grad: float) -> list[Tensor]:
    """Return a function's result and gradients for all pairs of special inputs."""
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=dtype)
    if name in ("relu6", "hardswish", "elu"):  # PyTorch's vectorized and scalar code give different gradients at NaN
        pairs = pairs[~pairs[:, 0].isnan()]
    x, u = (column.contiguous().requires_grad_() for column in pairs.unbind(1))
    y = fn(x, u, name)
    grads = torch.autograd.grad(y, (x, u), torch.full_like(y, grad), allow_unused=True)
    return [y.detach(), *(t for t in grads if t is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", IN_TORCH)
def test_results_at_infinite_and_nan_inputs_equal_torchs(name: str, form: str, dtype: torch.dtype) -> None:
    if name == "quick_gelu" and form == "gated":
        pytest.skip("step by step, autograd gives NaN for an infinite gradient at 0; the operator gives infinity")
    for incoming in (1.0, 0.0) if name == "quick_gelu" else (1.0, 0.0, torch.inf):
        actual, expected = (at_special_values(fn, name, dtype, incoming) for fn in FORMS[form])
        torch.testing.assert_close(actual, expected[: len(actual)], rtol=0.02, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", IN_TORCH)
def test_compiled_results_at_infinite_and_nan_inputs_equal_eager(name: str, form: str) -> None:
    fn, _ = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="fused")
        for incoming in (1.0, 0.0, torch.inf, torch.nan):
            eager, actual = (at_special_values(f, name, dtype, incoming) for f in (fn, compiled))
            torch.testing.assert_close(actual, eager, rtol=0.02, atol=1e-6, equal_nan=True)


# ---- compiled kernels ------------------------------------------------------------------------------------------------


X = torch.randn(6, 4, 24)
STRIDED = {
    "contiguous": X[..., :8].contiguous(),
    "columns": X[..., 8:16],
    "some rows of each matrix": X[:, :2, 16:],
    "every other column": X[..., ::3],
    "transposed": X[..., :6].transpose(1, 2),
}


def test_kernels_read_columns_in_place_and_copies_of_other_tensors():
    identify = compiled.identification(REGISTERED["glu"].signature, on_gpu=False)
    for name, gate in STRIDED.items():
        _, (read, _) = identify((gate, gate, None, "silu", 0.5, None))
        assert (read.data_ptr() == gate.data_ptr()) == (name in ("contiguous", "columns")), name
    identify = compiled.identification(REGISTERED["scaled_masked_softmax"].signature, on_gpu=False)
    masks = (torch.ones(shape, dtype=torch.bool) for shape in ((6, 4, 24), (6, 4, 24), (6, 1, 24)))
    same, twin, broadcast = (identify((X, mask, None))[0] for mask in masks)
    assert same == twin != broadcast


@pytest.mark.slow
@pytest.mark.skipif(not compiled.IS_SUPPORTED, reason="compiled kernels need torch 2.13")
def test_compiled_kernels_take_any_strides(monkeypatch):
    monkeypatch.setattr(compiled, "_KERNELS", {})
    monkeypatch.setattr(compiled, "FEWEST", 1)
    for name, gate in STRIDED.items():
        up = gate.flip(0) if name == "contiguous" else gate
        actual = fused.glu(gate, up, None, "silu", 0.5, None)
        torch.testing.assert_close(actual, F.silu(gate) * (up + 0.5)), name
    assert len({*compiled._KERNELS.values()}) == 2  # of contiguous tensors, and of rows apart
