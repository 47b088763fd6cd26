"""What the operators compute: their formulas on elements, in plain torch, and what they are made of.

An *element function* says what happens to one element: it takes tensors that broadcast together, already widened, and
returns unrounded results. The operators in plain torch (``operators/eager.py``), the CPU kernels and, traced on
scalars, Inductor's lowerings are all made of this text. Dropout's and softmax's operators, which are no such formulas,
stand here whole.

Widening: float16 and bfloat16 are computed in float32, float32 in float32, anything together with float64 in float64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from torch_fused_ops import activations

__all__ = [
    "CLAMP_KEEPS_BOUNDS",
    "FP8",
    "LAYOUTS",
    "PHILOX_FACTORS",
    "PHILOX_KEY_STEPS",
    "PHILOX_ROUNDS",
    "Gradients",
    "Spelling",
    "act_element",
    "act_input_grads",
    "clamped",
    "compute_dtype",
    "dropout_add",
    "dropout_add_at",
    "dropout_add_backward",
    "dropout_add_element",
    "dropout_backward_dtype",
    "dropout_factor",
    "dropout_input_grad",
    "glu_element",
    "glu_input_grads",
    "keep_scale",
    "keep_threshold",
    "load_fp8",
    "outside_window",
    "over_rows",
    "pack",
    "philox",
    "room",
    "row_major",
    "scaled_masked_softmax",
    "scaled_masked_softmax_backward",
    "softmax_factor",
    "softmax_input_grad",
    "softmax_peak",
    "softmax_sink_grad",
    "split_scale",
    "store_fp8",
    "unpack",
    "widened",
    "window_edges",
    "word",
]

Gradients: TypeAlias = tuple[Tensor | None, ...]  # one for each tensor of an operator; None where it is not wanted

LAYOUTS = ("halves", "interleaved", "swapped")


# ---- element functions ---------------------------------------------------------------------------------------------


class Spelling(Protocol):
    """An activation in other calls than the table's, which stands for its name in the formulas."""

    def value(self, x: Tensor, /) -> Tensor:
        """f(x)."""

    def input_grad(self, grad: Tensor, x: Tensor, /) -> Tensor:
        """grad · f'(x)."""


def _spelled(activation: str | Spelling) -> Spelling:
    return activations.get(activation) if isinstance(activation, str) else activation


def act_element(x: Tensor, scale: Tensor | None, activation: str | Spelling) -> Tensor:
    """act(x) · scale."""
    y = _spelled(activation).value(x)
    return y if scale is None else y * scale


def act_input_grads(grad: Tensor, x: Tensor, scale: Tensor | None, activation: str | Spelling) -> tuple[Tensor]:
    """grad · scale · act'(x)."""
    dx = _spelled(activation).input_grad(grad, x)
    return (dx if scale is None else dx * scale,)


def _clamp_keeps_its_bounds() -> bool:
    """Whether torch.clamp's gradient at a bound is 1 (until 2.13) or 0 (2.15). Ours follows: fusing changes nothing."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(1, device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(torch.clamp(x, max=1.0), x)[0])


CLAMP_KEEPS_BOUNDS = _clamp_keeps_its_bounds()
_cut = torch.gt if CLAMP_KEEPS_BOUNDS else torch.ge


def clamped(gate: Tensor, up: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """gate cut above, up on both sides; clamp None is none."""
    if clamp is None:
        return gate, up
    return torch.clamp(gate, max=clamp), torch.clamp(up, -clamp, clamp)


def glu_element(
    gate: Tensor, up: Tensor, scale: Tensor | None, activation: str | Spelling, up_offset: float, clamp: float | None
) -> Tensor:
    """act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · scale."""
    gate, up = clamped(gate, up, clamp)
    y = _spelled(activation).value(gate) * (up + up_offset if up_offset else up)
    return y if scale is None else y * scale


def glu_input_grads(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    scale: Tensor | None,
    activation: str | Spelling,
    up_offset: float,
    clamp: float | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up. At the clamp's bounds as torch.clamp's own: see CLAMP_KEEPS_BOUNDS."""
    act = _spelled(activation)
    g, u = clamped(gate, up, clamp)
    if scale is not None:
        grad = grad * scale
    d_gate = act.input_grad(grad * (u + up_offset if up_offset else u), g)
    d_up = grad * act.value(g)
    if clamp is not None:
        d_gate = torch.where(_cut(gate, clamp), 0.0, d_gate)
        d_up = torch.where(_cut(torch.abs(up), clamp), 0.0, d_up)
    return d_gate, d_up


