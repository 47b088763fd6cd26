"""Every operator in plain torch: the oracle, the CPU kernels, what transforms differentiate and what lowerings trace.

Two layers. The *element functions* (``bias_act_element`` …) say what happens to one element: they take tensors that
broadcast together, already widened, and return unrounded results; Inductor lowerings trace them on scalars. The
*operators* (``bias_act`` …) add widening, layout, the sums behind bias and scale gradients, and one rounding at the
end.

Widening: float16 and bfloat16 are computed in float32, float32 in float32, anything together with float64 in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_fused_ops import activations

__all__ = [
    "bias_act",
    "bias_act_backward",
    "bias_act_fp8",
    "bias_act_fp8_backward",
    "bias_glu",
    "bias_glu_backward",
    "bias_glu_fp8",
    "bias_glu_fp8_backward",
    "compute_dtype",
    "glu",
    "glu_backward",
    "glu_fp8",
    "glu_fp8_backward",
    "load_fp8",
    "pack",
    "store_fp8",
    "unpack",
]

Grads3: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]

LAYOUTS = ("halves", "interleaved", "swapped")


# ---- element functions ---------------------------------------------------------------------------------------------


def bias_act_element(x: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Tensor:
    """act(x + bias) · scale."""
    y = activations.get(activation).value(x if bias is None else x + bias)
    return y if scale is None else y * scale


def bias_act_input_grad(grad: Tensor, x: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Tensor:
    """grad · scale · act'(x + bias): the gradient of the input, and, summed over rows, of the bias."""
    dx = grad * activations.get(activation).derivative(x if bias is None else x + bias)
    return dx if scale is None else dx * scale


