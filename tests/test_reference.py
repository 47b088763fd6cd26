"""Compare reference.py with the design's formulas, written with PyTorch's own functions."""

import itertools

import pytest
import torch

from torch_fused_ops import activations
from torch_fused_ops.operators import reference

NAMES = activations.names()


def plain_bias_act(x, bias, scale, activation):
    y = activations.get(activation).definition(x if bias is None else x + bias)
    return y if scale is None else y * scale[..., None]


def plain_glu(gate, up, scale, activation, up_offset=0.0, clamp=None):
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    y = activations.get(activation).definition(gate) * (up + up_offset)
    return y if scale is None else y * scale[..., None]


def plain_bias_glu(x, bias, scale, activation, layout="halves", up_offset=0.0, clamp=None):
    x = x if bias is None else x + bias
    halves = (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    halves = halves[::-1] if layout == "swapped" else halves
    return plain_glu(*halves, scale, activation, up_offset, clamp)


SCALARS = {
    "bias_act": [()],
    "glu": [(), (1.0, None), (0.0, 0.8), (1.0, 0.8)],
    "bias_glu": [(), ("interleaved",), ("halves", 1.0, 0.8), ("interleaved", 0.5, 0.8), ("swapped", 0.5, 0.8)],
}
CASES = [
    (op, name, *s) for op, calls in SCALARS.items() for s in calls for name in (NAMES if not s else ("gelu", "silu"))
]


def arguments(op, shape=(2, 3, 8), dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    second = shape if op == "glu" else shape[-1:]
    return [torch.randn(s, generator=g, dtype=dtype) for s in (shape, second, shape[:-1])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward(case):
    op, *scalars = case
    tensors = [t.requires_grad_() for t in arguments(op)]
    plain = globals()[f"plain_{op}"](*tensors, *scalars)
    torch.testing.assert_close(getattr(reference, op)(*tensors, *scalars), plain, rtol=1e-11, atol=1e-14)
    grad = torch.randn(plain.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = torch.autograd.grad(plain, tensors, grad)
    full = {"bias_act": (), "glu": (0.0, None), "bias_glu": ("halves", 0.0, None)}[op]
    complete = (*scalars, *full[len(scalars) - 1 :])
    detached = [t.detach() for t in tensors]
    for mask in itertools.product((True, False), repeat=3):
        grads = getattr(reference, f"{op}_backward")(grad, *detached, *complete, mask)
        for requested, actual, truth in zip(mask, grads, expected, strict=True):
            assert (actual is not None) == requested
            if requested:
                torch.testing.assert_close(actual, truth, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("missing", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("op", ["bias_act", "bias_glu"])
def test_optional_tensors(op, missing):
    tensors = [None if i in missing else t for i, t in enumerate(arguments(op))]
    plain = globals()[f"plain_{op}"](*tensors, "silu")
    torch.testing.assert_close(getattr(reference, op)(*tensors, "silu"), plain)


def test_gradient_at_the_clamps_bounds_is_that_of_torch_clamp():
    """This gradient is 1 before torch 2.15, and 0 from 2.15 on. In bf16, inputs are often equal to a bound."""
    x = torch.tensor([[-2.0, -1.0, 0.5, 1.0, 2.0]], dtype=torch.float64)
    for gate, up in ((x, x), (x, x.roll(1)), (x.roll(2), x)):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        out = plain_glu(*leaves, None, "tanh", 1.0, 1.0)
        expected = torch.autograd.grad(out.sum(), leaves)
        got = reference.glu_backward(torch.ones_like(x), gate, up, None, "tanh", 1.0, 1.0, (True, True, False))
        torch.testing.assert_close(got[:2], expected)


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@pytest.mark.parametrize("shape", [(6,), (0,), (3, 2), (2, 0, 4), (2, 3, 10)])
def test_pack_is_the_inverse_of_unpack(layout, shape):
    packed = torch.randn(shape)
    gate, up = reference.unpack(packed, layout)
    assert gate.shape == up.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.equal(reference.pack(gate, up, layout), packed)
    if packed.numel():
        assert gate.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()  # a view


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_arguments_dtypes(dtype, other):
    """Every result has its argument's dtype, and arithmetic is at least float32."""
    assert reference.compute_dtype(torch.empty(0, dtype=dtype), None, torch.empty(0, dtype=other)) == (
        torch.float64 if torch.float64 in (dtype, other) else torch.float32
    )
    first, *others = arguments("glu")
    tensors = first.to(dtype), *(t.to(other) for t in others)
    out = reference.glu(*tensors, "silu")
    assert out.dtype == dtype
    wide = reference.glu(*(t.double() for t in tensors), "silu")
    torch.testing.assert_close(out.double(), wide, rtol=torch.finfo(dtype).eps, atol=1e-6)
    grads = reference.glu_backward(out, *tensors, "silu", 0.0, None, (True, True, True))
    assert [g.dtype for g in grads] == [dtype, other, other]
