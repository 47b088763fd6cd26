"""Linear layers in float8: numbers of 8 bits with one scale for each block of 128, and products of them.

A tensor of two axes is stored as float8_e4m3fn, in blocks along its last axis (the one that a product sums over): of
(1, 128) elements, or of (128, 128), as weights are. Scales are powers of two in float32. So storing moves exponents
and rounds to 4 significant bits, and nothing else: what is stored once and again in other blocks is not rounded twice,
but for what falls below float8's least normal number, 2⁻⁶ of the scale. e4m3 holds 2¹⁴·⁸ between that and its largest.

The recipe is DeepSeek-V3's (arXiv 2412.19437, section 3.3), which TransformerEngine has as ``Float8BlockScaling``:
activations and gradients in (1, 128), weights in (128, 128), every product summed in float32.

This is the text that oracle, CPU kernel, lowering and double precision tests share. Kernels for GPUs repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.formulas import FP8

__all__ = ["BLOCK", "FP8", "dequantise", "padded", "product", "quantise", "scales_shape"]

BLOCK = 128
# float32 as integers: 448, float8_e4m3fn's largest, is 1.75·2⁸.
_MANTISSA_BITS, _ABOVE_1_75, _LOG2_LARGEST = 23, 0x1FFFFF, 8
_WITHOUT_SIGN, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


def padded(size: int) -> int:
    """``size``, or the next multiple of a block's width."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


def scales_shape(stored: Sequence[int], rows: int) -> tuple[int, int]:
    """Of the scales of stored values (r, c) in blocks of (rows, 128), as GEMMs want them."""
    r, c = stored
    return (c // BLOCK, r) if rows == 1 else (r // rows, c // BLOCK)


def quantise(input: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(values, scales) of a tensor (r, c) in blocks of (rows, 128).

    scale = 2^⌈log₂(amax(|block|) / 448)⌉, at least 2⁻¹²⁶; value = block / scale, which 448 bounds. A block with an
    infinity or a NaN has the scale NaN, so that all of it loads as NaN. Float64 goes through float32.

    Args:
        input: (r, c), any strides; r a multiple of ``rows``.
        rows: 1 or 128.

    Returns:
        values, float8_e4m3fn: (r, c'), c' the next multiple of 128, zeros behind c. scales, float32, of
        ``scales_shape``: (c' / 128, r) for rows 1, (r / 128, c' / 128) for rows 128.
    """
    r, c = input.shape
    wide = torch.nn.functional.pad(input.to(torch.float32), (0, padded(c) - c))
    blocks = wide.reshape(r // rows, rows, padded(c) // BLOCK, BLOCK)
    largest = (blocks.view(torch.int32) & _WITHOUT_SIGN).amax((1, 3))
    exponent = (((largest + _ABOVE_1_75) >> _MANTISSA_BITS) - _LOG2_LARGEST).clamp(min=1)
    not_a_number = (largest >= _INFINITY).to(torch.int32) * _NAN
    scales = ((exponent << _MANTISSA_BITS) | not_a_number).view(torch.float32)
    inverse = ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)
    # Rounded as blocks, and seen as rows then: so Inductor of torch 2.11, too, makes both in one kernel.
    values = (blocks * inverse[:, None, :, None]).to(FP8, memory_format=torch.contiguous_format)
    values = values.reshape(r, padded(c))
    return values, scales.t().clone(memory_format=torch.contiguous_format) if rows == 1 else scales


def dequantise(values: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """value · scale in ``dtype``: what ``quantise`` stored, off by at most 2⁻⁴ of an element, or 2⁻¹⁰ of its scale."""
    r, c = values.shape
    of_blocks = scales.t() if rows == 1 else scales
    blocks = values.to(torch.float32).reshape(r // rows, rows, c // BLOCK, BLOCK)
    return (blocks * of_blocks[:, None, :, None]).reshape(r, c).to(dtype)


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """a · bᵀ + bias, a (m, k) in blocks of (1, 128) and b (n, k) in blocks of (rows, 128), summed in float32 at least.

    bfloat16 and float32 hold what is stored exactly, so these are products of the very numbers.
    """
    wide = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    left, right = dequantise(a, a_scales, 1, wide), dequantise(b, b_scales, rows, wide).t()
    out = torch.mm(left, right) if bias is None else torch.addmm(bias.to(wide), left, right)
    return out.to(dtype)
