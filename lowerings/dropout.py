"""``fused::dropout_add`` → Inductor IR: the generator is part of the element function, so the mask is no tensor.

An element's index is row-major in its own tensor, whatever the kernel's order is, so eager and compiled masks are the
same. Inductor simplifies it to the kernel's own index, of which a thread has some contiguous ones. LLVM then finds that
four of them call the generator with the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import register_lowering, to_dtype
from torch._inductor.virtualized import ops

from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.lowerings import operators  # whole: it may be half way through its own import

if TYPE_CHECKING:
    from torch_fused_ops.lowerings.operators import Box, Index, Load, Value


def _row_major(size: Sequence[Any]) -> list[Load]:
    """(counter, lane) of an element, as in ``formulas.row_major``."""
    strides = ir.FlexibleLayout.contiguous_strides(list(size))

    def place(index: Index) -> Value:
        return ops.index_expr(sum(i * stride for i, stride in zip(index, strides, strict=True)), torch.int64)

    return [lambda index: ops.bitwise_right_shift(place(index), ops.constant(2, torch.int64)), place]


def _random(size: Sequence[Any], seed: Box, p: float) -> list[Load | None]:
    """The generator's loads; None for each where nothing is random."""
    if formulas.keep_threshold(p) in (0, 2**32):
        return [None, None, None]
    load, ndim = seed.make_loader(), len(seed.get_size())
    return [*_row_major(size), lambda _: load([0] * ndim)]


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


def _unrounded_grad(grad: Tensor, d_input: Tensor, p: float) -> Tensor:
    """The input's gradient before it was rounded to d_input: 0 where that is, which is where it was dropped."""
    scaled = torch.where(torch.isnan(d_input), d_input, grad * formulas.keep_scale(p))
    return torch.where(d_input == 0, 0.0, scaled)


def _dropout_add_backward(
    grad: Box,
    seed: Box,
    p: float,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Box | None, ...]:
    size, d_input, d_bias = grad.get_size(), None, None
    shows_zeros = (
        torch.finfo(dtype).tiny <= torch.finfo(grad.get_dtype()).tiny
    )  # a gradient is 0 in dtype only if it is 0
    if torch.float64 in (dtype, bias_dtype):
        grad = to_dtype(grad, torch.float64)
    e = operators._Elementwise(size, (grad, operators._here), integers=_random(size, seed, p))
    if output_mask[0]:
        d_input = e.node(formulas.dropout_input_grad, p, dtype=dtype)
        operators._before_sums(output_mask[1:], d_input)
    if output_mask[1] and bias_dtype is not None:
        if d_input is not None and shows_zeros:
            # Where a thread adds columns the compiler shares few calls of the generator: 48 instructions an element on
            # sm_90, for bfloat16. Reading one more tensor takes 9, and as long as 14.
            terms = operators._Elementwise(size, (grad, operators._here), (d_input, operators._here)).node(
                _unrounded_grad, p
            )
        else:
            terms = e.node(formulas.dropout_input_grad, p)
        d_bias = operators._sum_rows(terms, bias_dtype)
    return d_input, d_bias


register_lowering(torch.ops.fused.dropout_add.default, type_promotion_kind=None)(_dropout_add)
register_lowering(torch.ops.fused.dropout_add_backward.default, type_promotion_kind=None)(_dropout_add_backward)
