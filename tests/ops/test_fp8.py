"""``memory="fp8"``: the same results, half the saved bytes, gradients exact at the stored values."""

import inspect

import pytest
import torch
from harness import Calls
from torch.fx.experimental.proxy_tensor import make_fx

from torch_fused_ops import functional as FF
from torch_fused_ops.declaration import OPERATORS
from torch_fused_ops.operators import fp8_store, reference
from torch_fused_ops.operators.fp8_store import is_marked
from torch_fused_ops.testing.samples import ACTIVATION_OPERATORS, samples

fused = torch.ops.fused
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ---- storing and loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_values_are_the_nearest(dtype):
    x = torch.randn(50, 64, dtype=torch.float64).mul(torch.logspace(-4, 4, 50, dtype=torch.float64)[:, None]).to(dtype)
    stored, scale = reference.store_fp8(x)
    assert (stored.dtype, stored.shape, stored.is_contiguous()) == (torch.float8_e4m3fn, x.shape, True)
    assert (scale.dtype, scale.shape) == (torch.float32, x.shape[:-1])
    error = (reference.load_fp8(stored, scale, torch.float64) - x.double()).abs()
    allowed = torch.maximum(2**-4 * x.double().abs(), 2**-10 * scale.double()[:, None])
    assert (error <= allowed * (1 + 1e-6)).all()
    largest = x.abs().argmax(-1, keepdim=True)
    loaded = reference.load_fp8(stored, scale, dtype)
    torch.testing.assert_close(loaded.gather(-1, largest), x.gather(-1, largest), rtol=1e-6, atol=0)


def test_float8_values_are_stored_exactly():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    row = codes[codes.isfinite()]
    stored, scale = reference.store_fp8(row)
    assert scale == 1 and torch.equal(stored.float(), row)


def test_rows_without_a_scale():
    x = torch.ones(5, 4)
    x[0], x[1, 2], x[2, 1], x[3] = 0, float("inf"), float("nan"), 1e-43
    stored, scale = reference.store_fp8(x)
    loaded = reference.load_fp8(stored, scale, torch.float32)
    assert scale[[0, 3]].tolist() == [1, 1] and torch.equal(loaded[[0, 3]], torch.zeros(2, 4))
    assert loaded[[1, 2]].isnan().all() and torch.equal(loaded[4], x[4])
    assert reference.store_fp8(torch.zeros(3, 0))[1].tolist() == [1, 1, 1]
    traced = make_fx(lambda x: reference.store_fp8(x), tracing_mode="symbolic")(torch.zeros(3, 0))
    assert traced(torch.zeros(2, 0))[1].tolist() == [1, 1]
    largest = torch.finfo(torch.float32).max * torch.ones(1, 3)
    assert reference.load_fp8(*reference.store_fp8(largest), torch.float32).isfinite().all()


