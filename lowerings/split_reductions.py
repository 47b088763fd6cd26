"""Split reductions, in the post-grad pass: compute a bias's gradient without reading the summands from memory again.

The bias of a linear layer before an activation gets the gradient Σ d over the rows, where d is the activation's
gradient. If the columns alone are too few to occupy a GPU, Inductor sums blocks of rows, and reads d again after
another kernel has written it: 2 more bytes for each 16-bit element. Inductor's scheduler would fuse the two kernels if
their loops matched. The sum loops over (blocks, columns, rows). Loops of d over (blocks, rows, columns) can be put into
that order, but loops over (rows, columns) cannot.

This pass therefore writes the sum as sums of blocks and a sum of their results, and marks the activation's nodes with
the number of rows per block. The lowerings of marked nodes loop over blocks (``operators.py``), and sum packed
gradients themselves. Inductor still chooses the fusions: if d is computed in a GEMM's epilogue, the sums are two
separate kernels, the same as without this pass. An activation before an active dropout does not change, because the
dropout's kernel computes its gradient in the same loops.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch._inductor.config as inductor_config
from torch.fx import Graph, Node

from torch_fused_ops.declaration import DATA, PointwiseOperator, pointwise_operators
from torch_fused_ops.graphs.modules import insert_call
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.partition import VIEWS

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused

_OPERATORS: dict[Any, PointwiseOperator] = {op.backward.overload: op for op in pointwise_operators()}
# With fewer rows per block, the sums of the blocks, written and read as 4 bytes each, are a large part of the traffic.
_FEWEST_ROWS = 32


def rows_of_a_block(rows: int, columns: int, device: torch.device) -> int | None:
    """Return the rows per block for a sum over a matrix's rows; None if the pass should not split it.

    Inductor's block size may leave a remainder. The result is the nearest divisor of ``rows``; None if it is below 32.
    Inductor does not split if there are at least 64 columns per multiprocessor (``Reduction.num_splits`` in
    torch/_inductor/ir.py, 2.11 to 2.15): 8448 on an H100 or H200. Such a sum loops over (columns, rows), and d fuses
    with it unchanged.
    """
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    if device.type != "cuda" or rows <= _FEWEST_ROWS:
        return None
    if columns >= 64 * DeviceProperties.create(device).multi_processor_count:
        return None
    blocks = V.choices.reduction_split_factor(device, rows, columns, inner_reduction=False)
    preferred = rows / max(blocks, 1)
    divisor = min((n for n in range(1, int(2 * preferred)) if rows % n == 0), key=lambda n: abs(n - preferred))
    return divisor if blocks > 1 and divisor >= _FEWEST_ROWS else None


def rewrite(graph: Graph) -> int:
    """Split sums over the rows of activations' gradients into sums of blocks. Return the number of activations."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _gather(graph, node)
    if compat.keeps_loops_it_tried() and (inductor_config.max_autotune or inductor_config.max_autotune_gemm):
        return 0  # Inductor would no longer compute d in the epilogue of its own GEMMs
    return sum(_split(graph, node) for node in list(graph.nodes) if node.target in _OPERATORS)


def _gather(graph: Graph, total: Node) -> None:
    """Add a bias's gradients from several tiles or uses in one sum, over a tensor with a row for each gradient.

    Inductor would fuse a chain of additions with the sums and their inputs, so that every tile's hidden layer stays in
    memory for this kernel (a GELU MLP with biases, 65536×4096→16384 in bf16, in eight tiles: 7000 MiB).
    """
    value, readers = total.meta["val"], {user.target for user in total.users}
    if value.ndim != 1 or value.device.type != "cuda" or not readers or aten.add.Tensor in readers:
        return
    parts = _parts(total)
    matches = [(part.meta["val"].shape, part.meta["val"].dtype) == (value.shape, value.dtype) for part in parts]
    if not all(matches) or not all(map(_is_bias_gradient, parts)):
        return
    with graph.inserting_before(total):
        rows = [insert_call(graph, aten.reshape.default, part, [1, -1], like=total) for part in parts]
        gathered = insert_call(graph, aten.cat.default, rows, like=total)
        result = insert_call(graph, aten.sum.dim_IntList, gathered, [0], like=total)
    total.replace_all_uses_with(result)
    graph.eliminate_dead_code()


def _parts(total: Node) -> list[Node]:
    """Return a sum's terms, through nested additions. For any other node, return the node as the only term."""
    if total.target is not aten.add.Tensor or total.kwargs or not all(isinstance(part, Node) for part in total.args):
        return [total]
    terms: list[Node] = []
    for part in cast(Sequence[Node], total.args):
        terms += _parts(part) if len(part.users) == 1 else [part]
    return terms


