"""State the precision contract, and measure errors in its units.

The truth is ``reference.py`` in float64 on the same arguments, widened exactly. The sum input + bias is rounded to the
compute dtype first: an error of half an ulp changes gelu(-8.4) by 4e-6, and a sum of 0.5014 plus an ``up_offset`` of
-0.5 by 2e-5. There are three kinds of numbers:

``forward``
    float16, bfloat16: at most 1 ulp, so the correctly rounded truth or its neighbor. float32: at most 1e-5 of the
    truth. float64: at most 1e-12 of the truth.
``gradient`` of a pointwise argument (input, gate, up)
    float16, bfloat16: at most 2 ulp. float32, float64: as forward. At a zero of an activation's derivative f', equal
    terms (0.22 each) cancel. In float32 only rounding error remains, in PyTorch as well, so the relative error is
    unbounded. Near such a zero (f' changes its sign between 3/4·x and 5/4·x), errors are relative to max(|f'|, 1/32)
    instead of |f'| in every dtype: in float32 they are at most 1e-5/32 = 3.1e-7 for a gradient of 1. Tails are never
    near a zero, so the relative bound applies to them.
``sum``, the gradients of bias and token_scale
    at most 4 ulp (in the compute dtype, float32 or float64) of the sum of absolute summands, and one rounding to the
    argument's dtype. This measures the *addition*: the truth is the float64 sum of the operator's unrounded summands,
    and the summands have the bounds above.

Two operators differ:

``dropout_add``
    drops the same elements in every dtype as in float64. Its result is a sum of up to three terms. If they cancel, no
    float32 formula is accurate relative to the result, so errors are relative to the sum of absolute terms.
``scaled_masked_softmax``
    The truth of input's gradient is scale · y · (g − Σ g·y) in float64 at the *rounded* output, which is all that
    backward gets. Errors are relative to the row's largest gradient (its ulp in half precision), after subtracting the
    loss allowed if the two terms cancel: 8 · 2⁻²⁴ (float64: 2⁻⁵³) of the largest scale · y · (|g| + Σ |g·y|) in the
    row. Summands of the gradient of sink are bounded by (1 + Σ y) · Σ |g·y|, over the head's rows.

Errors below an absolute floor count as 0: 2**-120 for bfloat16, 1e-30 for float32, 1e-290 for float64. float16 has no
floor, because its subnormals are ordinary results, 2**-24 apart. An activation's value and derivative have separate
floors, 256 times the least normal number of the compute dtype (2**-118, 3.0e-36, in float32). A smaller value may be 0,
even if a factor (``up``, ``token_scale``, the gradient) lifts a result above the result's floor. The exponential in a
sigmoid is infinite from 2**128 on: silu is 0 below x = -88.7, as in PyTorch, although its true value is x·2**-128. A
truth beyond the dtype's range becomes the dtype's infinity. NaN must match NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import OPERATORS, PointwiseOperator
from torch_fused_ops.families.dropout.formulas import dropout_backward_dtype
from torch_fused_ops.operators import reference
from torch_fused_ops.testing.samples import ACTIVATION_OPERATORS, Sample

HALF = (torch.bfloat16, torch.float16)
OF_LEAST_NORMAL = 2.0**8  # an activation may be 0 below this multiple of the least normal number
NEAR_ZERO = 1 / 32  # errors are relative to this value if a derivative is smaller and near its zero
FLOORS = {torch.bfloat16: 2.0**-120, torch.float16: 0.0, torch.float32: 1e-30, torch.float64: 1e-290}
_RELATIVE = {torch.bfloat16: 1e-5, torch.float16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-12}
KINDS = ("forward", "gradient", "sum")
LIMITS: dict[tuple[str, torch.dtype], float] = {
    **{("forward", d): 1.0 if d in HALF else _RELATIVE[d] for d in FLOORS},
    **{("gradient", d): 2.0 if d in HALF else _RELATIVE[d] for d in FLOORS},
    **{("sum", d): 4.0 for d in FLOORS},
}

Errors = dict[tuple[str, torch.dtype], float]  # the largest error of each kind and dtype, in the units of LIMITS


def show(kind: str, dtype: torch.dtype, error: float) -> str:
    """Format an error with its unit."""
    return f"{error:.2g} ulp" if kind == "sum" or dtype in HALF else f"{error:.1e}"


def _steps(got: Tensor, truth: Tensor) -> Tensor:
    """Count the representable numbers between half-precision tensors; -0 is 0."""

    def rank(t: Tensor) -> Tensor:
        bits = t.contiguous().view(torch.int16).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (rank(got) - rank(truth)).abs().double()


def error(got: Tensor, truth: Tensor, near: Tensor | None = None) -> Tensor:
    """Return element-wise errors in the contract's unit: ulp for float16 and bfloat16, otherwise relative to the truth.

    Args:
        got: the result, in its own dtype.
        truth: the exact result in float64.
        near: magnitudes that replace smaller magnitudes of the truth; None replaces nothing.

    Returns:
        float64; infinite if only one of got and truth is finite.
    """
    dtype = got.dtype
    rounded = truth.to(dtype)
    difference = (got.double() - truth).abs()
    scale = truth.abs() if near is None else torch.maximum(truth.abs(), near)
    if dtype in HALF:
        e = _steps(got, rounded)
        if near is not None:
            e = torch.where(difference <= _RELATIVE[dtype] * near, 0.0, e)
    else:
        e = difference / scale.clamp_min(FLOORS[dtype])
    e = torch.where((difference <= FLOORS[dtype]) | (got == rounded) | (got.isnan() & truth.isnan()), 0.0, e)
    return torch.where(e.isnan(), torch.inf, e)


def sum_error(got: Tensor, truth: Tensor, absolute: Tensor, computed_in: torch.dtype) -> Tensor:
    """Return a sum's error after one rounding to got's dtype, in ``computed_in``'s ulp of ``absolute``."""
    finfo = torch.finfo(got.dtype)
    rounding = (0.5 * finfo.eps * truth.abs()).clamp_min(0.5 * finfo.smallest_normal * finfo.eps)
    unit = (torch.finfo(computed_in).eps * absolute).clamp_min(FLOORS[computed_in])
    e = ((got.double() - truth).abs() - rounding).clamp_min(0.0) / unit
    e = torch.where((got == truth.to(got.dtype)) | (got.isnan() & truth.isnan()), 0.0, e)
    return torch.where(e.isnan(), torch.inf, e)