# ---- shared pieces -------------------------------------------------------------------------------------------------


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is float64, else float32."""
    for t in tensors:  # a loop: any() and a generator cost a call on few elements 0.7 µs
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def room(t: Tensor | None, wanted: bool) -> Tensor | None:
    """For the gradient of t: contiguous, and not filled; None where there is no t, or it is not wanted."""
    return t.new_empty(t.shape) if wanted and t is not None else None


def unpack(packed: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of a packed last axis, as views.

    "halves" is [gate | up], "interleaved" is g0 u0 g1 u1 …, "swapped" is [up | gate], as in ``F.glu``.
    """
    if layout == "interleaved":
        return packed[..., ::2], packed[..., 1::2]
    n = packed.shape[-1] // 2
    first, second = packed[..., :n], packed[..., n:]
    return (second, first) if layout == "swapped" else (first, second)


def pack(gate: Tensor, up: Tensor, layout: str) -> Tensor:
    """The inverse of unpack."""
    if layout == "interleaved":
        return torch.stack((gate, up), -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat((up, gate) if layout == "swapped" else (gate, up), -1)


def widened(dtype: torch.dtype, t: Tensor | None) -> Tensor | None:
    """t in ``dtype``, if there is one."""
    return None if t is None else t.to(dtype)


def over_rows(t: Tensor) -> Tensor:
    """The sum over all axes but the last."""
    return t.sum(tuple(range(t.ndim - 1))) if t.ndim > 1 else t


FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(FP8).max  # 448
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def store_fp8(x: Tensor, halves: bool = False) -> tuple[Tensor, Tensor]:
    """(stored, scale): x (..., n) as float8_e4m3fn with one float32 scale for each row, (...).

    scale = amax(|row|) / 448, so that the largest element is float8_e4m3fn's largest; 1 where that is no normal number,
    a row of zeros among them. Float64 goes through float32. A row with an infinity or a NaN loads as NaN, all of it:
    its scale is infinite or NaN.

    Args:
        x: of any dtype and strides.
        halves: whether to write it as two, whose loop a compiler fuses with an activation's of packed data.
    """
    x = x.to(torch.float32) if x.dtype == torch.float64 else x  # a float32 factor widens the others
    if x.shape[-1] == 0:
        return x.to(FP8, memory_format=torch.contiguous_format), x.new_ones(x.shape[:-1], dtype=torch.float32)
    parts = unpack(x, "halves") if halves else (x,)
    sizes = (torch.linalg.vector_norm(part, math.inf, -1, dtype=torch.float32) for part in parts)
    largest = functools.reduce(torch.maximum, sizes).contiguous()
    scale = largest / _FP8_LARGEST
    # The factor is not made of the scale, which is stored: Inductor then joins halves without a pass of their own.
    factor = torch.where(scale < _FLOAT32_TINY, 1.0, torch.reciprocal(scale)).unsqueeze(-1)
    stored = [(part * factor).to(FP8, memory_format=torch.contiguous_format) for part in parts]
    return torch.cat(stored, -1) if halves else stored[0], torch.where(scale < _FLOAT32_TINY, 1.0, scale)


def load_fp8(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What store_fp8 stored, in ``dtype``: off by at most 2⁻⁴ of an element, or 2⁻¹⁰·scale where that is more."""
    return (stored.to(torch.float32) * scale.unsqueeze(-1)).to(dtype)


# ---- dropout -------------------------------------------------------------------------------------------------------

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

    CPUs: Inductor's vectors have no conversion between int32 and int64 for the 32 elements of a vector of bfloat16
    (forward: 32 ns an element, and 4 in int64).
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


def dropout_factor(
    counter: Tensor | None, lane: Tensor | None, seed: Tensor | None, p: float, dtype: torch.dtype
) -> Tensor | float:
    """keep/(1 − p) of the element with the row-major index 4·counter + lane mod 4, all int64.

    So four neighbors share one call of the generator, a word for each. A number, and nothing random, where the chance
    of being dropped is 0 or 1, or rounds to it.
    """
    threshold = keep_threshold(p)
    if counter is None or lane is None or seed is None or threshold in (0, 2**32):
        return keep_scale(p)
    w0, w1, w2, w3 = philox(word(counter), word(counter >> 32), seed)
    place = word(lane)
    odd, late = (place & 1) != 0, (place & 2) != 0
    bits = torch.where(late, torch.where(odd, w3, w2), torch.where(odd, w1, w0))
    scale = torch.full((), keep_scale(p), dtype=dtype, device=bits.device)
    # Of int32 both sides less 2³¹: its order is then that of unsigned words.
    is_narrow = bits.dtype == torch.int32
    kept = (bits ^ -(2**31)) >= threshold - 2**31 if is_narrow else (bits & _WORD) >= threshold
    return torch.where(kept, scale, 0.0)


def dropout_add_element(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    counter: Tensor | None,
    lane: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> Tensor:
    """(x + bias) · keep/(1 − p) + residual."""
    y = (x if bias is None else x + bias) * dropout_factor(counter, lane, seed, p, x.dtype)
    return y if residual is None else y + residual


def dropout_input_grad(
    grad: Tensor, counter: Tensor | None, lane: Tensor | None, seed: Tensor | None, p: float
) -> Tensor:
    """grad · keep/(1 − p): the gradient of the input, and, summed over rows, of the bias."""
    return grad * dropout_factor(counter, lane, seed, p, grad.dtype)


def row_major(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(counter, lane) of each element of a tensor of this shape."""
    index = torch.arange(math.prod(shape), device=device).view(tuple(shape))  # torch.Size makes symbols numbers
    return index >> 2, index


def dropout_add_at(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, places: tuple[Tensor, Tensor], seed: Tensor, p: float
) -> Tensor:
    """``dropout_add`` with the elements' (counter, lane); all that is given broadcasts to input's shape."""
    dtype = compute_dtype(input, bias, residual)
    y = dropout_add_element(input.to(dtype), widened(dtype, bias), widened(dtype, residual), *places, seed, p)
    return y.to(input.dtype if residual is None else residual.dtype)


def dropout_add(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """residual + dropout(input + bias); input (..., n), bias (n,), residual as input, seed int64 with one element."""
    return dropout_add_at(input, bias, residual, row_major(input.shape, input.device), seed.reshape(()), p)


def dropout_backward_dtype(grad: Tensor, dtype: torch.dtype, bias_dtype: torch.dtype | None) -> torch.dtype:
    """What dropout_add's backward computes in."""
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
    dx = dropout_input_grad(grad.to(wide), *row_major(grad.shape, grad.device), seed.reshape(()), p)
    d_bias = over_rows(dx).to(bias_dtype) if output_mask[1] else None
    return dx.to(dtype) if output_mask[0] else None, d_bias


# ---- softmax -------------------------------------------------------------------------------------------------------


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """(sign, size): a score is size · (sign · x), with sign −1, 0 or 1, and size above 0 and finite in ``dtype``.

    Softmax's argument is then size · (x' − max x'), which is as exact as x' − max x' however large scores are, where
    scale·x − max would lose what scale·x rounds off; and −∞ may stand for what is masked, whatever the scale.
    """
    finfo = torch.finfo(dtype)
    size = min(abs(scale), finfo.max)
    return (math.copysign(1.0, scale), size) if size >= finfo.tiny * finfo.eps else (0.0, 1.0)


def window_edges(causal: bool, window_left: int, window_right: int) -> tuple[int | None, int | None]:
    """(left, right): key j is open to query i where −left ≤ j − i − (sk − sq) ≤ right; None: without bound."""
    right = 0 if causal else window_right
    return (None if window_left < 0 else window_left), (None if right < 0 else right)


def outside_window(input: Tensor, causal: bool, window_left: int, window_right: int) -> Tensor | None:
    """(sq, sk), True where causality or the window closes a key to a query; None where neither does."""
    left, right = window_edges(causal, window_left, window_right)
    if left is None and right is None:
        return None
    sq, sk = input.shape[-2:]
    i = torch.arange(sk - sq, sk, device=input.device).unsqueeze(-1)
    j = torch.arange(sk, device=input.device)
    if left is None or right is None:
        return j > i + right if right is not None else j < i - (left or 0)
    return (j > i + right) | (j < i - left)


def softmax_peak(top: Tensor) -> Tensor:
    """A row's largest score, to be taken off its scores; 0 where all of them are −∞."""
    return torch.where(top == -torch.inf, 0.0, top)


def softmax_factor(top: Tensor, total: Tensor, sink: Tensor | None, size: float) -> Tensor:
    """What makes a row's weights exp(size · (x − top)), of sum ``total``, its probabilities; finite where all are 0.

    The sink's weight beside theirs is exp(d), d = sink − size·top: in float64, for both may be large, and against the
    larger of the two, for d may be too large for exp.
    """
    closed = top == -torch.inf
    total = torch.where(closed, 1.0, total)
    if sink is None:
        return torch.reciprocal(total)
    exact = sink.double() - top.double() * size  # beyond 4096 only the sink counts, and float32 may have no such number
    exact = torch.where((exact > 4096.0) & (exact < torch.inf), 4096.0, exact)
    d = torch.where(closed, 0.0, exact.to(total.dtype))
    larger = torch.clamp_min(d.detach(), 0.0)  # any number gives the same result: no derivative goes through it
    less = torch.exp(-larger)
    return less / (total * less + torch.exp(d - larger))


def softmax_input_grad(grad: Tensor, y: Tensor, inner: Tensor, scale: float) -> Tensor:
    """scale · y · (grad − Σ grad·y)."""
    return y * (grad - inner) * scale


def softmax_sink_grad(inner: Tensor, total: Tensor) -> Tensor:
    """−(1 − Σ y) · Σ grad·y: summed over a head's rows, the gradient of its sink."""
    return (total - 1.0) * inner


def scaled_masked_softmax(
    input: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Tensor:
    """softmax(scale·input) over the last axis, with a sink beside the row's scores, where nothing masks a score.

    input (..., sq, sk); mask bool, broadcastable to it, True is masked; sink (heads,), heads = input.shape[-3]. A row
    that is masked altogether is 0, and so are its derivatives.
    """
    dtype = compute_dtype(input, sink)
    sign, size = split_scale(scale, dtype)
    x = input.to(dtype)
    if input.shape[-1] == 0:
        return x.to(input.dtype, memory_format=torch.contiguous_format)
    x = x if sign == 1.0 else x * sign
    for hidden in (mask, outside_window(input, causal, window_left, window_right)):
        x = x if hidden is None else torch.masked_fill(x, hidden, -torch.inf)
    top = torch.amax(x.detach(), -1, keepdim=True)  # any other number in its place gives the same: no derivative
    weight = torch.exp((x - softmax_peak(top)) * size)
    head = None if sink is None else sink.to(dtype).view(-1, 1, 1)
    y = weight * softmax_factor(top, weight.sum(-1, keepdim=True), head, size)
    return y.to(input.dtype, memory_format=torch.contiguous_format)


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
    """The gradients of scaled_masked_softmax for (input, sink), from its output; None where output_mask says no.

    The output is 0 where anything masks: the window is given so that kernels need not read what is outside it.
    """
    dtype = torch.float64 if sink_dtype == torch.float64 else compute_dtype(grad, output)
    g, y = grad.to(dtype), output.to(dtype)
    inner = (g * y).sum(-1, keepdim=True)
    d_input = d_sink = None
    if output_mask[0]:
        d_input = softmax_input_grad(g, y, inner, scale).to(output.dtype, memory_format=torch.contiguous_format)
    if output_mask[1]:
        terms = softmax_sink_grad(inner, y.sum(-1, keepdim=True))
        heads = terms.ndim - 3
        d_sink = terms.sum([a for a in range(terms.ndim) if a != heads]).to(sink_dtype)
    return d_input, d_sink
