"""``fused::dropout_add`` on the CPU, in eager mode: blocks of plain torch, a call of the generator for four elements.

The generator is ``formulas.philox``, in the steps that are quickest here: int64 throughout, in place. (int32 halves
read through a view of int64 products save a third of the passes, and each takes four times as long: it is strided.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.formulas import compute_dtype, over_rows, widened
from torch_fused_ops.kernels import cpu

with _disable_current_modes():  # whatever this module is imported under
    # As tensors: a Python number costs a call 1.8 µs.
    _SHIFT, _WORD, *_FACTORS = (torch.tensor(v, device="cpu") for v in (32, 0xFFFFFFFF, *formulas.PHILOX_FACTORS))
    _HALVES = torch.tensor([0, 32], device="cpu")
    _ROUNDS = torch.arange(formulas.PHILOX_ROUNDS, device="cpu").unsqueeze(-1)
    _KEY_STEPS = _ROUNDS * torch.tensor(formulas.PHILOX_KEY_STEPS, device="cpu")


def _keys(seed: Tensor) -> Tensor:
    """The keys of each round (rounds, 2): numbers from 0 to 2³² − 1."""
    return (_KEY_STEPS + (seed.reshape(1) >> _HALVES)).bitwise_and_(_WORD)


def _mixed(product: Tensor, *words: Tensor | int) -> Tensor:
    """The upper half of a product of words, xor the lower halves of others."""
    mixed = product >> _SHIFT
    for word in words:
        mixed.bitwise_xor_(word)
    return mixed.bitwise_and_(_WORD)


def _words(first: int, count: int, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of the counters from ``first`` on, which differ in their lower word: numbers from 0 to 2³² − 1."""
    (a, _), (_, b), *_ = keys.tolist()
    _, key0, key1, _, *others = keys.view(-1).unbind()
    low = first & 0xFFFFFFFF
    # The first round has one product that is not 0, the second one that is the same for all.
    product0 = torch.arange(low, low + count, device="cpu").mul_(_FACTORS[0])
    product1 = _mixed(product0, key0).mul_(_FACTORS[1])
    same = (first >> 32 ^ a) * formulas.PHILOX_FACTORS[0]
    words = _mixed(product1, key1), product0.bitwise_xor_(same >> 32 ^ b).bitwise_and_(_WORD)
    lower: tuple[Tensor | int, Tensor] = same & 0xFFFFFFFF, product1
    for key0, key1 in zip(others[::2], others[1::2], strict=True):
        product0, product1 = words[0].mul_(_FACTORS[0]), words[1].mul_(_FACTORS[1])
        words = _mixed(product1, lower[1], key0), _mixed(product0, lower[0], key1)
        lower = product0, product1
    return words[0], product1.bitwise_and_(_WORD), words[1], product0.bitwise_and_(_WORD)


def _mask(like: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """1 for each element of a tensor that is kept, else 0; None where nothing is random."""
    if not formulas.is_random(p):
        return None
    mask = seed.new_empty((-(-like.numel() // 4), 4), dtype=torch.bool)
    step = 1 << (cpu.block() // 4).bit_length() - 1  # divides 2**32, the counters of one upper word
    keys = _keys(seed)
    for first, fours in zip(range(0, len(mask), step), mask.split(step), strict=False):
        words = _words(first, len(fours), keys)
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