def near_zero(activation: str, x: Tensor) -> Tensor:
    """Return NEAR_ZERO for elements near a zero of the activation's derivative, otherwise 0; x in float64."""
    derivative = activations.get(activation).derivative
    return torch.where(derivative(0.75 * x) * derivative(1.25 * x) < 0, NEAR_ZERO, 0.0)


def _cast(value: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Move tensors, and convert floating-point tensors; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, dtype if value.is_floating_point() else value.dtype)


def wide_args(sample: Sample) -> list[Any]:
    """Return the reference's arguments in float64; a pointwise operator's bias is added to its input."""
    op, args = OPERATORS[sample.op], list(sample.args)
    if isinstance(op, PointwiseOperator) and op.bias_index is not None and args[op.bias_index] is not None:
        dtype = reference.compute_dtype(*sample.tensors)
        args[0] = _cast(args[0], dtype) + _cast(args[op.bias_index], dtype)
        args[op.bias_index] = torch.zeros_like(args[op.bias_index])
    return [_cast(a, torch.float64) for a in args]


def near_of(sample: Sample, grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Return ``error``'s argument ``near`` for the result; if ``grad`` (float64) is passed, for pointwise gradients."""
    if sample.op == "dropout_add" and grad is None:
        *terms, seed, p = wide_args(sample)
        return (reference.dropout_add(*(None if t is None else t.abs() for t in terms), seed, p),)
    if sample.op not in ACTIVATION_OPERATORS:
        return (None, None)
    op: Any = OPERATORS[sample.op]
    a, b, scale, *_ = wide_args(sample)
    name = sample.scalars[0]
    layout: Any = None if op.layout_index is None else sample.args[op.layout_index]
    gate, up = a, None
    factor = torch.ones_like(a[..., :1]) if grad is None else grad.abs()
    if scale is not None:
        factor = factor * scale.unsqueeze(-1).abs()
    if op.num_data == 2 or op.is_packed:
        gate, up = reference.unpack(a, layout) if op.is_packed else (a, b)
        up_offset, clamp = sample.scalars[-2:]
        gate, up = reference.clamped(gate, up, clamp)
    computed_in = reference.compute_dtype(*sample.tensors)
    least = OF_LEAST_NORMAL * torch.finfo(computed_in).smallest_normal
    of_gate = factor if up is None else factor * (up + up_offset).abs()

    def near(v: Tensor) -> Tensor:
        return torch.where(v.abs() < least, least / _RELATIVE[computed_in], 0.0)

    if grad is None:
        return (of_gate * near(activations.get(name).value(gate)),)
    d_gate = of_gate * torch.maximum(near(activations.get(name).derivative(gate)), near_zero(name, gate))
    if up is None:
        return d_gate, None
    d_up = factor * near(activations.get(name).value(gate))
    return (reference.pack(d_gate, d_up, layout), None) if op.is_packed else (d_gate, d_up)


def _summands(sample: Sample, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the unrounded summands of the gradients of bias (over rows) and token_scale (in a row)."""
    op: Any = OPERATORS[sample.op]
    dtype = reference.compute_dtype(*sample.tensors)
    grad, *args = (_cast(a, dtype, grad.device) for a in (grad, *sample.args))
    value = sample.overload(*(None if i == op.scale_index else a for i, a in enumerate(args)))
    backward = getattr(torch.ops.fused, f"{sample.op}_backward")
    d_input = backward(grad, *args, [i == 0 for i in range(len(sample.tensors))])[0]
    return d_input.double().cpu(), grad.double().cpu() * value.double().cpu()


_Measured = Iterator[tuple[str, Tensor, torch.dtype]]  # a kind, errors of numbers of this kind, and the numbers' dtype


def _pointwise(sample: Sample, grad: Tensor, got: list[Tensor | None]) -> _Measured:
    op: Any = OPERATORS[sample.op]
    wide_grad = grad.double().cpu()
    mask = [g is not None for g in got]
    truths = getattr(reference, f"{sample.op}_backward")(wide_grad, *wide_args(sample), mask)
    nears = near_of(sample, wide_grad)
    rows, row = _summands(sample, grad)
    computed_in = reference.compute_dtype(*sample.tensors)
    is_mixed = any(t is not None and t.dtype != computed_in for t in sample.tensors)
    sums: Any = {op.scale_index: (row, lambda t: t.sum(-1)), op.bias_index: (rows, reference.over_rows)}
    for i, (g, truth) in enumerate(zip(got, truths, strict=True)):
        if g is not None and i not in sums:
            yield "gradient", error(g, truth, nears[i]), g.dtype
        elif g is not None:
            summands, total = sums[i]
            absolute = total(summands.abs())
            if computed_in == torch.float64 and is_mixed:  # the summands come from the code for float64 only
                yield "gradient", error(g, total(summands), absolute), g.dtype
            else:
                yield "sum", sum_error(g, total(summands), absolute, computed_in), g.dtype


def _dropout(sample: Sample, grad: Tensor, got: list[Tensor | None]) -> _Measured:
    first, bias, _, seed, p = sample.args
    d_input, d_bias, d_residual, _ = got
    if d_input is not None:
        wide_grad, wide_seed = grad.double().cpu(), seed.cpu()
        truth, _ = reference.dropout_add_backward(wide_grad, wide_seed, p, torch.float64, None, (True, False))
        yield "gradient", error(d_input, truth), d_input.dtype
    if d_bias is not None:
        dtype = dropout_backward_dtype(grad, first.dtype, bias.dtype)
        # The operator's unrounded gradient, in its compute dtype.
        backward = torch.ops.fused.dropout_add_backward
        rows = backward(grad.to(dtype), seed, p, dtype, None, [True, False])[0].double().cpu()
        total, absolute = (reference.over_rows(t) for t in (rows, rows.abs()))
        yield "sum", sum_error(d_bias, total, absolute, dtype), d_bias.dtype
    if d_residual is not None:  # the truth is grad
        yield "gradient", error(d_residual, grad.double().cpu()), d_residual.dtype


def softmax_gradient_error(
    got: Tensor, grad: Tensor, y: Tensor, truth: Tensor, scale: float, exact: torch.dtype
) -> Tensor:
    """Return errors of the gradient of softmax's input in the contract's unit."""
    if truth.numel() == 0:
        return truth
    size = abs(scale) * y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True))
    lost = 4 * torch.finfo(exact).eps * size.amax(-1, keepdim=True)
    unit = truth.abs().amax(-1, keepdim=True)
    if got.dtype in HALF:
        finfo = torch.finfo(got.dtype)
        unit = torch.exp2(unit.clamp_min(finfo.smallest_normal).log2().floor()) * finfo.eps
    difference = (got.double() - truth).abs() - lost - FLOORS[got.dtype]
    e = difference.clamp_min(0.0) / unit.clamp_min(FLOORS[got.dtype])
    e = torch.where((got == truth.to(got.dtype)) | (got.isnan() & truth.isnan()), 0.0, e)
    return torch.where(e.isnan(), torch.inf, e)


def _softmax(sample: Sample, grad: Tensor, got: list[Tensor | None]) -> _Measured:
    exact = reference.compute_dtype(sample.args[0], sample.args[2])
    d_input, _, d_sink = got
    wide_grad, y = grad.double().cpu(), sample().detach().double().cpu()
    backward: Any = reference.scaled_masked_softmax_backward  # Any: the types of the sample's scalars are unknown
    mask = (d_input is not None, d_sink is not None)
    truth, sink_truth = backward(wide_grad, y, *sample.scalars, torch.float64, mask)
    if d_input is not None:
        e = softmax_gradient_error(d_input, wide_grad, y, truth, sample.scalars[0], exact)
        yield "gradient", e, d_input.dtype
    if d_sink is not None:
        absolute = (1 + y.sum(-1)) * (wide_grad * y).abs().sum(-1)
        absolute = absolute.movedim(-2, 0).flatten(1).sum(-1)
        yield "sum", sum_error(d_sink, sink_truth, absolute, exact), d_sink.dtype


def measure(sample: Sample, grad: Tensor | None = None) -> Errors:
    """Return the largest errors of a sample's result and requested gradients, for ``grad`` or a random gradient."""
    out = sample()
    truth = getattr(reference, sample.op)(*wide_args(sample))
    measured = [("forward", error(out.detach().cpu(), truth, near_of(sample)[0]), out.dtype)]
    if out.requires_grad:
        if grad is None:
            g = torch.Generator().manual_seed(0)
            grad = torch.randn(out.shape, generator=g, dtype=torch.float64).to(out)
        requested = [t is not None and t.requires_grad for t in sample.tensors]
        leaves = [t for t in sample.tensors if t is not None and t.requires_grad]
        results = iter(torch.autograd.grad(out, leaves, grad))
        got = [next(results).cpu() if of_tensor else None for of_tensor in requested]
        of_gradients = {"dropout_add": _dropout, "scaled_masked_softmax": _softmax}.get(sample.op, _pointwise)
        measured += of_gradients(sample, grad, got)
    errors: Errors = {}
    for kind, e, dtype in measured:
        errors[kind, dtype] = max(errors.get((kind, dtype), 0.0), float(e.max()) if e.numel() else 0.0)
    return errors


def every_value(dtype: torch.dtype) -> Tensor:
    """Return all values of float16 or bfloat16 except ±∞; for float32, a random value after each bfloat16."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype in HALF:
        x = bits.to(torch.int16).view(dtype)
    else:
        low = torch.randint(1 << 16, bits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        x = ((bits << 16) | low).view(torch.float32)
    return x[~x.isinf()]


def sweep(activation: str, dtype: torch.dtype, device: str | torch.device = "cpu") -> Errors:
    """Return the largest errors of an activation and its derivative in ``bias_act`` over ``every_value(dtype)``."""
    x = every_value(dtype).to(device)[None]
    ones = torch.ones_like(x[:, 0])  # with a scale, backward reads x and not the result
    return measure(Sample("bias_act", "sweep", (x.requires_grad_(), None, ones, activation)), torch.ones_like(x))
