"""The precision contract, and the one way to measure against it.

The truth is ``reference.py`` in float64 on the same arguments, widened exactly; input + bias count as the sum rounded
to the dtype that is computed in: gelu changes by 8e-6 within half a unit at -8.4, and 0.5014 of it less an
``up_offset`` of 0.5 has lost 2e-5. Three kinds of numbers:

``forward``
    float16, bfloat16: at most 1 ulp: the correctly rounded truth or a neighbor of it. float32: at most 1e-5 of the
    truth. float64: at most 1e-12 of it.
``gradient`` of a pointwise argument (input, gate, up)
    float16, bfloat16: at most 2 ulp. float32, float64: as forward. Where an activation's derivative f' goes through
    zero it is the difference of two equal terms (0.22 each). In float32 the difference is rounding error, ours as
    PyTorch's own: the relative error has no bound. Near such a zero (f' changes its sign between 3/4·x and 5/4·x)
    errors count relative to max(|f'|, 1/32) instead of |f'|, for every dtype: in float32 they are at most 1e-5/32 =
    3.1e-7, for a gradient of 1. Tails are never near a zero: the relative bound applies to them.
``sum``, the gradients of bias and token_scale
    at most 4 ulp of the summands' absolute sum (ulp of the dtype that is computed in: float32, or float64), and one
    rounding to the argument's dtype. This measures the *addition*: the truth is the float64 sum of the operator's own
    unrounded summands, to which the bounds above apply.

Absolute floors, below which an error counts as none: 2**-120 for bfloat16, 1e-30 for float32, 1e-290 for float64.
float16 has none: its subnormals are results like others, 2**-24 apart. An activation's value and derivative have floors
of their own, 256 times the least normal number of the dtype computed in (2**-118, 3.0e-36, in float32): below it they
may be 0, even where a factor (``up``, ``token_scale``, the gradient) lifts a result above the result's floor. The
exponential in a sigmoid is infinite from 2**128 on: silu is 0 below x = -88.7, as PyTorch's own is, and truly
x·2**-128. Truth beyond the dtype's range is that dtype's infinity. NaN must meet NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.operators import reference
from torch_fused_ops.testing.samples import Sample, declared_as, family, requested

HALF = (torch.bfloat16, torch.float16)
OF_LEAST_NORMAL = 2.0**8  # below so many of the least normal number an activation may be 0
NEAR_ZERO = 1 / 32  # what errors count relative to where a derivative is smaller and near its zero
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
    """An error with its unit, for a table."""
    return f"{error:.2g} ulp" if kind == "sum" or dtype in HALF else f"{error:.1e}"


def _steps(got: Tensor, truth: Tensor) -> Tensor:
    """The distance of two tensors of one half-precision dtype, counted in representable numbers; -0 is 0."""

    def rank(t: Tensor) -> Tensor:
        bits = t.contiguous().view(torch.int16).to(torch.int64)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (rank(got) - rank(truth)).abs().double()


def error(got: Tensor, truth: Tensor, near: Tensor | None = None) -> Tensor:
    """The error of each element in the contract's unit: ulp for float16 and bfloat16, else relative to the truth.

    Args:
        got: the result, in its own dtype.
        truth: the same in float64.
        near: a magnitude that the error may count relative to instead, where it is larger than the truth (or None).

    Returns:
        float64; infinite where got is not finite and the truth is, or the other way round.
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
    """The error of a sum, less one rounding to got's dtype, in ulp (of computed_in) of the summands' absolute sum."""
    finfo = torch.finfo(got.dtype)
    rounding = (0.5 * finfo.eps * truth.abs()).clamp_min(0.5 * finfo.smallest_normal * finfo.eps)
    unit = (torch.finfo(computed_in).eps * absolute).clamp_min(FLOORS[computed_in])
    e = ((got.double() - truth).abs() - rounding).clamp_min(0.0) / unit
    e = torch.where((got == truth.to(got.dtype)) | (got.isnan() & truth.isnan()), 0.0, e)
    return torch.where(e.isnan(), torch.inf, e)


def near_zero(activation: str, x: Tensor) -> Tensor:
    """NEAR_ZERO where the activation's derivative goes through zero nearby, else 0; x in float64."""
    derivative = activations.get(activation).derivative
    return torch.where(derivative(0.75 * x) * derivative(1.25 * x) < 0, NEAR_ZERO, 0.0)


def _worst(errors: Errors, kind: str, e: Tensor, dtype: torch.dtype) -> None:
    errors[kind, dtype] = max(errors.get((kind, dtype), 0.0), float(e.max()) if e.numel() else 0.0)


def _cast(args: Iterable[Any], dtype: torch.dtype, device: str | torch.device) -> tuple[Any, ...]:
    return tuple(a.detach().to(device, dtype) if isinstance(a, Tensor) else a for a in args)


