"""``fused::dropout_add`` → Inductor IR: the generator is part of the element function, so the mask is no tensor.

The index of an element is that in its own tensor, row-major, whatever the kernel's order is: eager and compiled masks
are the same. Inductor simplifies it to the kernel's own index, of which a thread has some contiguous ones, and LLVM
then finds that four of them ask the generator for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, to_dtype
from torch._inductor.virtualized import ops

from torch_fused_ops import formulas
from torch_fused_ops.lowerings import operators  # whole: it may be half way through its own import

if TYPE_CHECKING:
    from torch_fused_ops.lowerings.operators import Box, Index, Load, Value


def _row_major(size: Sequence[Any]) -> list[Load]:
    """(counter, lane) of an element, as in ``formulas.row_major``."""
    strides = ir.FlexibleLayout.contiguous_strides(list(size))

    def place(index: Index) -> Value:
        return ops.index_expr(sum(i * stride for i, stride in zip(index, strides, strict=True)), torch.int64)

    return [lambda index: ops.bitwise_right_shift(place(index), ops.constant(2, torch.int64)), place]


def _single(box: Box) -> Load:
    """A tensor's one element."""
    load, ndim = box.make_loader(), len(box.get_size())
    return lambda _: load([0] * ndim)


def _random(size: Sequence[Any], seed: Box, p: float) -> list[Load | None]:
    """What the generator reads, where anything is random."""
    none: list[Load | None] = [None, None, None]
    return none if formulas.keep_threshold(p) in (0, 2**32) else [*_row_major(size), _single(seed)]


def _dropout_add(input: Box, bias: Box | None, residual: Box | None, seed: Box, p: float) -> Box:
    size = input.get_size()
    e = operators._Elementwise(
        size,
        (input, operators._here),
        (bias, operators._column),
        (residual, operators._here),
        integers=_random(size, seed, p),
    )
    return e.node(formulas.dropout_add_element, p, dtype=(input if residual is None else residual).get_dtype())


def _kept_grad(grad: Tensor, d_input: Tensor, p: float) -> Tensor:
    """The input's gradient before it was rounded to d_input: 0 where that is, which is where nothing was kept."""
    kept = torch.where(torch.isnan(d_input), d_input, grad * formulas.keep_scale(p))
    return torch.where(d_input == 0, 0.0, kept)


def _shows_zeros(grad: torch.dtype, d_input: torch.dtype) -> bool:
    """Whether a gradient of that dtype is 0 in the other only where it is 0."""
    return torch.finfo(d_input).tiny <= torch.finfo(grad).tiny


def _dropout_add_backward(
    grad: Box,
    seed: Box,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Box | None, ...]:
    size, d_input, d_bias, shows_zeros = grad.get_size(), None, None, _shows_zeros(grad.get_dtype(), dtype)
    if torch.float64 in (dtype, bias_dtype):
        grad = to_dtype(grad, torch.float64)
    e = operators._Elementwise(size, (grad, operators._here), integers=_random(size, seed, p))
    if output_mask[0]:
        d_input = e.node(formulas.dropout_input_grad, p, dtype=dtype)
        operators._before_sums(output_mask[1:], d_input)
    if output_mask[1] and bias_dtype is not None:
        if d_input is not None and shows_zeros:
            # Where a thread adds up columns the compiler shares few calls of the generator: 48 instructions an element
            # on sm_90, for bfloat16, where reading one more tensor takes 9, and as long as 14.
            terms = operators._Elementwise(size, (grad, operators._here), (d_input, operators._here)).node(
                _kept_grad, p
            )
        else:
            terms = e.node(formulas.dropout_input_grad, p)
        d_bias = operators._sum_rows(terms, bias_dtype)
    return d_input, d_bias


register_lowering(torch.ops.fused.dropout_add.default, type_promotion_kind=None)(_dropout_add)
register_lowering(torch.ops.fused.dropout_add_backward.default, type_promotion_kind=None)(_dropout_add_backward)
