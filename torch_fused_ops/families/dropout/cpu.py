"""``fused::dropout_add`` on the CPU, in eager mode: blocks of plain torch, a call of the generator for four elements.

The generator is ``formulas.philox``, in the steps that are quickest here: int64 throughout, in buffers of a block, two
words at a time. (int32 halves read through a view of int64 products save a third of the passes, and each takes four
times as long, because it is strided.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.formulas import compute_dtype, over_rows, widened
from torch_fused_ops.kernels import cpu

__all__ = ["dropout_add", "dropout_add_backward"]

_ROUNDS = range(formulas.PHILOX_ROUNDS)
with _disable_current_modes():  # whatever this module is imported under
    # As tensors: a Python number costs a call 1.8 µs.
    _SHIFT, _WORD = (torch.tensor(v, device="cpu") for v in (32, 0xFFFFFFFF))
    # A round makes of word 0's row word 2's, and the other way round.
    _FACTORS = [
        torch.tensor(formulas.PHILOX_FACTORS[:: -1 if i % 2 else 1], device="cpu").unsqueeze(-1) for i in _ROUNDS
    ]


class _Factors:
    """``formulas.dropout_factor`` of one element after the other. A tensor that it returned may be overwritten."""

    def __init__(self, seed: Tensor, p: float, dtype: torch.dtype) -> None:
        key = int(seed), int(seed) >> 32
        of_rounds = [[key[j] + i * formulas.PHILOX_KEY_STEPS[j] & 0xFFFFFFFF for j in (~i & 1, i & 1)] for i in _ROUNDS]
        self.keys = torch.tensor(of_rounds, device="cpu").unsqueeze(-1).unbind()
        self.threshold = torch.tensor(formulas.keep_threshold(p), device="cpu")
        self.scale = torch.tensor(formulas.keep_scale(p), dtype=dtype, device="cpu")
        self.is_random = 0 < formulas.keep_threshold(p) < 2**32
        self.place = 0
        self.buffers = seed.new_empty((3, 2, 0))
        self.kept, self.result = seed.new_empty(0, dtype=torch.bool), seed.new_empty(0, dtype=dtype)

    def words(self, first: int, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The words of the counters from ``first`` on: four tensors of ``count`` numbers from 0 to 2³² − 1."""
        if self.buffers.shape[-1] != count:
            self.buffers = self.buffers.new_empty((3, 2, count))
        state, last, product = self.buffers.unbind()
        (state0, state1), (last0, last1), (product0, product1) = (t.unbind() for t in (state, last, product))
        counter = torch.arange(first, first + count, out=product0)
        torch.bitwise_and(counter, _WORD, out=state0)
        torch.bitwise_right_shift(counter, _SHIFT, out=last0)
        state1.zero_(), last1.zero_()
        # The lower halves of the products before these are words 3 and 1; the upper are masked off with the sum.
        for factor, key in zip(_FACTORS, self.keys, strict=True):
            torch.bitwise_right_shift(torch.mul(state, factor, out=product), _SHIFT, out=state)
            state0.bitwise_xor_(last1)
            state1.bitwise_xor_(last0)
            state.bitwise_xor_(key).bitwise_and_(_WORD)
            last, last0, last1, product, product0, product1 = product, product0, product1, last, last0, last1
        last.bitwise_and_(_WORD)
        return state0, last0, state1, last1

    def next(self, like: Tensor) -> Tensor:
        """Return the factors of the elements of ``like``, which come after the last call's."""
        if not self.is_random:
            return self.scale
        first, skipped = self.place >> 2, self.place & 3
        self.place += like.numel()
        count = ((self.place + 3) >> 2) - first
        kept, result = self.kept.resize_(count, 4), self.result.resize_(4 * count)
        for lane, word in enumerate(self.words(first, count)):
            torch.ge(word, self.threshold, out=kept[:, lane])
        torch.mul(kept.view(torch.uint8).view(-1), self.scale, out=result)
        return result[skipped : skipped + like.numel()].view(like.shape)


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(input + bias); see ``formulas.dropout_add``."""
    dtype = compute_dtype(input, bias, residual)
    factors = _Factors(seed, p, dtype)

    def compute(input: Tensor, bias: Tensor | None, residual: Tensor | None) -> tuple[Tensor]:
        x = input.to(dtype)
        y = (x if bias is None else x + bias) * factors.next(x)
        return (y if residual is None else y.add_(residual),)

    tensors = (input, widened(dtype, bias), residual)
    (out,) = cpu.in_blocks(
        compute, tensors, ("data", "per_column", "data"), ("data",), [(input if residual is None else residual).dtype]
    )
    assert out is not None
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
    wide = formulas.dropout_backward_dtype(grad, dtype, bias_dtype)
    factors = _Factors(seed, p, wide)

    def compute(grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        g = grad.to(wide)
        d = g * factors.next(g)
        return d if output_mask[0] else None, over_rows(d) if output_mask[1] else None

    d_input, d_bias = cpu.in_blocks(compute, (grad,), ("data",), ("data", "per_column"), [dtype, bias_dtype])
    return d_input, d_bias
