"""Linear layers in float8: numbers of 8 bits with one scale for each block, and products of them.

A tensor of two axes is stored in float8, in blocks along its last axis (the one that a product sums over): of (1, 32)
elements, of (1, 128) or of (128, 128), a row each, or as one block. Scales are powers of two in float32. So storing
moves exponents and rounds to 4 significant bits, and nothing else: what is stored once and again in other blocks is not
rounded twice, but for what falls below float8's least normal number, 2⁻⁶ of the scale. e4m3 holds 2¹⁴·⁸ between that
and its largest.

The numbers are float8_e4m3fn's, on every device. gfx942 (MI300) has float8_e4m3fnuz in its place, in which the same
byte is half as much and the byte of −0 is NaN: there the scales are twice as large, and −0 is 0. What that has besides
(240 where e4m3fn's largest gives 224) is not used, so that a recipe multiplies the same numbers everywhere.

This is the text that oracle, CPU kernel, lowering and double precision tests share. Kernels for GPUs repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.formulas import FP8

FNUZ = torch.float8_e4m3fnuz
DTYPES = (FP8, FNUZ)
# float32 as integers: 448, float8_e4m3fn's largest, is 1.75·2⁸.
_MANTISSA_BITS, _ABOVE_1_75, _LOG2_LARGEST = 23, 0x1FFFFF, 8
_WITHOUT_SIGN, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000


# ---- numbers ---------------------------------------------------------------------------------------------------------


def dtype_of(device: torch.device) -> torch.dtype:
    """float8_e4m3fn, or on gfx942, whose products have no other, float8_e4m3fnuz."""
    if device.type != "cuda" or torch.version.hip is None:
        return FP8
    return FNUZ if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx942") else FP8


def padded(size: int, multiple: int = BLOCK) -> int:
    """``size``, or the next multiple."""
    return (size + multiple - 1) // multiple * multiple


def stored_columns(size: int, columns: int) -> int:
    """The number of columns that ``quantize`` stores for ``size`` columns, in blocks that wide."""
    return padded(size, columns) if columns in (BLOCK, MX_BLOCK) else size


def scales_shape(stored: Sequence[int], rows: int, columns: int = BLOCK) -> tuple[int, int]:
    """The shape of the scales of stored values (r, c) in blocks of (rows, columns), as GEMMs read them."""
    r, c = stored
    blocks = c // (columns or BLOCK)
    return (blocks, r) if rows == 1 else (r // rows, blocks)


def columns_of(values: Tensor, scales: Tensor, rows: int) -> int:
    """The width of the blocks in which ``quantize`` stored values."""
    blocks = scales.shape[0 if rows == 1 else 1]
    return values.shape[1] // blocks if blocks else BLOCK


def block_of_columns(columns: int) -> tuple[int, int]:
    """The blocks of a layer's input along its columns, as of a weight, beside blocks of (1, columns) along its rows."""
    return (1, MX_BLOCK) if columns == MX_BLOCK else (BLOCK, BLOCK)


