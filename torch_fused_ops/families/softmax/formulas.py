"""Attention's softmax in plain torch: the window, the formula on rows, the operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.formulas import compute_dtype


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """(sign, size): a score is size · (sign · x), with sign −1, 0 or 1, and size above 0 and finite in ``dtype``.

    Softmax's argument is then size · (x' − max x'), which is as exact as x' − max x' however large scores are, where
    scale·x − max would lose what scale·x rounds off; and −∞ may stand for what is masked, whatever the scale.
    """
    finfo = torch.finfo(dtype)
    size = min(abs(scale), finfo.max)
    return (math.copysign(1.0, scale), size) if size >= finfo.tiny * finfo.eps else (0.0, 1.0)


def window_edges(causal: int = False, window_left: int = -1, window_right: int = -1) -> tuple[int | None, int | None]:
    """(left, right): key j is open to query i where −left ≤ j − i − (sk − sq) ≤ right; None: without bound."""
    right = 0 if causal else window_right
    return (None if window_left < 0 else window_left), (None if right < 0 else right)


def outside_window(input: Tensor, *window: int) -> Tensor | None:
    """(sq, sk), True where causality or the window closes a key to a query; None where neither does."""
    left, right = window_edges(*window)
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
    """The factor from a row's weights exp(size · (x − top)), of sum ``total``, to probabilities; finite if all are 0.

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
    input: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float = 1.0, *window: int
) -> Tensor:
    """softmax(scale·input) over the last axis, with a sink beside the row's scores, where nothing masks a score.

    input (..., sq, sk); mask bool, broadcastable to it, True is masked; sink (heads,), heads = input.shape[-3]; window:
    causal, window_left, window_right. A row that is masked altogether is 0, and so are its derivatives.
    """
    dtype = compute_dtype(input, sink)
    sign, size = split_scale(scale, dtype)
    x = input.to(dtype)
    if input.shape[-1] == 0:
        return x.to(input.dtype, memory_format=torch.contiguous_format)
    x = x if sign == 1.0 else x * sign
    for hidden in (mask, outside_window(input, *window)):
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
