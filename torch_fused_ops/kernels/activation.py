# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of the activation family (``operators/activation.py``) in eager mode on a GPU.

There is one kernel forward, one backward, and one for backward's partial sums. Every tensor is a matrix
(rows, columns) with a row and a column stride. A program computes tiles of BLOCK_M × BLOCK_N elements:

* If no operand depends on the row or column (no bias, no token scale) and every tensor is one evenly strided sequence,
  the matrix is one row: a flat loop over memory, 16 bytes a thread and tensor, 32 in forward.
* Otherwise a tile has several rows, which share the loaded bias. In backward a program computes ``steps`` consecutive
  tiles, so that the bias gradient is summed in registers first and leaves few partial sums. There are no atomics. The
  partial sums and their order depend only on shapes and strides, so results are the same in every run.

An absent tensor or a gradient that is not requested is ``None``. Triton specializes on it, and its compiler removes
unused loads and arithmetic. Clamp and offset are constants of the kernel, exact in float64; arguments would arrive in
float32. A model has one or two pairs of them, and a kernel for each pair.

The formulas repeat ``torch_fused_ops.activations`` and ``glu_element`` of ``formulas.py``; tests compare both.
``families/float8/kernels.py`` imports the formulas. Operators with other scalars are rejected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations, formulas
from torch_fused_ops.declaration import PointwiseOperator, pointwise_operators
from torch_fused_ops.formulas import Gradients
from torch_fused_ops.kernels import launching
from torch_fused_ops.kernels.launching import (
    INT32_MAX,
    OPTIONS,
    Matrix,
    blocks,
    compute_type,
    libdevice,
    matrix,
    power_of_2,
    row_grid,
    tl,
    triton,
    unit,
)

LOG2E = tl.constexpr(activations.LOG2E)
GELU_TANH_SLOPE = tl.constexpr(activations.GELU_TANH_SLOPE)
GELU_TANH_CUBIC = tl.constexpr(activations.GELU_TANH_CUBIC)
QUICK_GELU_SLOPE = tl.constexpr(activations.QUICK_GELU_SLOPE)
SQRT1_2 = tl.constexpr(activations.SQRT1_2)
INV_SQRT_2PI = tl.constexpr(activations.INV_SQRT_2PI)
NORMAL_TAIL_P = tl.constexpr(activations.NORMAL_TAIL_P)
NORMAL_TAIL = tl.constexpr(activations.NORMAL_TAIL)
NORMAL_TERMS = tl.constexpr(len(activations.NORMAL_TAIL))
CLAMP_KEEPS_BOUNDS = tl.constexpr(formulas.CLAMP_KEEPS_BOUNDS)
PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)

# ---- formulas ------------------------------------------------------------------------------------------------------


@triton.jit
def _swish(x, slope: tl.constexpr):
    d = 1.0 + tl.exp2(x * (-slope * LOG2E))
    s = 1.0 / d
    slope_x = x * (s * (1.0 - s))
    return x / d, s + (slope_x if slope == 1.0 else slope_x * slope)


@triton.jit
def _gelu_tanh(x):
    scale: tl.constexpr = -GELU_TANH_SLOPE * LOG2E
    x2 = x * x
    d = 1.0 + tl.exp2(x * (x2 * (scale * GELU_TANH_CUBIC) + scale))
    s = 1.0 / d
    slope = tl.minimum(x2, 900.0) * (3 * GELU_TANH_SLOPE * GELU_TANH_CUBIC) + GELU_TANH_SLOPE
    return x / d, s + ((x * s) * (1.0 - s)) * slope


@triton.jit
def _gelu(x):
    if x.dtype == tl.float64:
        normal = 0.5 * libdevice.erfc(x * -SQRT1_2)
        return x * normal, normal + x * (tl.exp(-0.5 * x * x) * INV_SQRT_2PI)
    else:
        a = tl.abs(x)
        t = libdevice.fast_dividef(1.0, 1.0 + a * NORMAL_TAIL_P)  # near 1 as exact as a division, and cheaper
        q = t * NORMAL_TAIL[NORMAL_TERMS - 1] + NORMAL_TAIL[NORMAL_TERMS - 2]
        for i in tl.static_range(NORMAL_TERMS - 3, -1, -1):
            q = t * q + NORMAL_TAIL[i]
        q = t * q
        e = tl.exp2(x * x * (-0.5 * LOG2E))
        below = (q + a * INV_SQRT_2PI) * -e
        return tl.maximum(x, 0.0) + (a * q) * e, tl.where(x < 0, below, 1.0 - below)


