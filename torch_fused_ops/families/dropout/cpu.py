"""``fused::dropout_add`` on the CPU, in eager mode: blocks of plain torch, a call of the generator for four elements.

The generator is ``formulas.philox``, in the steps that are quickest here: int64 throughout, in buffers that stay in
the cache, 90 passes over a quarter of the elements. (int32 halves read through a view of int64 products save a third of
the passes, and each takes four times as long, because it is strided: 15 ns an element instead of 9 on one core, where
``F.dropout`` takes 6 to 9 and keeps its mask.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.formulas import compute_dtype, over_rows
from torch_fused_ops.kernels import cpu

__all__ = ["dropout_add", "dropout_add_backward"]

with _disable_current_modes():  # whatever this module is imported under
    # As tensors: a Python number costs a call 1.8 µs.
    _SHIFT, _WORD = (torch.tensor(v, device="cpu") for v in (32, 0xFFFFFFFF))
    _FACTORS = torch.tensor(formulas.PHILOX_FACTORS, device="cpu").unbind()
    _ROUNDS = torch.arange(formulas.PHILOX_ROUNDS, device="cpu").unsqueeze(-1)
    _KEY_STEPS = _ROUNDS * torch.tensor(formulas.PHILOX_KEY_STEPS, device="cpu")


def _block() -> int:
    """Elements of a block: so that a quarter of them is still shared by the threads, if there are more than two."""
    threads = torch.get_num_threads()
    return 4 * cpu._GRAIN * threads if threads > 2 else cpu._GRAIN


class _Factors:
    """``formulas.dropout_factor`` of a range of indices. What it returns is overwritten by the next call."""

    def __init__(self, seed: Tensor, p: float, dtype: torch.dtype, most: int) -> None:
        words = torch.stack((seed.reshape(()), seed.reshape(()) >> _SHIFT)) & _WORD
        flat = ((words + _KEY_STEPS) & _WORD).view(-1).unbind()
        self.keys = list(zip(flat[::2], flat[1::2], strict=True))
        self.scale = torch.tensor(formulas.keep_scale(p), dtype=dtype)
        self.threshold = torch.tensor(formulas.keep_threshold(p))
        calls = most // 4 + 2  # a range may begin and end in the middle of four
        self.buffers = torch.empty((6, calls), dtype=torch.int64).unbind()
        self.kept = torch.empty((calls, 4), dtype=torch.bool)
        self.result = torch.empty((calls, 4), dtype=dtype)

    def words(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the counters from ``first`` on: four tensors of ``count`` words, as numbers from 0 to 2³² − 1."""
        c0, c2, p0, p1, q0, q1 = (buffer[:count] for buffer in self.buffers)
        (key0, key1), *keys = self.keys
        torch.arange(first, first + count, out=c2)
        torch.bitwise_right_shift(c2, _SHIFT, out=c0).bitwise_xor_(key0)
        torch.mul(c2.bitwise_and_(_WORD), _FACTORS[0], out=p0)
        torch.bitwise_right_shift(p0, _SHIFT, out=c2).bitwise_and_(_WORD).bitwise_xor_(key1)
        p1.zero_()
        # c1 and c3 are the products' lower halves: left in place, their upper halves masked off with the next sum.
        for key0, key1 in keys:
            torch.mul(c0, _FACTORS[0], out=q0)
            torch.mul(c2, _FACTORS[1], out=q1)
            torch.bitwise_right_shift(q1, _SHIFT, out=c0).bitwise_xor_(p1).bitwise_xor_(key0).bitwise_and_(_WORD)
            torch.bitwise_right_shift(q0, _SHIFT, out=c2).bitwise_xor_(p0).bitwise_xor_(key1).bitwise_and_(_WORD)
            p0, p1, q0, q1 = q0, q1, p0, p1
        return c0, p1.bitwise_and_(_WORD), c2, p0.bitwise_and_(_WORD)

    def __call__(self, start: int, count: int) -> Tensor:
        first = start >> 2
        calls = ((start + count + 3) >> 2) - first
        kept, result = self.kept[:calls], self.result[:calls]
        for lane, word in enumerate(self.words(first, calls)):
            torch.ge(word, self.threshold, out=kept[:, lane])
        torch.mul(kept.view(torch.uint8), self.scale, out=result)
        return result.view(-1)[start & 3 :][:count]


def _pieces(shape: Sequence[int], most: int) -> Iterator[tuple[Any, ...]]:
    """Indices that cut a tensor into views of about ``most`` elements, one after the other in row-major order."""
    *rows, columns = shape
    if columns <= most:
        yield from cpu._blocks(shape, most)
        return
    for row in itertools.product(*map(range, rows)):
        for start in range(0, columns, most):
            yield (*row, slice(start, start + most))


def _part(t: Tensor | None, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor | None:
    return None if t is None else cpu._wide(t[index] if index else t, dtype)


def _column_part(bias: Tensor | None, index: tuple[Any, ...], ndim: int) -> Tensor | None:
    return bias[index[-1]] if bias is not None and len(index) == ndim else bias


def _factor_of(shape: Sequence[int], seed: Tensor, p: float, dtype: torch.dtype) -> _Factors | Tensor:
    """What each element is multiplied with: the same for all where nothing is random."""
    if formulas.keep_threshold(p) in (0, 2**32):
        return torch.tensor(formulas.keep_scale(p), dtype=dtype)
    return _Factors(seed, p, dtype, min(torch.Size(shape).numel(), _block()))


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(input + bias); see ``formulas.dropout_add``."""
    shape, dtype = input.shape, compute_dtype(input, bias, residual)
    out = (input if residual is None else residual).new_empty(shape)
    if input.numel() == 0:
        return out
    wide_bias, factor, start = None if bias is None else cpu._wide(bias, dtype), _factor_of(shape, seed, p, dtype), 0
    for i in _pieces(shape, _block()):
        x, b = _part(input, i, dtype), _column_part(wide_bias, i, len(shape))
        assert x is not None
        x = x if b is None else x + b
        f = factor if isinstance(factor, Tensor) else factor(start, x.numel()).view(x.shape)
        r, here = _part(residual, i, dtype), out[i] if i else out
        y = here if out.dtype == dtype else None
        y = torch.mul(x, f, out=y) if r is None else torch.addcmul(r, x, f, out=y)
        if y is not here:
            here.copy_(y)
        start += x.numel()
    return out


def dropout_add_backward(
    grad: Tensor,
    seed: Tensor,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of dropout_add for (input, bias); None where output_mask says no."""
    shape, wide = grad.shape, formulas.dropout_backward_dtype(grad, dtype, bias_dtype)
    d_input = grad.new_empty(shape, dtype=dtype) if output_mask[0] else None
    # Hundreds of partial sums: in float64, so that their order costs nothing.
    total = grad.new_zeros(shape[-1:], dtype=torch.float64) if output_mask[1] else None
    if grad.numel() and any(output_mask):
        factor, start = _factor_of(shape, seed, p, wide), 0
        for i in _pieces(shape, _block()):
            g = _part(grad, i, wide)
            assert g is not None
            d = g * (factor if isinstance(factor, Tensor) else factor(start, g.numel()).view(g.shape))
            start += g.numel()
            if d_input is not None:
                (d_input[i] if i else d_input).copy_(d)
            if total is not None:
                part = _column_part(total, i, len(shape))
                assert part is not None
                part += over_rows(d)
    return d_input, None if total is None else total.to(bias_dtype)
