# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of ``fused::scaled_masked_softmax`` in eager mode on a GPU.

There is one kernel forward and one backward; PyTorch sums the rows' terms of the sink's gradient. A program has whole
rows: several short rows, or a single row, which it reads once, into registers. If a row does not fit registers (WHOLE
is false), the program reads it twice, first for a running maximum and sum.

Every tensor has four axes (outer, heads, queries, keys) with four strides. A broadcast mask has stride 0; its last two
axes are never expanded. Causality and the window need no mask: each row computes its first and last visible key, loads
beyond them are disabled, and loops over a long row skip whole blocks. Loads are disabled in groups of 16 bytes (GROUP):
if single elements were disabled, loads would not be vectorized.

Exponentials have base 2: a score's exponent is (x − peak) · c with c = size · log2(e) (``split_scale``). The float64 c
is an argument, so a new scale needs no new kernel. It is passed as bits, since Triton passes numbers in float32. There
are no atomics.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.families.softmax import formulas
from torch_fused_ops.kernels import launching
from torch_fused_ops.kernels.launching import (
    INT32_MAX,
    OPTIONS,
    blocks,
    common_stride,
    power_of_2,
    row_grid,
    tl,
    triton,
    unit,
)

LOG2E = tl.constexpr(activations.LOG2E)

# ---- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _rows(WIDE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return this program's rows. The grid's second and third axes form one index: each is limited to 65535."""
    block = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    return (block.to(tl.int64) if WIDE else block) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def _float64(bits):
    """Reinterpret bits as float64. Triton passes small integers, such as 0, as int32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _row_starts(r, queries, heads, outer_stride, head_stride, row_stride):
    """Return the offset of each row, in elements."""
    matrix = r // queries
    return (matrix // heads) * outer_stride + (matrix % heads) * head_stride + (r % queries) * row_stride


@triton.jit
def _load_mask(c, diagonal, left, right, valid, columns, GROUP: tl.constexpr):
    """Return the mask of loads: visible keys, and other keys in their groups of 16 bytes."""
    load_mask = valid[:, None] & (c < columns)[None, :]
    group = c // GROUP * GROUP
    if left is not None:
        load_mask &= (group + (GROUP - 1))[None, :] >= (diagonal - left)[:, None]
    if right is not None:
        load_mask &= group[None, :] <= (diagonal + right)[:, None]
    return load_mask


@triton.jit
def _scores(
    x_rows, mask, mask_starts, c, x_column, mask_column, diagonal, left, right, valid, columns,
    SIGN: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return SIGN · x, or −∞ if masked, past the end, or outside the window: −left ≤ key − diagonal ≤ right."""
    load_mask = _load_mask(c, diagonal, left, right, valid, columns, GROUP)
    fill: tl.constexpr = float("inf") if SIGN == -1 else float("-inf")
    x = tl.load(x_rows[:, None] + c[None, :] * x_column, mask=load_mask, other=fill).to(COMPUTE)
    if SIGN != 1:
        x *= SIGN
    is_open = load_mask
    if mask is not None:
        is_open &= tl.load(mask + (mask_starts[:, None] + c[None, :] * mask_column), mask=load_mask, other=1) == 0
    if left is not None:
        is_open &= c[None, :] >= (diagonal - left)[:, None]
    if right is not None:
        is_open &= c[None, :] <= (diagonal + right)[:, None]
    if mask is not None or left is not None or right is not None or SIGN == 0:
        x = tl.where(is_open, x, float("-inf"))
    return x


