"""``fused::scaled_masked_softmax`` in eager mode."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from harness import Calls, saved_by
from hypothesis import given, settings
from torch.func import grad, jvp

from torch_fused_ops.kernels import compiled
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import samples

softmax = torch.ops.fused.scaled_masked_softmax
backward = torch.ops.fused.scaled_masked_softmax_backward
INF = math.inf


def composed(x, mask=None, sink=None, scale=1.0):
    """Compose the operator of PyTorch's functions. Fully masked rows are NaN."""
    scores = x * scale if mask is None else (x * scale).masked_fill(mask, -INF)
    if sink is None:
        return torch.softmax(scores, -1)
    sinks = sink[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]


def masked(*shape, seed=0):
    """Return a mask that leaves each row its key on the diagonal, so that ``composed`` has no NaN."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    sq, sk = shape[-2:]
    return mask & ~torch.eye(max(sq, sk), dtype=torch.bool)[-sq:, -sk:]


def tensors(*shape, sink=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=g, dtype=dtype)
    return (x, torch.randn(shape[-3], generator=g, dtype=dtype)) if sink else (x,)


# Arguments on which a derivative depends.
CASES = {
    "plain": {},
    "scale": {"scale": -0.7},
    "mask": {"mask": masked(2, 1, 4, 5), "scale": 0.3},
    "everything": {"mask": masked(2, 1, 4, 5), "scale": 1.3, "causal": True, "left": 2, "right": 1},
    "window": {"left": 1, "right": 0},
}


def call(x, mask=None, sink=None, scale=1.0, causal=False, left=-1, right=-1):
    return softmax(x, mask, sink, scale, causal, left, right)


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.1, -1.0000001, 3.0])
@pytest.mark.parametrize("offset", [0.0, 100.0, -3000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_keep_the_contract(dtype, offset, scale):
    """Rounding scale·x would cause an error of 3000 · 2⁻²⁴, eighteen times float32's limit."""
    x = torch.linspace(-30, 30, 3001, dtype=torch.float64).add(offset).to(dtype)[None].repeat(2, 1)
    assert_contract(softmax(x, None, None, scale), reference.scaled_masked_softmax(x.double(), None, None, scale))
    sink = torch.tensor([abs(offset * scale)], dtype=dtype)  # in the order of the scores
    out = softmax(x[None], None, sink, scale)
    assert_contract(out, reference.scaled_masked_softmax(x[None].double(), None, sink.double(), scale))


@pytest.mark.parametrize("scale", [1.0, 2.0, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_a_sink_the_lowest_scores_are_zero(dtype, scale):
    """Like transformers, masks set rows to the lowest number. Its product with scale exceeds float32's range."""
    x = torch.full((2, 2, 3, 8), torch.finfo(dtype).min if scale > 0 else torch.finfo(dtype).max, dtype=dtype)
    sink = torch.tensor([0.5, -3.0], dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, sink)]
    for call in (softmax, torch.compile(softmax, backend="aot_eager_decomp_partition")):
        out = call(inputs[0], None, inputs[1], scale)
        assert torch.equal(out, torch.zeros_like(out))
        assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(out.sum(), inputs))


def assert_contract(actual, truth):
    assert precision.error(actual, truth).max() <= precision.LIMITS["forward", actual.dtype]


def test_the_measure_sees_a_wrong_gradient(monkeypatch):
    """The measure rejects 3 ulp of a row's largest gradient, and a sink's gradient that is off by 1 in 10000."""
    sample = next(s for s in samples("scaled_masked_softmax") if s.name == "bf16 with sink fp32")
    before = precision.measure(sample)
    truths = reference.scaled_masked_softmax_backward

    monkeypatch.setattr(
        reference,
        "scaled_masked_softmax_backward",
        lambda *a: tuple(t * f for t, f in zip(truths(*a), (1 + 3 / 128, 1.0001), strict=True)),
    )
    after = precision.measure(sample)
    for kind, dtype in (("gradient", torch.bfloat16), ("sum", torch.float32)):
        assert before[kind, dtype] <= precision.LIMITS[kind, dtype] < after[kind, dtype]


