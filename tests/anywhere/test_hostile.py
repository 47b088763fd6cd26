"""Operators are precise for any strides, values and dtypes: in eager mode, and as interpreted GPU kernels.

Hypothesis draws a call, and ``testing.precision`` compares it with the float64 reference. Some values are
special: NaN, infinities, denormals, zeros of either sign, the largest finite numbers, numbers at which activations
saturate, a clamp's bound and its neighbors.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from harness import on_gpu, raises
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops import functional as F
from torch_fused_ops.operators import reference
from torch_fused_ops.testing import precision
from torch_fused_ops.testing.samples import ACTIVATION_OPERATORS, OPERATORS, Sample

fused = torch.ops.fused
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = activations.names()
CLAMPS = (None, 0.5, 7.0)

# ---- values ----------------------------------------------------------------------------------------------------------

# Numbers at which an activation turns (0), saturates in some dtype or has a derivative of 0, and the clamps' bounds.
TURNING = (0.0, 0.5, 0.7517, 1.0, 1.2784, 3.0, 5.5, 7.0, 8.3, 9.3, 14.0, 17.4, 38.5, 88.8, 104.0, 710.0, 746.0)


@functools.cache
def special(dtype: torch.dtype) -> Tensor:
    """Return the special values with both signs and both neighbors, then NaN, infinities and -0."""
    finfo = torch.finfo(dtype)
    points = [*TURNING, finfo.max, finfo.max / 2, math.sqrt(finfo.max), finfo.tiny, finfo.smallest_normal * finfo.eps]
    wide = torch.tensor(points, dtype=torch.float64).to(dtype)
    around = torch.cat([wide, step(wide, 1), step(wide, -1)])
    around = around[around.isfinite()]
    return torch.cat([around, -around, torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=dtype)])


def step(t: Tensor, by: int) -> Tensor:
    """Return the neighbors of t in its dtype, larger or smaller in magnitude."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
    neighbors = t.view(bits) + by
    return torch.where(t == 0, t.new_full((), torch.finfo(t.dtype).tiny), neighbors.view(t.dtype))


def values(count: int, dtype: torch.dtype, seed: int, kind: str) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(count, generator=g, dtype=torch.float64).mul(2).to(dtype)
    if kind == "ordinary" or not count:
        return t
    pool = special(dtype)
    if kind == "finite":  # products of up to four stay within float32's range
        pool = pool[pool.abs() <= 18]
    chosen = pool[torch.randint(len(pool), (count,), generator=g)]
    return torch.where(torch.rand(count, generator=g) < 0.4, chosen, t)


# ---- memory ----------------------------------------------------------------------------------------------------------

MEMORY = ("contiguous", "permuted", "stepped", "expanded", "overlapping", "far apart", "offset", "flipped", "negated")