@triton.jit
def _sigmoid_derivative(x):
    e = tl.exp2(tl.abs(x) * -LOG2E)
    d = 1.0 + e
    return e / (d * d)


@triton.jit
def _activate(x, activation: tl.constexpr):
    """Return (act(x), act'(x)). The compiler removes an unused result."""
    if activation == "silu":
        return _swish(x, 1.0)
    elif activation == "quick_gelu":
        return _swish(x, QUICK_GELU_SLOPE)
    elif activation == "gelu":
        return _gelu(x)
    elif activation == "gelu_tanh":
        return _gelu_tanh(x)
    elif activation == "sigmoid":
        return 1.0 / (1.0 + tl.exp2(x * -LOG2E)), _sigmoid_derivative(x)
    elif activation == "tanh":
        return libdevice.tanh(x), 4.0 * _sigmoid_derivative(2.0 * x)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN)
        if activation == "relu":
            return positive, tl.where(x <= 0, 0.0, 1.0).to(x.dtype)
        else:
            tl.static_assert(activation == "relu2")
            return positive * positive, 2.0 * positive


@triton.jit
def _input_grad(grad, x, derivative, activation: tl.constexpr):
    """Return grad · act'(x); see ``Activation.gradient``."""
    if activation == "relu":
        return tl.where(x <= 0, 0.0, grad)
    elif activation == "relu2":
        return tl.where(x <= 0, 0.0, grad * derivative)
    else:
        return grad * derivative


# ---- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def _column_block(WIDE: tl.constexpr):
    block = tl.program_id(0)
    return block.to(tl.int64) if WIDE else block


@triton.jit
def _row_block(FLAT: tl.constexpr, WIDE: tl.constexpr):
    """Return this program's row block. The grid's second and third axes form one index: each is limited to 65535."""
    if FLAT:
        return 0
    else:
        block = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        return block.to(tl.int64) if WIDE else block


@triton.jit
def _columns(WIDTH: tl.constexpr, WIDE: tl.constexpr):
    return _column_block(WIDE) * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def _clamp_above(x, bound: tl.constexpr):
    """Return min(x, bound). NaN stays NaN."""
    return tl.minimum(x, tl.full((1, 1), bound, x.dtype), propagate_nan=PROPAGATE_NAN)  # a plain scalar is float32


@triton.jit
def _clamp(x, bound: tl.constexpr):
    """Clamp x to ±bound. NaN stays NaN."""
    if x.dtype == tl.float64:
        return _clamp_above(tl.maximum(x, tl.full((1, 1), -bound, x.dtype), propagate_nan=PROPAGATE_NAN), bound)
    else:  # a single instruction, which Triton lacks for float64
        return tl.clamp(x, -bound, bound, propagate_nan=PROPAGATE_NAN)


@triton.jit
def _within(x, bound: tl.constexpr):
    """Return True where a clamp passes the gradient, as in ``formulas``."""
    return x <= bound if CLAMP_KEEPS_BOUNDS else x < bound


@triton.jit
def _tile(matrix, r, c, row_stride, column_stride, mask, COMPUTE: tl.constexpr):
    return tl.load(matrix + r[:, None] * row_stride + c[None, :] * column_stride, mask=mask, other=0.0).to(COMPUTE)


@triton.jit
def _vector(vector, i, stride, size, COMPUTE: tl.constexpr):
    return tl.load(vector + i * stride, mask=i < size, other=0.0).to(COMPUTE)


