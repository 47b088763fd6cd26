# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment, misc"
# ruff: noqa: RUF005, SIM300 - Triton rejects (*strips, strip), and a comparison with DTYPE's value on the right
"""Triton kernels of the float8 operators (``operators.py``), and their GEMMs, which libraries compute.

If a row is one block, each program processes a row. Otherwise it processes a tile of 128 × 128 elements. Blocks of all
layouts fit the tile: (1, 128), (128, 128) and (1, 32), for the tensor and for its transpose. A program reads the tile
once along the input's contiguous axis, and stores each layout along that layout's contiguous axis.

The tile consists of 8 *strips* of 16 rows: strip q has the rows q, q + 8, q + 16 …, so a thread has the same columns in
8 neighboring rows. Four neighboring rows of a column, in float8, are one 32-bit word. Shared memory transposes words,
not bytes (and not float8, which Triton 3.7 transposes wrongly). Two 16-bit numbers share a register from rounding to
storing; the callers of ``_pair`` choose the two numbers.

The largest element is found by comparing bits as integers. This is exact, orders NaN above infinity above all numbers,
and avoids min.NaN and max.NaN, after which ptxas 12.9 stores float8 wrongly. In a block whose scale is NaN, the
hardware converts an infinity to 448 and torch converts it to NaN: multiplied by the scale, both are NaN.

Formulas are in ``families/float8/formulas.py``; activations' formulas are in ``activations.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from torch_fused_ops import formulas
from torch_fused_ops.declaration import OPERATORS, PointwiseOperator
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.activations import activate, clamp, clamp_above, input_grad, tl, triton, within
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.formulas import FP8

SIDE = tl.constexpr(BLOCK)
STRIPS = tl.constexpr(8)
STRIP_ROWS = tl.constexpr(BLOCK // 8)
NARROW = tl.constexpr(MX_BLOCK)
PARTS = tl.constexpr(BLOCK // MX_BLOCK)
# The constants of ``float8.quantize``, shifted to the exponent's bits: an exponent of 1 is 1 << 23.
ABOVE_1_75 = tl.constexpr(float8._ABOVE_1_75)
LOG2_LARGEST = tl.constexpr(float8._LOG2_LARGEST << float8._MANTISSA_BITS)
LEAST_SCALE = tl.constexpr(1 << float8._MANTISSA_BITS)
INVERSE = tl.constexpr(254 << float8._MANTISSA_BITS)
INFINITY = tl.constexpr(float8._INFINITY)
BF16_LARGEST = tl.constexpr(float8.largest(torch.bfloat16))

# ---- pairs -----------------------------------------------------------------------------------------------------------


@triton.jit
def _pair(low, high, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Return two numbers rounded to DTYPE, in one integer with twice DTYPE's bits."""
    if DTYPE.primitive_bitwidth == 32:
        bits = high.to(tl.float32).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        return (bits | low.to(tl.float32).to(tl.uint32, bitcast=True)).to(tl.int64, bitcast=True)
    elif PTX and low.dtype == tl.float32:  # converting the numbers one by one takes four times as long
        if DTYPE == tl.bfloat16:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        bits = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return (bits | low.to(DTYPE).to(tl.uint16, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def _of_pair(pair, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the upper or lower number of a pair, in float32."""
    if DTYPE == tl.bfloat16:
        return ((pair & -0x10000) if HIGH else (pair << 16)).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        return ((pair >> 16) if HIGH else pair).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return ((pair >> 32) if HIGH else pair).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _high_once(pair, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Return the upper number of a pair. The instruction differs from the instruction in ``_of_pair``.

    With equal instructions, ptxas (it sees through ``_anew``) spills 16 words on sm_90 instead of masking them twice.
    """
    if PTX and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x3244;", "=r,r", [pair], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return _of_pair(pair, True, DTYPE)


@triton.jit
def _sizes(pair):
    """Clear both signs of a pair."""
    if pair.dtype == tl.int32:
        return pair & 0x7FFF7FFF
    else:
        return pair & 0x7FFFFFFF7FFFFFFF


@triton.jit
def _larger_ptx(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger(a, b):
    if a.dtype == tl.int32:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & -0x10000, b & -0x10000)
    else:
        return tl.maximum(a & 0xFFFFFFFF, b & 0xFFFFFFFF) | tl.maximum(a & -0x100000000, b & -0x100000000)


@triton.jit
def _largest(pairs, AXIS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest upper and the largest lower number along an axis. The pairs have no signs."""
    if PTX and pairs.dtype == tl.int32:
        return tl.reduce(pairs, AXIS, _larger_ptx)
    else:
        return tl.reduce(pairs, AXIS, _larger)


@triton.jit
def _largest_of_strips(strips, PTX: tl.constexpr):
    largest = _sizes(strips[0])
    for i in tl.static_range(1, len(strips)):
        if PTX and largest.dtype == tl.int32:
            largest = _larger_ptx(largest, _sizes(strips[i]))
        else:
            largest = _larger(largest, _sizes(strips[i]))
    return largest


@triton.jit
def _anew(strips, PTX: tl.constexpr):
    """Hide the strips' origin from the compiler, which would otherwise hold unpacked float32 values in registers."""
    if PTX:
        hidden = ()
        for i in tl.static_range(len(strips)):
            if strips[i].dtype == tl.int32:
                hidden = hidden + (
                    tl.inline_asm_elementwise(
                        "mov.b32 $0, $1;", "=r,r", [strips[i]], dtype=tl.int32, is_pure=False, pack=1
                    ),
                )
            else:
                hidden = hidden + (strips[i],)
        return hidden
    else:
        return strips


# ---- blocks ----------------------------------------------------------------------------------------------------------


@triton.jit
def _to_fp8(x, NATIVE: tl.constexpr):
    """Convert float32 of at most 448 to the bits of float8_e4m3fn, rounded to nearest even."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2⁻⁶ float8's spacing is 2⁻⁹, as in float32 from 2¹⁴ (0x46800000) on. So adding 2¹⁴ rounds.
        small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, tl.minimum(normal, 0x7F))
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_fp8(code, NATIVE: tl.constexpr):
    """Convert float8_e4m3fn's bits to float32. Without NATIVE, NaN becomes 480, but its scale is NaN or infinite."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = code.to(tl.int32)
        size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2¹²⁰: the exponents' bias
        return tl.where(bits < 128, size, -size)


@triton.jit
def _scale(largest):
    """Return (scale, 1 / scale) of a block whose largest element, in float32, is ``largest``."""
    bits = largest.to(tl.int32, bitcast=True)
    scale = tl.maximum(((bits + ABOVE_1_75) & INFINITY) - LOG2_LARGEST, LEAST_SCALE)
    inverse = (-scale + INVERSE).to(tl.float32, bitcast=True)
    return tl.where(bits < INFINITY, scale.to(tl.float32, bitcast=True), float("nan")), inverse


@triton.jit
def _four(a, b, c, d, PTX: tl.constexpr):
    """Return four numbers of at most 448 as float8 in one word."""
    if PTX:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = _to_fp8(a, False).to(tl.uint32) | (_to_fp8(b, False).to(tl.uint32) << 8)
        high = _to_fp8(c, False).to(tl.uint32) | (_to_fp8(d, False).to(tl.uint32) << 8)
        return (low | (high << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _in_order(s, COLUMNS: tl.constexpr):
    """Merge the values of 8 strips in row order: (16,) each into (128,), with blocks of 32 (16, 4) into (4, 128)."""
    even = tl.join(tl.join(s[0], s[4]), tl.join(s[2], s[6]))
    odd = tl.join(tl.join(s[1], s[5]), tl.join(s[3], s[7]))
    if COLUMNS == NARROW:
        return tl.reshape(tl.permute(tl.join(even, odd), (1, 0, 2, 3, 4)), (PARTS, SIDE))
    else:
        return tl.reshape(tl.join(even, odd), (SIDE,))


@triton.jit
def _strips_of_pairs(pairs, HIGH: tl.constexpr, ALONG: tl.constexpr, DTYPE: tl.constexpr):
    """Return 8 strips in float32: the lower or upper half of 8 pairs; if ALONG, both halves of 4 pairs."""
    strips = ()
    if ALONG:
        for i in tl.static_range(len(pairs)):
            strips = strips + (_of_pair(pairs[i], False, DTYPE), _of_pair(pairs[i], True, DTYPE))
    else:
        for i in tl.static_range(len(pairs)):
            strips = strips + (_of_pair(pairs[i], HIGH, DTYPE),)
    return strips


@triton.jit
def _store_sums(s, sums):
    """Store the sums over the tile's rows."""
    total = s[0]
    for i in tl.static_range(1, len(s)):
        total += s[i]
    tl.store(sums + tl.arange(0, SIDE), tl.sum(total, 0))


@triton.jit
def _store_transposed(s, inverse, values, stride, columns_left, WIDE: tl.constexpr, PTX: tl.constexpr, words_left=None):
    """Store the transpose of 8 strips · inverse. ``values``, ``stride`` and ``words_left`` (in a row) count words."""
    low = _four(s[0] * inverse, s[1] * inverse, s[2] * inverse, s[3] * inverse, PTX)
    high = _four(s[4] * inverse, s[5] * inverse, s[6] * inverse, s[7] * inverse, PTX)
    words = tl.reshape(tl.permute(tl.join(low, high), (1, 0, 2)), (SIDE, SIDE // 4))
    c = _anew((_places(SIDE, WIDE),), PTX)[0]  # otherwise the addresses would stay in registers after their first use
    word = tl.arange(0, SIDE // 4)[None, :]
    mask = None if columns_left is None else (c < columns_left)[:, None]
    if words_left is not None:
        mask = mask & (word < words_left)
    tl.store(values + c[:, None] * stride + word, words, mask=mask)


@triton.jit
def _places(SIZE: tl.constexpr, WIDE: tl.constexpr):
    place = tl.arange(0, SIZE)
    return place.to(tl.int64) if WIDE else place


@triton.jit
def _tile_of(column_blocks):
    """Return the (row, column) of this program's tile, counted in tiles."""
    program = tl.program_id(0)
    return (program // column_blocks).to(tl.int64), (program % column_blocks).to(tl.int64)


# Blocks in a tile have COLUMNS columns. With 128, values per block have the shape (rows,) or (columns,). With 32, the
# shape is (rows, 4) or (4, columns).


@triton.jit
def _largest_of_rows(pairs, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest element of each block in a strip's rows: (16,) or (16, 4)."""
    if COLUMNS == NARROW:
        return _largest(tl.reshape(_sizes(pairs), (STRIP_ROWS, PARTS, NARROW)), 2, PTX)
    else:
        return _largest(_sizes(pairs), 1, PTX)


@triton.jit
def _largest_of_columns(strips, COLUMNS: tl.constexpr, PTX: tl.constexpr):
    """Return the largest element of each block in a tile's columns: (128,) or (4, 128)."""
    if COLUMNS == NARROW:  # rows 0 to 3 of all strips are the tile's first 32 rows
        return _largest(tl.reshape(_largest_of_strips(strips, PTX), (PARTS, STRIP_ROWS // PARTS, SIDE)), 1, PTX)
    else:
        return _largest(_largest_of_strips(strips, PTX), 0, PTX)


@triton.jit
def _larger_half(pairs, DTYPE: tl.constexpr):
    """Return the larger number of each pair, in float32. The numbers have no signs."""
    low = _of_pair(pairs, False, DTYPE).to(tl.int32, bitcast=True)
    return tl.maximum(low, _of_pair(pairs, True, DTYPE).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _scales_of_columns(strips, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Return (scale, 1 / scale) of each block in a tile's columns, and (scale, 1 / scale) of the tile."""
    largest = _larger_half(_largest_of_columns(strips, COLUMNS, PTX), DTYPE)
    scale, inverse = _scale(largest)
    of_tile = tl.max(tl.reshape(largest.to(tl.int32, bitcast=True), (largest.numel,)), 0)
    scale_of_tile, inverse_of_tile = _scale(of_tile.to(tl.float32, bitcast=True))
    return scale, inverse, scale_of_tile, inverse_of_tile


@triton.jit
def _beside_rows(of_blocks, COLUMNS: tl.constexpr):
    """Broadcast the values of row blocks to a strip's elements."""
    if COLUMNS == NARROW:
        return tl.reshape(tl.broadcast_to(of_blocks[:, :, None], (STRIP_ROWS, PARTS, NARROW)), (STRIP_ROWS, SIDE))
    else:
        return of_blocks[:, None]


@triton.jit
def _beside_columns(of_blocks, COLUMNS: tl.constexpr):
    """Broadcast the values of column blocks to a strip's elements."""
    if COLUMNS == NARROW:
        wide = tl.broadcast_to(of_blocks[:, None, :], (PARTS, STRIP_ROWS // PARTS, SIDE))
        return tl.reshape(wide, (STRIP_ROWS, SIDE))
    else:
        return of_blocks[None, :]


@triton.jit
def _places_of_scales(stride, place, COLUMNS: tl.constexpr):
    """Return the scales' offsets within a tile: ``place``, with blocks of 32 plus ``stride`` for each of 4 parts."""
    if COLUMNS == NARROW:
        return tl.arange(0, PARTS)[:, None] * stride + place[None, :]
    else:
        return place


@triton.jit
def _scales_left(place, left, part, blocks_left, COLUMNS: tl.constexpr):
    """Return the mask of a tile's scales: place < ``left``, and with blocks of 32 part < ``blocks_left``."""
    if COLUMNS == NARROW:
        return (place < left)[None, :] & (part < blocks_left)
    else:
        return place < left


@triton.jit
def _pairs_of_tile(
    input, input_scales, first, place, rows, rows_left, columns_left, input_row, input_column,
    COLUMNS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Load a tile's 8 strips as 4 pairs of neighbors. With ``input_scales``, input is float8 in blocks of one row."""
    strips = ()
    for i in tl.static_range(0, STRIPS, 2):
        two = ()
        for j in tl.static_range(i, i + 2):
            row = first + j
            mask = (row < rows_left)[:, None] & (place < columns_left)[None, :]
            places = row[:, None] * input_row + place[None, :] * input_column
            loaded = tl.load(input + places, mask=mask, other=0.0)
            if input_scales is not None:
                mask = row < rows_left
                if COLUMNS == NARROW:
                    part = tl.arange(0, PARTS)[None, :]
                    mask = mask[:, None] & (part * NARROW < columns_left)
                    row = part * rows + row[:, None]
                scale = _beside_rows(tl.load(input_scales + row, mask=mask, other=0.0), COLUMNS)
                loaded = clamp(_from_fp8(loaded, PTX) * scale, BF16_LARGEST)
            two = two + (loaded.to(DTYPE),)
        strips = strips + (_pair(two[0], two[1], DTYPE, PTX),)
    return strips


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _quantize(
    input, input_scales, values, scales, values_t, scales_t,
    rows, columns, column_blocks, input_row, input_column, values_row, values_t_row,
    ROWS: tl.constexpr, ROWS_T: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize input (rows, columns) in blocks of (ROWS, COLUMNS), its transpose in blocks of (ROWS_T, COLUMNS).

    values (rows, values_row) and scales are ``float8.quantize(input, ROWS, COLUMNS)``; values_t
    (columns, 4 · values_t_row), in words, and scales_t are ``float8.quantize(inputᵀ, ROWS_T, COLUMNS)``. If ROWS or
    ROWS_T is None, that result is not computed. With ``input_scales`` input is float8 in blocks of (1, COLUMNS).
    """
    BLOCKS: tl.constexpr = SIDE // COLUMNS  # in a tile's row: 1 or 4
    r, c = _tile_of(column_blocks)
    first, place = _places(STRIP_ROWS, WIDE) * STRIPS, _places(SIDE, WIDE)
    part = tl.arange(0, PARTS)[:, None]
    rows_left, columns_left = rows - r * SIDE, columns - c * SIDE
    # bfloat16 represents float8 times a power of two exactly.
    OWN: tl.constexpr = tl.bfloat16 if input_scales is not None else input.dtype.element_ty
    DTYPE: tl.constexpr = tl.float32 if OWN == tl.float64 else OWN
    input += r * SIDE * input_row + c * SIDE * input_column
    if input_scales is not None:
        input_scales += c * BLOCKS * rows + r * SIDE
    strips = _pairs_of_tile(
        input, input_scales, first, place, rows, rows_left, columns_left, input_row, input_column, COLUMNS, DTYPE, PTX
    )

    if COLUMNS == SIDE and (ROWS_T is not None or ROWS == SIDE):
        scale_t, inverse_t, scale_all, inverse_all = _scales_of_columns(strips, COLUMNS, DTYPE, PTX)

    if ROWS is not None:
        values += r * SIDE * values_row + c * SIDE
        stored = place < values_row - c * SIDE
        of_rows = ()
        numbers = _strips_of_pairs(_anew(strips, PTX), False, True, DTYPE)
        for i in tl.static_range(STRIPS):
            if ROWS == 1:
                if i % 2 == 0:
                    both = _largest_of_rows(strips[i // 2], COLUMNS, PTX)
                largest_of_rows = _of_pair(both, i % 2 == 1, DTYPE)
                of_rows = of_rows + (largest_of_rows,)
                inverse = _beside_rows(_scale(largest_of_rows)[1], COLUMNS)
            else:
                inverse = inverse_all
            code = _to_fp8(numbers[i] * inverse, PTX)
            row = first + i
            mask = (row < rows_left)[:, None] if COLUMNS == SIDE else (row < rows_left)[:, None] & stored[None, :]
            tl.store(values + row[:, None] * values_row + place[None, :], code, mask=mask)
        if ROWS == 1:
            scales += c * BLOCKS * rows + r * SIDE
            mask = _scales_left(place, rows_left, part, values_row // COLUMNS - c * BLOCKS, COLUMNS)
            scale = _scale(_in_order(of_rows, COLUMNS))[0]
            tl.store(scales + _places_of_scales(rows, place, COLUMNS), scale, mask=mask)
        else:
            tl.store(scales + r * column_blocks + c, scale_all)

    if ROWS_T is not None:
        values_t += c * SIDE * values_t_row + r * (SIDE // 4)
        if COLUMNS == NARROW:
            scale_t, inverse_t, _, _ = _scales_of_columns(strips, COLUMNS, DTYPE, PTX)
        if ROWS_T == 1:
            mask = _scales_left(place, columns_left, part, values_t_row // (COLUMNS // 4) - r * BLOCKS, COLUMNS)
            scales_t += r * BLOCKS * columns + c * SIDE
            tl.store(scales_t + _places_of_scales(columns, place, COLUMNS), scale_t, mask=mask)
            inverse = _beside_columns(inverse_t, COLUMNS)
        else:
            tl.store(scales_t + c * (values_t_row // (SIDE // 4)) + r, scale_all)
            inverse = inverse_all
        numbers = _strips_of_pairs(_anew(strips, PTX), False, True, DTYPE)
        words_left = values_t_row - r * (SIDE // 4) if COLUMNS == NARROW else None
        _store_transposed(numbers, inverse, values_t, values_t_row, columns_left, WIDE, PTX, words_left)


@triton.jit
def _quantize_rows(input, values, scales, columns, input_row, input_column, PLACES: tl.constexpr, PTX: tl.constexpr):
    """Compute ``float8.quantize`` of rows with up to PLACES columns. Each program processes a row."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    places = input + row * input_row + place.to(tl.int64) * input_column
    x = tl.load(places, mask=place < columns, other=0.0).to(tl.float32)
    scale, inverse = _scale(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True))
    tl.store(scales + row, scale)
    tl.store(values + row * columns + place, _to_fp8(x * inverse, PTX), mask=place < columns)


@triton.jit
def _quantize_turned(
    input, scales, values_t, rows, columns, column_blocks, input_one, input_row, input_column,
    scale_one, scale_column, values_t_row, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute ``float8.quantize_by`` of inputᵀ. values_t (columns, values_t_row) has four values per word.

    Each program processes a tile, in one matrix of a stack.
    """
    index = tl.program_id(1).to(tl.int64)
    input += index * input_one
    scales += index * scale_one
    values_t += index * columns * values_t_row
    r, c = _tile_of(column_blocks)
    first, place = _places(STRIP_ROWS, WIDE) * STRIPS, _places(SIDE, WIDE)
    rows_left, columns_left = rows - r * SIDE, columns - c * SIDE
    input += r * SIDE * input_row + c * SIDE * input_column
    strips = ()
    for i in tl.static_range(STRIPS):
        mask = (first + i < rows_left)[:, None] & (place < columns_left)[None, :]
        strips = strips + (_strip(input, first + i, place, input_row, input_column, mask),)
    scale = tl.load(scales + (c * SIDE + place) * scale_column, mask=place < columns_left, other=1.0)
    inverse = (-scale.to(tl.int32, bitcast=True) + INVERSE).to(tl.float32, bitcast=True)[None, :]
    values_t += c * SIDE * values_t_row + r * (SIDE // 4)
    words_left = values_t_row - r * (SIDE // 4)
    _store_transposed(strips, inverse, values_t, values_t_row, columns_left, WIDE, PTX, words_left)


@triton.jit
def _dequantize_rows(
    out, values, scales, columns, scale_row, LARGEST: tl.constexpr, PLACES: tl.constexpr, PTX: tl.constexpr
):
    """Compute ``float8.dequantize`` for rows or one block, PLACES elements a program; out and values are contiguous."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    scale = tl.load(scales + row * scale_row)
    code = tl.load(values + row * columns + place, mask=place < columns, other=0)
    tl.store(out + row * columns + place, clamp(_from_fp8(code, PTX) * scale, LARGEST), mask=place < columns)


@triton.jit
def _strip(matrix, row, place, row_stride, column_stride, mask):
    places = matrix + row[:, None] * row_stride + place[None, :] * column_stride
    if mask is None:
        return tl.load(places).to(tl.float32)
    else:
        return tl.load(places, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _parking(values_t, stride, row, STRIP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """Return a 16-bit strip's addresses in a transposed float8 tile, which has room for four strips. row: 0 to 15."""
    r, c = row[:, None], _places(SIDE, WIDE)[None, :]
    half: tl.constexpr = SIDE // 2
    places = (STRIP * 2 * STRIP_ROWS + r * 2 + c // half) * (stride * 2) + c % half
    return values_t.to(tl.pointer_type(DTYPE), bitcast=True) + places


@triton.jit
def _parked(values_t, stride, DTYPE: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr):
    """Load four parked strips as two pairs. Afterwards the tile may be overwritten."""
    row = _anew((_places(STRIP_ROWS, WIDE),), PTX)[0]
    a = tl.load(_parking(values_t, stride, row, 0, DTYPE, WIDE))
    b = tl.load(_parking(values_t, stride, row, 1, DTYPE, WIDE))
    c = tl.load(_parking(values_t, stride, row, 2, DTYPE, WIDE))
    d = tl.load(_parking(values_t, stride, row, 3, DTYPE, WIDE))
    tl.debug_barrier()
    return _pair(a, b, DTYPE, PTX), _pair(c, d, DTYPE, PTX)


@triton.jit
def _gradients(
    grad, gate, up,
    gate_values, gate_scales, gate_values_t, gate_scales_t, gate_sums,
    up_values, up_scales, up_values_t, up_scales_t, up_sums, out_values_t, out_scales_t,
    rows, column_blocks, width, row_blocks,
    grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of act(gate) or act(gate) · up, and the transposed result, all quantized.

    Each gradient, and its transpose, is stored in blocks of (1, COLUMNS). Each gradient is summed over each tile's
    rows. The result is stored transposed, in blocks of (128, 128) or (1, 32). ``width``: columns of a gradient.
    WHOLE: every tile is complete, as always with COLUMNS of 32.

    A pair holds an element's gradients for gate and up; without up, its gradient and its result. With up, the result
    does not fit 128 registers per thread. With 128, two programs share a multiprocessor, and one loads while the other
    computes. A 16-bit result is parked in the memory of the program's last two transposed tiles, and thus in the cache.
    Parking costs half an instruction per element, recomputing the result 17.
    """
    PAIR: tl.constexpr = up is not None
    DTYPE: tl.constexpr = gate.dtype.element_ty
    r, c = _tile_of(column_blocks)
    first, place = _places(STRIP_ROWS, WIDE) * STRIPS, _places(SIDE, WIDE)
    rows_left = rows - r * SIDE
    values_t_row = row_blocks * (SIDE // 4)
    grad += r * SIDE * grad_row + c * SIDE * grad_column
    gate += r * SIDE * gate_row + c * SIDE * gate_column
    if PAIR:
        up += r * SIDE * up_row + c * SIDE * up_column
    corner = r * SIDE * width + c * SIDE
    corner_t = c * SIDE * values_t_row + r * (SIDE // 4)

    out_values_t += corner_t
    if PAIR:
        up_values_t += corner_t
    PARKED: tl.constexpr = PAIR and DTYPE.primitive_bitwidth == 16
    BLOCKS: tl.constexpr = SIDE // COLUMNS  # in a tile's row: 1 or 4

    strips = ()
    results = ()
    of_rows = ()
    for i in tl.static_range(STRIPS):
        row = first + i
        mask = None if WHOLE else (row < rows_left)[:, None]
        g = _strip(grad, row, place, grad_row, grad_column, mask)
        x = _strip(gate, row, place, gate_row, gate_column, mask)
        if PAIR:
            u = _strip(up, row, place, up_row, up_column, mask)
            if CLAMP is not None:
                gate_within = within(x, CLAMP)
                up_within = within(tl.abs(u), CLAMP)
                x = clamp_above(x, CLAMP)
                u = clamp(u, CLAMP)
            if OFFSET != 0.0:
                u += OFFSET
            y, derivative = activate(x, ACTIVATION)
            dx = input_grad(g * u, x, derivative, ACTIVATION)
            du = g * y
            if CLAMP is not None:
                dx = tl.where(gate_within, dx, 0.0)
                du = tl.where(up_within, du, 0.0)
            pair = _pair(dx, du, DTYPE, PTX)
            result = y * u if WHOLE else tl.where(mask, y * u, 0.0)
            if PARKED:
                parked_in = out_values_t if i < 4 else up_values_t
                tl.store(
                    _parking(parked_in, values_t_row, _places(STRIP_ROWS, WIDE), i % 4, DTYPE, WIDE), result.to(DTYPE)
                )
            elif i % 2 == 0:
                above = result
            else:
                results = results + (_pair(above, result, DTYPE, PTX),)
        else:
            y, derivative = activate(x, ACTIVATION)
            result = y if WHOLE else tl.where(mask, y, 0.0)
            pair = _pair(input_grad(g, x, derivative, ACTIVATION), result, DTYPE, PTX)
        strips = strips + (pair,)
        largest = _largest_of_rows(pair, COLUMNS, PTX)
        of_rows = of_rows + (largest,)
        places = corner + row[:, None] * width + place[None, :]
        inverse = _beside_rows(_scale(_of_pair(largest, False, DTYPE))[1], COLUMNS)
        tl.store(gate_values + places, _to_fp8(_of_pair(pair, False, DTYPE) * inverse, PTX), mask=mask)
        if PAIR:
            inverse = _beside_rows(_scale(_of_pair(largest, True, DTYPE))[1], COLUMNS)
            tl.store(up_values + places, _to_fp8(_high_once(pair, DTYPE, PTX) * inverse, PTX), mask=mask)
    place = _anew((place,), PTX)[0]  # otherwise the addresses would stay in registers from the start
    largest = _in_order(of_rows, COLUMNS)
    places = c * BLOCKS * rows + r * SIDE + _places_of_scales(rows, place, COLUMNS)
    mask = (place < rows_left)[None, :] if COLUMNS == NARROW else place < rows_left
    tl.store(gate_scales + places, _scale(_of_pair(largest, False, DTYPE))[0], mask=mask)
    if PAIR:
        tl.store(up_scales + places, _scale(_of_pair(largest, True, DTYPE))[0], mask=mask)

    strips = _anew(strips, PTX)
    of_columns = _largest_of_columns(strips, COLUMNS, PTX)
    places = r * width + c * SIDE
    scale, inverse = _scale(_of_pair(of_columns, False, DTYPE))
    corner_of_scales = r * BLOCKS * width + c * SIDE
    tl.store(gate_scales_t + corner_of_scales + _places_of_scales(width, place, COLUMNS), scale)
    strips = _anew(strips, PTX)
    _store_sums(_strips_of_pairs(strips, False, False, DTYPE), gate_sums + places)
    strips = _anew(strips, PTX)
    numbers = _strips_of_pairs(strips, False, False, DTYPE)
    inverse = _beside_columns(inverse, COLUMNS)
    _store_transposed(numbers, inverse, gate_values_t + corner_t, values_t_row, None, WIDE, PTX)

    strips = _anew(strips, PTX)
    of_columns = _of_pair(of_columns, True, DTYPE)
    if PAIR:
        if PARKED:
            results = _parked(up_values_t, values_t_row, DTYPE, WIDE, PTX)
        scale, inverse = _scale(of_columns)
        tl.store(up_scales_t + corner_of_scales + _places_of_scales(width, place, COLUMNS), scale)
        _store_sums(_strips_of_pairs(strips, True, False, DTYPE), up_sums + places)
        strips = _anew(strips, PTX)
        numbers = _strips_of_pairs(strips, True, False, DTYPE)
        _store_transposed(numbers, _beside_columns(inverse, COLUMNS), up_values_t, values_t_row, None, WIDE, PTX)

        if PARKED:
            results = _parked(out_values_t, values_t_row, DTYPE, WIDE, PTX) + results
        strips = results
        strips = _anew(strips, PTX)
        of_columns = _larger_half(_largest_of_columns(strips, COLUMNS, PTX), DTYPE)
    if COLUMNS == NARROW:
        scale, inverse = _scale(of_columns)
        columns = column_blocks * SIDE
        out_scales_t += r * BLOCKS * columns + c * SIDE
        tl.store(out_scales_t + _places_of_scales(columns, place, COLUMNS), scale)
        inverse = _beside_columns(inverse, COLUMNS)
    else:
        scale, inverse = _scale(tl.max(of_columns.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True))
        tl.store(out_scales_t + c * row_blocks + r, scale)
    numbers = _strips_of_pairs(strips, True, PAIR, DTYPE)
    _store_transposed(numbers, inverse, out_values_t, values_t_row, None, WIDE, PTX)


# ---- launches --------------------------------------------------------------------------------------------------------

# The formulas' cost and accuracy depend on fused multiply-adds, which Triton 3.10 turns off by default.
OPTIONS = {"enable_fp_fusion": True}
INT32_MAX = 2**31 - 1
_WARPS = 8  # 64 elements per thread: a strip is one load of 16 bytes per thread
_REGISTERS = 128  # two programs fit a multiprocessor with 64 Ki registers
_COLUMNS_AT_ONCE = 32768  # largest row that fits registers: 32 warps with 32 elements per thread
_COLUMNS_OF_A_WARP, _COLUMNS_OF_A_PART = 1024, 2048


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    device: torch.device,
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int | None, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel on the tensors' device, which may differ from the current one.

    Args:
        kernel: a kernel with arguments ``tensors``, ``integers``, ``constants``, in this order.
        grid: the number of programs along each axis.
        device: the tensors' device.
        tensors, integers: the kernel's positional arguments.
        constants: ``tl.constexpr`` arguments and Triton's options, by name.
    """
    with torch.accelerator.device_index(device.index):
        try:
            kernel[grid](*tensors, *integers, **constants)
        except Exception as error:
            raise RuntimeError(
                f"the kernel {kernel.__name__} of torch_fused_ops cannot be compiled or launched on {device}: {error}\n"
                "With TORCH_FUSED_OPS_WITHOUT=float8_kernels in the environment, float8 operators run as plain "
                "PyTorch. Please report it."
            ) from error


def _ptx(device: torch.device) -> bool:
    """Return True if kernels may use sm_90's instructions, which convert or compare two numbers at once.

    On other targets (sm_80, Triton's interpreter) the kernels compute with bits.

    Raises:
        NotImplementedError: on AMD GPUs, whose libraries have no GEMM with these blocks.
    """
    if torch.version.hip is not None:
        raise NotImplementedError(
            "float8 linear layers with a scale for each block are not accepted on AMD GPUs; accepted: NVIDIA GPUs "
            '(the GEMMs need sm_90), or recipe="fp8-rowwise"'
        )
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _wide(*strides: int) -> bool:
    """Return True if an offset within a tile needs 64 bits. Offsets of tiles always have 64 bits."""
    return BLOCK * max(strides) * 2 > INT32_MAX


def _as(dtype: torch.dtype, values: Tensor | None) -> Tensor | None:
    """View float8 as an integer dtype, as kernels expect it."""
    return None if values is None else values.view(dtype)


_LIMITS_REGISTERS = triton.__version__.startswith(("3.6.", "3.7."))


def _run_quantize(
    input: Tensor, rows: int | None, rows_t: int | None, columns: int, input_scales: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Quantize input in blocks of (rows, columns), and its transpose in blocks of (rows_t, columns).

    Returns values, scales, values_t, scales_t, without the two tensors for which ``rows`` or ``rows_t`` is None. One
    pass over memory, which reads along rows. ``columns``: 128 or 32. With ``input_scales`` input is float8 in blocks
    of (1, columns).
    """
    (r, c), ptx = input.shape, _ptx(input.device)
    width, width_t = float8.padded(c, columns), float8.padded(r, columns)
    stored: list[Tensor | None] = []
    for of_blocks, shape in ((rows, (r, width)), (rows_t, (c, width_t))):
        stored += [None, None]
        if of_blocks is not None:
            scales_shape = float8.scales_shape(shape, of_blocks, columns)
            stored[-2:] = input.new_empty(shape, dtype=FP8), input.new_empty(scales_shape, dtype=torch.float32)
    values, scales, values_t, scales_t = stored
    # Triton 3.6 and 3.7 use 70 to 80 registers although 64 suffice: 3 programs per multiprocessor instead of 4.
    # Triton 3.9 uses 64, and a limit would spill 8 bytes.
    limited = ptx and _LIMITS_REGISTERS and rows is not None and rows_t is None and columns == BLOCK
    limit = {"maxnreg": 64} if limited else {}
    if r and c:
        launch(
            _quantize, (triton.cdiv(r, BLOCK) * triton.cdiv(c, BLOCK), 1, 1), input.device,
            (input, input_scales, _as(torch.uint8, values), scales, _as(torch.int32, values_t), scales_t),
            (r, c, triton.cdiv(c, BLOCK), *input.stride(), width, width_t // 4),
            {
                "ROWS": rows, "ROWS_T": rows_t, "COLUMNS": columns, "WIDE": _wide(*input.stride(), width, width_t),
                "PTX": ptx, "num_warps": _WARPS, **OPTIONS, **limit,
            },
        )  # fmt: skip
    return tuple(t for t in stored if t is not None)


def _is_turned(t: Tensor) -> bool:
    """Return True if a matrix, or each matrix in a stack, has contiguous columns."""
    return t.stride(-2) == 1 and t.stride(-1) != 1


def _converts(t: Tensor) -> bool:
    """Return True if Triton converts to float8_e4m3fn in hardware: from sm_89 on."""
    on_nvidia = t.device.type == "cuda" and torch.version.hip is None
    return on_nvidia and torch.cuda.get_device_capability(t.device) >= (8, 9)


def quantize_by(input: Tensor, scales: Tensor) -> Tensor:
    """Compute ``float8.quantize_by``: in one kernel if matrices are transposed, otherwise in plain torch."""
    r, c = input.shape[-2:]
    if not (_is_turned(input) and c % 4 == 0 and input.numel()):
        return float8.quantize_by(input, scales)
    values = input.new_empty(input.shape, dtype=FP8)
    matrix_stride, row, column = input.stride() if input.ndim == 3 else (0, *input.stride())
    of_scales = scales.shape[-1], int(scales.shape[-1] > 1)  # a single block's rows share a scale
    launch(
        _quantize_turned, (triton.cdiv(c, BLOCK) * triton.cdiv(r, BLOCK), input.shape[:-2].numel(), 1), input.device,
        (input, scales.contiguous(), _as(torch.int32, values)),
        (c, r, triton.cdiv(r, BLOCK), matrix_stride, column, row, *of_scales, c // 4),
        {"WIDE": _wide(row, column, c), "PTX": _converts(input), "num_warps": _WARPS, **OPTIONS},
    )  # fmt: skip
    return values


def quantize(input: Tensor, rows: int, columns: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Compute ``float8.quantize`` in one kernel, which reads and writes along contiguous axes.

    A single block, and rows that are too long or not contiguous, are quantized in plain torch.
    """
    (r, c), turned = input.shape, _is_turned(input)
    if rows == 1 and 0 < columns == c <= _COLUMNS_AT_ONCE and not turned:
        values, scales = input.new_empty((r, c), dtype=FP8), input.new_empty((1, r), dtype=torch.float32)
        if r:
            launch(
                _quantize_rows, (r, 1, 1), input.device,
                (input, _as(torch.uint8, values), scales), (c, *input.stride()),
                {
                    "PLACES": triton.next_power_of_2(c), "PTX": _converts(input),
                    "num_warps": max(triton.next_power_of_2(c) // _COLUMNS_OF_A_WARP, 1), **OPTIONS,
                },
            )  # fmt: skip
        return values, scales
    if columns in (0, BLOCK, MX_BLOCK):
        matrix, straight, across = (input.t(), None, rows) if turned else (input, rows, None)
        values, scales = _run_quantize(matrix, straight, across, columns or BLOCK)
        return values, scales
    return float8.quantize(input, rows, columns)


def quantize_both(input: Tensor, columns: int = BLOCK) -> tuple[Tensor, ...]:
    """Return (*quantize(input, 1, columns), *quantize(input.t(), 1, columns)), reading input (r, c) once."""
    if _is_turned(input):
        values_t, scales_t, *straight = _run_quantize(input.t(), 1, 1, columns)
        return *straight, values_t, scales_t
    return _run_quantize(input, 1, 1, columns)


def requantize(values: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Return quantize(dequantize(values, scales, 1).t(), 128), or (…, 1, 32), in one kernel.

    Computes in float32, except that numbers below 2⁻¹²⁶ lose their last bits to bfloat16.
    """
    rows_t, columns = float8.block_of_columns(float8.columns_of(values, scales, 1))
    return _run_quantize(values.contiguous().view(torch.uint8), None, rows_t, columns, scales.contiguous())


def dequantize(values: Tensor, scales: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Compute ``float8.dequantize``: in one kernel for rows or a single block, in plain torch for other blocks."""
    r, c = values.shape
    if rows not in (1, r) or float8.columns_of(values, scales, rows) != c:
        return float8.dequantize(values, scales, rows, dtype)
    out = values.new_empty((r, c), dtype=dtype)
    if out.numel():
        launch(
            _dequantize_rows, (r, triton.cdiv(c, _COLUMNS_OF_A_PART), 1), values.device,
            (out, _as(torch.uint8, values.contiguous()), scales),
            (c, int(scales.shape[1] > 1)),  # a single block's rows share a scale
            {
                "LARGEST": float8.largest(dtype), "PLACES": _COLUMNS_OF_A_PART, "PTX": _converts(values),
                "num_warps": 4, **OPTIONS,
            },
        )  # fmt: skip
    return out


def gradients_quantized(op: PointwiseOperator, grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute ``fused::…_backward_quantized`` of an operator (``quantized.py``) in one pass over grad and data.

    Gradients and the result are rounded to data's dtype before they are quantized, as in separate operators.

    Args:
        op: bias_act, glu or bias_glu.
        grad: the result's gradient (rows, n). n is a multiple of 128; with blocks of 32, so is rows.
        args: the operator's data, its scalars, and optionally the columns of a block, 128 or 32.

    Raises:
        ValueError: if packed data has an interleaved layout, or a size is not a multiple.
        TypeError: if data is not bfloat16, float16 or float32.
    """
    data, end = args[: op.num_data], op.num_data + len(op.required_scalars)
    others = (None,) * (len(op.tensors) - op.num_data)
    _, layout, (activation, *scalars) = op.split((*data, *others, *args[op.num_data : end]))
    up_offset, clamp = scalars or (0.0, None)
    (columns,) = args[end:] or (BLOCK,)  # omitted if it is the default
    if layout not in (None, "halves", "swapped"):
        raise ValueError(f"layout={layout!r} is not accepted: it must be 'halves' or 'swapped'")
    if grad.shape[1] % BLOCK:
        raise ValueError(f"grad has shape {tuple(grad.shape)}; accepted: columns in multiples of {BLOCK}")
    if columns == MX_BLOCK and grad.shape[0] % BLOCK:
        raise ValueError(f"grad has shape {tuple(grad.shape)}; accepted: rows in multiples of {BLOCK}")
    if data[0].dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"data has dtype {data[0].dtype}; accepted: bfloat16, float16, float32")
    ptx = _ptx(grad.device)
    (r, c), width = grad.shape, data[0].shape[1]
    padded = float8.padded(r)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return grad.new_empty(shape, dtype=dtype)

    gradients = [
        (
            empty(FP8, r, width),
            empty(torch.float32, width // columns, r),
            empty(FP8, width, padded),
            empty(torch.float32, padded // columns, width),
            empty(torch.float32, padded // BLOCK, width),
        )
        for _ in data
    ]
    result_block = float8.block_of_columns(columns)
    result = empty(FP8, c, padded), empty(torch.float32, *float8.scales_shape((c, padded), *result_block))
    results = (*(t for five in gradients for t in five), *result)
    if grad.numel() == 0:
        return results
    if layout is None:
        gate, of_gate = data[0], gradients[0]
        up = data[1] if op.num_data == 2 else None
        of_up: Sequence[Any] = gradients[1] if op.num_data == 2 else (None,) * 5
    else:
        gate, up = formulas.unpack(data[0], layout)
        halves = (t.chunk(2, axis) for t, axis in zip(gradients[0], (1, 0, 0, 1, 1), strict=True))
        of_gate, of_up = list(zip(*halves, strict=True))[:: -1 if layout == "swapped" else 1]
    up_strides = (0, 0) if up is None else up.stride()
    strides = (*grad.stride(), *gate.stride(), *up_strides)
    registers = {"maxnreg": _REGISTERS} if ptx and data[0].element_size() == 2 else {}
    dtypes = torch.uint8, torch.float32, torch.int32, torch.float32, torch.float32
    launch(
        _gradients, (padded // BLOCK * (c // BLOCK), 1, 1), grad.device,
        (grad, gate, up, *map(_as, dtypes, of_gate), *map(_as, dtypes, of_up), _as(torch.int32, result[0]), result[1]),
        (r, c // BLOCK, width, padded // BLOCK, *strides),
        {
            "ACTIVATION": activation, "OFFSET": up_offset, "CLAMP": clamp, "COLUMNS": columns, "WHOLE": r == padded,
            "WIDE": _wide(*strides, width, padded), "PTX": ptx, "num_warps": _WARPS, **registers, **OPTIONS,
        },
    )  # fmt: skip
    return results


@functools.cache
def launch_of(name: str) -> Callable[..., Any]:
    """Return the function that computes ``fused::name`` on a GPU."""
    operator = name.removesuffix("_backward_quantized")
    if operator == name:
        return globals()[name]  # type: ignore[no-any-return]
    op = OPERATORS[operator]
    assert isinstance(op, PointwiseOperator)
    return functools.partial(gradients_quantized, op)


# ---- GEMMs -----------------------------------------------------------------------------------------------------------

# Requirements of cuBLASLt on sm_90, from CUDA 12.9 on, which ATen's ScaledBlas.cpp checks: the scales' outer axis is
# contiguous, scales of (128, 128) are padded to multiples of 4 along k, and the rows of both operands are multiples of
# the library's tile sizes.
_ROWS_OF_A, _ROWS_OF_B, _BLOCKS_OF_K = 8, 16, 4


def _up_to(t: Tensor, axis: int, multiple: int) -> Tensor:
    """Pad an axis with zeros to a multiple. The result is contiguous even along axes of size 1, as torch checks it."""
    missing = -t.shape[axis] % multiple
    if missing:
        shape = list(t.shape)
        shape[axis] = missing
        t = torch.cat((t, t.new_zeros(shape)), axis)
    return t.contiguous().view(-1).view(t.shape)


def _multiply(
    a: Tensor, of_a: tuple[Tensor, ScalingType], b: Tensor, of_b: tuple[Tensor, ScalingType],
    bias: Tensor | None, dtype: torch.dtype, rows_of_a: int = 1, swizzle: SwizzleType | None = None,
) -> Tensor:  # fmt: skip
    """Return a · bᵀ + bias by torch's libraries, without fast accumulation. For float16 the GEMM returns float32.

    Args:
        a, b: (m, k), (n, k). Their rows are padded with zeros to multiples.
        of_a, of_b: scales and scaling type of each operand; ``swizzle`` is the layout of both scales.
        rows_of_a: a's rows are padded to a multiple of this number.
    """
    (m, k), n = a.shape, b.shape[0]
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    addend, fused_bias = None if bias is None else bias.to(wide), None
    if m and n and k:
        left, right = _up_to(a, 0, rows_of_a), _up_to(b, 0, _ROWS_OF_B)
        if wide == torch.bfloat16 and right.shape[0] == n:
            fused_bias = addend  # torch rejects a bias with float32 results
        out = torch.nn.functional.scaled_mm(
            left, right.t(), scale_a=of_a[0], scale_recipe_a=of_a[1], scale_b=of_b[0], scale_recipe_b=of_b[1],
            swizzle_a=swizzle, swizzle_b=swizzle, bias=fused_bias, output_dtype=wide,
        )[:m, :n]  # fmt: skip
    else:
        out = a.new_zeros((m, n), dtype=wide)
    if addend is not None and fused_bias is None:
        out = out + addend
    return out.to(dtype).contiguous()


def scaled_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, bias: Tensor | None, rows: int, dtype: torch.dtype
) -> Tensor:
    """Compute ``float8.product``. Blocks of 128 use cuBLASLt (CUDA 12.9) on sm_90.

    Rows use CUTLASS on sm_89 and sm_100, cuBLASLt on sm_90, and hipBLASLt on ROCm. These GEMMs apply a scale per row
    only to bfloat16 results. For other dtypes the GEMM has no scales and returns float32, which is then scaled.

    Raises:
        NotImplementedError: from torch, on devices without such GEMMs (``recipes.RECIPES``).
    """
    (m, k), n, columns = a.shape, b.shape[0], float8.columns_of(a, a_scales, 1)
    if rows in (1, n) and columns == k:  # also if a row is a single block of 128 or 32 columns
        of_a, of_b = a_scales.reshape(m, 1).contiguous(), b_scales.reshape(1, -1).expand(1, n)
        if dtype == torch.bfloat16:
            by_rows = _up_to(of_b, 1, _ROWS_OF_B), ScalingType.RowWise
            return _multiply(a, (of_a, ScalingType.RowWise), b, by_rows, bias, dtype)
        unscaled = of_a.new_ones(()), ScalingType.TensorWise
        out = _multiply(a, unscaled, b, unscaled, None, torch.float32) * of_a * of_b
        return (out if bias is None else out + bias.to(torch.float32)).to(dtype)
    if columns == MX_BLOCK:  # plain torch computes the tiles, a byte for each 32 elements
        return scaled_mm_tiled(a, float8.tiled(a_scales), b, float8.tiled(b_scales), bias, dtype)
    _ptx(a.device)
    by_a = _up_to(a_scales, 1, _ROWS_OF_A).t(), ScalingType.BlockWise1x128
    if rows == 1:
        by_b = _up_to(b_scales, 1, _ROWS_OF_B).t(), ScalingType.BlockWise1x128
    else:
        by_b = _up_to(b_scales, 1, _BLOCKS_OF_K).t(), ScalingType.BlockWise128x128
    return _multiply(a, by_a, b, by_b, bias, dtype, _ROWS_OF_A)


def scaled_mm_tiled(
    a: Tensor, a_tiles: Tensor, b: Tensor, b_tiles: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return a · bᵀ + bias in blocks of (1, 32), with scales from ``float8.tiled``, by cuBLASLt (CUDA 12.8 or later).

    Raises:
        ValueError, RuntimeError: from torch, on devices except sm_100 and sm_103.
    """
    of_a, of_b = ((tiles.view(torch.float8_e8m0fnu), ScalingType.BlockWise1x32) for tiles in (a_tiles, b_tiles))
    return _multiply(a, of_a, b, of_b, bias, dtype, swizzle=SwizzleType.SWIZZLE_32_4_4)


def scaled_grouped_mm(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute ``float8.grouped_product`` by CUTLASS on sm_90, without fast accumulation.

    Groups may have any number of rows, even 0: every row is aligned, since k is a multiple of 16 (ATen's
    GroupMMCommon.cuh).

    Raises:
        ValueError: from torch, on devices except sm_90.
    """
    (experts, n, _), rows = b.shape, a.shape[0]
    if not rows:
        return a.new_zeros((0, n), dtype=dtype)
    of_b = b_scales.expand(experts, 1, n).reshape(experts, n).contiguous()
    return torch._scaled_grouped_mm(  # v2's fake kernel is missing in torch 2.13
        a.contiguous(), b.contiguous().transpose(1, 2), a_scales.reshape(rows).contiguous(), of_b,
        offs=ends, out_dtype=dtype,
    )  # fmt: skip