@st.composite
def tensors(draw: Any, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> Tensor:
    """Draw a leaf of this shape, its memory layout, and whether it requires a gradient."""
    make = functools.partial(values, dtype=dtype, seed=draw(st.integers(0, 1000)), kind=kind)
    count, layout, offset = math.prod(shape), draw(st.sampled_from(MEMORY)), draw(st.sampled_from((0, 0, 1, 3, 7)))
    if layout == "overlapping":  # like unfold's windows: neighbors share elements along every axis
        strides = [draw(st.sampled_from((1, 1, 2, 3))) for _ in shape]
    elif layout == "far apart":
        strides = [draw(st.sampled_from((1, 17, 1009))) for _ in shape]
    elif layout == "expanded":
        strides = [draw(st.sampled_from((0, 0, n))) for n in torch.empty(shape, device="meta").stride()]
    elif layout == "permuted":
        order = draw(st.permutations(range(len(shape))))
        t = make(count + offset)[offset:].view([shape[i] for i in order])
        return leaf(draw, t.permute([order.index(i) for i in range(len(shape))]))
    elif layout == "stepped":
        steps = [draw(st.integers(1, 3)) for _ in shape]
        t = make(math.prod(n * s for n, s in zip(shape, steps, strict=True)))
        t = t.view([n * s for n, s in zip(shape, steps, strict=True)])
        return leaf(draw, t[tuple(slice(None, None, s) for s in steps)])
    elif layout == "flipped":
        return leaf(draw, make(count).view(shape).flip(draw(st.integers(0, len(shape) - 1)) if shape else ()))
    elif layout == "negated" and count:
        return leaf(draw, torch._neg_view(make(count).view(shape)))
    else:
        return leaf(draw, make(count + offset)[offset:].view(shape))
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if count else 0
    return leaf(draw, make(extent + offset).as_strided(shape, strides, offset))


def leaf(draw: Any, t: Tensor) -> Tensor:
    return t.detach().requires_grad_(draw(st.booleans()))


# ---- calls -----------------------------------------------------------------------------------------------------------

sizes = st.sampled_from((0, 1, 1, 2, 3, 4, 5, 8, 13))


@st.composite
def calls(
    draw: Any, ops: tuple[str, ...] = OPERATORS, kinds: tuple[str, ...] = ("ordinary", "finite", "any")
) -> Sample:
    op, kind = draw(st.sampled_from(ops)), draw(st.sampled_from(kinds))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(3)]
    if draw(st.booleans()):
        dtypes = dtypes[:1] * 3
    shape = tuple(draw(st.lists(sizes, min_size=2 if op == "scaled_masked_softmax" else 1, max_size=5)))
    if math.prod(max(n, 1) for n in shape) > 2000:
        shape = shape[-3:]
    if op == "scaled_masked_softmax":
        return draw(softmaxes(shape, dtypes, kind))
    if op == "bias_glu":
        shape = (*shape[:-1], 2 * shape[-1])
    if op == "dropout_add":
        shapes = (shape, shape[-1:], shape)
    else:
        shapes = (shape, shape if op == "glu" else shape[-1:], shape[:-1])
    optional = (False, op != "glu", True)
    arguments = [
        None if o and draw(st.booleans()) else draw(tensors(s, d, kind))
        for s, d, o in zip(shapes, dtypes, optional, strict=True)
    ]
    scalars: list[Any]
    if op == "dropout_add":
        seed = torch.tensor(draw(st.integers(-(2**63), 2**63 - 1)))
        seed = seed.reshape(draw(st.sampled_from(((), (1,), (1, 1)))))
        scalars = [seed, draw(st.sampled_from((0.0, 0.1, 0.5, 1.0, 1e-12, 1 - 2.0**-40)))]
    else:
        scalars = [draw(st.sampled_from(NAMES))]
        if op == "bias_glu":
            scalars.append(draw(st.sampled_from(reference.LAYOUTS)))
        if op != "bias_act":
            scalars += [draw(st.sampled_from((0.0, 1.0, -0.5))), draw(st.sampled_from(CLAMPS))]
    return Sample(op, kind, (*arguments, *scalars))


@st.composite
def softmaxes(draw: Any, shape: tuple[int, ...], dtypes: list[torch.dtype], kind: str) -> Sample:
    x = draw(tensors(shape, dtypes[0], kind))
    mask = sink = None
    if draw(st.booleans()):
        full = tuple(draw(st.sampled_from((1, n))) for n in shape)
        bits = draw(tensors(full[draw(st.integers(0, len(full) - 1)) :], torch.float32, "ordinary"))
        mask = bits.detach() > draw(st.sampled_from((-9.0, 0.0, 1.5)))
    if len(shape) > 2 and draw(st.booleans()):
        sink = draw(tensors(shape[-3:-2], dtypes[1], "ordinary"))
    scale = draw(st.sampled_from((1.0, 0.3, 0.0, -0.7, 1e-3, 30.0)))
    windows = [draw(st.sampled_from((-1, -1, 0, 2))) for _ in range(2)]
    return Sample("scaled_masked_softmax", kind, (x, mask, sink, scale, draw(st.booleans()), *windows))


