"""``fused::scaled_masked_softmax`` → Inductor IR: two reductions over a row, and pointwise nodes around them.

The reductions inline the loaders of scores, masks and weights, so operators before (a bias, a cast) and after (a
dropout, a cast) run in the same kernel. Causality and the window are index expressions: they read no memory. On a GPU,
hidden scores are not loaded either.

The row's maximum is computed first, then the sum. Inductor's reduction for both (``prepare_softmax_online``) saves one
read of a long row from the cache, but takes twice the instructions (rows of 4096 on sm_90: 61 per element instead of
26). It also needs scores that are already scaled and rounded.

The formulas for a row (its factor, its sink) are traced from ``formulas.py``. The formula for an element is one line in
this file: on a GPU its exponential has base 2, like the hardware's instruction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering, to_dtype
from torch._inductor.virtualized import V, ops
from torch.utils._sympy.functions import FloorDiv

from torch_fused_ops.families.softmax import formulas
from torch_fused_ops.lowerings import operators, programs  # as modules, which may still be importing

if TYPE_CHECKING:
    from torch_fused_ops.lowerings.programs import Box, Index, Load, Value

aten = torch.ops.aten


def _row(index: Index) -> Index:
    return [*index[:-1], 0]


def _node(like: Box, dtype: torch.dtype, ranges: Sequence[Any], inner: Callable[[Index], Value]) -> Box:
    return ir.Pointwise.create(device=like.get_device(), dtype=dtype, inner_fn=inner, ranges=list(ranges))


def _window(size: Sequence[Any], causal: bool, window_left: int, window_right: int, group: int = 1) -> Load | None:
    """Return a function of the index that is true if a query sees a key of the group; None if queries see all keys."""
    left, right = formulas.window_edges(causal, window_left, window_right)
    if left is None and right is None:
        return None
    shift = size[-1] - size[-2]

    def number(expression: Any) -> Value:
        return ops.index_expr(expression, torch.int64)

    def is_open(index: Index) -> Value:
        i, j = index[-2:]
        j = FloorDiv(j, group) * group if group > 1 else j
        sides = []
        if left is not None:
            sides.append(ops.ge(number(j + group - 1), number(i + shift - left)))
        if right is not None:
            sides.append(ops.le(number(j), number(i + shift + right)))
        return functools.reduce(ops.logical_and, sides)

    return is_open


# Loads are masked in groups of this size, because loads that are masked for single elements are not vectorized
# (bfloat16, causal, backward, rows of 2048 on sm_90: 31.5 instructions per element for single keys, 23.2 for groups).
_GROUP = 8


def _unread(load: Load, group_is_open: Load | None, otherwise: float) -> Load:
    """Return a load that reads memory only if a key of the group is visible, and else returns ``otherwise``."""
    if group_is_open is None:
        return load
    return lambda index: ops.masked(group_is_open(index), lambda: load(index), otherwise)


def _row_node(function: Callable[..., Any], scalars: tuple[Any, ...], *boxes: Box | None) -> Box:
    """Apply a function of ``formulas.py`` to one value per row."""
    present = [b for b in boxes if b is not None]
    first, loads = present[0], [b.make_loader() for b in present]
    is_present, dtype = tuple(b is not None for b in boxes), first.get_dtype()
    (program,) = programs.programs_of(function, is_present, scalars, dtype, first.get_device().type)
    return _node(first, dtype, first.get_size(), lambda index: program(loads, index))


def _softmax(
    input: Box,
    mask: Box | None,
    sink: Box | None,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> Box:
    shape = input.get_size()
    if V.graph.sizevars.statically_known_equals(shape[-1], 0):
        return lowerings[aten.clone.default](input)
    input.mark_reuse(2)  # read twice: Inductor should compute an expensive input only once
    double = torch.float64 in (input.get_dtype(), None if sink is None else sink.get_dtype())
    dtype = torch.float64 if double else torch.float32
    on_gpu = programs.is_on_gpu(input)
    sign, size = formulas.split_scale(scale, dtype)
    load = programs.widening_load(input, lambda index: index, dtype)
    is_open = _window(shape, causal, window_left, window_right)
    group_is_open = _window(shape, causal, window_left, window_right, _GROUP) if on_gpu else None
    hidden = None if mask is None else lowerings[aten.expand.default](mask, shape).make_loader()

    def visible(index: Index) -> Value:
        x = load(index)
        if sign != 1.0:
            x = ops.mul(x, ops.constant(sign, dtype))
        if hidden is not None:
            x = ops.where(hidden(index), ops.constant(-math.inf, dtype), x)
        return x

    seen = _unread(visible, group_is_open, -math.inf)

    def scores(index: Index) -> Value:
        if is_open is None:
            return seen(index)
        return ops.where(is_open(index), seen(index), ops.constant(-math.inf, dtype))

    (power,) = programs.programs_of(torch.exp2, (True,), (), dtype, input.get_device().type)
    factor = min(size / math.log(2), torch.finfo(dtype).max)
    top = lowerings[aten.amax.default](_node(input, dtype, shape, scores), [len(shape) - 1], True)
    peaks = _row_node(formulas.softmax_peak, (), top).make_loader()

    def exponent(index: Index) -> Value:
        x = ops.sub(scores(index), peaks(_row(index)))
        return x if factor == 1.0 else ops.mul(x, ops.constant(factor, dtype))

    weights = _node(input, dtype, shape, lambda index: power([exponent], index))
    if not on_gpu:
        weights.realize()  # on a CPU, reading a row from the cache is cheaper than a second exponential
    weight_of = weights.make_loader()
    total = lowerings[aten.sum.dim_IntList](weights, [len(shape) - 1], True)
    if sink is not None:
        sink = _node(input, dtype, top.get_size(), programs.widening_load(sink, lambda index: index[-3:-2], dtype))
    factors = _row_node(formulas.softmax_factor, (size,), top, total, sink).make_loader()

    def result(index: Index) -> Value:
        return ops.to_dtype(ops.mul(weight_of(index), factors(_row(index))), input.get_dtype())

    return _node(input, input.get_dtype(), shape, result)


def _softmax_backward(
    grad: Box,
    output: Box,
    scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    sink_dtype: torch.dtype | None,
    output_mask: Sequence[bool],
) -> tuple[Box | None, Box | None]:
    shape = output.get_size()
    double = torch.float64 in (grad.get_dtype(), output.get_dtype(), sink_dtype)
    dtype = torch.float64 if double else torch.float32
    grad.mark_reuse(2)
    output.mark_reuse(2)
    group_is_open = _window(shape, causal, window_left, window_right, _GROUP) if programs.is_on_gpu(output) else None
    loads = [programs.widening_load(box, programs.element_index, dtype) for box in (grad, output)]
    g, y = (_unread(load, group_is_open, 0.0) for load in loads)
    last = [len(shape) - 1]
    product = _node(output, dtype, shape, lambda index: ops.mul(g(index), y(index)))
    inner = lowerings[aten.sum.dim_IntList](product, last, True)
    d_input = d_sink = None
    if output_mask[0]:
        inner_of = inner.make_loader()
        (program,) = programs.programs_of(
            formulas.softmax_input_grad, (True, True, True), (scale,), dtype, output.get_device().type
        )

        def d(index: Index) -> Value:
            return ops.to_dtype(program((g, y, lambda index: inner_of(_row(index))), index), output.get_dtype())

        d_input = _node(output, output.get_dtype(), shape, d)
        operators.before_sums(output_mask[1:], d_input)
    if output_mask[1] and sink_dtype is not None:
        total = lowerings[aten.sum.dim_IntList](_node(output, dtype, shape, y), last, True)
        terms = _row_node(formulas.softmax_sink_grad, (), inner, total)
        terms.realize()  # so that the kernel that adds the terms reads one number per row, not two
        axes = [a for a in range(len(shape)) if a != len(shape) - 3]
        d_sink = to_dtype(lowerings[aten.sum.dim_IntList](terms, axes), sink_dtype)
    return d_input, d_sink


# type_promotion_kind=None: promotion would load wider values.
register_lowering(torch.ops.fused.scaled_masked_softmax.default, type_promotion_kind=None)(_softmax)
register_lowering(torch.ops.fused.scaled_masked_softmax_backward.default, type_promotion_kind=None)(_softmax_backward)
