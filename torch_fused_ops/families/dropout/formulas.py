"""Dropout with bias and residual in plain torch: the random generator, the formula on elements, the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.formulas import compute_dtype, over_rows, widened

_WORD = 0xFFFFFFFF
PHILOX_ROUNDS = 10
PHILOX_FACTORS = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(low: Tensor, high: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits for a counter of two words (``word``) under a 64-bit key, int64.

    Philox4x32-10 with the counter's upper two words 0 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as
    1, 2, 3; SC 2011, doi:10.1145/2063384.2063405), the generator of Random123, cuRAND and Triton.
    """
    words: list[Tensor | None] = [low, high, None, None]
    for i in range(PHILOX_ROUNDS):
        # The steps times the round, not a chain of sums: the same, as words wrap.
        keys = [word((k & _WORD) + i * step) for k, step in zip((seed, seed >> 32), PHILOX_KEY_STEPS, strict=True)]
        (high0, low0), (high1, low1) = (_product(words[2 * j], factor) for j, factor in enumerate(PHILOX_FACTORS))
        words = [_xor(high1, words[1], keys[0]), low1, _xor(high0, words[3], keys[1]), low0]
    w0, w1, w2, w3 = words
    assert w0 is not None and w1 is not None and w2 is not None and w3 is not None
    return w0, w1, w2, w3


def word(x: Tensor) -> Tensor:
    """The lower 32 bits of int64, for the generator: int32 on a GPU; on a CPU x itself, whose upper bits do not count.

    GPUs: int32 that is widened for a product alone is the form in which LLVM sees one 32×32→64 multiplication in it,
    and a call of the generator once for four elements. For bfloat16 on sm_90, 8 elements a thread, dropout takes
    21 instructions an element so, 54 with words kept in int64 (H200's budget for one tensor read and written: 28).

    CPUs: products need int64 there, and Inductor's vectors have few conversions between int32 and int64.
    """
    return x if x.device.type == "cpu" else x.to(torch.int32)


def _product(factor: Tensor | None, other: int) -> tuple[Tensor | None, Tensor | None]:
    """The halves of the product of a word and a number, as words; None is 0."""
    if factor is None:
        return None, None
    product = (factor.to(torch.int64) & _WORD) * other
    return word(product >> 32), word(product)


def _xor(*words: Tensor | None) -> Tensor:
    first, *rest = (w for w in words if w is not None)
    for w in rest:
        first = first ^ w
    return first


def keep_scale(p: float) -> float:
    """1/(1 − p); 0 where nothing is kept."""
    return 1.0 / (1.0 - p) if keep_threshold(p) < 2**32 else 0.0


def keep_threshold(p: float) -> int:
    """An element is kept where its word, of 32 random bits, is not below this: of its chance p rounds off 2⁻³³."""
    return round(p * 2**32)


def mask_of_four(counter: Tensor, seed: Tensor, p: float) -> Tensor:
    """For CPUs: 1 for each of a counter's four elements that is kept, else 0, in a byte each of an int32."""
    bits = torch.zeros_like(counter)
    for i, random in enumerate(philox(counter, counter >> 32, seed)):
        bits = bits | torch.where((random & _WORD) >= keep_threshold(p), 1 << 8 * i, 0)
    return bits.to(torch.int32)


def mask_at(counter: Tensor, lane: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """True for an element with the row-major index 4·counter + lane mod 4, all int64, that is kept.

    So four neighbors share one call of the generator, a word for each. None where nothing is random.
    """
    if not is_random(p):
        return None
    w0, w1, w2, w3 = philox(word(counter), word(counter >> 32), seed)
    place, threshold = word(lane), keep_threshold(p)
    odd, late = (place & 1) != 0, (place & 2) != 0
    bits = torch.where(late, torch.where(odd, w3, w2), torch.where(odd, w1, w0))
    # Of int32 both sides less 2³¹: its order is then that of unsigned words.
    is_narrow = bits.dtype == torch.int32
    return (bits ^ -(2**31)) >= threshold - 2**31 if is_narrow else (bits & _WORD) >= threshold


def is_random(p: float) -> bool:
    """True if some elements are kept and some are dropped: the chance neither is 0 or 1 nor rounds to it."""
    return 0 < keep_threshold(p) < 2**32


def dropped(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """x · keep/(1 − p), the keep being mask: of a gradient that of the input, and, summed over rows, of the bias."""
    if mask is None:  # nothing is random
        return x * keep_scale(p)
    if mask.dtype == torch.uint8:
        return x * (mask.to(x.dtype) * keep_scale(p))
    return x * torch.where(mask, torch.full((), keep_scale(p), dtype=x.dtype, device=x.device), 0.0)


def dropout_add_element(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, p: float
) -> Tensor:
    """(x + bias) · keep/(1 − p) + residual."""
    y = dropped(x if bias is None else x + bias, mask, p)
    return y if residual is None else y + residual


def row_major(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(counter, lane) of each element of a tensor of this shape."""
    index = torch.arange(math.prod(shape), device=device).view(tuple(shape))  # torch.Size makes symbols numbers
    return index >> 2, index


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(input + bias); input (..., n), bias (n,), residual as input, seed int64 with one element."""
    dtype = compute_dtype(input, bias, residual)
    mask = mask_at(*row_major(input.shape, input.device), seed.reshape(()), p)
    y = dropout_add_element(input.to(dtype), widened(dtype, bias), widened(dtype, residual), mask, p)
    return y.to(input.dtype if residual is None else residual.dtype)


def dropout_backward_dtype(grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that dropout_add's backward computes in."""
    return torch.float64 if torch.float64 in (dtype, bias_dtype) else compute_dtype(grad)


def dropout_add_backward(
    grad: Tensor,
    seed: Tensor,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of dropout_add for (input, bias), in their dtypes; None where output_mask says no.

    The residual's is grad itself.
    """
    wide = dropout_backward_dtype(grad, dtype, bias_dtype)
    dx = dropped(grad.to(wide), mask_at(*row_major(grad.shape, grad.device), seed.reshape(()), p), p)
    d_bias = over_rows(dx).to(bias_dtype) if output_mask[1] else None
    return dx.to(dtype) if output_mask[0] else None, d_bias