# ---- checks ----------------------------------------------------------------------------------------------------------


def memory_of(t: Tensor) -> list[int]:
    """Return t's version counter and all bytes of its storage."""
    bytes_of = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
    return [t._version, *bytes_of.tolist()]


def as_kernels(sample: Sample, grad: Tensor, mask: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the operator's result and gradients, through autograd."""
    out = sample()
    required = [t for t, requested in zip(sample.tensors, mask, strict=False) if requested and t is not None]
    grads = iter(torch.autograd.grad(out, required, grad, materialize_grads=True) if required else ())
    return out.detach(), [next(grads) if requested else None for requested in mask]


def as_reference(sample: Sample, grad: Tensor, mask: list[bool], *, wide: bool) -> Any:
    """Return the result and gradients of plain torch, in the operator's compute dtype, or in float64 if ``wide``."""
    args = [a.detach() if isinstance(a, Tensor) else a for a in sample.args]
    if wide:
        args = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        grad = grad.double()
    if wide and sample.op in ACTIVATION_OPERATORS:
        args = list(precision.wide_args(sample))
    out = getattr(reference, sample.op)(*args)
    y = sample().detach().double() if wide and sample.op == "scaled_masked_softmax" else out  # the rounded result
    return out, gradients(getattr(reference, f"{sample.op}_backward"), sample.op, grad, args, y, mask)


def gradients(
    backward: Callable[..., Any], op: str, grad: Tensor, args: list[Any], out: Tensor, mask: list[bool]
) -> list[Tensor | None]:
    """Return gradients of an operator's first three arguments. ``backward`` has its backward operator's signature."""
    if op == "dropout_add":
        x, bias, _, seed, p = args
        grads = backward(grad, seed, p, x.dtype, None if bias is None else bias.dtype, mask[:2])
        return [*grads, grad if mask[2] else None]
    if op == "scaled_masked_softmax":
        sink_dtype = None if args[2] is None else args[2].dtype
        d_x, d_sink = backward(grad, out, *args[3:], sink_dtype, (mask[0], mask[2]))
        return [d_x, None, d_sink]
    return list(backward(grad, *args, mask))


def is_as_in_torch(sample: Sample, run: Callable[..., Any] = as_kernels) -> None:
    """Check a call with infinities, NaN or overflow.

    Each element must be near the float64 reference, or near the same formulas in plain torch, which overflow and
    underflow as float32 does. Sums depend on their order then, so they are checked only if nothing overflows.
    """
    mask = [t is not None and t.requires_grad for t in sample.tensors[:3]]
    with torch.no_grad():
        like = sample()
    grad = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like.dtype)
    got, grads = run(sample, grad, mask)
    plain, plain_grads = as_reference(sample, grad, mask, wide=False)
    truth, true_grads = as_reference(sample, grad, mask, wide=True)

    def check(kind: str, got: Tensor, terms_of: Tensor | None, *accepted: Tensor) -> None:
        limit, terms_of = precision.LIMITS[kind, got.dtype], None if terms_of is None else terms_of.nan_to_num(0.0)
        worst = torch.minimum(*(precision.error(got, value.double(), terms_of) for value in accepted))
        assert got.dtype == accepted[0].dtype and got.shape == accepted[0].shape
        assert not (worst > limit).any(), (
            kind,
            got[worst > limit][:3],
            [value[worst > limit][:3] for value in accepted],
        )

    terms: Tensor | None = None  # terms that cancel
    if sample.op == "dropout_add":
        (terms,) = precision.near_of(sample)
        x, _, residual, seed, p = sample.args
        dropped = reference.dropout_add(torch.ones(x.shape), None, None, seed, p) == 0
        residual_or_0 = torch.zeros(()) if residual is None else residual.detach()
        truth = torch.where(dropped & truth.isnan(), residual_or_0.double(), truth)  # dropping an element removes NaN
        # A fused multiply-add does not overflow where the product alone would, and float64 has no wider oracle.
        widest = x.detach().isfinite() & (reference.compute_dtype(*sample.tensors[:3]) == torch.float64)
        plain = torch.where(widest & plain.isinf() & residual_or_0.isfinite() & got.isfinite(), got, plain)
        truth = torch.where(widest & truth.isnan() & residual_or_0.isinf(), residual_or_0.double(), truth)
    nears: tuple[Tensor | None, ...] = (None,) * 3
    if sample.op in ACTIVATION_OPERATORS:
        (terms,), nears = precision.near_of(sample), precision.near_of(sample, grad.double())
        if got.dtype != torch.float64:
            # Some roundings flush a number below float32's range to 0, and a factor of infinity then makes it NaN.
            args = [a.detach().double() if isinstance(a, Tensor) else a for a in sample.args]
            alone = getattr(reference, sample.op)(*args[:2], None, *args[3:])
            lost = (alone != 0) & (alone.abs() < torch.finfo(torch.float32).tiny)
            truth = torch.where(lost & truth.isinf() & got.isnan(), got.double(), truth)
    check("forward", got, terms, plain, truth)
    sums = {"glu": (2,), "scaled_masked_softmax": (2,), "dropout_add": (1,)}.get(sample.op, (1, 2))
    for i, (computed, by_plain, true) in enumerate(zip(grads, plain_grads, true_grads, strict=True)):
        if computed is None:
            continue
        if i in sums:
            assert computed.shape == sample.tensors[i].shape and computed.dtype == sample.tensors[i].dtype
            finite = true.isfinite() & (true.abs() < torch.finfo(computed.dtype).max / 4)
            assert computed[true.isnan() & by_plain.isnan()].isnan().all()  # NaN propagates
            assert sample.name == "any" or computed[finite].isfinite().all()
        elif sample.op != "scaled_masked_softmax":  # precision.measure checks it, relative to a row's maximum
            if nears[i] is not None:  # a derivative below float32's range times a factor that overflows
                by_plain = torch.where(computed.isnan() & by_plain.isinf() & (nears[i] != 0), computed, by_plain)
            check("gradient", computed, nears[i], by_plain, true)
        else:
            assert torch.equal(computed.isnan(), by_plain.isnan())


