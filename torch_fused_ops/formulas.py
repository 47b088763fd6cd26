"""Define the operators' formulas on elements, and shared helpers, in plain torch.

An *element function* is elementwise: its arguments are widened tensors that broadcast together, and its results are
unrounded. The operators in plain torch (``operators/eager.py``) call these functions. Inductor's lowerings, from which
eager kernels are compiled, trace them on scalars.

Widening: float16, bfloat16 and float32 are computed in float32. If any tensor is float64, all are computed in float64.
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from torch_fused_ops import activations

Gradients: TypeAlias = tuple[Tensor | None, ...]  # for each tensor of an operator; None if not requested

_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Tensor | None)

LAYOUTS = ("halves", "interleaved", "swapped")


# ---- element functions ---------------------------------------------------------------------------------------------


def act_element(x: Tensor, scale: Tensor | None, activation: str) -> Tensor:
    """Return act(x) · scale."""
    y = activations.get(activation).value(x)
    return y if scale is None else y * scale


def act_input_grads(grad: Tensor, x: Tensor, scale: Tensor | None, activation: str) -> tuple[Tensor]:
    """Return grad · scale · act'(x)."""
    dx = activations.get(activation).input_grad(grad, x)
    return (dx if scale is None else dx * scale,)


def _clamp_keeps_its_bounds() -> bool:
    """Return True if torch.clamp's gradient at a bound is 1 (torch 2.13 and older), False if it is 0 (2.15).

    Our gradient follows torch.clamp, so that fusing changes nothing.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, max=1.0), x)[0])


CLAMP_KEEPS_BOUNDS = _clamp_keeps_its_bounds()
_within = torch.le if CLAMP_KEEPS_BOUNDS else torch.lt  # False for NaN, as in torch.clamp's gradient


def clamped(gate: Tensor, up: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """Clamp gate from above and up on both sides. ``clamp=None`` changes nothing."""
    if clamp is None:
        return gate, up
    return torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)


def glu_element(
    gate: Tensor, up: Tensor, scale: Tensor | None, activation: str, up_offset: float, clamp: float | None
) -> Tensor:
    """Return act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · scale."""
    gate, up = clamped(gate, up, clamp)
    y = activations.get(activation).value(gate) * (up + up_offset if up_offset else up)
    return y if scale is None else y * scale


def glu_input_grads(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up. At the clamp's bounds they follow torch.clamp: see CLAMP_KEEPS_BOUNDS."""
    act = activations.get(activation)
    g, u = clamped(gate, up, clamp)
    if scale is not None:
        grad = grad * scale
    of_gate = grad * (u + up_offset if up_offset else u)
    d_gate = act.input_grad(of_gate, g)
    d_up = grad * act.value(g)
    if clamp is not None:
        d_gate = torch.where(_within(gate, clamp), d_gate, 0.0)
        d_up = torch.where(_within(torch.abs(up), clamp), d_up, 0.0)
    return d_gate, d_up


# ---- shared pieces -------------------------------------------------------------------------------------------------


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Return float64 if any tensor is float64, else float32."""
    for t in tensors:  # a loop: any() and a generator take 0.7 µs
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def empty_gradient(t: Tensor | None, requested: bool) -> Tensor | None:
    """Allocate an uninitialized, contiguous gradient for t. Return None if t is None or its gradient not requested."""
    return t.new_empty(t.shape) if requested and t is not None else None


def unpack(packed: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Split a packed last axis: return (gate, up) as views.

    "halves" is [gate | up], "interleaved" is g0 u0 g1 u1 …, "swapped" is [up | gate], as in ``F.glu``.
    """
    if layout == "interleaved":
        return packed[..., ::2], packed[..., 1::2]
    n = packed.shape[-1] // 2
    first, second = packed[..., :n], packed[..., n:]
    return (second, first) if layout == "swapped" else (first, second)


def pack(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """Pack gate and up along the last axis: the inverse of ``unpack``."""
    if layout == "interleaved":
        return torch.stack((gate, up), -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((up, gate) if layout == "swapped" else (gate, up), -1)


def widened(dtype: torch.dtype, t: _MaybeTensor) -> _MaybeTensor:
    """Convert t to ``dtype``; None stays None."""
    return t if t is None or t.dtype == dtype else t.to(dtype)  # t.to() without a change takes 1 µs


def over_rows(t: Tensor) -> Tensor:
    """Sum over all axes except the last. Never returns t itself: gradients must not share memory."""
    return t.sum(tuple(range(t.ndim - 1))) if t.ndim > 1 else t.clone()


FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(FP8).max  # 448
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def store_fp8(x: Tensor, halves: bool = False) -> tuple[Tensor, Tensor]:
    """Return (stored, scale): x (..., n) as float8_e4m3fn with one float32 scale per row, (...).

    scale = amax(|row|) / 448, which maps the row's largest element to float8_e4m3fn's largest. If the quotient is below
    float32's normal numbers, as for a row of zeros, the scale is 1. Float64 is converted to float32 first. A row that
    contains an infinity or a NaN has an infinite or NaN scale, and the entire row loads as NaN.

    Args:
        x: any dtype and strides.
        halves: store x as two halves, in a loop that a compiler can fuse with an activation's loop on packed data.
    """
    x = x.to(torch.float32) if x.dtype == torch.float64 else x  # the float32 factor widens other dtypes
    # torch's reference of vector_norm rejects every empty tensor (2.13); eager mode and kernels reject empty rows.
    if any(isinstance(n, int) and n == 0 for n in x.shape):
        return x.to(FP8, memory_format=torch.contiguous_format), x.new_ones(x.shape[:-1], dtype=torch.float32)
    parts = unpack(x, "halves") if halves else (x,)
    sizes = (torch.linalg.vector_norm(part, math.inf, -1, dtype=torch.float32) for part in parts)
    largest = functools.reduce(torch.maximum, sizes).contiguous()
    scale = largest / _FP8_LARGEST
    # The factor does not read the stored scale, so Inductor concatenates halves without a separate pass.
    factor = torch.where(scale < _FLOAT32_TINY, 1.0, torch.reciprocal(scale)).unsqueeze(-1)
    stored = [(part * factor).to(FP8, memory_format=torch.contiguous_format) for part in parts]
    return torch.cat(stored, -1) if halves else stored[0], torch.where(scale < _FLOAT32_TINY, 1.0, scale)


def load_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Load store_fp8's result in ``dtype``. The error is at most 2⁻⁴ of an element, or 2⁻¹⁰·scale if this is larger."""
    return (stored.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)