def bias_act_scale_grad(grad: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """grad · act(x + bias): summed over a row, the gradient of that row's scale."""
    return grad * bias_act_element(x, bias, None, activation)


def _clamp_keeps_its_bounds() -> bool:
    """Whether torch.clamp's gradient at a bound is 1 (until 2.13) or 0 (2.15). Ours follows: fusing changes nothing."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, max=1.0), x)[0])


CLAMP_KEEPS_BOUNDS = _clamp_keeps_its_bounds()
_cut = torch.gt if CLAMP_KEEPS_BOUNDS else torch.ge


def _clamped(gate: Tensor, up: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    if clamp is None:
        return gate, up
    return torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)


def glu_element(
    gate: Tensor, up: Tensor, scale: Tensor | None, activation: str, up_offset: float, clamp: float | None
) -> Tensor:
    """act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · scale."""
    gate, up = _clamped(gate, up, clamp)
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
    """The gradients of gate and up. At the clamp's bounds as torch.clamp's own: see CLAMP_KEEPS_BOUNDS."""
    act = activations.get(activation)
    g, u = _clamped(gate, up, clamp)
    if scale is not None:
        grad = grad * scale
    d_gate = grad * (u + up_offset if up_offset else u) * act.derivative(g)
    d_up = grad * act.value(g)
    if clamp is not None:
        d_gate = torch.where(_cut(gate, clamp), 0.0, d_gate)
        d_up = torch.where(_cut(torch.abs(up), clamp), 0.0, d_up)
    return d_gate, d_up


def glu_scale_grad(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, up_offset: float, clamp: float | None
) -> Tensor:
    """grad · glu(gate, up): summed over a row, the gradient of that row's scale."""
    return grad * glu_element(gate, up, None, activation, up_offset, clamp)


# ---- shared pieces -------------------------------------------------------------------------------------------------


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


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


def _to(dtype: torch.dtype, t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(dtype)


def _column(dtype: torch.dtype, scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.to(dtype).unsqueeze(-1)


def _over_rows(t: Tensor) -> Tensor:
    """The sum over all axes but the last."""
    return t.sum(tuple(range(t.ndim - 1))) if t.ndim > 1 else t


FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(FP8).max  # 448
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def store_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(stored, scale): x (..., n) as float8_e4m3fn with one float32 scale for each row, (...).

    scale = amax(|row|) / 448, so that the largest element is float8_e4m3fn's largest; 1 where that is no normal number,
    a row of zeros among them. Float64 goes through float32. A row with an infinity or a NaN loads as NaN, all of it:
    its scale is infinite or NaN.
    """
    wide = x.to(torch.float32)
    if x.shape[-1] == 0:
        return wide.to(FP8, memory_format=torch.contiguous_format), wide.new_ones(wide.shape[:-1])
    scale = torch.amax(torch.abs(wide), -1).contiguous() / _FP8_LARGEST
    scale = torch.where(scale < _FLOAT32_TINY, 1.0, scale)
    stored = wide * torch.reciprocal(scale).unsqueeze(-1)
    return stored.to(FP8, memory_format=torch.contiguous_format), scale


def load_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What store_fp8 stored, in ``dtype``: off by at most 2⁻⁴ of an element, or 2⁻¹⁰·scale where that is more."""
    return (stored.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)


# ---- operators -----------------------------------------------------------------------------------------------------


def bias_act(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Tensor:
    """act(input + bias) · token_scale[..., None]; input (..., n), bias (n,), token_scale (...)."""
    dtype = compute_dtype(input, bias, token_scale)
    return bias_act_element(input.to(dtype), _to(dtype, bias), _column(dtype, token_scale), activation).to(input.dtype)


def bias_act_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of bias_act for (input, bias, token_scale); None where output_mask says no."""
    dtype = compute_dtype(grad, input, bias, token_scale)
    g, x, b, s = grad.to(dtype), input.to(dtype), _to(dtype, bias), _column(dtype, token_scale)
    d_input = d_bias = d_scale = None
    if output_mask[0] or output_mask[1]:
        dx = bias_act_input_grad(g, x, b, s, activation)
        d_input = dx.to(input.dtype) if output_mask[0] else None
        if output_mask[1]:
            assert bias is not None
            d_bias = _over_rows(dx).to(bias.dtype)
    if output_mask[2]:
        assert token_scale is not None
        d_scale = bias_act_scale_grad(g, x, b, activation).sum(-1).to(token_scale.dtype)
    return d_input, d_bias, d_scale


def glu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]; gate, up (..., n)."""
    dtype = compute_dtype(gate, up, token_scale)
    y = glu_element(gate.to(dtype), up.to(dtype), _column(dtype, token_scale), activation, up_offset, clamp)
    return y.to(gate.dtype)


def glu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of glu for (gate, up, token_scale); None where output_mask says no."""
    dtype = compute_dtype(grad, gate, up, token_scale)
    g, x, u, s = grad.to(dtype), gate.to(dtype), up.to(dtype), _column(dtype, token_scale)
    d_gate = d_up = d_scale = None
    if output_mask[0] or output_mask[1]:
        dg, du = glu_input_grads(g, x, u, s, activation, up_offset, clamp)
        d_gate = dg.to(gate.dtype) if output_mask[0] else None
        d_up = du.to(up.dtype) if output_mask[1] else None
    if output_mask[2]:
        assert token_scale is not None
        d_scale = glu_scale_grad(g, x, u, activation, up_offset, clamp).sum(-1).to(token_scale.dtype)
    return d_gate, d_up, d_scale


def bias_glu(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """glu of the packed input (..., 2n) + bias (2n,)."""
    dtype = compute_dtype(input, bias, token_scale)
    x = input.to(dtype) if bias is None else input.to(dtype) + bias.to(dtype)
    y = glu_element(*unpack(x, layout), _column(dtype, token_scale), activation, up_offset, clamp)
    return y.to(input.dtype)


def bias_glu_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of bias_glu for (input, bias, token_scale); None where output_mask says no."""
    dtype = compute_dtype(grad, input, bias, token_scale)
    g, s = grad.to(dtype), _column(dtype, token_scale)
    gate, up = unpack(input.to(dtype) if bias is None else input.to(dtype) + bias.to(dtype), layout)
    d_input = d_bias = d_scale = None
    if output_mask[0] or output_mask[1]:
        dx = pack(*glu_input_grads(g, gate, up, s, activation, up_offset, clamp), layout)
        d_input = dx.to(input.dtype) if output_mask[0] else None
        if output_mask[1]:
            assert bias is not None
            d_bias = _over_rows(dx).to(bias.dtype)
    if output_mask[2]:
        assert token_scale is not None
        d_scale = glu_scale_grad(g, gate, up, activation, up_offset, clamp).sum(-1).to(token_scale.dtype)
    return d_input, d_bias, d_scale


# ---- operators whose backward reads what forward stored in float8 ----------------------------------------------------


def _stored(*data: Tensor) -> tuple[Tensor, ...]:
    """store_fp8 of each; no derivative goes through it, in any mode."""
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
        return tuple(part for t in data for part in store_fp8(t))


def _load_dtype(dtype: torch.dtype, *tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else compute_dtype(*tensors)


def _rounded(dtype: torch.dtype, t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(dtype)


def bias_act_fp8(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    """(bias_act, stored, scale): with store_fp8 of input."""
    return bias_act(input, bias, token_scale, activation), *_stored(input)


def bias_act_fp8_backward(
    grad: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """bias_act_backward at load_fp8 of what was stored, unrounded; the input's gradient in ``dtype``."""
    x = load_fp8(stored, scale, _load_dtype(dtype, grad, bias, token_scale))
    d_input, d_bias, d_scale = bias_act_backward(grad, x, bias, token_scale, activation, output_mask)
    return _rounded(dtype, d_input), d_bias, d_scale


def glu_fp8(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> tuple[Tensor, ...]:
    """(glu, stored gate, its scale, stored up, its scale): with store_fp8 of both."""
    return glu(gate, up, token_scale, activation, up_offset, clamp), *_stored(gate, up)


def glu_fp8_backward(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    gate_dtype: torch.dtype,
    up_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """glu_backward at load_fp8 of what was stored, unrounded; the gradients in gate_dtype and up_dtype."""
    dtype = torch.float64 if torch.float64 in (gate_dtype, up_dtype) else compute_dtype(grad, token_scale)
    x, u = load_fp8(gate, gate_scale, dtype), load_fp8(up, up_scale, dtype)
    d_gate, d_up, d_scale = glu_backward(grad, x, u, token_scale, activation, up_offset, clamp, output_mask)
    return _rounded(gate_dtype, d_gate), _rounded(up_dtype, d_up), d_scale


def bias_glu_fp8(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> tuple[Tensor, ...]:
    """(bias_glu, stored, scale): with store_fp8 of the packed input, one scale for a packed row."""
    return bias_glu(input, bias, token_scale, activation, layout, up_offset, clamp), *_stored(input)


def bias_glu_fp8_backward(
    grad: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """bias_glu_backward at load_fp8 of what was stored, unrounded; the input's gradient in ``dtype``."""
    x = load_fp8(stored, scale, _load_dtype(dtype, grad, bias, token_scale))
    d_input, d_bias, d_scale = bias_glu_backward(
        grad, x, bias, token_scale, activation, layout, up_offset, clamp, output_mask
    )
    return _rounded(dtype, d_input), d_bias, d_scale
