"""Formulas of float8 linear layers: 8-bit numbers with one scale per block, and their GEMMs.

A matrix is stored in float8, in blocks along its last axis, over which the GEMM sums. A block has (1, 32), (1, 128) or
(128, 128) elements, or is a row, or is the whole matrix. Scales are powers of two in float32, so storing shifts
exponents and rounds to 4 significant bits. Storing the same numbers in other blocks does not round them twice, except
numbers below float8's smallest normal number, 2⁻⁶ of the scale. e4m3's largest number is 2¹⁴·⁸ times that number.

The oracle, the CPU kernels, the lowerings and the float64 tests share these formulas. GPU kernels implement them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.formulas import FP8

# Constants for float32 numbers read as integers. float8_e4m3fn's largest number is 448 = 1.75·2⁸.
_MANTISSA_BITS, _ABOVE_1_75, _LOG2_LARGEST = 23, 0x1FFFFF, 8
_WITHOUT_SIGN, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


# ---- numbers ---------------------------------------------------------------------------------------------------------


def padded(size: int, multiple: int = BLOCK) -> int:
    """Round ``size`` up to a multiple."""
    return (size + multiple - 1) // multiple * multiple


def stored_columns(size: int, columns: int) -> int:
    """Return how many columns ``quantize`` stores for ``size`` columns, in blocks of ``columns``."""
    return padded(size, columns) if columns in (BLOCK, MX_BLOCK) else size


def scales_shape(stored: Sequence[int], rows: int, columns: int = BLOCK) -> tuple[int, int]:
    """Return the scales' shape, in the layout that GEMMs read, for (r, c) values in blocks of (rows, columns)."""
    r, c = stored
    blocks = c // (columns or BLOCK)
    return (blocks, r) if rows == 1 else (r // rows, blocks)


def columns_of(values: Tensor, scales: Tensor, rows: int) -> int:
    """The width of the blocks in which ``quantize`` stored values."""
    blocks = scales.shape[0 if rows == 1 else 1]
    return values.shape[1] // blocks if blocks else BLOCK


def block_of_columns(columns: int) -> tuple[int, int]:
    """Return the block shape for an input's transpose, given that the input's blocks are (1, columns)."""
    return (1, MX_BLOCK) if columns == MX_BLOCK else (BLOCK, BLOCK)


def quantize(input: Tensor, rows: int, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Return (values, scales) of a tensor (r, c) in blocks of (rows, columns).

    scale = 2^⌈log₂(amax(|block|) / 448)⌉, at least 2⁻¹²⁶; value = block / scale, at most 448. A block with an infinity
    or a NaN has the scale NaN, so all of its elements load as NaN. float64 is converted to float32 first.

    Args:
        input: (r, c), any strides; r is a multiple of ``rows``.
        rows: 1 or 128; or r, if ``columns`` is c.
        columns: 128, 32, or c.

    Returns:
        values, float8: (r, c'). If ``columns`` is 128 or 32, zeros pad c to a multiple c'; otherwise c' = c. scales,
        float32: (c' / columns, r) for rows=1, otherwise (r / rows, c' / columns).
    """
    (r, c), columns = input.shape, columns or BLOCK
    width = stored_columns(c, columns)
    wide = torch.nn.functional.pad(input.to(torch.float32), (0, width - c))
    blocks = wide.reshape(r // rows, rows, width // columns, columns)
    scales, inverse = _scales(_magnitudes(blocks).amax((1, 3)))
    # Round before the reshape, so that even torch 2.11's Inductor computes scales and values in one kernel.
    values = (blocks * inverse[:, None, :, None]).to(FP8, memory_format=torch.contiguous_format)
    values = values.reshape(r, width)
    return values, scales.t().clone(memory_format=torch.contiguous_format) if rows == 1 else scales


def _magnitudes(wide: Tensor) -> Tensor:
    """Return integers that order float32 numbers by magnitude: numbers, then infinities, then NaN."""
    return wide.view(torch.int32) & _WITHOUT_SIGN


def _scales(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, 1 / scale) of blocks, given their largest magnitudes."""
    exponent = (((largest + _ABOVE_1_75) >> _MANTISSA_BITS) - _LOG2_LARGEST).clamp(min=1)
    not_a_number = (largest >= _INFINITY).to(torch.int32) * _NAN
    scales = ((exponent << _MANTISSA_BITS) | not_a_number).view(torch.float32)
    return scales, ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)


def quantize_halves(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``cat((first, second), 1)`` in rows. Return first's values, second's values, and scales (1, r).

    A compiler generates one loop over both, which a ``cat`` would prevent.
    """
    halves = first.to(torch.float32), second.to(torch.float32)
    largest = torch.maximum(*map(_magnitudes, halves)).amax(1, keepdim=True)
    scales, inverse = _scales(largest)
    left, right = ((half * inverse).to(FP8, memory_format=torch.contiguous_format) for half in halves)
    return left, right, scales.reshape(1, -1)


def quantize_by(input: Tensor, scales: Tensor) -> Tensor:
    """Quantize a matrix in rows or as a single block, with given scales. Return the values.

    Args:
        input: (r, c), or a stack (e, r, c); any strides.
        scales: (1, 1) or (1, r); for a stack (e, 1, 1) or (e, 1, r). The scales from ``quantize``, larger powers of
            two, or NaN.
    """
    exponent = scales.contiguous().view(torch.int32) >> _MANTISSA_BITS
    inverse = ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)
    values = input.to(torch.float32) * inverse.transpose(-2, -1)
    return values.to(FP8, memory_format=torch.contiguous_format)


def tiled(scales: Tensor) -> Tensor:
    """Return the scales of blocks of (1, 32) in the layout of sm_100's tensor cores: 8 bits each, in tiles.

    A scale is stored in e8m0: the byte b means 2^(b − 127); NaN is 255. A tile has 4 scales for each of 128 rows, in
    512 bytes: first rows 0, 32, 64, 96, each with its 4 scales in sequence, then rows 1, 33, …. The tiles of 128
    rows are contiguous. Padding after the last row or block is 0.

    Args:
        scales: (blocks, rows), from ``quantize``.

    Returns:
        uint8, (⌈rows / 128⌉ · ⌈blocks / 4⌉ · 512,).

    Source: cuBLAS's documentation, "1D Block Scaling Factors Layout"; torch's ``SwizzleType.SWIZZLE_32_4_4``.
    """
    blocks, rows = scales.shape
    exponents = scales.t().view(torch.int32) >> _MANTISSA_BITS
    if not isinstance(blocks * rows, int) or blocks % 4 or rows % BLOCK:
        exponents = torch.nn.functional.pad(exponents, (0, -blocks % 4, 0, -rows % BLOCK))
    tiles = exponents.view(padded(rows) // BLOCK, 4, 32, padded(blocks, 4) // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.to(torch.uint8, memory_format=torch.contiguous_format).view(-1)  # the second launch in eager mode


def _untiled(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Return the scales (blocks, rows) that ``tiled`` received."""
    exponents = tiles.view(padded(rows) // BLOCK, padded(blocks, 4) // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    bits = exponents.reshape(padded(rows), padded(blocks, 4))[:rows, :blocks].to(torch.int32) << _MANTISSA_BITS
    return torch.where(bits == _INFINITY, _NAN, bits).view(torch.float32).t()


def dequantize(values: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Return value · scale in ``dtype``. Its error is at most the larger of 2⁻⁴ of the element and 2⁻¹⁰ of its scale.

    Results are clamped to the dtype's largest number, so finite numbers load as finite numbers.
    """
    (r, c), columns = values.shape, columns_of(values, scales, rows)
    block_scales = scales.t() if rows == 1 else scales
    blocks = values.to(torch.float32).reshape(r // rows, rows, c // columns, columns)
    most = largest(dtype)
    return (blocks * block_scales[:, None, :, None]).clamp(-most, most).reshape(r, c).to(dtype)


def requantize(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the transpose of a matrix that is stored in blocks of (1, 128) or (1, 32), such as a layer's input."""
    wide = dequantize(values, scales, 1, torch.float32)
    return quantize(wide.t(), *block_of_columns(columns_of(values, scales, 1)))


def largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of ``dtype`` that float32 can represent."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """Return a · bᵀ + bias, with a (m, k) in blocks of one row and b (n, k) in blocks of ``rows``.

    Sums are computed in float32 or wider. bfloat16 and float32 represent the stored values exactly.
    """
    wide = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    left, right = dequantize(a, a_scales, 1, wide), dequantize(b, b_scales, rows, wide).t()
    out = torch.mm(left, right) if bias is None else torch.addmm(bias.to(wide), left, right)
    return out.to(dtype)


def tiled_product(
    a: Tensor, a_tiles: Tensor, b: Tensor, b_tiles: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` in blocks of (1, 32), with scales from ``tiled``."""
    (m, k), n = a.shape, b.shape[0]
    a_scales, b_scales = _untiled(a_tiles, m, k // MX_BLOCK), _untiled(b_tiles, n, k // MX_BLOCK)
    return product(a, a_scales, b, b_scales, bias, 1, dtype)


def grouped_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply each row of a (t, k) by bᵀ of its group. Returns (t, n).

    Args:
        a, a_scales: from ``quantize``, in rows.
        b, b_scales: (e, n, k), and (e, 1, n), or (e, 1, 1) if each matrix is one block.
        ends: (e,), int32: the end of each group's rows. Rows after the last group are undefined.
        dtype: of the result, bfloat16 or float32.
    """
    left = dequantize(a, a_scales, 1, dtype)
    right = (b.to(torch.float32) * b_scales.transpose(-2, -1)).to(dtype)
    if not a.shape[0]:
        return left.new_zeros(0, b.shape[1])
    return torch.nn.functional.grouped_mm(left, right.transpose(1, 2), offs=ends)