def holds_the_contract(sample: Sample) -> None:
    """Check precision, that the result is contiguous in new memory, and that inputs do not change."""
    arguments = [t for t in sample.args if isinstance(t, Tensor)]
    before = [memory_of(t.detach()) for t in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if sample.name == "any":
            is_as_in_torch(sample)
        else:
            errors = precision.measure(sample)
            assert all(e <= precision.LIMITS[key] for key, e in errors.items()), errors
        out = sample()
    assert out.is_contiguous() and not out.is_neg()
    assert all(out.untyped_storage()._cdata != t.untyped_storage()._cdata for t in arguments)
    assert [memory_of(t.detach()) for t in arguments] == before, "an input was written"


def hypothesis_settings(examples: int, **options: Any) -> Any:
    checks = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=checks, **options)


@hypothesis_settings(200, derandomize=True)
@given(calls())
def test_any_call_keeps_the_precision_contract(sample: Sample) -> None:
    holds_the_contract(sample)


@pytest.mark.slow
@hypothesis_settings(10_000, phases=(Phase.generate, Phase.shrink))
@given(calls())
def test_10000_calls_keep_the_precision_contract(sample: Sample) -> None:
    holds_the_contract(sample)


# ---- interpreted ----------------------------------------------------------------------------------------------------


def by_triton(sample: Sample, grad: Tensor, mask: list[bool]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the GPU kernels' results in Triton's interpreter. Resolve negative bits, as the dispatcher does."""
    args = [a.detach().resolve_neg() if isinstance(a, Tensor) else a for a in sample.args]
    out = on_gpu(sample.op)(*args)
    return out, gradients(on_gpu(f"{sample.op}_backward"), sample.op, grad, args, out, mask)


@pytest.mark.slow
@hypothesis_settings(1000, phases=(Phase.generate, Phase.shrink))
@given(calls())
def test_1000_calls_of_gpu_kernels_match_the_reference(sample: Sample) -> None:
    pytest.importorskip("triton")
    arguments = [t for t in sample.args if isinstance(t, Tensor)]
    before = [memory_of(t.detach()) for t in arguments]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about infinities
        is_as_in_torch(sample, by_triton)
    assert [memory_of(t.detach()) for t in arguments] == before, "an input was written"


# ---- writes between forward and backward -----------------------------------------------------------------------------

X, N8, ROWS = (3, 8), (8,), (3,)
HEADS = (2, 3, 8)
# Shapes of the tensor arguments, the call, the arguments that backward reads, and whether backward reads the result.
WRITTEN: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor], set[int], bool]] = {
    "bias_act": ((X, N8, ROWS), lambda *t: fused.bias_act(*t, "gelu"), {0, 1, 2}, False),
    "bias_act, silu alone": ((X,), lambda x: fused.bias_act(x, None, None, "silu"), {0}, False),
    "bias_act, ReLU": ((X, N8), lambda x, b: fused.bias_act(x, b, None, "relu"), set(), True),
    "bias_act, ReLU alone": ((X,), lambda x: fused.bias_act(x, None, None, "relu"), set(), True),
    "bias_act, fp8": ((X, N8, ROWS), lambda *t: F.bias_act(*t, activation="gelu", memory="fp8"), {1, 2}, False),
    "glu": ((X, X, ROWS), lambda *t: fused.glu(*t, "silu"), {0, 1, 2}, False),
    "glu, fp8": ((X, X, ROWS), lambda *t: F.glu(*t, activation="silu", memory="fp8"), {2}, False),
    "bias_glu": ((X, N8, ROWS), lambda *t: fused.bias_glu(*t, "silu", "interleaved"), {0, 1, 2}, False),
    "bias_glu, fp8": ((X, N8, ROWS), lambda *t: F.bias_glu(*t, activation="silu", memory="fp8"), {1, 2}, False),
    "dropout_add": ((X, N8, X), lambda *t: fused.dropout_add(*t, torch.tensor([5]), 0.5), set(), False),
    "softmax": ((HEADS, (2,)), lambda x, s: fused.scaled_masked_softmax(x, None, s, 0.5), set(), True),
}
WRITES = {"itself": lambda t: t, "a view": lambda t: t[...], "a detached alias": lambda t: t.detach()}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", WRITTEN)
def test_writes_raise_if_backward_reads_the_tensor(name: str, write: str) -> None:
    """A write raises if backward reads the tensor, and otherwise changes no gradient, as for PyTorch's functions."""
    shapes, call, saved, keeps_result = WRITTEN[name]

    def gradients(written: int | None) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
        arguments = [t.clone() for t in leaves]
        out = call(*arguments)
        if written is not None:
            with torch.no_grad():
                WRITES[write]([*arguments, out][written]).add_(1.0)
        return list(torch.autograd.grad(out, leaves, torch.ones_like(out)))

    expected = gradients(None)
    for i in range(len(shapes) + 1):
        if i in saved or (i == len(shapes) and keeps_result):
            raises(RuntimeError, "modified by an inplace operation", gradients, i)
        else:
            assert all(map(torch.equal, gradients(i), expected)), f"argument {i}"


def test_writing_the_seed_before_backward_raises() -> None:
    seed, x = torch.tensor([5]), torch.ones(3, 8, requires_grad=True)
    out = fused.dropout_add(x, None, None, seed, 0.5)
    seed.add_(1)
    raises(RuntimeError, "modified by an inplace operation", out.sum().backward)
