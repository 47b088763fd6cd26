"""Lowerings of the declared operators: their formulas become Inductor IR. Generated code never calls a fused operator.

``programs.py`` turns a formula into a pointwise node. This file adds packed data, the gradients of biases and scales,
and sums over rows in two steps: over the rows of each block, then over the blocks. Inductor fuses the first step with
the summands. ``split_reductions.py`` chooses the blocks of compiled GPU code, and ``kernels/compiled.py`` chooses the
blocks of eager kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering, to_dtype
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv

from torch_fused_ops.declaration import DATA, PointwiseOperator, Signature, pointwise_operators
from torch_fused_ops.lowerings import compat, programs  # as modules, which may still be importing
from torch_fused_ops.lowerings.partition import VIEWS

if TYPE_CHECKING:
    from torch_fused_ops.lowerings.programs import Box, Index

aten = torch.ops.aten

ROWS_PER_BLOCK_KEY = "fused_rows_of_a_block"  # key of a node's meta: rows per block of its loops (split_reductions.py)
# For calls on a CPU with a bias gradient. SiLU, relu2 and SwiGLU, 1024², take 0.6 to 1.0 times the time without
# fusion; with 2 rows 0.85 to 1.3 times, with 8 rows 0.9 to 1.4 times.
_CPU_ROWS_PER_BLOCK = 4

# ---- packed data -----------------------------------------------------------------------------------------------------


def _packed(layout: str, n: Any, up: int) -> Callable[[Index], Index]:
    if layout == "interleaved":
        return lambda index: [*index[:-1], 2 * index[-1] + up]
    half = 1 - up if layout == "swapped" else up
    return lambda index: [*index[:-1], index[-1] + half * n]


def pack(gate: Box, up: Box, layout: str) -> Box:
    """Concatenate two (…, n) boxes to (…, 2n), in memory: a masked pointwise node would compute each half twice."""
    size = list(gate.get_size())
    with compat.concat_node():
        if layout != "interleaved":
            halves = [up, gate] if layout == "swapped" else [gate, up]
            return ir.TensorBox(ir.ConcatKernel.create(halves, len(size) - 1))
        pair = [lowerings[aten.unsqueeze.default](b, -1) for b in (gate, up)]
        stacked = ir.TensorBox(ir.ConcatKernel.create(pair, len(size)))
    return lowerings[aten.view.default](stacked, [*size[:-1], 2 * size[-1]])


# ---- sums over rows, in blocks ---------------------------------------------------------------------------------------


def before_sums(requested: Sequence[bool], *boxes: Box | None) -> None:
    """Realize results before the sums over them, if any sum is requested.

    A sum's cast to its dtype ends the loop over the summed values. Later results would need their own loop, which
    reads all inputs again (SiLU with a bias gradient: 748 instructions in the kernel's text, 462 with one loop).
    """
    for box in boxes:
        if any(requested) and box is not None:
            box.realize()


def _rows_of_a_block() -> int | None:
    """Return the rows per block of the current node; None if its loops do not go over blocks."""
    rows: int | None = V.graph.current_node.meta.get(ROWS_PER_BLOCK_KEY)
    return rows


def rows_in_blocks(box: Box) -> Box:
    """View a box (…, n) as (blocks, rows per block, n) if the current node's loops go over blocks."""
    block, (*rows, n) = _rows_of_a_block(), box.get_size()
    return box if block is None else lowerings[aten.view.default](box, [FloorDiv(sympy_product(rows), block), block, n])


def _leaves_blocks(node: torch.fx.Node) -> bool:
    """Return True if a node without blocks reads a result of this node, which has blocks."""
    through = (*VIEWS, operator.getitem)
    return any(
        _leaves_blocks(user) if user.target in through else ROWS_PER_BLOCK_KEY not in user.meta for user in node.users
    )


def sum_rows(box: Box, dtype: torch.dtype) -> Box:
    if _rows_of_a_block() is not None:
        box = lowerings[aten.sum.dim_IntList](box, [1])
        box.realize()  # otherwise the next sum would inline this sum of a few rows, which has no loop
    axes = list(range(len(box.get_size()) - 1))
    return to_dtype(lowerings[aten.sum.dim_IntList](box, axes) if axes else box, dtype)


def _is_row_by_row(box: Box, layout: str | None) -> bool:
    # In the interleaved layout, gate and up of a row are not contiguous.
    return _rows_of_a_block() is not None and not programs.is_on_gpu(box) and layout != "interleaved"


def _row_by_row(*boxes: Box, sums: bool = False) -> Box:
    """Concatenate boxes of (blocks, rows, n) along n, or sum along n, with a loop over (blocks, n) for each row.

    The sum of a block's few rows has the same loops, so Inductor fuses all of them and computes each value once.
    """
    blocks, count, n = boxes[0].get_size()
    rows = [lowerings[aten.select.int](box, 1, row) for row in range(count) for box in boxes]
    rows = [lowerings[aten.sum.dim_IntList](row, [1]) for row in rows] if sums else rows
    with compat.concat_node():
        written = ir.ConcatKernel.create([lowerings[aten.unsqueeze.default](row, 1) for row in rows], 1)
    return lowerings[aten.view.default](ir.TensorBox(written), [blocks, count, 1 if sums else len(boxes) * n])


def _over_blocks(op: PointwiseOperator, signature: Signature, lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a lowering to split the rows of arguments and results into blocks if its node has ``ROWS_PER_BLOCK_KEY``.

    On a CPU, it sets the key if a backward call on the same data computes a bias gradient.
    """
    kinds, data = [argument.kind for argument in signature.arguments], int(signature.is_backward)

    def viewed(box: Any, kind: str, rows: Sequence[Any]) -> Any:
        if not isinstance(box, ir.TensorBox) or kind not in (*DATA, "per_row"):
            return box
        columns = [] if kind == "per_row" else box.get_size()[-1:]
        return lowerings[aten.view.default](box, [*rows, *columns])

    def run(*args: Any) -> Any:
        rows, node = args[0].get_size()[:-1], V.graph.current_node
        fits = V.graph.sizevars.statically_known_multiple_of(sympy_product(rows), _CPU_ROWS_PER_BLOCK)
        if fits and not programs.is_on_gpu(args[0]) and _sums_bias(op, node, data):
            node.meta[ROWS_PER_BLOCK_KEY] = _CPU_ROWS_PER_BLOCK
        block = _rows_of_a_block()
        if block is None:
            return lowering(*args)
        blocks = [FloorDiv(sympy_product(rows), block), block]
        lowered = lowering(*(viewed(a, kind, blocks) for a, kind in zip(args, kinds, strict=False)))
        boxes = lowered if isinstance(lowered, tuple) else (lowered,)
        for box in filter(None, boxes) if _leaves_blocks(node) else ():
            box.realize()  # a GEMM would copy nested views of an unrealized box
        views = tuple(viewed(box, kind, rows) for box, kind in zip(boxes, signature.results, strict=True))
        return views if isinstance(lowered, tuple) else views[0]

    return run


def _sums_bias(op: PointwiseOperator, node: torch.fx.Node, data: int) -> bool:
    """Return True if a backward call on a call's data, argument number ``data``, computes a bias gradient."""
    bias = op.bias_index
    if bias is None or node.kwargs:
        return False
    calls = (user for user in cast(torch.fx.Node, node.args[data]).users if not user.kwargs)
    backward: list[Any] = [user.args for user in calls if user.target is op.backward.overload]
    return any(args[1 + bias] is not None and args[-1][bias] for args in backward)


# ---- the lowerings of a declared operator ----------------------------------------------------------------------------


class _Elements(NamedTuple):
    """A declared operator's formula on scalars, in the order in which its tensors are loaded (``_loads``)."""

    value: Callable[..., Tensor]
    grads: Callable[..., tuple[Tensor, ...]]
    scale_grad: Callable[..., Tensor]


@functools.cache  # the programs' cache has these functions as keys
def _elements(op: PointwiseOperator) -> _Elements:
    data = 2 if op.is_packed else op.num_data
    biases = 0 if op.bias_index is None else data if op.is_packed else 1
    count = data + biases

    def biased(values: Sequence[Any]) -> list[Any]:
        x = list(values[:data])
        for i, bias in enumerate(values[data:count]):
            x[i] = x[i] if bias is None else x[i] + bias
        return x

    def value(*values: Any) -> Tensor:
        return op.value(*biased(values), *values[count:])

    def grads(grad: Tensor, *values: Any) -> tuple[Tensor, ...]:
        return op.grads(grad, *biased(values), *values[count:])

    def scale_grad(grad: Tensor, *values: Any) -> Tensor:
        return grad * op.value(*biased(values), None, *values[count + 1 :])

    return _Elements(value, grads, scale_grad)


def _loads(
    op: PointwiseOperator, tensors: Sequence[Any], layout: str | None
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return the ranges (…, n) and the loads: data, biases, scale. Packed data and biases have two loads each."""
    *rows, n = tensors[0].get_size()
    to_index: list[Callable[[Index], Index]] = [programs.element_index]
    data: list[tuple[Any, Callable[[Index], Index]]] = [(t, programs.element_index) for t in tensors[: op.num_data]]
    if layout is not None:
        n = V.graph.sizevars.simplify(FloorDiv(n, 2))
        to_index = [_packed(layout, n, up) for up in (0, 1)]
        data = [(tensors[0], a) for a in to_index]
    biases = []
    if op.bias_index is not None:
        biases = [(tensors[op.bias_index], lambda index, a=a: programs.column(a(index))) for a in to_index]
    scales = [] if op.scale_index is None else [(tensors[op.scale_index], programs.row)]
    return [*rows, n], [*data, *biases, *scales]


def _forward(op: PointwiseOperator) -> Callable[..., Box]:
    def lowering(*args: Any) -> Box:
        tensors, layout, scalars = op.split(args)
        ranges, loads = _loads(op, tensors, layout)
        value = programs.Elementwise(ranges, *loads).node(_elements(op).value, *scalars, dtype=tensors[0].get_dtype())
        return _row_by_row(value) if _is_row_by_row(value, layout) else value

    return _over_blocks(op, op.forward, lowering)


def _backward(op: PointwiseOperator) -> Callable[..., tuple[Box | None, ...]]:
    def lowering(grad: Box, *args: Any) -> tuple[Box | None, ...]:
        tensors, layout, scalars = op.split(args[:-1])
        mask, elements = args[-1], _elements(op)
        ranges, loads = _loads(op, tensors, layout)
        e = programs.Elementwise(ranges, (grad, programs.element_index), *loads)

        bias = tensors[op.bias_index] if op.bias_index is not None and mask[op.bias_index] else None
        sums_on_cpu = bias is not None and not programs.is_on_gpu(grad)
        row_by_row = _is_row_by_row(grad, layout)
        realized: list[Box] = []

        def unrounded(i: int) -> list[Box]:
            results = [i] if layout is None else [0, 1]
            return realized or [e.node(elements.grads, *scalars, result=result) for result in results]

        def joined(boxes: Sequence[Box]) -> Box:
            return boxes[0] if layout is None else pack(boxes[0], boxes[1], layout)

        if sums_on_cpu and not row_by_row:
            realized = unrounded(0)
            for box in realized:
                box.realize()  # sums over rows have their own loop, which would recompute the box
        d_tensors: list[Box | None] = [None] * len(tensors)
        for i, t in enumerate(tensors[: op.num_data]):
            if mask[i]:
                grads = [to_dtype(box, t.get_dtype()) for box in unrounded(i)]
                in_memory_order = reversed(grads) if layout == "swapped" else grads
                d_tensors[i] = _row_by_row(*in_memory_order) if row_by_row else joined(grads)
        if layout is None:
            before_sums(mask[op.num_data :], *d_tensors[: op.num_data])
        if op.bias_index is not None and bias is not None:
            d_tensors[op.bias_index] = joined([sum_rows(box, bias.get_dtype()) for box in unrounded(0)])
        if op.scale_index is not None and mask[op.scale_index] and (scale := tensors[op.scale_index]) is not None:
            terms = e.node(elements.scale_grad, *scalars)
            sums = _row_by_row(terms, sums=True) if row_by_row else lowerings[aten.sum.dim_IntList](terms, [-1])
            d_tensors[op.scale_index] = to_dtype(sums, scale.get_dtype())
        return tuple(d_tensors)

    return _over_blocks(op, op.backward, lowering)


for _operator in pointwise_operators():
    for _signature, _make in ((_operator.forward, _forward), (_operator.backward, _backward)):
        # type_promotion_kind=None: the arguments' dtypes differ by design, and promotion would load wider values.
        register_lowering(_signature.overload, type_promotion_kind=None)(_make(_operator))
register_lowering(torch.ops.fused.with_saved.default, type_promotion_kind=None)(lambda result, saved: result)
