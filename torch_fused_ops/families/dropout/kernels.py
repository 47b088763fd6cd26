# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels of ``fused::dropout_add`` in eager mode on a GPU: one forward, one backward, and one for partial sums.

``kernels/activation.py`` explains how tensors are divided into tiles and summed over rows. The mask is a function of
the seed and an element's index, so kernels neither read nor write it. A generator call gives four words, for four
neighbors in row-major order. If a row's length is a multiple of four, such neighbors share a tile, and the compiler
merges their calls (the source calls the generator for every element).

The dropout probability is a constant of the kernel, exact in float64; an argument would arrive in float32. A model has
one or two probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.kernels import launching
from torch_fused_ops.kernels.activation import (
    _columns,
    _partial_sums,
    _plan,
    _row_block,
    _tile,
    _total,
    _vector,
    _zeros,
)
from torch_fused_ops.kernels.launching import Matrix, compute_type, matrix, tl, triton

PHILOX_ROUNDS = tl.constexpr(formulas.PHILOX_ROUNDS)
PHILOX_FACTORS = tl.constexpr(formulas.PHILOX_FACTORS)
PHILOX_KEY_STEPS = tl.constexpr(formulas.PHILOX_KEY_STEPS)


@triton.jit
def _product(word, FACTOR: tl.constexpr):
    """Return both halves of a product of unsigned words, in one instruction; ``umulhi`` and a product take two."""
    product = word.to(tl.uint64) * tl.full((1, 1), FACTOR, tl.uint64)
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _philox(low, high, seed):
    """Compute ``formulas.philox`` in uint32."""
    zero = low * 0
    c0, c1, c2, c3 = low, high, zero, zero
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        high0, low0 = _product(c0, PHILOX_FACTORS[0])
        high1, low1 = _product(c2, PHILOX_FACTORS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full((), PHILOX_KEY_STEPS[0], tl.uint32)
        k1 += tl.full((), PHILOX_KEY_STEPS[1], tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _factor(
    seed, r, c, columns,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, FOURS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return mask/(1 − p) for a tile. FOURS: each row begins with the first word of a generator call."""
    key = tl.load(seed).to(tl.uint64, bitcast=True)
    if FOURS:
        counter = r[:, None] * (columns // 4) + (c >> 2)[None, :]
        lane = (c & 3)[None, :]
    else:
        index = r[:, None] * columns + c[None, :]
        counter = index >> 2
        lane = index & 3
    high = (counter.to(tl.int64) >> 32).to(tl.uint32)
    w0, w1, w2, w3 = _philox(counter.to(tl.uint32), high, key)
    odd = (lane & 1) != 0
    word = tl.where((lane & 2) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    keep = word >= tl.full((1, 1), THRESHOLD, tl.uint32)
    return tl.where(keep, tl.full((1, 1), SCALE, COMPUTE), tl.full((1, 1), 0.0, COMPUTE))


@triton.jit
def _forward(
    out, input, bias, residual, seed,
    rows, columns, input_row, input_column, residual_row, residual_column, bias_stride,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, FOURS: tl.constexpr,
    COMPUTE: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out = (input + bias) · mask · SCALE + residual. Skip None operands. If THRESHOLD is None, mask is 1."""
    columns, input_row, residual_row = columns * UNIT, input_row * UNIT, residual_row * UNIT
    c = _columns(BLOCK_N, WIDE)
    r = _row_block(FLAT, WIDE) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    x = _tile(input, r, c, input_row, input_column, mask, COMPUTE)
    if bias is not None:
        x += _vector(bias, c, bias_stride, columns, COMPUTE)[None, :]
    if THRESHOLD is not None:
        x *= _factor(seed, r, c, columns, THRESHOLD, SCALE, FOURS, COMPUTE)
    elif SCALE != 1.0:
        x *= SCALE
    if residual is not None:
        x += _tile(residual, r, c, residual_row, residual_column, mask, COMPUTE)
    tl.store(out + r[:, None] * columns + c[None, :], x, mask=mask)


@triton.jit
def _backward(
    grad, seed, d_input, bias_sums,
    rows, columns, steps, grad_row, grad_column, sums_row,
    THRESHOLD: tl.constexpr, SCALE: tl.constexpr, FOURS: tl.constexpr,
    COMPUTE: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute d_input = grad · mask · SCALE, and its sums over the rows of this program's ``steps`` tiles."""
    columns, grad_row, sums_row = columns * UNIT, grad_row * UNIT, sums_row * UNIT
    c = _columns(BLOCK_N, WIDE)
    block = _row_block(FLAT, WIDE)
    total = tl.zeros((BLOCK_M, BLOCK_N), COMPUTE)
    for step in range(steps):
        r = (block * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (r < rows)[:, None] & (c < columns)[None, :]
        d = _tile(grad, r, c, grad_row, grad_column, mask, COMPUTE)
        if THRESHOLD is not None:
            d *= _factor(seed, r, c, columns, THRESHOLD, SCALE, FOURS, COMPUTE)
        elif SCALE != 1.0:
            d *= SCALE
        if d_input is not None:
            tl.store(d_input + r[:, None] * columns + c[None, :], d, mask=mask)
        if bias_sums is not None:
            total += d
    if bias_sums is not None:
        tl.store(bias_sums + block * sums_row + c, tl.sum(total, 0), mask=c < columns)


# ---- launches ------------------------------------------------------------------------------------------------------


def _constants(p: float, columns: int) -> dict[str, Any]:
    threshold = formulas.keep_threshold(p)
    return {
        "THRESHOLD": threshold if 0 < threshold < 2**32 else None,
        "SCALE": formulas.keep_scale(p),
        "FOURS": columns % 4 == 0,
    }


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """Return residual + dropout(input + bias), in one kernel; see ``formulas.dropout_add``."""
    out = (input if residual is None else residual).new_empty(input.shape)
    if out.numel() == 0:
        return out
    columns = out.shape[-1]
    (x, x_m), (r, r_m), out_m = matrix(input), matrix(residual), matrix(out)[1]
    bias_m = Matrix() if bias is None else Matrix(0, bias.stride(0), 0, bias.element_size())
    plan = _plan(out.numel() // columns, columns, (out_m, x_m, r_m), (bias_m,), loads=1, add_rows=False)
    _, x_s, r_s = plan.strides
    launching.launch(
        _forward, plan.grid, out.device,
        (out, x, bias, r, seed),
        (*plan.sizes[:2], *x_s, *r_s, bias_m.column),
        {
            **_constants(p, plan.columns if plan.rows > 1 else 4),
            "COMPUTE": compute_type(input, bias, residual)[1], **plan.constants,
        },
    )  # fmt: skip
    return out


def dropout_add_backward(
    grad: Tensor,
    seed: Tensor,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return dropout_add's gradients for (input, bias), in one pass; None if not requested by output_mask."""
    d_input = grad.new_empty(grad.shape, dtype=dtype) if output_mask[0] else None
    # Only the shape and dtype of ``bias`` are read.
    bias = grad.new_empty(grad.shape[-1:], dtype=bias_dtype) if output_mask[1] else None
    if grad.numel() == 0 or not any(output_mask):
        return d_input, _zeros(bias)
    columns, wide = grad.shape[-1], formulas.dropout_backward_dtype(grad, dtype, bias_dtype)
    (g, g_m), d_m = matrix(grad), Matrix(columns, 1, columns, dtype.itemsize)
    vectors = () if bias is None else (Matrix(0, 1, 0, bias.element_size()),)
    plan = _plan(grad.numel() // columns, columns, (g_m, d_m), vectors, loads=1, add_rows=bias is not None)
    sums = _partial_sums(bias, plan.row_blocks, wide)
    launching.launch(
        _backward, plan.grid, grad.device,
        (g, seed, d_input, sums),
        (*plan.sizes[:2], plan.steps, *plan.strides[0], 0 if sums is None else columns // plan.constants["UNIT"]),
        {
            **_constants(p, plan.columns if plan.rows > 1 else 4),
            "COMPUTE": tl.float64 if wide == torch.float64 else tl.float32, **plan.constants,
        },
    )  # fmt: skip
    return d_input, _total(sums, bias)
