"""Compute dropout with bias and residual in plain torch: random generator, formula on elements, operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.formulas import compute_dtype, over_rows, widened

_WORD = 0xFFFFFFFF
PHILOX_ROUNDS = 10
PHILOX_FACTORS = 0xD2511F53, 0xCD9E8D57
PHILOX_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(low: Tensor, high: Tensor, seed: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words of 32 random bits for a counter of two words (``word``) and a 64-bit key ``seed``, an int64.

    This is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011,
    doi:10.1145/2063384.2063405), the generator of Random123, cuRAND and Triton. The counter's upper two words are 0.
    """
    words: list[Tensor | None] = [low, high, None, None]
    for i in range(PHILOX_ROUNDS):
        # Multiply the step by the round instead of adding it each round. As words wrap, both give the same key.
        keys = [word((k & _WORD) + i * step) for k, step in zip((seed, seed >> 32), PHILOX_KEY_STEPS, strict=True)]
        (high0, low0), (high1, low1) = (_product(words[2 * j], factor) for j, factor in enumerate(PHILOX_FACTORS))
        words = [_xor(high1, words[1], keys[0]), low1, _xor(high0, words[3], keys[1]), low0]
    w0, w1, w2, w3 = words
    assert w0 is not None and w1 is not None and w2 is not None and w3 is not None
    return w0, w1, w2, w3


def word(x: Any) -> Any:
    """Return an int64 tensor's word: on a GPU its lower 32 bits as int32, on a CPU x itself.

    The generator ignores the upper bits. On GPUs words are int32, widened only for products. LLVM then recognizes a
    32×32→64 multiplication, and merges the generator calls of four elements. For bfloat16 on sm_90, 8 elements a
    thread, dropout takes 21 instructions an element, and 54 with int64 words. (While an H200 reads and writes an
    element, it can run 28.) On CPUs products need int64; Inductor's vectors have few conversions to and from int32.
    """
    return x if isinstance(x, int) or x.device.type == "cpu" else x.to(torch.int32)


def _product(factor: Tensor | None, other: int) -> tuple[Tensor | None, Tensor | None]:
    """Return both halves of the product of a word and a number, as words; None represents 0."""
    if factor is None:
        return None, None
    product = (factor.to(torch.int64) & _WORD) * other
    return word(product >> 32), word(product)


def _xor(*words: Tensor | int | None) -> Any:
    first, *others = (w for w in words if w is not None)
    for w in others:
        first = first ^ w
    return first


def keep_scale(p: float) -> float:
    """Return the factor of elements that are not dropped, 1/(1 − p); 0 if p rounds to 1."""
    return 1.0 / (1.0 - p) if keep_threshold(p) < 2**32 else 0.0


def keep_threshold(p: float) -> int:
    """Return the lowest random word that does not drop an element. Its rounding changes p by at most 2⁻³³."""
    return round(p * 2**32)


def mask_of_four(counter: Tensor, seed: Tensor | int, p: float) -> Tensor:
    """Return the mask of a counter's four elements as an int32's bytes, 0 for dropped elements, else 1; for CPUs."""
    bits = torch.zeros_like(counter)
    for i, random in enumerate(philox(counter, counter >> 32, seed)):
        bits = bits | torch.where((random & _WORD) >= keep_threshold(p), 1 << 8 * i, 0)
    return bits.to(torch.int32)


def mask_at(counter: Tensor, lane: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """Return the mask, False for dropped elements. An element's row-major index is 4·counter + lane mod 4, in int64.

    Four neighbors share a generator call, which returns a word for each neighbor. If p rounds to 0 or 1, return None.
    """
    if not is_random(p):
        return None
    w0, w1, w2, w3 = philox(word(counter), word(counter >> 32), seed)
    lane, threshold = word(lane), keep_threshold(p)
    odd, upper = (lane & 1) != 0, (lane & 2) != 0
    bits = torch.where(upper, torch.where(odd, w3, w2), torch.where(odd, w1, w0))
    # For int32 subtract 2³¹ from both sides, so that signed order equals the order of unsigned words.
    is_narrow = bits.dtype == torch.int32
    return (bits ^ -(2**31)) >= threshold - 2**31 if is_narrow else (bits & _WORD) >= threshold


def is_random(p: float) -> bool:
    """Return True if p rounds to neither 0 nor 1."""
    return 0 < keep_threshold(p) < 2**32


def dropped(x: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Return x · mask/(1 − p). For the result gradient this is the input gradient, and the sum the bias gradient."""
    if mask is None:  # the mask is not random
        return x * keep_scale(p)
    if mask.dtype == torch.uint8:
        return x * (mask.to(x.dtype) * keep_scale(p))
    return x * torch.where(mask, torch.full((), keep_scale(p), dtype=x.dtype, device=x.device), 0.0)


def dropout_add_element(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, mask: Tensor | None, p: float
) -> Tensor:
    """Return (x + bias) · mask/(1 − p) + residual."""
    y = dropped(x if bias is None else x + bias, mask, p)
    return y if residual is None else y + residual


def row_major(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (counter, lane) for each element of a tensor with this shape."""
    sizes = tuple(shape)  # torch.Size would turn symbols into numbers
    index = torch.arange(math.prod(sizes), device=device).view(sizes)
    return index >> 2, index


def mask(like: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """Return a tensor's mask, False for dropped elements; None if p rounds to 0 or 1."""
    return mask_at(*row_major(like.shape, like.device), seed.reshape(()), p)


_COUNTERS_PER_BLOCK = 1 << 13  # their words fit the cache


def mask_in_fours(like: Tensor, seed: Tensor, p: float) -> Tensor | None:
    """Return ``mask`` as bytes, 0 for False, for eager CPUs: in blocks, with a generator call for four elements."""
    if not is_random(p):
        return None
    counters = torch.arange(-(-like.numel() // 4), device=like.device).split(_COUNTERS_PER_BLOCK)
    key = int(seed)  # with a number instead of a tensor, a small call takes half the time
    fours = torch.cat([mask_of_four(counter, key, p) for counter in counters])
    return fours.view(torch.uint8)[: like.numel()].view(like.shape)


def dropout_add(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
    *,
    draw: Callable[[Tensor, Tensor, float], Tensor | None] = mask,
) -> Tensor:
    """Return residual + dropout(input + bias); input (..., n), bias (n,), residual like input, seed one int64."""
    dtype = compute_dtype(input, bias, residual)
    keep = draw(input, seed, p)
    y = dropout_add_element(input.to(dtype), widened(dtype, bias), widened(dtype, residual), keep, p)
    dtype = input.dtype if residual is None else residual.dtype
    return y.to(dtype).contiguous()


def dropout_backward_dtype(grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which dropout_add's backward computes."""
    return torch.float64 if torch.float64 in (dtype, bias_dtype) else compute_dtype(grad)


def dropout_add_backward(
    grad: Tensor,
    seed: Tensor,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
    *,
    draw: Callable[[Tensor, Tensor, float], Tensor | None] = mask,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dropout_add's gradients for (input, bias), in their dtypes; None if not requested by output_mask.

    The residual's gradient is grad itself.
    """
    wide = dropout_backward_dtype(grad, dtype, bias_dtype)
    dx = dropped(grad.to(wide), draw(grad, seed, p), p)
    d_bias = over_rows(dx).to(bias_dtype) if output_mask[1] else None
    d_input = dx.to(dtype).contiguous() if output_mask[0] else None
    return d_input, d_bias