def _is_bias_gradient(node: Node) -> bool:
    """Return True for a sum over the rows of an activation's gradient, also if it is reshaped."""
    through, sums = (*VIEWS, aten.sum.dim_IntList, operator.getitem), 0
    while node.target in through:
        sums += node.target is aten.sum.dim_IntList
        node = cast(Node, node.args[0])
    return sums == 1 and node.target in _OPERATORS


def _split(graph: Graph, node: Node) -> bool:
    """Split the sums over the gradients of a backward call, if these are summed per column and not per row.

    If the gradients are packed, the call itself computes the sums. Return True if the graph has changed.
    """
    from torch_fused_ops.lowerings.operators import ROWS_PER_BLOCK_KEY  # not earlier: it imports Inductor's lowerings

    op, grad = _OPERATORS[node.target], cast(Node, node.args[0])
    kinds = op.backward.results
    value = grad.meta["val"]
    rows, columns = value.numel() // max(value.shape[-1], 1), value.shape[-1]
    gradients = [(kinds[cast(int, user.args[1])], user) for user in node.users if user.users]
    requested = {kind for kind, _ in gradients}
    sums = [total for kind, d in gradients if kind in DATA for total in _sums(d)]
    # The loop that computes d also computes sums along rows.
    if not (sums or "per_column" in requested) or "per_row" in requested or not isinstance(rows * columns, int):
        return False
    in_operator = bool(sums) and op.is_packed
    block = rows_of_a_block(rows, columns, value.device)
    if block is None or (in_operator and node.args[1 + kinds.index("per_column")] is not None):
        return False
    while grad.target in (*VIEWS, operator.getitem):
        grad = cast(Node, grad.args[0])
    if grad.target is fused.dropout_add_backward.default:
        return False  # the dropout's loops go over rows, and would be another kernel
    data = cast(Node, node.args[1])
    for call in (node, *(user for user in data.users if user.target is op.forward.overload)):
        call.meta[ROWS_PER_BLOCK_KEY] = block
    if in_operator:
        _sum_in_operator(graph, node, kinds.index("per_column"), sums)
    else:
        for total in sums:
            _sum_blocks(graph, total, block)
    return True


def _sum_in_operator(graph: Graph, node: Node, bias: int, sums: Sequence[Node]) -> None:
    """Have an operator sum its packed gradients, as for a bias of zeros. A sum cannot read the two halves as one."""
    grad, *arguments, mask = node.args
    value = cast(Node, arguments[0]).meta["val"]
    with graph.inserting_before(node):
        zeros = graph.call_function(aten.full.default, ([value.shape[-1]], 0.0))
    zeros.kwargs, zeros.meta = {"dtype": value.dtype, "device": value.device}, {"val": value.new_zeros(value.shape[-1])}
    arguments[bias] = zeros
    node.args = (grad, *arguments, [is_set or i == bias for i, is_set in enumerate(cast(Sequence[bool], mask))])
    for total in sums:
        with graph.inserting_before(total):
            summed = graph.call_function(operator.getitem, (node, bias))
            summed.meta = {**total.meta, "val": zeros.meta["val"]}
            shaped = insert_call(graph, aten.reshape.default, summed, list(total.meta["val"].shape), like=total)
        total.replace_all_uses_with(shaped)
        graph.erase_node(total)


def _sums(d: Node) -> list[Node]:
    """Return the sums over all rows of d."""
    sums, value = [], d.meta["val"]
    for user in d.users:
        if user.target in VIEWS and user.meta["val"].shape[-1] == value.shape[-1]:
            sums += _sums(user)
        elif user.target is aten.sum.dim_IntList and "dtype" not in user.kwargs:
            axes = cast(Sequence[int], user.args[1])
            if sorted(axis % value.ndim for axis in axes) == list(range(value.ndim - 1)):
                sums.append(user)
    return sums


def _sum_blocks(graph: Graph, total: Node, rows: int) -> None:
    d, value, call = cast(Node, total.args[0]), total.meta["val"], partial(insert_call, graph, like=total)
    with graph.inserting_before(total):
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        blocks = call(aten.reshape.default, d, [-1, rows, d.meta["val"].shape[-1]])
        parts = call(aten.sum.dim_IntList, blocks, [1], dtype=wide)
        summed = call(aten.sum.dim_IntList, parts, [0])
        rounded = call(prims.convert_element_type.default, summed, value.dtype)
        result = call(aten.reshape.default, rounded, list(value.shape))
    total.replace_all_uses_with(result)
    graph.erase_node(total)