# ---- what it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sink", [None, -2.0, -INF])
@pytest.mark.parametrize("scale", [1.0, 0.3, -1.0, -0.3])
def test_masked_rows_are_zero_forward_and_backward(dtype, sink, scale):
    """A mask, causality (with more queries than keys) or −∞ scores mask whole rows. The reference has no NaN."""
    x = torch.randn(2, 2, 6, 3, dtype=torch.float64).to(dtype)
    x[0, 0, 4] = math.copysign(INF, -scale)
    mask = torch.zeros(2, 1, 6, 3, dtype=torch.bool)
    mask[1, 0, 5] = True
    zero = torch.zeros(2, 2, 6, dtype=torch.bool)
    zero[:, :, :3], zero[0, 0, 4], zero[1, :, 5] = True, True, True  # j <= i - 3
    s = None if sink is None else torch.full((2,), sink, dtype=dtype)

    def total(x, *s):
        y = softmax(x, mask, s[0] if s else None, scale, True)
        return (y * torch.linspace(-1, 1, 3, dtype=dtype)).sum(), y

    arguments = (x,) if s is None else (x, s)
    results = [grad(total, tuple(range(len(arguments))), has_aux=True)(*arguments)]
    leaves = [a.clone().requires_grad_() for a in arguments]
    loss, y = total(*leaves)
    results.append((torch.autograd.grad(loss, leaves), y.detach()))
    for grads, y in results:
        assert all(g.isfinite().all() for g in grads) and y.isfinite().all()
        assert (y[zero] == 0).all() and (grads[0][zero] == 0).all()
        assert (y[~zero].sum(-1) > 0.05).all()
    tangent = jvp(lambda x: total(x, *arguments[1:])[1], (x,), (torch.ones_like(x),))[1]
    assert tangent.isfinite().all() and (tangent[zero] == 0).all()


@pytest.mark.parametrize("value", [INF, math.nan])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("sink", [False, True])
def test_infinity_and_nan_give_torchs_results(value, scale, sink):
    x, *sinks = tensors(1, 2, 3, 4, sink=sink)
    x[0, 0, 1, 2] = value
    plain = {"scale": scale, **({"sink": sinks[0]} if sink else {})}
    for args in (plain, {**plain, "mask": torch.tensor([True, False, False, False])}):
        torch.testing.assert_close(call(x, **args), composed(x, **args), equal_nan=True, rtol=1e-12, atol=0)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[1, 2] = True
    assert call(x, **{**plain, "mask": hidden}).isfinite().all(), "masked scores are ignored"
    if sink:
        assert call(x[:, 1:], sink=torch.tensor([value], dtype=x.dtype)).isnan().all()


def naive(x, mask, sink, scale, causal, left, right):
    """Evaluate the definition with Python's numbers."""
    *batch, sq, sk = x.shape
    out = torch.zeros(x.shape, dtype=torch.float64)
    full = mask.expand(x.shape) if mask is not None else None
    for index in itertools.product(*map(range, batch), range(sq)):
        i, d = index[-1], sk - sq
        keys = [
            j
            for j in range(sk)
            if not (full is not None and full[(*index, j)])
            and (not causal or j <= i + d)
            and (left < 0 or j >= i + d - left)
            and (right < 0 or j <= i + d + right)
        ]
        logits = [scale * float(x[(*index, j)]) for j in keys]
        logits += [] if sink is None or not keys else [float(sink[index[-2]])]
        if keys:
            top = max(logits)
            below = math.fsum(math.exp(z - top) for z in logits)
            for j, z in zip(keys, logits, strict=False):
                out[(*index, j)] = math.exp(z - top) / below
    return out


