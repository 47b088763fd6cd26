"""Megatron-LM's names: values and gradients, and each upstream defect compared with our behavior.

Upstream's behavior is written in plain torch after its sources; Megatron is not imported.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH as gelu_tanh
from harness import quick_gelu as quick
from harness import raises, saving

from torch_fused_ops import megatron as mg
from torch_fused_ops.megatron import AttnMaskType, FusedScaleMaskSoftmax

TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 1e-3}}


def randn(*shape, dtype=torch.float32, seed=0, scale=1.0, requires_grad=False):
    return (
        (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale)
        .to(dtype)
        .requires_grad_(requires_grad)
    )


def leaves(*tensors):
    return [t if t is None else t.detach().clone().requires_grad_() for t in tensors]


def glu(act, y, bias=None, weights=None, offset=0.0, clamp=None):
    """Compute any GLU by its definition, in float64."""
    y = y.double() if bias is None else y.double() + bias.double()
    gate, up = y.chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    out = act(gate) * (up + offset)
    return out if weights is None else out * weights.double().reshape(*y.shape[:-1], 1)


X, BIAS, WEIGHTS = randn(6, 8, scale=3), randn(8, seed=1), randn(6, 1, seed=2)

# name → (arguments, the same formula in plain torch)
FORWARD = {
    "bias_gelu": ((BIAS, X), lambda b, x: gelu_tanh(x + b)),
    "bias_gelu_impl": ((X, BIAS), lambda x, b: gelu_tanh(x + b)),
    "GeLUFunction": ((X, BIAS), lambda x, b: gelu_tanh(x + b)),
    "fast_gelu": ((X,), gelu_tanh),
    "geglu": ((X,), lambda y: glu(gelu_tanh, y)),
    "bias_geglu_impl": ((X, BIAS), lambda y, b: glu(gelu_tanh, y, b)),
    "BiasGeGLUFunction": ((X, BIAS), lambda y, b: glu(gelu_tanh, y, b)),
    "quick_gelu": ((X,), quick),
    "quick_geglu": ((X, 0.5), lambda y, o: glu(quick, y, offset=o)),
    "weighted_quick_geglu": ((X, WEIGHTS, 1.0), lambda y, w, o: glu(quick, y, None, w, o)),
    "weighted_bias_quick_geglu_impl": (
        (X, BIAS, WEIGHTS, False, 1.0, 2.0),
        lambda y, b, w, _, o, c: glu(quick, y, b, w, o, c),
    ),
    "swiglu": ((X,), lambda y: glu(F.silu, y)),
    "bias_swiglu_impl": ((X, BIAS, False, True, 2.0), lambda y, b, _, __, c: glu(F.silu, y, b, clamp=c)),
    "weighted_bias_swiglu_impl": (
        (X, BIAS, WEIGHTS, False, 2.0),
        lambda y, b, w, _, c: glu(F.silu, y, b, w, clamp=c),
    ),
    "squared_relu": ((X,), lambda x: F.relu(x).square()),
    "weighted_squared_relu_impl": ((X, WEIGHTS), lambda x, w: F.relu(x).square() * w),
}


def function(name):
    attribute = getattr(mg, name)
    return attribute.apply if inspect.isclass(attribute) else attribute


# ---- the module ------------------------------------------------------------------------------------------------------


def test_every_public_name_is_tested():
    tested = {*FORWARD}
    elsewhere = {
        *("AttnMaskType", "FusedScaleMaskSoftmax", "ScaledMaskedSoftmax", "ScaledSoftmax"),
        *("ScaledUpperTriangMaskedSoftmax", "attention_mask_func", "bias_dropout_add_fused_inference"),
        *("bias_dropout_add_fused_train", "bias_dropout_add_unfused", "get_bias_dropout_add"),
        # tests/ops/test_viewless.py
        *("MakeViewlessTensor", "make_viewless_tensor"),
    }
    public = {n for n, v in vars(mg).items() if n[0] != "_" and "torch_fused_ops" in getattr(v, "__module__", "")}
    assert tested | elsewhere == public and not tested & elsewhere
    assert all(getattr(mg, name).__doc__ for name in public)


@pytest.mark.parametrize("name", FORWARD)
def test_value_and_gradients(name):
    args, formula = FORWARD[name]
    fused_args = [t.detach().clone().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args]
    double_args = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in args]
    out, expected = function(name)(*fused_args), formula(*double_args)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert out.dtype == torch.float32
    incoming = randn(*out.shape, seed=9)
    out.backward(incoming)
    expected.backward(incoming.double())
    for t, p in zip(fused_args, double_args, strict=True):
        if isinstance(t, torch.Tensor):
            assert t.grad.shape == t.shape
            torch.testing.assert_close(t.grad.double(), p.grad, rtol=1e-5, atol=1e-5)


def test_compiles_once_for_all_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend

    def fn(y, weights, scores, mask):
        y = mg.make_viewless_tensor(y.transpose(0, 1), True, True)
        a = mg.weighted_bias_quick_geglu_impl(y, BIAS, weights, False, 1.0, 2.0)
        b = mg.bias_dropout_add_fused_inference((a, None), a, 0.1)
        return b, softmax(AttnMaskType.causal, window=(4, 0))(scores, mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=counter, fullgraph=True, dynamic=True)
    for n in (5, 6, 7):
        args = randn(2, n, 8, requires_grad=True), randn(2 * n, 1), randn(2, 3, n, n + 2), padding(2, n + 2)
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert counter.frame_count == 1


# ---- inputs that upstream fails on -----------------------------------------------------------------------------------

IMPLS = {
    "bias_swiglu_impl": lambda y, b, w: mg.bias_swiglu_impl(y, b, clamp_value=2.0),
    "bias_geglu_impl": lambda y, b, w: mg.bias_geglu_impl(y, b),
    "bias_gelu_impl": lambda y, b, w: mg.bias_gelu_impl(y, b),
    "weighted_bias_swiglu_impl": lambda y, b, w: mg.weighted_bias_swiglu_impl(y, None, w),
    "weighted_bias_quick_geglu_impl": lambda y, b, w: mg.weighted_bias_quick_geglu_impl(y, b, w),
    "weighted_squared_relu_impl": lambda y, b, w: mg.weighted_squared_relu_impl(y, w),
}


@pytest.mark.parametrize("impl", IMPLS.values(), ids=IMPLS)
def test_inputs_may_have_any_strides_and_axes(impl):
    y = randn(3, 2, 8).transpose(0, 1)
    raises(RuntimeError, "view", y.view, -1, 8)
    expected = impl(y.contiguous(), BIAS, randn(6, 1))
    torch.testing.assert_close(impl(y, BIAS, randn(6, 1)), expected)
    torch.testing.assert_close(impl(y, BIAS, randn(6, 1).view(2, 3, 1)), expected)
    torch.testing.assert_close(impl(y[None, :, None], BIAS, randn(6, 1)), expected[None, :, None])
    torch.testing.assert_close(impl(y[:0], BIAS, randn(0, 1)), expected[:0])


def test_bias_may_broadcast():
    y = randn(2, 3, 8)
    expected = mg.bias_gelu(BIAS, y)
    for bias in (BIAS.view(1, 1, 8), BIAS.expand(2, 3, 8)):
        (b,) = leaves(bias)
        out = mg.bias_gelu(b, y)
        torch.testing.assert_close(out, expected)
        out.sum().backward()
        assert b.grad.shape == bias.shape


def test_weights_of_wrong_shapes_are_rejected():
    for weights in (randn(6), randn(1, 1), randn(6, 8), randn(3, 1)):
        raises(
            ValueError,
            r"weights has shape .*accepted: \(6, 1\), a number",
            mg.weighted_bias_swiglu_impl,
            X,
            None,
            weights,
        )
    raises(TypeError, r"weights=1\.0 is not accepted", mg.weighted_bias_swiglu_impl, X, None, 1.0)


# ---- upstream's defects in activations -------------------------------------------------------------------------------


def test_quick_geglu_clamps_after_the_bias():
    y, bias = torch.full((1, 2), 6.0), torch.full((2,), 5.0)
    upstream = glu(quick, y.clamp(max=7), bias)  # upstream clamps, then adds the bias
    assert upstream.item() > 100
    actual = mg.weighted_bias_quick_geglu_impl(y, bias, torch.ones(1, 1), clamp_value=7.0)
    torch.testing.assert_close(actual.item(), 49.0, rtol=1e-4, atol=0)


def test_bias_geglu_can_clamp():
    y = torch.full((1, 2), 100.0)
    assert mg.bias_geglu_impl(y, None).item() == 10000  # upstream ignores a configured clamp
    assert mg.bias_geglu_impl(y, None, clamp_value=7.0).item() == 49


def test_a_clamp_of_0_clamps_nothing_and_negative_clamps_are_rejected():
    assert torch.equal(mg.bias_swiglu_impl(X, None, clamp_value=0.0), mg.bias_swiglu_impl(X, None))
    raises(ValueError, r"clamp=-1.* is not accepted", mg.bias_swiglu_impl, X, None, clamp_value=-1.0)


@pytest.mark.parametrize("name", ["bias_swiglu_impl", "weighted_bias_swiglu_impl", "weighted_bias_quick_geglu_impl"])
def test_fp8_store_keeps_half(name):
    y = randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    args = (y, None) if name == "bias_swiglu_impl" else (y, None, torch.ones(8, 1))

    def saved(**flags):
        return saving(lambda: getattr(mg, name)(*args, **flags))[1]

    rows = 8 * 4 * (1 + (len(args) == 3))  # a float32 scale, and a float32 weight, for each row
    assert saved(fp8_input_store=True) == 8 * 64 + rows
    assert saved() == 8 * 64 * 2 + rows - 8 * 4


# ---- bias, dropout, residual -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual_dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_bias_dropout_add_drops_in_training_only(residual_dtype, has_bias):
    """The result has the residual's dtype, float32 or bfloat16."""
    residual = randn(16, 64, dtype=residual_dtype, seed=1, scale=1e-3)
    x, bias = randn(16, 64, dtype=torch.bfloat16), randn(64, dtype=torch.bfloat16) if has_bias else None
    expected = residual.float() + x.float() + (bias.float() if has_bias else 0)
    for training, fused in ((True, True), (True, False), (False, True), (False, False)):
        out = mg.get_bias_dropout_add(training, fused)((x, bias), residual, prob=0.25)
        is_dropped = (out.float() - residual.float()).abs() < 1e-6
        assert out.dtype == residual_dtype and (is_dropped.float().mean() > 0.1) == training
        if not training:
            torch.testing.assert_close(out, expected.to(residual_dtype), **TOLERANCES[residual_dtype])