def wide_args(sample: Sample) -> tuple[Any, ...]:
    """The arguments of the truth: in float64, with input + bias in place of the input, and a bias of zeros."""
    op, args = declared_as(sample.op), list(sample.args)
    if op.bias is not None and args[op.bias] is not None:
        args[0] = sum(_cast((args[0], args[op.bias]), reference.compute_dtype(*sample.tensors), "cpu"))
        args[op.bias] = torch.zeros_like(args[op.bias])
    return _cast(args, torch.float64, "cpu")


def near_of(sample: Sample, grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The ``near`` of ``error``: of the result, or with a gradient, in float64, of those of the data.

    None where there is no activation.
    """
    op = declared_as(sample.op)
    if "activation" not in op.scalars:
        return (None,) * (1 if grad is None else op.data)
    a, b, scale, *_ = wide_args(sample)
    name = sample.scalars[0]
    layout: Any = None if op.layout is None else sample.args[op.layout]
    gate, up, factor = a, None, torch.ones_like(a[..., :1]) if grad is None else grad.abs()
    if scale is not None:
        factor = factor * scale.unsqueeze(-1).abs()
    if op.data == 2 or op.is_packed:
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
    """The operator's unrounded summands of the gradients of bias (over rows) and token_scale (over a row)."""
    (grad,), args = (_cast(a, reference.compute_dtype(*sample.tensors), grad.device) for a in ((grad,), sample.args))
    scale = declared_as(sample.op).scale
    value = sample.overload(*(None if i == scale else a for i, a in enumerate(args)))
    backward = getattr(torch.ops.fused, f"{sample.op}_backward")
    d_input = backward(grad, *args, [i == 0 for i in range(len(sample.tensors))])[0]
    return d_input.double().cpu(), grad.double().cpu() * value.double().cpu()


def gradients(sample: Sample, out: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """A random gradient of a sample's result, and the gradients of its tensors for it, None where none is required."""
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out)
    mask = requested(sample.tensors)
    required = [t for t, of_tensor in zip(sample.tensors, mask, strict=True) if t is not None and of_tensor]
    results = iter(torch.autograd.grad(out, required, grad))
    return grad, [next(results).cpu() if of_tensor else None for of_tensor in mask]


def measure(sample: Sample) -> Errors:
    """The largest errors of an operator on a sample: of its result, and of every gradient that the sample asks for."""
    if (module := family(sample.op)) is not None:
        return module.measure(sample)  # type: ignore[no-any-return]
    out = sample()
    wide = wide_args(sample)
    errors: Errors = {}
    truth = getattr(reference, sample.op)(*wide)
    _worst(errors, "forward", error(out.detach().cpu(), truth, *near_of(sample)), out.dtype)
    if not out.requires_grad:
        return errors
    grad, got = gradients(sample, out)
    wide_grad = grad.double().cpu()
    truths = getattr(reference, f"{sample.op}_backward")(wide_grad, *wide, requested(sample.tensors))
    nears = near_of(sample, wide_grad)
    rows, row = _summands(sample, grad)
    op = declared_as(sample.op)
    added: dict[int | None, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
        op.scale: (row, lambda t: t.sum(-1)),
        op.bias: (rows, reference.over_rows),
    }
    computed_in = reference.compute_dtype(*sample.tensors)
    is_mixed = any(t is not None and t.dtype != computed_in for t in sample.tensors)
    for i, (g, truth) in enumerate(zip(got, truths, strict=True)):
        if g is None:
            continue
        if i in added:
            summands, total = added[i]
            absolute = total(summands.abs())
            if computed_in == torch.float64 and is_mixed:  # other code than that of float64 alone, the summands'
                _worst(errors, "gradient", error(g, total(summands), absolute), g.dtype)
            else:
                _worst(errors, "sum", sum_error(g, total(summands), absolute, computed_in), g.dtype)
        else:
            _worst(errors, "gradient", error(g, truth, nears[i]), g.dtype)
    return errors


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of float16 or bfloat16 but ±∞; for float32 as many, one at random after each bfloat16."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype in HALF:
        x = bits.to(torch.int16).view(dtype)
    elif dtype == torch.float32:
        low = torch.randint(1 << 16, bits.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
        x = ((bits << 16) | low).view(torch.float32)
    else:
        raise ValueError(f"dtype={dtype} is not accepted: it must be bfloat16, float16 or float32")
    return x[~x.isinf()]


def sweep(activation: str, dtype: torch.dtype, device: str | torch.device = "cpu") -> Errors:
    """The largest errors of an activation's value and derivative, through ``bias_act``, over ``every_value(dtype)``."""
    x = every_value(dtype)
    act, wide = activations.get(activation), x.double()
    on_device = x.to(device)
    value = torch.ops.fused.bias_act(on_device, None, None, activation)
    mask = [True, False, False]
    derivative, _, _ = torch.ops.fused.bias_act_backward(
        torch.ones_like(on_device), on_device, None, None, activation, mask
    )
    errors: Errors = {}
    _worst(errors, "forward", error(value.cpu(), act.value(wide)), dtype)
    _worst(errors, "gradient", error(derivative.cpu(), act.derivative(wide), near_zero(activation, wide)), dtype)
    return errors
