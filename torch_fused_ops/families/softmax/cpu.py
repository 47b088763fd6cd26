"""``fused::scaled_masked_softmax`` on the CPU, in eager mode: PyTorch's own softmax, and one tensor to work in.

PyTorch's softmax of a row is our function of scores that are scaled and masked, but for rows that are masked
altogether, and it is one pass where its parts would be four. It may write over its own argument (each row is read
before it is written), so scaling, masking and softmax share one tensor, which becomes the result: on large tensors
most of what a step costs is the pages of its new tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fused_ops.families.softmax import formulas
from torch_fused_ops.formulas import compute_dtype

aten = torch.ops.aten

# Up to which |score| rounding scale·x keeps the precision contract, and nothing need be taken off first. Float32: two
# scores are off by half an ulp each, and a difference of up to 58 by two halves: 2⁻²⁴ · (2 · 24 + 2 · 58) is 1e-5.
# Float16 and bfloat16 are computed in float32, with room.
_LARGEST_SCORE = {torch.float32: 24.0, torch.float64: 1024.0, torch.float16: 1024.0, torch.bfloat16: 1024.0}


def _exact(factor: float) -> bool:
    """True if factor · x is exact, or nearly, and finite in any dtype: a power of 2 up to 1."""
    return abs(factor) <= 1.0 and abs(math.frexp(factor)[0]) == 0.5


def _times(x: Tensor, own: bool, factor: float) -> tuple[Tensor, bool]:
    """x · factor, in x where that is ours, and whether the result is."""
    if factor == 1.0:
        return x, own
    return (x.mul_(factor) if own else x * factor), True


def _hide(x: Tensor, own: bool, hidden: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """x with −∞ where hidden, in x where that is ours, and whether the result is."""
    for closed in hidden:
        x, own = (x.masked_fill_(closed, -torch.inf) if own else x.masked_fill(closed, -torch.inf)), True
    return x, own


def _softmax(x: Tensor, own: bool) -> Tensor:
    return aten._softmax.out(x, -1, False, out=x) if own and x.is_contiguous() else torch.softmax(x, -1)


def _zero_closed_rows(y: Tensor, input: Tensor, sign: float, hidden: Sequence[Tensor]) -> Tensor:
    """y with 0 for the rows of nothing but −∞, for which PyTorch's softmax is NaN."""
    lost = y.select(-1, 0).isnan()
    if lost.any():
        scores, _ = _hide(input[lost].float().mul_(sign), True, [closed[lost] for closed in hidden])
        closed_rows = lost.index_put((lost,), (scores == -torch.inf).all(-1))
        y.masked_fill_(closed_rows.unsqueeze(-1), 0.0)
    return y


def scaled_masked_softmax(
    input: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float = 1.0, *window: int
) -> Tensor:
    """softmax(scale·input) where nothing masks it; see ``formulas.scaled_masked_softmax``."""
    if input.numel() == 0:
        return input.new_empty(input.shape)
    dtype = compute_dtype(input, sink)
    sign, size = formulas.split_scale(scale, dtype)
    outside = formulas.outside_window(input, *window)
    hidden = [t.expand(input.shape) for t in (mask, outside) if t is not None]
    factor = sign * size
    # PyTorch's softmax computes float16 and bfloat16 in float32 and rounds once: nothing need be widened.
    exact = sink is None and _exact(factor)
    wide = input.dtype != dtype and not exact
    x = input.to(dtype) if wide else input
    is_small = exact
    if sink is None and sign and not exact:
        low, high = torch.aminmax(input)
        is_small = max(-low.item(), high.item()) * size <= _LARGEST_SCORE[input.dtype]  # not NaN: Python's max keeps it
    if is_small:
        y = _zero_closed_rows(_softmax(*_hide(*_times(x, wide, factor), hidden)), input, sign, hidden)
    else:
        x, own = _hide(*_times(x, wide, sign), hidden)
        top = x.amax(-1, keepdim=True)
        peak = formulas.softmax_peak(top)
        x = (x.sub_(peak) if own else x - peak).mul_(size)
        if sink is None:
            y = _zero_closed_rows(_softmax(x, True), input, sign, hidden)
        else:
            y = x.exp_()
            heads = sink.to(dtype).view(-1, 1, 1)
            y.mul_(formulas.softmax_factor(top, y.sum(-1, keepdim=True), heads, size))
    y = y.to(input.dtype)
    return y if y.is_contiguous() else y.contiguous()


def _input_grad(g: Tensor, own: bool, y: Tensor, scale: float) -> Tensor:
    """scale · y · (g − Σ g·y), in g where that is ours."""
    if own and g.is_contiguous():
        d: Tensor = aten._softmax_backward_data.out(g, y, -1, y.dtype, grad_input=g)
    else:
        d = aten._softmax_backward_data.default(g, y, -1, y.dtype)
    return d if scale == 1.0 else d.mul_(scale)


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
    """The gradients of scaled_masked_softmax for (input, sink); None where output_mask says no."""
    if output.numel() == 0:
        d_sink = output.new_zeros(output.shape[-3:-2], dtype=sink_dtype) if output_mask[1] else None
        return output.new_empty(output.shape) if output_mask[0] else None, d_sink
    dtype = torch.float64 if sink_dtype == torch.float64 else compute_dtype(grad, output)
    d_input = d_sink = None
    wide_enough = dtype == output.dtype or dtype != torch.float64  # torch's own works in float32 on halves
    if not output_mask[1] and grad.dtype == output.dtype and wide_enough and _exact(scale):
        d_input = _input_grad(grad, False, output, scale)
    else:
        g, y = grad.to(dtype), output.to(dtype)
        if output_mask[1]:
            inner, total = (g * y).sum(-1, keepdim=True), y.sum(-1, keepdim=True)
            terms = formulas.softmax_sink_grad(inner, total).double()  # so that their order costs nothing
            heads = terms.ndim - 3
            d_sink = terms.sum([a for a in range(terms.ndim) if a != heads]).to(sink_dtype)
        if output_mask[0]:
            d_input = _input_grad(g, grad.dtype != dtype, y, scale).to(output.dtype)
    return d_input if d_input is None or d_input.is_contiguous() else d_input.contiguous(), d_sink
