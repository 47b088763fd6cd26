"""Compute attention's softmax in plain torch: window, formula on rows, operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.formulas import compute_dtype


def split_scale(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Split the scale into sign (−1, 0 or 1) and size (positive, finite in ``dtype``): a score is size · (sign · x).

    An exponent is then size · (x' − max x') with x' = sign · x, as exact as the difference, for scores of any size.
    In scale·x − max the rounding error of scale·x would remain. And masked scores can be −∞ for every scale.
    """
    finfo = torch.finfo(dtype)
    size = min(abs(scale), finfo.max)
    return (math.copysign(1.0, scale), size) if size >= finfo.tiny * finfo.eps else (0.0, 1.0)


def window_edges(causal: int = False, window_left: int = -1, window_right: int = -1) -> tuple[int | None, int | None]:
    """Return (left, right): query i sees key j if −left ≤ j − i − (sk − sq) ≤ right. None means no bound."""
    right = 0 if causal else window_right
    return (None if window_left < 0 else window_left), (None if right < 0 else right)


def outside_window(input: Tensor, *window: int) -> Tensor | None:
    """Return a mask (sq, sk), True where causality or the window hides a key from a query; None if they hide none."""
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
    """Return the number to subtract from a row's scores: the largest score, or 0 if all scores are −∞."""
    return torch.where(top == -torch.inf, 0.0, top)


def softmax_factor(top: Tensor, total: Tensor, sink: Tensor | None, size: float) -> Tensor:
    """Return the factor that turns a row's weights exp(size · (x − top)), with sum ``total``, into probabilities.

    It is finite if all weights are 0. The sink adds a weight exp(d) with d = sink − size·top. Both terms may be large,
    so d is computed in float64. exp(d) may overflow, so all weights are divided by the larger of exp(d) and 1.
    """
    is_masked = top == -torch.inf
    total = torch.where(is_masked, 1.0, total)
    if sink is None:
        return torch.reciprocal(total)
    exact = sink.double() - top.double() * size  # beyond 4096 only the sink counts, and float32 may overflow
    exact = torch.where((exact > 4096.0) & (exact < torch.inf), 4096.0, exact)
    d = torch.where(is_masked, 0.0, exact.to(total.dtype))
    shift = torch.clamp_min(d.detach(), 0.0)  # the result does not depend on it, so it needs no derivative
    weight = torch.exp(-shift)
    return weight / (total * weight + torch.exp(d - shift))


def softmax_input_grad(grad: Tensor, y: Tensor, inner: Tensor, scale: float) -> Tensor:
    """Return scale · y · (grad − inner), with inner = Σ grad·y."""
    return y * (grad - inner) * scale


def softmax_sink_grad(inner: Tensor, total: Tensor) -> Tensor:
    """Return −(1 − Σ y) · Σ grad·y of a row. The sum over a head's rows is the gradient of the head's sink."""
    return (total - 1.0) * inner


def scaled_masked_softmax(
    input: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float = 1.0, *window: int
) -> Tensor:
    """Return softmax(scale·input) over the last axis of unmasked scores, with a sink as one more score per row.

    input (..., sq, sk); mask bool, broadcastable to input, True is masked; sink (heads,), heads = input.shape[-3];
    window: causal, window_left, window_right. A fully masked row and its derivatives are 0.
    """
    dtype = compute_dtype(input, sink)
    sign, size = split_scale(scale, dtype)
    x = input.to(dtype)
    if input.shape[-1] == 0:
        return x.to(input.dtype).clone(memory_format=torch.contiguous_format)
    x = x if sign == 1.0 else x * sign
    for hidden in (mask, outside_window(input, *window)):
        x = x if hidden is None else torch.masked_fill(x, hidden, -torch.inf)
    top = torch.amax(x.detach(), -1, keepdim=True)  # the result does not depend on it, so it needs no derivative
    weight = torch.exp((x - softmax_peak(top)) * size)
    head = None if sink is None else sink.to(dtype).view(-1, 1, 1)
    y = weight * softmax_factor(top, weight.sum(-1, keepdim=True), head, size)
    return y.to(input.dtype).contiguous()


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
    """Return scaled_masked_softmax's gradients for (input, sink) from its output; None if not requested.

    The output is 0 for masked scores. The window's arguments let kernels skip keys outside the window.
    """
    dtype = torch.float64 if sink_dtype == torch.float64 else compute_dtype(grad, output)
    g, y = grad.to(dtype), output.to(dtype)
    inner = (g * y).sum(-1, keepdim=True)
    d_input = d_sink = None
    if output_mask[0]:
        d_input = softmax_input_grad(g, y, inner, scale).to(output.dtype).contiguous()
    if output_mask[1]:
        terms = softmax_sink_grad(inner, y.sum(-1, keepdim=True))
        heads = terms.ndim - 3
        d_sink = terms.sum([a for a in range(terms.ndim) if a != heads]).to(sink_dtype)
    return d_input, d_sink
