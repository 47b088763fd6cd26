"""``fused::dropout_add`` on the CPU, in eager mode: blocks of plain torch, a call of the generator for four elements.

The generator is ``formulas.philox``, in the steps that are quickest here: int64 throughout, two words at a time. (int32
halves read through a view of int64 products save a third of the passes, and each takes four times as long, because it
is strided.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.formulas import compute_dtype, over_rows, widened
from torch_fused_ops.kernels import cpu

_ROUNDS = range(formulas.PHILOX_ROUNDS)
with _disable_current_modes():  # whatever this module is imported under
    # As tensors: a Python number costs a call 1.8 µs.
    _SHIFT, _WORD = (torch.tensor(v, device="cpu") for v in (32, 0xFFFFFFFF))
    # A round makes of word 0's row word 2's, and the other way round.
    _FACTORS = [
        torch.tensor(formulas.PHILOX_FACTORS[:: -1 if i % 2 else 1], device="cpu").unsqueeze(-1) for i in _ROUNDS
    ]


def _words(counter: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each counter: numbers from 0 to 2³² − 1."""
    key = int(seed), int(seed) >> 32
    of_rounds = [[key[j] + i * formulas.PHILOX_KEY_STEPS[j] & 0xFFFFFFFF for j in (~i & 1, i & 1)] for i in _ROUNDS]
    keys = torch.tensor(of_rounds, device="cpu").unsqueeze(-1)
    none = torch.zeros_like(counter)
    state, product = torch.stack((counter & _WORD, none)), torch.stack((counter >> _SHIFT, none))
    for factor, of_round in zip(_FACTORS, keys.unbind(), strict=True):
        # The lower halves of the products before these are words 3 and 1; the upper halves are masked off with the sum.
        crossed, product = product.flip(0).bitwise_xor_(of_round), state * factor
        state = (product >> _SHIFT).bitwise_xor_(crossed).bitwise_and_(_WORD)
    product.bitwise_and_(_WORD)
    return state[0], product[0], state[1], product[1]


def _mask(like: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """1 for each element of a tensor that is kept, else 0; None where nothing is random."""
    if not formulas.is_random(p):
        return None
    mask = seed.new_empty((-(-like.numel() // 4), 4), dtype=torch.bool)
    step = cpu.block() // 4
    for first, fours in zip(range(0, len(mask), step), mask.split(step), strict=False):
        words = _words(torch.arange(first, first + len(fours), device="cpu"), seed)
        for word, lane in zip(words, fours.unbind(-1), strict=True):
            torch.ge(word, formulas.keep_threshold(p), out=lane)
    return mask.view(torch.uint8).view(-1)[: like.numel()].view(like.shape)


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(input + bias); see ``formulas.dropout_add``."""
    dtype = compute_dtype(input, bias, residual)

    def compute(input: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None) -> tuple[Tensor]:
        return (formulas.dropout_add_element(input.to(dtype), bias, residual, mask, p),)

    tensors, kinds = (input, widened(dtype, bias), residual, _mask(input, seed, p)), ("data", "per_column", "data")
    out_dtype = (input if residual is None else residual).dtype
    (out,) = cpu.in_blocks(compute, tensors, (*kinds, "data"), ("data",), [out_dtype])
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

    def compute(grad: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        d = formulas.dropped(grad.to(wide), mask, p)
        return d if output_mask[0] else None, over_rows(d) if output_mask[1] else None

    results = ("data", "per_column")
    d_input, d_bias = cpu.in_blocks(compute, (grad, _mask(grad, seed, p)), ("data",) * 2, results, [dtype, bias_dtype])
    return d_input, d_bias
