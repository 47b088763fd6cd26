"""The operators' formulas on elements, in plain torch, and their parts.

An *element function* says what happens to one element: it takes tensors that broadcast together, already widened, and
returns unrounded results. The operators in plain torch (``operators/eager.py``), the CPU kernels and, traced on
scalars, Inductor's lowerings are all made of this text.

Widening: float16 and bfloat16 are computed in float32, float32 in float32, anything together with float64 in float64.
"""

from __future__ import annotations

import functools
import math
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.activations import Activation

__all__ = [
    "CLAMP_KEEPS_BOUNDS",
    "FP8",
    "LAYOUTS",
    "Gradients",
    "act_element",
    "act_input_grads",
    "clamped",
    "compute_dtype",
    "glu_element",
    "glu_input_grads",
    "load_fp8",
    "over_rows",
    "pack",
    "room",
    "store_fp8",
    "unpack",
    "widened",
]

Gradients: TypeAlias = tuple[Tensor | None, ...]  # one for each tensor of an operator; None where it is not wanted

_MaybeTensor = TypeVar("_MaybeTensor", Tensor, Tensor | None)

LAYOUTS = ("halves", "interleaved", "swapped")


# ---- element functions ---------------------------------------------------------------------------------------------


def _row(activation: str | Activation) -> Activation:
    """The table's row of that name; another implementation of it as it is."""
    return activations.get(activation) if isinstance(activation, str) else activation


def _times(y: Tensor, factor: Tensor, activation: str | Activation) -> Tensor:
    """y · factor; in y where an implementation of eager CPUs has just computed it."""
    return y * factor if isinstance(activation, str) else y.mul_(factor)


def act_element(x: Tensor, scale: Tensor | None, activation: str | Activation) -> Tensor:
    """act(x) · scale."""
    y = _row(activation).value(x)
    return y if scale is None else _times(y, scale, activation)


def act_input_grads(grad: Tensor, x: Tensor, scale: Tensor | None, activation: str | Activation) -> tuple[Tensor]:
    """grad · scale · act'(x)."""
    dx = _row(activation).input_grad(grad, x)
    return (dx if scale is None else dx * scale,)


def _clamp_keeps_its_bounds() -> bool:
    """True if torch.clamp's gradient at a bound is 1 (until 2.13) or 0 (2.15). Ours follows: fusing changes nothing."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, max=1.0), x)[0])


CLAMP_KEEPS_BOUNDS = _clamp_keeps_its_bounds()
_within = torch.le if CLAMP_KEEPS_BOUNDS else torch.lt  # False for NaN, as in torch.clamp's gradient


def clamped(gate: Tensor, up: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """gate cut above, up on both sides; clamp None is none."""
    if clamp is None:
        return gate, up
    return torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)


def glu_element(
    gate: Tensor, up: Tensor, scale: Tensor | None, activation: str | Activation, up_offset: float, clamp: float | None
) -> Tensor:
    """act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · scale."""
    gate, up = clamped(gate, up, clamp)
    y = _times(_row(activation).value(gate), up + up_offset if up_offset else up, activation)
    return y if scale is None else _times(y, scale, activation)


def glu_input_grads(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    activation: str | Activation,
    up_offset: float,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up. At the clamp's bounds as torch.clamp's own: see CLAMP_KEEPS_BOUNDS."""
    act = _row(activation)
    g, u = clamped(gate, up, clamp)
    if scale is not None:
        grad = grad * scale
    of_gate = grad * (u + up_offset if up_offset else u)
    if act.gated is not None:
        d_gate, d_up = act.gated(of_gate, g, grad)
    else:
        d_gate = act.input_grad(of_gate, g)
        d_up = grad * act.value(g) if isinstance(activation, str) else act.value(g).mul_(grad)
    if clamp is not None:
        d_gate = torch.where(_within(gate, clamp), d_gate, 0.0)
        d_up = torch.where(_within(torch.abs(up), clamp), d_up, 0.0)
    return d_gate, d_up


# ---- shared pieces -------------------------------------------------------------------------------------------------


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    for t in tensors:  # a loop: any() and a generator cost a call on few elements 0.7 µs
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def room(t: Tensor | None, wanted: bool) -> Tensor | None:
    """For the gradient of t: contiguous, and not filled; None where there is no t, or it is not wanted."""
    return t.new_empty(t.shape) if wanted and t is not None else None


def unpack(packed: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of a packed last axis, as views.

    "halves" is [gate | up], "interleaved" is g0 u0 g1 u1 …, "swapped" is [up | gate], as in ``F.glu``.
    """
    if layout == "interleaved":
        return packed[..., ::2], packed[..., 1::2]
    n = packed.shape[-1] // 2
    first, second = packed[..., :n], packed[..., n:]
    return (second, first) if layout == "swapped" else (first, second)


def pack(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """The inverse of unpack."""
    if layout == "interleaved":
        return torch.stack((gate, up), -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((up, gate) if layout == "swapped" else (gate, up), -1)


def widened(dtype: torch.dtype, t: _MaybeTensor) -> _MaybeTensor:
    """t in ``dtype``, if there is one."""
    return t if t is None or t.dtype == dtype else t.to(dtype)  # a call that does nothing takes 1 µs


def over_rows(t: Tensor) -> Tensor:
    """The sum over all axes but the last, never t itself: a gradient shares no memory with another."""
    return t.sum(tuple(range(t.ndim - 1))) if t.ndim > 1 else t.clone()


FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(FP8).max  # 448
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def store_fp8(x: Tensor, halves: bool = False) -> tuple[Tensor, Tensor]:
    """(stored, scale): x (..., n) as float8_e4m3fn with one float32 scale for each row, (...).

    scale = amax(|row|) / 448, so that the largest element is float8_e4m3fn's largest; 1 where that is no normal number,
    a row of zeros among them. Float64 goes through float32. A row with an infinity or a NaN loads as NaN, all of it:
    its scale is infinite or NaN.

    Args:
        x: of any dtype and strides.
        halves: whether to write it as two, whose loop a compiler fuses with an activation's of packed data.
    """
    x = x.to(torch.float32) if x.dtype == torch.float64 else x  # a float32 factor widens the others
    # Torch's reference of vector_norm rejects every empty tensor (2.13), eager mode and kernels those without columns.
    if isinstance(x.numel(), int) and x.numel() == 0:
        return x.to(FP8, memory_format=torch.contiguous_format), x.new_ones(x.shape[:-1], dtype=torch.float32)
    parts = unpack(x, "halves") if halves else (x,)
    sizes = (torch.linalg.vector_norm(part, math.inf, -1, dtype=torch.float32) for part in parts)
    largest = functools.reduce(torch.maximum, sizes).contiguous()
    scale = largest / _FP8_LARGEST
    # The factor is not made of the scale, which is stored: Inductor then joins halves without a pass of their own.
    factor = torch.where(scale < _FLOAT32_TINY, 1.0, torch.reciprocal(scale)).unsqueeze(-1)
    stored = [(part * factor).to(FP8, memory_format=torch.contiguous_format) for part in parts]
    return torch.cat(stored, -1) if halves else stored[0], torch.where(scale < _FLOAT32_TINY, 1.0, scale)


def load_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Load store_fp8's result in ``dtype``: off by at most 2⁻⁴ of an element, or 2⁻¹⁰·scale where that is more."""
    return (stored.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)