# ---- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("op", ACTIVATION_OPERATORS)
def test_results_and_gradients_equal_the_operator_at_stored_values(op, by_kernels, monkeypatch):
    """Results have the same bits. Only the backward operator's data differ, without a second rounding."""
    monkeypatch.setattr(fp8_store, "_has_kernels", lambda t: by_kernels and t.shape[-1] > 0)
    data = OPERATORS[op].num_data
    for sample in samples(op):
        plain, marked = sample(), sample.overload(fused.keep_fp8(sample.args[0]), *sample.args[1:])
        torch.testing.assert_close(marked, plain, rtol=0, atol=0, equal_nan=True)
        output_mask = [t is not None and t.requires_grad for t in sample.tensors]
        if not any(output_mask):
            continue
        grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(plain)
        leaves = [t for t, requested in zip(sample.tensors, output_mask, strict=True) if requested]
        dtype = reference.compute_dtype(*sample.tensors)
        tensors = [t if t is None else t.detach() for t in sample.tensors]
        dtypes = [t.dtype if fp8_store._has_kernels(t) else dtype for t in tensors[:data]]
        loaded = [fp8_store.load(*fp8_store.store(t), d) for t, d in zip(tensors, dtypes, strict=False)]
        gradients = getattr(fused, f"{op}_backward")(grad, *loaded, *tensors[data:], *sample.scalars, output_mask)
        expected = (t for t in gradients if t is not None)
        for got, truth in zip(torch.autograd.grad(marked, leaves, grad), expected, strict=True):
            torch.testing.assert_close(got, truth.to(got.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_stored_by_gpu_kernels_load_exactly(dtype, monkeypatch):
    """The scales are powers of two, so loading in the data's dtype does not round."""
    monkeypatch.setattr(fp8_store, "_has_kernels", lambda t: True)
    x = torch.randn(50, 64, dtype=torch.float64).mul(torch.logspace(-4, 4, 50, dtype=torch.float64)[:, None]).to(dtype)
    loaded, exact = (fp8_store.load(*fp8_store.store(x), d) for d in (dtype, torch.float64))
    assert loaded.dtype == dtype and torch.equal(loaded.double(), exact)
    sizes = x.double().abs()
    assert ((exact - x).abs() <= torch.maximum(2**-4 * sizes, 2**-9 / 448 * sizes.amax(-1, keepdim=True))).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_give_the_same_values_and_scales(dtype):
    x = torch.randn(3, 5, 8).to(dtype)
    for actual, expected in zip(reference.store_fp8(x, halves=True), reference.store_fp8(x), strict=True):
        assert torch.equal(actual.float(), expected.float()) and actual.is_contiguous()


def test_mark_and_with_saved():
    x = torch.randn(3, 8)
    torch.library.opcheck(fused.with_saved.default, (x, [x + 1]))
    marked = fused.keep_fp8(x)
    assert marked.data_ptr() == x.data_ptr() and is_marked(marked) and not is_marked(x)
    assert not any(map(is_marked, (marked + 1, marked.view(8, 3), fused.bias_act(marked, None, None, "silu"))))


def test_calls_without_gradients_store_no_float8():
    x = torch.randn(3, 8)
    with Calls() as calls:
        FF.bias_gelu(x, memory="fp8")
        with torch.no_grad():
            FF.bias_gelu(x.requires_grad_(), memory="fp8")
    assert [func for func, *_ in calls.made] == [fused.bias_act.default] * 2


# ---- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()], ids=["of its result", "constant"])
def test_second_derivatives_of_a_backward_pass_raise(loss):
    """Stored values are not differentiable, so a second derivative of 0 would be silently wrong.

    This also holds if the incoming gradient needs no gradient, and if another path to x is added.
    """
    x = torch.randn(3, 8, requires_grad=True)
    total = loss(FF.bias_gelu(x, memory="fp8")) + (x**3).sum()
    with pytest.raises(
        RuntimeError, match="a second derivative through fused::bias_act with memory='fp8' is not accepted"
    ):
        torch.autograd.grad(total, x, create_graph=True)
    torch.autograd.grad(total, x)


# ---- the argument ----------------------------------------------------------------------------------------------------


# Functions without an activation's input to save in float8.
OTHERS = ("dropout_add", "linear_fp8", "softmax", "shard_seed", "viewless")
ACTIVATIONS = [n for n in FF.__all__ if not any(other in n.lower() for other in OTHERS)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_function_takes_memory(name):
    parameter = inspect.signature(getattr(FF, name)).parameters.get("memory")  # GluOptions has it for some
    assert parameter is None or (parameter.default, parameter.kind) == ("free", inspect.Parameter.KEYWORD_ONLY)
    x = torch.randn(3, 8, requires_grad=True)
    glu = name in ("glu", "swiglu", "geglu")
    args = (x, torch.randn(3, 8)) if glu else (x,)
    extra = {"activation": "silu"} if name in ("bias_act", "glu", "bias_glu") else {}
    plain = getattr(FF, name)(*args, **extra)
    assert torch.equal(getattr(FF, name)(*args, **extra, memory="fp8"), plain)
    for value in ("fp4", None, 8):
        with pytest.raises(ValueError, match=f"memory={value!r} is not known; accepted: 'free', 'fp8'"):
            getattr(FF, name)(*args, **extra, memory=value)