# ---- softmax ---------------------------------------------------------------------------------------------------------


def exact(x, hidden=None, sink=None, scale=1.0):
    """Compute softmax of unmasked scores in float64. Fully masked rows are 0."""
    x = x.double() * scale
    x = x if hidden is None else x.masked_fill(hidden, -torch.inf)
    column = torch.full((*x.shape[:-1], 1), -torch.inf, dtype=torch.float64)
    if sink is not None:
        column = sink.double().view(-1, 1, 1).expand_as(column)
    return torch.softmax(torch.cat([x, column], -1), -1)[..., :-1].nan_to_num(0.0)


def softmax(mask_type=AttnMaskType.causal, fusion=True, scale=None, window=None, fp16=False, bf16=False, **kwargs):
    mask_func = kwargs.get("mask_func", mg.attention_mask_func)
    return FusedScaleMaskSoftmax(fp16, bf16, mask_type, fusion, mask_func, kwargs.get("fp32", True), scale, window)


def causal(sq, sk):
    return torch.ones(sq, sk, dtype=torch.bool).triu(1 + sk - sq)


def outside(sq, sk, left, right):
    """Return True where a key is outside the window; −1 means unbounded."""
    visible = torch.ones(sq, sk, dtype=torch.bool).tril(right + sk - sq if right >= 0 else sk)
    return ~(visible if left < 0 else visible.triu(sk - sq - left))