@st.composite
def problems(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)) + [draw(st.integers(1, 5)) for _ in range(2)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 10000)))
    dtype = draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    x = (torch.randn(shape, generator=g) * draw(st.sampled_from((0.5, 3.0, 50.0)))).to(dtype)
    if draw(st.booleans()):
        x = x.mT.contiguous().mT
    mask = None
    if draw(st.booleans()):
        drop = draw(st.integers(0, len(shape) - 1))
        size = [draw(st.sampled_from((1, n))) for n in shape[drop:]]
        mask = torch.rand(size, generator=g) < draw(st.sampled_from((0.2, 0.8)))
    sink = torch.randn(shape[-3], generator=g) if len(shape) > 2 and draw(st.booleans()) else None
    scale = draw(st.sampled_from((1.0, 0.125, 0.3, -1.0, -2.5, 0.0)))
    window = draw(st.integers(-1, 4)), draw(st.integers(-1, 4))
    return x, mask, sink, scale, draw(st.booleans()), *window


@settings(max_examples=200, deadline=None, derandomize=True)
@given(problems())
def test_any_call(problem):
    x, mask, sink, *_ = problem
    y, truth = softmax(*problem), naive(*problem)
    assert_contract(y, truth)
    assert ((y == 0) | (truth > 0)).all(), "masked scores give exactly 0"
    sums = y.double().sum(-1)
    loose = 4 * torch.finfo(y.dtype).eps
    if sink is None:
        assert ((sums == 0) | ((sums - 1).abs() <= loose * x.shape[-1])).all()
    else:
        assert (sums <= 1 + loose * x.shape[-1]).all()
    if mask is not None and mask.shape[-1] == x.shape[-1] and problem[4:] == (False, -1, -1):
        order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(softmax(x[..., order], mask[..., order], *problem[2:]), y[..., order])


# ---- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name, sink):
    leaves = [t.requires_grad_() for t in tensors(1, 2, 3, 4, sink=sink)]
    args = {k: v[:1, :, :3, :4] if k == "mask" else v for k, v in CASES[name].items()}

    def fn(x, *s):
        return call(x, **args, **({"sink": s[0]} if s else {}))

    assert torch.autograd.gradcheck(
        fn, leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(fn, leaves, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)])
def test_frozen_arguments_cost_nothing(mask):
    x, sink = (t.requires_grad_(requested) for t, requested in zip(tensors(2, 3, 4), mask, strict=True))
    with Calls() as calls:
        softmax(x, None, sink).sin().sum().backward()
    assert [tuple(args[-1]) for args in calls.arguments_of(backward.default)] == [mask]
    assert (x.grad is not None, sink.grad is not None) == mask
    grads = backward(torch.ones(2, 3, 4), torch.ones(2, 3, 4), 1.0, False, -1, -1, torch.float16, list(mask))
    assert tuple(g is not None for g in grads) == mask
    assert grads[1] is None or grads[1].dtype == torch.float16


def test_output_is_the_only_saved_tensor():
    x, sink = (t.requires_grad_() for t in tensors(2, 3, 4))
    out, saved = saved_by(lambda: softmax(x, masked(3, 4), sink, 0.3, True))
    assert [t.data_ptr() for t in saved] == [out.data_ptr()]


@pytest.mark.slow
@pytest.mark.skipif(not compiled.IS_SUPPORTED, reason="compiled kernels need torch 2.13")
def test_compiled_kernels_take_any_mask(monkeypatch):
    """A mask's axes of size 1 are broadcast. They are part of a kernel's key."""
    monkeypatch.setattr(compiled, "_KERNELS", {})
    monkeypatch.setattr(compiled, "FEWEST", 1)
    x = torch.randn(2, 3, 5, 8)
    for shape in ((2, 3, 5, 8), (2, 1, 5, 8)):
        mask = torch.rand(shape) > 0.5
        mask[..., 0] = False
        expected = x.masked_fill(mask, -torch.inf).softmax(-1)
        torch.testing.assert_close(torch.ops.fused.scaled_masked_softmax(x, mask, None), expected)