def quantize(input: Tensor, rows: int, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    """(values, scales) of a tensor (r, c) in blocks of (rows, columns).

    scale = 2^⌈log₂(amax(|block|) / 448)⌉, at least 2⁻¹²⁶; value = block / scale, which 448 bounds. A block with an
    infinity or a NaN has the scale NaN, so that all of it loads as NaN. Float64 goes through float32. As
    float8_e4m3fnuz (``dtype_of``) the scale is twice that.

    Args:
        input: (r, c), any strides; r a multiple of ``rows``.
        rows: 1 or 128; or r, with c columns.
        columns: 128, 32, or c.

    Returns:
        values, float8: (r, c'), c' = c, or the next multiple of ``columns``, zeros behind c. scales, float32,
        of ``scales_shape``: (c' / columns, r) for rows 1, else (r / rows, c' / columns).
    """
    (r, c), dtype, columns = input.shape, dtype_of(input.device), columns or BLOCK
    width = stored_columns(c, columns)
    wide = torch.nn.functional.pad(input.to(torch.float32), (0, width - c))
    blocks = wide.reshape(r // rows, rows, width // columns, columns)
    scales, inverse = _scales(_magnitudes(blocks).amax((1, 3)), dtype)
    # Rounded as blocks, and seen as rows then: so Inductor of torch 2.11, too, makes both in one kernel.
    values = (blocks * inverse[:, None, :, None]).to(dtype, memory_format=torch.contiguous_format)
    values = values.reshape(r, width)
    return values, scales.t().clone(memory_format=torch.contiguous_format) if rows == 1 else scales


def _magnitudes(wide: Tensor) -> Tensor:
    """Integers that order float32 numbers by their magnitudes, infinities and NaN last."""
    return wide.view(torch.int32) & _WITHOUT_SIGN


def _scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of blocks by their largest magnitude."""
    exponent = (((largest + _ABOVE_1_75) >> _MANTISSA_BITS) - _LOG2_LARGEST).clamp(min=1)
    exponent = exponent + 1 if dtype == FNUZ else exponent
    not_a_number = (largest >= _INFINITY).to(torch.int32) * _NAN
    scales = ((exponent << _MANTISSA_BITS) | not_a_number).view(torch.float32)
    return scales, ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)


def quantize_halves(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize`` of ``cat((first, second), 1)`` in rows, the values in two: (first's, second's, scales (1, r)).

    A compiler makes one loop of it, over both, which ``cat`` would stand in front of.
    """
    dtype, halves = dtype_of(first.device), (first.to(torch.float32), second.to(torch.float32))
    largest = torch.maximum(*map(_magnitudes, halves)).amax(1, keepdim=True)
    scales, inverse = _scales(largest, dtype)
    one, other = ((half * inverse).to(dtype, memory_format=torch.contiguous_format) for half in halves)
    return one, other, scales.reshape(1, -1)


def quantize_by(input: Tensor, scales: Tensor) -> Tensor:
    """``quantize``'s values in one block, or in rows, by scales that are known; input (r, c), any strides.

    Args:
        input: (r, c), or a stack of such, (e, r, c); any strides.
        scales: (1, 1), or (1, r); those that ``quantize`` gives, or larger ones that are powers of two, or NaN. Of a
            stack (e, 1, 1) or (e, 1, r).
    """
    exponent = scales.contiguous().view(torch.int32) >> _MANTISSA_BITS
    inverse = ((254 - exponent) << _MANTISSA_BITS).view(torch.float32)
    values = input.to(torch.float32) * inverse.transpose(-2, -1)
    return values.to(dtype_of(input.device), memory_format=torch.contiguous_format)


def tiled_size(blocks: int, rows: int) -> int:
    """The number of bytes that ``tiled`` returns for scales (blocks, rows)."""
    return padded(blocks, 4) * padded(rows)


def tiled(scales: Tensor) -> Tensor:
    """The scales of blocks of (1, 32) as tensor cores of sm_100 read them: 8 bits each, in tiles.

    A scale's exponent is e8m0: 2 to the byte − 127, and NaN as 255. A tile, of 128 rows and the 4 blocks of 128
    columns, lies in 512 bytes: first its rows 0, 32, 64, 96, each with its blocks next to each other, then rows 1, 33,
    …. Tiles follow each other along the rows. What is behind the last row or block is 0.

    Args:
        scales: (blocks, rows), as ``quantize`` gives them.

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
    """The scales (blocks, rows) that ``tiled`` was given."""
    exponents = tiles.view(padded(rows) // BLOCK, padded(blocks, 4) // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    bits = exponents.reshape(padded(rows), padded(blocks, 4))[:rows, :blocks].to(torch.int32) << _MANTISSA_BITS
    return torch.where(bits == _INFINITY, _NAN, bits).view(torch.float32).t()


def dequantize(values: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """value · scale in ``dtype``: what ``quantize`` stored, off by at most 2⁻⁴ of an element, or 2⁻¹⁰ of its scale.

    Where rounding to 4 bits goes beyond the dtype's largest number, that number: finite numbers load as finite ones.
    """
    (r, c), columns = values.shape, columns_of(values, scales, rows)
    of_blocks = scales.t() if rows == 1 else scales
    blocks = values.to(torch.float32).reshape(r // rows, rows, c // columns, columns)
    most = largest(dtype)
    return (blocks * of_blocks[:, None, :, None]).clamp(-most, most).reshape(r, c).to(dtype)


def requantize(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize`` of the transpose of what is stored in blocks of (1, 128) or (1, 32), as of a layer's input."""
    wide = dequantize(values, scales, 1, torch.float32)
    return quantize(wide.t(), *block_of_columns(columns_of(values, scales, 1)))


def largest(dtype: torch.dtype) -> float:
    """The largest finite number of ``dtype`` that float32 holds."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """a · bᵀ + bias, a (m, k) in blocks of one row and b (n, k) in blocks of ``rows``, summed in float32 at least.

    bfloat16 and float32 hold what is stored exactly, so these are products of the very numbers.
    """
    wide = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    left, right = dequantize(a, a_scales, 1, wide), dequantize(b, b_scales, rows, wide).t()
    out = torch.mm(left, right) if bias is None else torch.addmm(bias.to(wide), left, right)
    return out.to(dtype)


def tiled_product(
    a: Tensor, a_tiles: Tensor, b: Tensor, b_tiles: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``product`` in blocks of (1, 32), by scales that ``tiled`` has given."""
    (m, k), n = a.shape, b.shape[0]
    of_a, of_b = _untiled(a_tiles, m, k // MX_BLOCK), _untiled(b_tiles, n, k // MX_BLOCK)
    return product(a, of_a, b, of_b, bias, 1, dtype)


def grouped_product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Each row of a (t, k) times bᵀ of its group: (t, n).

    Args:
        a, a_scales: in rows, as ``quantize`` gives them.
        b, b_scales: (e, n, k), and (e, 1, n), or (e, 1, 1) of one block each.
        ends: (e,), int32: where each group's rows end; what lies behind the last is undefined.
        dtype: the result's, bfloat16 or float32.
    """
    left = dequantize(a, a_scales, 1, dtype)
    right = (b.to(torch.float32) * b_scales.transpose(-2, -1)).to(dtype)
    if not a.shape[0]:
        return left.new_zeros(0, b.shape[1])
    return torch.nn.functional.grouped_mm(left, right.transpose(1, 2), offs=ends)