def padding(b, sk, dtype=torch.bool):
    mask = torch.zeros(b, 1, 1, sk, dtype=dtype)
    mask[0, ..., sk // 2 :] = 1
    return mask


@pytest.mark.parametrize(
    ("mask_type", "window", "mask_dtype"),
    [
        (AttnMaskType.padding, None, torch.bool),
        (AttnMaskType.causal, (2, 0), torch.uint8),
        (AttnMaskType.causal, None, torch.bool),
        (AttnMaskType.arbitrary, (-1, 2), torch.uint8),
    ],
)
def test_mask_causality_window_scale_and_sink_all_apply(mask_type, window, mask_dtype):
    x, mask, sink = randn(2, 3, 6, 9), padding(2, 9, mask_dtype), randn(3, seed=1)
    hidden = mask.bool().expand(2, 3, 6, 9)
    if mask_type == AttnMaskType.causal:
        hidden = hidden | causal(6, 9)
    if window is not None:
        hidden = hidden | outside(6, 9, *window)
    module = softmax(mask_type, scale=0.5, window=window)
    torch.testing.assert_close(module(x, mask).double(), exact(x, hidden, None, 0.5), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(module(x, mask, sink).double(), exact(x, hidden, sink, 0.5), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("flags", [{"fp16": True}, {"bf16": True}, {}])
def test_dtypes(flags):
    dtype = torch.float16 if "fp16" in flags else torch.bfloat16 if "bf16" in flags else torch.float32
    x = randn(2, 4, 8, 8)
    for inp in (x.to(dtype), x):  # upstream casts any input to the dtype of its flags
        out = softmax(**flags)(inp, None)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), exact(inp, causal(8, 8)), rtol=1e-2 if flags else 1e-5, atol=1e-6)


@pytest.mark.codegen_is_slow
def test_gradients_and_compile():
    module = softmax(AttnMaskType.causal, scale=0.5, window=(4, 0))
    x, sink = leaves(randn(2, 3, 5, 7), randn(3, seed=1))
    mask = padding(2, 7)
    hidden = mask | causal(5, 7) | outside(5, 7, 4, 0)
    incoming = randn(2, 3, 5, 7, seed=2)
    plain = leaves(x.double(), sink.double())
    expected = torch.autograd.grad(exact(plain[0], hidden, plain[1], 0.5), plain, incoming.double())
    for backend in (None, "eager", "aot_eager", "fused"):
        torch.compiler.reset()
        fn = module if backend is None else torch.compile(module, backend=backend, fullgraph=True)
        got = torch.autograd.grad(fn(x, mask, sink), (x, sink), incoming)
        torch.testing.assert_close([g.double() for g in got], list(expected), rtol=1e-4, atol=1e-6)


def test_masked_scores_never_win():
    """Upstream sets masked scores to −10000, so a masked key gets all the attention if other scores are lower."""
    x, mask = torch.tensor([[[[-20000.0, -20001.0, 0.0]]]]), torch.tensor([[[[False, False, True]]]])
    upstream = torch.softmax(x.masked_fill(mask, -10000.0), -1)
    assert upstream.flatten().tolist() == [0, 0, 1]
    actual = softmax(AttnMaskType.padding)(x, mask)
    torch.testing.assert_close(actual, exact(x, mask).float())
    torch.testing.assert_close(mg.ScaledMaskedSoftmax.apply(x, mask, 1.0), exact(x, mask).float())
    torch.testing.assert_close(torch.softmax(mg.attention_mask_func(x, mask), -1), exact(x, mask).float())


def test_custom_mask_function_gets_a_copy():
    """The function is called as in upstream, but on a copy. Causality and window apply as well."""

    def mine(scores, mask):
        scores.add_(mask)
        return scores

    module = softmax(mask_func=mine, scale=0.5)
    x, mask = randn(2, 3, 6, 6), torch.zeros(2, 1, 1, 6)
    mask[..., 0] = -3.0
    before = x.clone()
    assert not module.is_kernel_available(mask, 2, 3, 6, 6) and module.is_kernel_available(None, 2, 3, 6, 6)
    expected = exact(x * 0.5 + mask, causal(6, 6))
    torch.testing.assert_close(module(x, mask).double(), expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(x, before)


def test_is_kernel_available():
    module = softmax()
    for sizes in ((1, 1, 1, 1), (3, 5, 7, 33), (1, 1, 2, 100_000)):
        assert module.is_kernel_available(None, *sizes) is True
        assert softmax(fusion=False).is_kernel_available(None, *sizes) is False
    assert module.is_kernel_available(padding(2, 9), 2, 3, 6, 9) is True


def test_inconsistent_arguments_are_rejected():
    raises(AssertionError, "input_in_fp16=True and input_in_bf16=True", softmax, fp16=True, bf16=True)
    raises(AssertionError, r"scale=2\.0 with softmax_in_fp32=False", softmax, scale=2.0, fp32=False)
    raises(AssertionError, r"input has shape \(2, 3, 4\); accepted: four axes", softmax(), randn(2, 3, 4), None)
    raises(TypeError, "attn_mask_type='causal' is not accepted", softmax, "causal")
    additive = torch.full((2, 1, 1, 9), -10000.0)
    with pytest.raises(TypeError, match=r"mask has dtype torch.float32; accepted: bool or uint8.*`mask < 0`"):
        softmax()(randn(2, 3, 6, 9), additive)
    raises(TypeError, r"mask has dtype torch\.float32", mg.ScaledMaskedSoftmax.apply, randn(2, 3, 6, 9), additive, 1.0)
    with pytest.raises(TypeError, match=r"mask has dtype torch\.int64"):
        mg.ScaledMaskedSoftmax.apply(randn(2, 3, 6, 9), additive.long(), 1.0)


def test_enum_members_are_read_by_name():
    import enum

    other_enum = enum.Enum("AttnMaskType", {"padding": 1, "causal": 2})
    x = randn(1, 1, 4, 4)
    assert torch.equal(softmax(other_enum.causal)(x, None), softmax()(x, None))
    assert [m.value for m in AttnMaskType] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_functions(dtype):
    tolerance = {"rtol": 1e-2 if dtype != torch.float32 else 1e-5, "atol": 1e-6}
    x, mask = randn(2, 3, 6, 9, dtype=dtype), padding(2, 9)
    for m in (mask, mask.to(torch.uint8), mask.expand(2, 1, 6, 9)):
        out = mg.ScaledMaskedSoftmax.apply(x, m, 0.5)
        torch.testing.assert_close(out.double(), exact(x, mask, scale=0.5), **tolerance)
    for out in (mg.ScaledMaskedSoftmax.apply(x, None, 0.5), mg.ScaledSoftmax.apply(x, 0.5)):
        torch.testing.assert_close(out.double(), exact(x, scale=0.5), **tolerance)
    square = randn(5, 7, 7, dtype=dtype)
    out = mg.ScaledUpperTriangMaskedSoftmax.apply(square, 2.0)
    torch.testing.assert_close(out.double(), exact(square, causal(7, 7), scale=2.0), **tolerance)
    assert out.dtype == dtype


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_forgotten_tuple_raises(training, fused):
    x = torch.randn(4, 8)
    with pytest.raises(TypeError, match=r"x_with_bias is a Tensor; accepted: \(x, bias\)"):
        mg.get_bias_dropout_add(training, fused)(x, x, 0.1)


def test_softmax_errors_name_the_argument():
    module, scores = softmax(AttnMaskType.padding), torch.randn(2, 3, 4, 4)
    mask = torch.zeros(2, 1, 3, 4, dtype=torch.bool)
    words = r"mask has shape \(2, 1, 3, 4\); accepted: a shape that broadcasts to input's"
    raises(ValueError, words, module, scores, mask)
    raises(TypeError, r"input has dtype torch\.int64; accepted", module, scores.long(), None)
    for window in (3, (1,), (1, -2)):
        raises(ValueError, "window_size=.* is not accepted", softmax, window=window)