@triton.jit
def _deinterleave(x):
    """Split x into even and odd columns; tl.interleave is the inverse."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _result(
    x, u, scale, r, rows, scale_stride,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, PAIR: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return act(min(x, CLAMP)) · (clamp(u, ±CLAMP) + OFFSET) · scale; without PAIR the second factor is 1."""
    if CLAMP is not None:
        x = _clamp_above(x, CLAMP)
        u = _clamp(u, CLAMP)
    y, _ = _activate(x, ACTIVATION)
    if PAIR:
        y *= u + OFFSET if OFFSET != 0.0 else u
    if scale is not None:
        y *= _vector(scale, r, scale_stride, rows, COMPUTE)[:, None]
    return y


@triton.jit
def _forward(
    out, gate, up, gate_bias, up_bias, scale,
    rows, columns, packed_columns, gate_row, gate_column, up_row, up_column, bias_stride, scale_stride,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMPUTE: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out = act(min(gate, CLAMP)) · (clamp(up, ±CLAMP) + OFFSET) · scale; None operands are skipped.

    ``columns`` is the width of out and up, ``packed_columns`` the width of gate; both and the row strides arrive
    divided by UNIT. INTERLEAVED: gate and gate_bias also contain up and its bias, as g0 u0 g1 u1 …; up is None.
    """
    columns, packed_columns = columns * UNIT, packed_columns * UNIT
    gate_row, up_row = gate_row * UNIT, up_row * UNIT
    PACK: tl.constexpr = 2 if INTERLEAVED else 1
    c = _columns(BLOCK_N, WIDE)
    packed_c = _columns(BLOCK_N * PACK, WIDE)
    r = _row_block(FLAT, WIDE) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    packed_mask = (r < rows)[:, None] & (packed_c < packed_columns)[None, :]

    x = _tile(gate, r, packed_c, gate_row, gate_column, packed_mask, COMPUTE)
    if gate_bias is not None:
        x += _vector(gate_bias, packed_c, bias_stride, packed_columns, COMPUTE)[None, :]
    u = x
    if INTERLEAVED:
        x, u = _deinterleave(x)
    elif up is not None:
        u = _tile(up, r, c, up_row, up_column, mask, COMPUTE)
        if up_bias is not None:
            u += _vector(up_bias, c, bias_stride, columns, COMPUTE)[None, :]
    PAIR: tl.constexpr = INTERLEAVED or up is not None
    y = _result(x, u, scale, r, rows, scale_stride, ACTIVATION, OFFSET, CLAMP, PAIR, COMPUTE)
    tl.store(out + r[:, None] * columns + c[None, :], y, mask=mask)


@triton.jit
def _backward(
    grad, gate, up, gate_bias, up_bias, scale, d_gate, d_up, gate_bias_sums, up_bias_sums, scale_sums,
    rows, columns, packed_columns, steps, grad_row, grad_column, gate_row, gate_column, up_row, up_column,
    bias_stride, scale_stride, d_row, sums_row,
    ACTIVATION: tl.constexpr, OFFSET: tl.constexpr, CLAMP: tl.constexpr, INTERLEAVED: tl.constexpr,
    COMPUTE: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of ``_forward``'s inputs, and this program's partial sums for bias and scale gradients.

    A program computes ``steps`` consecutive tiles. gate_bias_sums and up_bias_sums have a row per block of rows,
    scale_sums a row per block of columns. Every tile loads the biases from the cache: if registers held them, a thread
    would need 128 registers instead of 96 (interleaved, sm_90). INTERLEAVED: d_gate and gate_bias_sums contain both.
    """
    columns, packed_columns, d_row, sums_row = columns * UNIT, packed_columns * UNIT, d_row * UNIT, sums_row * UNIT
    grad_row, gate_row, up_row = grad_row * UNIT, gate_row * UNIT, up_row * UNIT
    PACK: tl.constexpr = 2 if INTERLEAVED else 1
    PAIR: tl.constexpr = INTERLEAVED or up is not None
    c = _columns(BLOCK_N, WIDE)
    packed_c = _columns(BLOCK_N * PACK, WIDE)
    block = _row_block(FLAT, WIDE)
    gate_sum = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    up_sum = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)

    for step in range(steps):
        r = (block * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        packed_mask = (r < rows)[:, None] & (packed_c < packed_columns)[None, :]
        g = _tile(grad, r, c, grad_row, grad_column, mask, COMPUTE)
        x = _tile(gate, r, packed_c, gate_row, gate_column, packed_mask, COMPUTE)
        if gate_bias is not None:
            x += _vector(gate_bias, packed_c, bias_stride, packed_columns, COMPUTE)[None, :]
        if INTERLEAVED:
            x, u = _deinterleave(x)
        elif up is not None:
            u = _tile(up, r, c, up_row, up_column, mask, COMPUTE)
            if up_bias is not None:
                u += _vector(up_bias, c, bias_stride, columns, COMPUTE)[None, :]
        if CLAMP is not None:
            gate_within = _within(x, CLAMP)
            up_within = _within(tl.abs(u), CLAMP)
            x = _clamp_above(x, CLAMP)
            u = _clamp(u, CLAMP)
        if OFFSET != 0.0:
            u += OFFSET

        y, derivative = _activate(x, ACTIVATION)
        if scale_sums is not None:
            total = tl.sum(g * (y * u if PAIR else y), 1)
            tl.store(scale_sums + _column_block(WIDE) * rows + r, total, mask=r < rows)
        if not PAIR:  # in the formula's order: a gradient times a large scale might overflow before the derivative
            g = _input_grad(g, x, derivative, ACTIVATION)
        if scale is not None:
            g *= _vector(scale, r, scale_stride, rows, COMPUTE)[:, None]
        dx = g
        if PAIR:
            dx = _input_grad(g * u, x, derivative, ACTIVATION)
            du = g * y
            if CLAMP is not None:
                dx = tl.where(gate_within, dx, 0.0)
                du = tl.where(up_within, du, 0.0)
            if d_up is not None:
                tl.store(d_up + r[:, None] * d_row + c[None, :], du, mask=mask)
            if gate_bias_sums is not None:
                up_sum += du
        if gate_bias_sums is not None:
            gate_sum += dx
        if d_gate is not None:
            packed = tl.interleave(dx, du) if INTERLEAVED else dx
            tl.store(d_gate + r[:, None] * d_row + packed_c[None, :], packed, mask=packed_mask)

    if gate_bias_sums is not None:
        gate_total = tl.sum(gate_sum, 0)
        up_total = tl.sum(up_sum, 0)
        packed_total = tl.interleave(gate_total, up_total) if INTERLEAVED else gate_total
        tl.store(gate_bias_sums + block * sums_row + packed_c, packed_total, mask=packed_c < packed_columns)
        if up is not None:
            tl.store(up_bias_sums + block * sums_row + c, up_total, mask=c < columns)


@triton.jit
def _add_rows(
    out, sums, rows, columns,
    WIDE: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out, the sum of the matrix's rows, with Kahan's correction for large numbers of rows."""
    columns = columns * UNIT
    c = _columns(BLOCK_N, WIDE)
    r = tl.arange(0, BLOCK_M).to(tl.int64 if WIDE else tl.int32)
    total = tl.zeros((BLOCK_M, BLOCK_N), sums.dtype.element_ty)
    excess = tl.zeros((BLOCK_M, BLOCK_N), sums.dtype.element_ty)
    for start in range(0, rows, BLOCK_M):
        mask = (start + r < rows)[:, None] & (c < columns)[None, :]
        term = _tile(sums, start + r, c, columns, 1, mask, sums.dtype.element_ty) - excess
        longer = total + term
        excess = (longer - total) - term
        total = longer
    tl.store(out + c, tl.sum(total, 0), mask=c < columns)


# ---- division of the work ------------------------------------------------------------------------------------------

# A tile gives each thread one load of 16 bytes per tensor, two in forward: two rows then share a load of the bias, and
# a flat loop has 5 % fewer instructions an element. These are enough loads in flight to hide memory latency, and few
# enough registers to avoid spills and low occupancy.
_WARPS = 4
_THREADS = 32 * _WARPS
_LOAD_BYTES = 16
_WIDEST_STRIDED = 64  # widest tile if some tensor's rows are strided: tiles are then nearly square

# Tiles that a backward program sums in registers before it writes a partial sum. More tiles cause less traffic but
# leave fewer programs.
_MOST_STEPS = 64
_FEWEST_STEPS = 4
_ENOUGH_PROGRAMS = 1024
_SUM_HEIGHT, _SUM_WIDTH = 128, 16  # tile size for adding partial sums: many narrow programs with few iterations


class _Plan(NamedTuple):
    """The division of the work among programs."""

    rows: int
    columns: int
    sizes: tuple[int, int, int]  # kernel arguments: rows, columns / UNIT, packed columns / UNIT
    strides: tuple[tuple[int, int], ...]  # for each matrix: (row stride / UNIT, column stride)
    steps: int
    row_blocks: int
    column_blocks: int
    grid: tuple[int, int, int]
    constants: dict[str, Any]  # the kernels' last constexpr arguments, and Triton's options


@functools.lru_cache(maxsize=1024)
def _plan(
    rows: int, columns: int, matrices: tuple[Matrix, ...], vectors: tuple[Matrix, ...], loads: int, add_rows: bool
) -> _Plan:
    """Plan the work for these matrices; ``vectors`` are bias and scale.

    Args:
        rows, columns: the output's size.
        loads: the number of loads per tensor that a thread has in flight.
        add_rows: whether sums over the rows are requested.
    """
    all_matrices, matrices = matrices, tuple(m for m in matrices if m.itemsize)
    vectors = tuple(v for v in vectors if v.itemsize)
    widest = _THREADS * _LOAD_BYTES // max(m.itemsize for m in matrices)
    pack = max(m.columns for m in matrices) // columns
    flat = not vectors and all(rows == 1 or m.row == m.columns * m.column for m in matrices)
    if flat:
        rows, columns = 1, rows * columns
        height, width = 1, widest * loads
    else:
        strided = columns > 1 and any(m.column > 1 for m in matrices)
        width = min(power_of_2(columns), _WIDEST_STRIDED if strided else widest)
        while width > 256 and blocks(columns, width) * width > 1.125 * columns:
            width //= 2  # 1408 columns become 3 blocks of 512 instead of 2 of 1024
        height = min(power_of_2(rows), widest * loads // width)
    row_blocks, column_blocks, steps = blocks(rows, height), blocks(columns, width), 1
    if add_rows:
        steps = min(_MOST_STEPS, power_of_2(row_blocks))
        while steps > _FEWEST_STEPS and row_blocks * column_blocks < steps * _ENOUGH_PROGRAMS:
            steps //= 2
        row_blocks = blocks(row_blocks, steps)
    high, deep = row_grid(row_blocks)
    row_blocks = high * deep  # a few programs may have no rows; their partial sums are zero
    # The largest offset into tensors and partial sums, including masked elements past the ends.
    last_row, last_column = row_blocks * steps * height - 1, column_blocks * width * pack - 1
    reach = max(last_row * m.row + last_column * m.column for m in (*matrices, *vectors))
    reach = max(reach, column_blocks * last_row, row_blocks * last_column)
    wide = reach > INT32_MAX
    strides = [(0 if rows == 1 else m.row, m.column) for m in all_matrices]
    divisor = 1 if wide else unit(columns, [row for row, _ in strides], min(m.itemsize for m in matrices))
    constants = {
        "FLAT": flat,
        "WIDE": wide,
        "UNIT": divisor,
        "BLOCK_M": height,
        "BLOCK_N": width,
        "num_warps": _WARPS,
        **OPTIONS,
    }
    return _Plan(
        rows,
        columns,
        (rows, columns // divisor, columns * pack // divisor),
        tuple((row // divisor, column) for row, column in strides),
        steps,
        row_blocks,
        column_blocks,
        (column_blocks, high, deep),
        constants,
    )


# ---- launches ------------------------------------------------------------------------------------------------------


class _Operands(NamedTuple):
    """The tensors that the formulas read. ``up`` is None for bias_act, and if ``gate`` contains it, interleaved."""

    gate: Tensor
    up: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    scale: Tensor | None
    layout: str = ""  # the packed input's layout; "" for separate gate and up

    @staticmethod
    def of(op: PointwiseOperator, tensors: Sequence[Any], layout: str | None) -> _Operands:
        bias, scale = (None if i is None else tensors[i] for i in (op.bias_index, op.scale_index))
        if layout is None:
            if op.num_data == 1:
                return _Operands(tensors[0], None, bias, None, scale)
            return _Operands(tensors[0], tensors[1], bias, None, scale)
        if layout == "interleaved":
            return _Operands(tensors[0], None, bias, None, scale, layout)
        gate, up = formulas.unpack(tensors[0], layout)
        gate_bias, up_bias = (None, None) if bias is None else formulas.unpack(bias, layout)
        return _Operands(gate, up, gate_bias, up_bias, scale, layout)

    def vectors(self) -> tuple[Matrix, Tensor | None, Matrix]:
        """Return (bias, scale tensor, scale) as matrices; both biases of a packed input have the same stride."""
        scale, s = matrix(None if self.scale is None else self.scale.unsqueeze(-1))
        b = self.gate_bias
        bias = Matrix() if b is None else Matrix(0, b.stride(0), 0, b.element_size())
        return bias, scale, s._replace(column=0)


def _run_forward(out: Tensor, x: _Operands, activation: str, up_offset: float, clamp: float | None) -> Tensor:
    if out.numel() == 0:
        return out
    columns = out.shape[-1]
    (gate, gate_m), (up, up_m), (bias_m, scale, scale_m) = matrix(x.gate), matrix(x.up), x.vectors()
    matrices = (matrix(out)[1], gate_m, up_m)
    plan = _plan(out.numel() // columns, columns, matrices, (bias_m, scale_m), loads=2, add_rows=False)
    _, gate_s, up_s = plan.strides
    launching.launch(
        _forward, plan.grid, out.device,
        (out, gate, up, x.gate_bias, x.up_bias, scale),
        (*plan.sizes, *gate_s, *up_s, bias_m.column, scale_m.row),
        {
            "ACTIVATION": activation, "OFFSET": up_offset, "CLAMP": clamp, "INTERLEAVED": x.layout == "interleaved",
            "COMPUTE": compute_type(x.gate, x.up, x.gate_bias, x.scale)[1], **plan.constants,
        },
    )  # fmt: skip
    return out


def _run_backward(
    grad: Tensor,
    x: _Operands,
    d_gate: Tensor | None,
    d_up: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill d_gate and d_up unless they are None, and return the gradients of ``bias`` and ``scale``, or None."""
    if grad.numel() == 0:
        return _zeros(bias), _zeros(scale)
    if d_gate is None and d_up is None and bias is None and scale is None:
        return None, None
    columns = grad.shape[-1]
    (g, g_m), (gate, gate_m), (up, up_m) = matrix(grad), matrix(x.gate), matrix(x.up)
    bias_m, x_scale, scale_m = x.vectors()
    d_m = matrix(d_up if d_gate is None else d_gate)[1]
    matrices = (g_m, gate_m, up_m, d_m)
    plan = _plan(grad.numel() // columns, columns, matrices, (bias_m, scale_m), loads=1, add_rows=bias is not None)
    dtype, compute = compute_type(grad, x.gate, x.up, x.gate_bias, x.scale)
    g_s, gate_s, up_s, d_s = plan.strides
    bias_sums = _partial_sums(bias, plan.row_blocks, dtype)
    scale_sums = _partial_sums(scale, plan.column_blocks, dtype)
    gate_sums, up_sums = bias_sums, None
    if bias_sums is not None and x.up is not None:
        gate_sums, up_sums = formulas.unpack(bias_sums, x.layout)
    launching.launch(
        _backward, plan.grid, grad.device,
        (
            g, gate, up, x.gate_bias, x.up_bias, x_scale, d_gate, d_up, gate_sums, up_sums, scale_sums,
        ),
        (
            *plan.sizes, plan.steps, *g_s, *gate_s, *up_s, bias_m.column, scale_m.row, d_s[0],
            0 if bias_sums is None else bias_sums.shape[1] // plan.constants["UNIT"],
        ),
        {
            "ACTIVATION": activation, "OFFSET": up_offset, "CLAMP": clamp, "INTERLEAVED": x.layout == "interleaved",
            "COMPUTE": compute, **plan.constants,
        },
    )  # fmt: skip
    return _total(bias_sums, bias), _total(scale_sums, scale)


def _zeros(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.new_zeros(t.shape)


def _partial_sums(t: Tensor | None, parts: int, dtype: torch.dtype) -> Tensor | None:
    """Allocate ``parts`` partial sums of t's gradient. A single part is the gradient itself, in t's dtype."""
    return None if t is None else t.new_empty((parts, t.numel()), dtype=dtype if parts > 1 else t.dtype)


def _total(sums: Tensor | None, t: Tensor | None) -> Tensor | None:
    """Return t's gradient from its partial sums."""
    if sums is None or t is None:
        return None
    parts, size = sums.shape
    if parts == 1:
        return sums.view(t.shape)
    out = t.new_empty(t.shape)
    height, width = min(_SUM_HEIGHT, power_of_2(parts)), _SUM_WIDTH
    wide = (parts + height) * size + width > INT32_MAX
    divisor = 1 if wide else unit(size, (), sums.element_size())
    constants = {"WIDE": wide, "UNIT": divisor, "BLOCK_M": height, "BLOCK_N": width, "num_warps": _WARPS, **OPTIONS}
    launching.launch(_add_rows, (blocks(size, width), 1, 1), t.device, (out, sums), (parts, size // divisor), constants)
    return out


# ---- the kernels of an operator ------------------------------------------------------------------------------------


_SCALARS = {"activation", "layout", "up_offset", "clamp"}


def _formula(op: PointwiseOperator, scalars: Sequence[Any]) -> tuple[str, float, float | None]:
    """Return (activation, up_offset, clamp), the scalars that the kernels implement."""
    values = dict(zip((name for name in op.scalars if name != "layout"), scalars, strict=True))
    return values["activation"], values.get("up_offset", 0.0), values.get("clamp")


def forward(op: PointwiseOperator) -> Callable[..., Tensor]:
    """Return a function that computes the operator in one kernel."""

    def launch(*args: Any) -> Tensor:
        tensors, layout, scalars = op.split(args)
        x = _Operands.of(op, tensors, layout)
        *rows, size = tensors[0].shape
        out = tensors[0].new_empty((*rows, size if layout is None else size // 2))
        return _run_forward(out, x, *_formula(op, scalars))

    return launch


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """Return a function that computes the gradients in one pass."""

    def launch(grad: Tensor, *args: Any) -> Gradients:
        tensors, layout, scalars = op.split(args[:-1])
        x, mask = _Operands.of(op, tensors, layout), args[-1]
        results: list[Tensor | None] = [None] * len(tensors)
        for i in range(op.num_data):
            results[i] = formulas.empty_gradient(tensors[i], mask[i])
        d_gate, d_up = results[0], results[1] if op.num_data == 2 else None
        if x.layout and x.up is not None and d_gate is not None:
            d_gate, d_up = formulas.unpack(d_gate, x.layout)
        bias, scale = (None if i is None or not mask[i] else tensors[i] for i in (op.bias_index, op.scale_index))
        sums = _run_backward(grad, x, d_gate, d_up, bias, scale, *_formula(op, scalars))
        for index, gradient in zip((op.bias_index, op.scale_index), sums, strict=True):
            if index is not None:
                results[index] = gradient
        return tuple(results)

    return launch


@functools.cache
def launch_of(name: str) -> Callable[..., Any]:
    """Return the function that runs ``fused::name`` on a GPU in eager mode, with unchecked arguments.

    A declaration's ``kernels`` names a module that defines ``launch_of``. It finds operators and backward operators.

    Raises:
        KeyError: no declared operator has this name.
        ValueError: these kernels do not implement the operator's formula or scalars.
    """
    launches = forward, backward
    by_name = {
        s.name: (op, make) for op in pointwise_operators() for s, make in zip(op.signatures, launches, strict=True)
    }
    op, make = by_name[name]
    if op.value not in (formulas.act_element, formulas.glu_element) or not op.scalars.keys() <= _SCALARS:
        raise ValueError(
            f"{op.name}({', '.join(op.scalars)}) is not accepted: these kernels compute act_element and glu_element of "
            f"{', '.join(sorted(_SCALARS))}; extend them, or declare other kernels, or none"
        )
    return make(op)