@triton.jit
def _factor(peak, total, c64, sink, r, queries, heads, sink_stride, COMPUTE: tl.constexpr):
    """Return ``formulas.softmax_factor``. A fully masked row may have any finite factor, as its weights are 0."""
    if sink is None:
        return 1.0 / tl.where(total == 0.0, 1.0, total)
    else:
        s = tl.load(sink + (r // queries) % heads * sink_stride).to(tl.float64) * LOG2E
        exact = s - peak.to(tl.float64) * c64
        d = tl.where((exact > 4096.0) & (exact < float("inf")), 4096.0, exact).to(COMPUTE)
        shift = tl.maximum(d, 0.0)
        weight = tl.exp2(-shift)
        return tl.where(total == 0.0, 1.0, weight / (total * weight + tl.exp2(d - shift)))


@triton.jit
def _loop_bounds(diagonal, left, right, columns, BLOCK_N: tl.constexpr):
    """Return (begin, end) of the blocks in which some row has a visible key; both are multiples of BLOCK_N."""
    begin = columns * 0
    end = columns
    if left is not None:
        first = tl.min(diagonal - left, 0)
        begin = tl.minimum(tl.maximum(first, 0), columns) // BLOCK_N * BLOCK_N
    if right is not None:
        last = tl.max(diagonal + right, 0)
        end = tl.minimum(tl.maximum(last + 1, 0), columns)
    return begin, begin + tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N) * BLOCK_N


@triton.jit
def _store_blocks(out_rows, value, begin, end, valid, columns, n):
    """Store a value per row in columns ``begin`` to ``end``."""
    for start in range(begin, end, n.shape[0]):
        c = start + n
        tile = value[:, None] + tl.zeros((1, n.shape[0]), value.dtype)
        tl.store(out_rows[:, None] + c[None, :], tile, mask=valid[:, None] & (c < columns)[None, :])


@triton.jit
def _forward(
    out, input, mask, sink,
    rows, columns, queries, heads, c_bits, left, right,
    x_outer, x_head, x_row, x_column, mask_outer, mask_head, mask_row, mask_column, sink_stride,
    SIGN: tl.constexpr, LOWEST: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out, the softmax of the rows' scores. LOWEST is COMPUTE's lowest finite number.

    ``columns`` and the outer, head and row strides arrive divided by UNIT.
    """
    columns, x_outer, x_head, x_row = columns * UNIT, x_outer * UNIT, x_head * UNIT, x_row * UNIT
    mask_outer, mask_head, mask_row = mask_outer * UNIT, mask_head * UNIT, mask_row * UNIT
    r = _rows(WIDE, BLOCK_M)
    valid = r < rows
    n = tl.arange(0, BLOCK_N)
    if WIDE:
        n = n.to(tl.int64)
    x_rows = input + _row_starts(r, queries, heads, x_outer, x_head, x_row)
    mask_starts = _row_starts(r, queries, heads, mask_outer, mask_head, mask_row)
    out_rows = out + r * columns
    diagonal = r % queries + (columns - queries)
    c64 = _float64(c_bits)
    c = c64.to(COMPUTE)
    if WHOLE:
        x = _scores(
                x_rows, mask, mask_starts, n, x_column, mask_column, diagonal, left, right, valid, columns,
                SIGN, GROUP, COMPUTE,
            )  # fmt: skip
        peak = tl.max(x, 1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2((x - peak[:, None]) * c)
        total = tl.sum(weight, 1)
        y = weight * _factor(peak, total, c64, sink, r, queries, heads, sink_stride, COMPUTE)[:, None]
        tl.store(out_rows[:, None] + n[None, :], y, mask=valid[:, None] & (n < columns)[None, :])
    else:
        begin, end = _loop_bounds(diagonal, left, right, columns, BLOCK_N)
        peaks = tl.full((BLOCK_M, BLOCK_N), LOWEST, COMPUTE)  # not −∞: −∞ − (−∞) is NaN
        totals = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(begin, end, BLOCK_N):
            x = _scores(
                x_rows, mask, mask_starts, start + n, x_column, mask_column, diagonal, left, right, valid, columns,
                SIGN, GROUP, COMPUTE,
            )  # fmt: skip
            higher = tl.maximum(peaks, x)
            totals = totals * tl.exp2((peaks - higher) * c) + tl.exp2((x - higher) * c)
            peaks = higher
        peak = tl.max(peaks, 1)
        total = tl.sum(totals * tl.exp2((peaks - peak[:, None]) * c), 1)
        factor = _factor(peak, total, c64, sink, r, queries, heads, sink_stride, COMPUTE)
        fill = factor * 0.0  # 0, or NaN if the row is NaN
        _store_blocks(out_rows, fill, begin * 0, begin, valid, columns, n)
        for start in range(begin, end, BLOCK_N):
            x = _scores(
                x_rows, mask, mask_starts, start + n, x_column, mask_column, diagonal, left, right, valid, columns,
                SIGN, GROUP, COMPUTE,
            )  # fmt: skip
            y = tl.exp2((x - peak[:, None]) * c) * factor[:, None]
            tl.store(out_rows[:, None] + (start + n)[None, :], y, mask=valid[:, None] & (start + n < columns)[None, :])
        _store_blocks(out_rows, fill, end, columns, valid, columns, n)


@triton.jit
def _tile(t_rows, c, column, load_mask, COMPUTE: tl.constexpr):
    return tl.load(t_rows[:, None] + c[None, :] * column, mask=load_mask, other=0.0).to(COMPUTE)


@triton.jit
def _backward(
    d_input, terms, grad, output,
    rows, columns, queries, heads, scale_bits, left, right,
    g_outer, g_head, g_row, g_column, y_outer, y_head, y_row, y_column,
    GROUP: tl.constexpr, COMPUTE: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute d_input = scale · y · (g − Σ g·y), and each row's term of the sink's gradient. Skip None results."""
    columns, g_outer, g_head, g_row = columns * UNIT, g_outer * UNIT, g_head * UNIT, g_row * UNIT
    y_outer, y_head, y_row = y_outer * UNIT, y_head * UNIT, y_row * UNIT
    r = _rows(WIDE, BLOCK_M)
    valid = r < rows
    n = tl.arange(0, BLOCK_N)
    if WIDE:
        n = n.to(tl.int64)
    g_rows = grad + _row_starts(r, queries, heads, g_outer, g_head, g_row)
    y_rows = output + _row_starts(r, queries, heads, y_outer, y_head, y_row)
    diagonal = r % queries + (columns - queries)
    scale = _float64(scale_bits).to(COMPUTE)
    if WHOLE:
        load_mask = _load_mask(n, diagonal, left, right, valid, columns, GROUP)
        g = _tile(g_rows, n, g_column, load_mask, COMPUTE)
        y = _tile(y_rows, n, y_column, load_mask, COMPUTE)
        inner = tl.sum(g * y, 1)
        total = tl.sum(y, 1)
        if d_input is not None:
            d = y * (g - inner[:, None]) * scale
            tl.store(d_input + r[:, None] * columns + n[None, :], d, mask=valid[:, None] & (n < columns)[None, :])
    else:
        begin, end = _loop_bounds(diagonal, left, right, columns, BLOCK_N)
        inners = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        totals = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
        for start in range(begin, end, BLOCK_N):
            load_mask = _load_mask(start + n, diagonal, left, right, valid, columns, GROUP)
            y = _tile(y_rows, start + n, y_column, load_mask, COMPUTE)
            inners += _tile(g_rows, start + n, g_column, load_mask, COMPUTE) * y
            if terms is not None:
                totals += y
        inner = tl.sum(inners, 1)
        total = tl.sum(totals, 1)
        if d_input is not None:
            d_rows = d_input + r * columns
            fill = inner * 0.0
            _store_blocks(d_rows, fill, begin * 0, begin, valid, columns, n)
            for start in range(begin, end, BLOCK_N):
                load_mask = _load_mask(start + n, diagonal, left, right, valid, columns, GROUP)
                g = _tile(g_rows, start + n, g_column, load_mask, COMPUTE)
                y = _tile(y_rows, start + n, y_column, load_mask, COMPUTE)
                d = y * (g - inner[:, None]) * scale
                tl.store(
                    d_rows[:, None] + (start + n)[None, :], d, mask=valid[:, None] & (start + n < columns)[None, :]
                )
            _store_blocks(d_rows, fill, end, columns, valid, columns, n)
    if terms is not None:
        tl.store(terms + r, (total - 1.0) * inner, mask=valid)


# ---- division of the work ------------------------------------------------------------------------------------------

_LEAST_TILE = 1024  # elements per program with short rows
_WARPS, _MOST_WARPS = 4, 16
_NUMBERS = 16  # 4-byte registers per thread for a row's elements in all tensors; the widest rows use 2 · 16
_WIDEST_ROW = 32 * _MOST_WARPS * 2 * _NUMBERS
_LONG_BLOCK = 4096  # registers per block of a row that is read twice
_GROUP_BYTES = 16


class _View(NamedTuple):
    """A tensor's strides along (outer, heads, queries, keys)."""

    outer: int = 0
    head: int = 0
    row: int = 0
    column: int = 0


def _view(t: Tensor | None, shape: Sequence[int]) -> tuple[Tensor | None, _View]:
    """Return (t, strides of t broadcast to ``shape``). If the outer axes have no common stride, t is copied first."""
    if t is None:
        return None, _View()
    full = t.expand(shape)
    outer = common_stride(shape[:-3], full.stride()[:-3])
    if outer is None:  # the copy of a mask does not expand its last two axes
        t = t.expand(*shape[:-2], *t.shape[max(0, t.ndim - 2) :]).contiguous()
        full = t.expand(shape)
        outer = common_stride(shape[:-3], full.stride()[:-3]) or 0
    head, row, column = (0, *full.stride())[-3:]
    return t, _View(outer, head, row, column)


class _Plan(NamedTuple):
    """The division of rows among programs; ``columns`` and ``views`` are kernel arguments."""

    columns: int
    views: tuple[_View, ...]
    grid: tuple[int, int, int]
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _plan(shape: tuple[int, ...], views: tuple[_View, ...], itemsize: int, numbers: int) -> _Plan:
    """Plan for rows of ``shape``. An element has ``itemsize`` bytes in memory, and needs ``numbers`` registers."""
    queries, columns = shape[-2:]
    heads = shape[-3] if len(shape) > 2 else 1
    rows = math.prod(shape[:-1])
    width = power_of_2(columns)
    fits = width * numbers <= _WIDEST_ROW
    width = width if fits else _LONG_BLOCK // numbers
    height = min(power_of_2(rows), max(1, _LEAST_TILE // width))
    high, deep = row_grid(blocks(rows, height))
    last_row = high * deep * height - 1
    reach = last_row * columns + width
    for v in views:
        outermost = last_row // (queries * heads)
        ends = blocks(columns, width) * width - 1
        reach = max(reach, outermost * v.outer + (heads - 1) * v.head + (queries - 1) * v.row + ends * v.column)
    wide = reach > INT32_MAX
    divisor = 1 if wide else unit(columns, [n for v in views for n in v[:3]], itemsize)
    constants = {
        "GROUP": _GROUP_BYTES // itemsize if all(v.column in (0, 1) for v in views) else 1,
        "WHOLE": fits,
        "WIDE": wide,
        "UNIT": divisor,
        "BLOCK_M": height,
        "BLOCK_N": width,
        "num_warps": min(_MOST_WARPS, max(_WARPS, width * height * numbers // (32 * _NUMBERS))),
        **OPTIONS,
    }
    divided = tuple(_View(v.outer // divisor, v.head // divisor, v.row // divisor, v.column) for v in views)
    return _Plan(columns // divisor, divided, (1, high, deep), constants)


# ---- the operators -------------------------------------------------------------------------------------------------


def _bits(number: float) -> int:
    """Return a float64's bits as an integer, since Triton passes floats as float32."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _heads(shape: Sequence[int]) -> int:
    return shape[-3] if len(shape) > 2 else 1


def scaled_masked_softmax(
    input: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float = 1.0, *window: int
) -> Tensor:
    """Compute ``formulas.scaled_masked_softmax`` in one kernel."""
    shape = tuple(input.shape)
    out = input.new_empty(shape)
    if out.numel() == 0:
        return out
    dtype, compute = launching.compute_type(input, sink)
    finfo = torch.finfo(dtype)
    sign, size = formulas.split_scale(scale, dtype)
    left, right = formulas.window_edges(*window)
    x, x_v = _view(input, shape)
    hidden, mask_v = _view(None if mask is None else mask.view(torch.uint8), shape)
    plan = _plan(shape, (x_v,) if mask is None else (x_v, mask_v), input.element_size(), dtype.itemsize // 4)
    x_v, mask_v = (*plan.views, mask_v)[:2]
    launching.launch(
        _forward, plan.grid, out.device,
        (out, x, hidden, sink),
        (
            out.numel() // shape[-1], plan.columns, shape[-2], _heads(shape),
            _bits(min(size * activations.LOG2E, finfo.max)),
            left, right, *x_v, *mask_v, 0 if sink is None else sink.stride(0),
        ),
        {"SIGN": int(sign), "LOWEST": finfo.min, "COMPUTE": compute, **plan.constants},
    )  # fmt: skip
    return out


def scaled_masked_softmax_backward(
    grad: Tensor,
    output: Tensor,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return scaled_masked_softmax's gradients for (input, sink); None if not requested."""
    shape = tuple(output.shape)
    d_input = output.new_empty(shape) if output_mask[0] else None
    if not any(output_mask):
        return None, None
    if output.numel() == 0:
        return d_input, output.new_zeros(shape[-3:-2], dtype=sink_dtype) if output_mask[1] else None
    dtype, compute = launching.compute_type(grad, output)
    if sink_dtype == torch.float64:
        dtype, compute = torch.float64, tl.float64
    left, right = formulas.window_edges(causal, window_left, window_right)
    (g, g_v), (y, y_v) = _view(grad, shape), _view(output, shape)
    rows, queries, heads = output.numel() // shape[-1], shape[-2], _heads(shape)
    terms = output.new_empty(rows, dtype=dtype) if output_mask[1] else None
    itemsize = max(grad.element_size(), output.element_size())
    plan = _plan(shape, (g_v, y_v), itemsize, 2 * dtype.itemsize // 4)
    launching.launch(
        _backward, plan.grid, output.device,
        (d_input, terms, g, y),
        (rows, plan.columns, queries, heads, _bits(scale), left, right, *plan.views[0], *plan.views[1]),
        {"COMPUTE": compute, **plan.constants},
    )  # fmt: skip
    if terms is None:
        return d_input, None
    # Sum in float64, so that the order of summation does not matter.
    return d_input, terms.view(-1, heads, queries).sum((0, 2), dtype=torch.float64).to(sink_dtype)
