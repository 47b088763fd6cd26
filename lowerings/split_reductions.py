"""Split reductions, in the post-grad pass: a bias's gradient without another read of the tensor that it sums.

A linear layer's bias in front of an activation gets Σ d over the rows, d the activation's gradient. Where columns alone
are too few for a GPU, Inductor sums blocks of rows, and reads d again, which a kernel before has written: 2 more bytes
an element of 16 bits. Its scheduler would fuse the two if their loops had one form. The sum's are (blocks, columns,
rows). Loops of d over (blocks, rows, columns) can be put into that order, loops over (rows, columns) cannot.

So the sum is written as sums of blocks and a sum of their results, and the activation's nodes are marked with the rows
of a block: their lowerings loop over blocks (``operators.py``), and sum packed gradients themselves. Inductor still
chooses the fusions: where d leaves a GEMM's epilogue the sums are two kernels of their own, as they are without this
pass.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from torch_fused_ops.declaration import PointwiseOperator, elementwise
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.epilogues import autotuned
from torch_fused_ops.lowerings.partition import VIEWS

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused


# With fewer rows in a block, the blocks' sums, written and read in 4 bytes, are a large part of the traffic.
_FEWEST_ROWS = 32


def rows_of_a_block(rows: int, columns: int, device: torch.device) -> int | None:
    """The rows of the blocks in which to sum a matrix's rows; None where Inductor does not split, or not evenly.

    The divisor of the rows nearest to Inductor's own blocks, which may leave a remainder. Inductor does not split from
    64 columns a multiprocessor on (``Reduction.num_splits`` in torch/_inductor/ir.py, 2.11 to 2.15): 8448 on an H100 or
    H200. There a sum's loops are (columns, rows), and d fuses with them unchanged.
    """
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    if device.type != "cuda" or rows <= _FEWEST_ROWS:
        return None
    if columns >= 64 * DeviceProperties.create(device).multi_processor_count:
        return None
    blocks = V.choices.reduction_split_factor(device, rows, columns, inner_reduction=False)
    near = rows / max(blocks, 1)
    divisor = min((n for n in range(1, int(2 * near)) if rows % n == 0), key=lambda n: abs(n - near))
    return divisor if blocks > 1 and divisor >= _FEWEST_ROWS else None


class _Edit(NamedTuple):
    marked: list[Node]
    sums: list[Node]
    rows: int


def rewrite(graph: Graph) -> int:
    """Sum over blocks where activations' gradients are summed over their rows; count these activations."""
    from torch_fused_ops.lowerings.operators import ROWS  # not earlier: it imports Inductor's lowerings

    operators = {op.backward.overload: op for op in elementwise()}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _gather(graph, node, operators)
    if autotuned("TRITON") and compat.keeps_loops_it_tried():
        return 0  # d would leave the epilogues of Inductor's own GEMMs
    edits = [edit for node in graph.nodes if node.target in operators and (edit := _edit(node, operators[node.target]))]
    for marked, sums, rows in edits:
        for node in marked:
            node.meta[ROWS] = rows
        for total in sums:
            _sum_blocks(graph, total, rows)
    return len(edits)


def _gather(graph: Graph, total: Node, operators: Container[Any]) -> None:
    """Add a bias's gradients of several tiles, or uses, in one sum, over a tensor with a row for each.

    Where they are added one after the other, Inductor fuses all additions with the sums and their inputs: it keeps
    every tile's hidden layer for that kernel (a GELU MLP with biases, 65536×4096→16384 in bf16, in eight tiles: 7000
    MiB).
    """
    value = total.meta["val"]
    if value.ndim != 1 or value.device.type != "cuda" or any(user.target is aten.add.Tensor for user in total.users):
        return
    parts = _parts(total)
    like = [(part.meta["val"].shape, part.meta["val"].dtype) == (value.shape, value.dtype) for part in parts]
    if not all(like) or not all(_is_bias_gradient(part, operators) for part in parts):
        return
    with graph.inserting_before(total):
        rows = [_call(graph, total, aten.reshape.default, part, [1, -1]) for part in parts]
        gathered = _call(graph, total, aten.cat.default, rows)
        result = _call(graph, total, aten.sum.dim_IntList, gathered, [0])
    total.replace_all_uses_with(result)
    added = [total]
    while added:
        node = added.pop()
        added += [part for part in node.all_input_nodes if part not in parts]
        graph.erase_node(node)


def _parts(total: Node) -> list[Node]:
    """The terms of a chain of additions; any other node is a term by itself."""
    if total.target is not aten.add.Tensor or total.kwargs or not all(isinstance(part, Node) for part in total.args):
        return [total]
    parts = cast(Sequence[Node], total.args)
    return [term for part in parts for term in (_parts(part) if len(part.users) == 1 else [part])]


def _is_bias_gradient(node: Node, operators: Container[Any]) -> bool:
    """Tell whether a node is a sum over the rows of an activation's gradient, maybe in another shape."""
    through, sums = (*VIEWS, aten.sum.dim_IntList, operator.getitem), 0
    while node.target in through:
        sums += node.target is aten.sum.dim_IntList
        node = cast(Node, node.args[0])
    return sums == 1 and node.target in operators


def _call(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call with its fake value, in place of ``like``."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
    node.meta = {**like.meta, "val": target(*values, **kwargs)}
    return node


def _edit(node: Node, op: PointwiseOperator) -> _Edit | None:
    """The edit for an activation whose gradients are summed over rows, and not along them; None for any other."""
    grad, data = cast(Node, node.args[0]).meta["val"], cast(Node, node.args[1])
    rows, columns = grad.numel() // max(grad.shape[-1], 1), grad.shape[-1]
    gradients = {cast(int, user.args[1]): user for user in node.users if user.users}
    sums = [total for i, d in gradients.items() if i < op.data for total in _sums(d)]
    if not sums and op.bias not in gradients:
        return None
    # A sum along the rows is in the loop that computes d.
    if op.scale in gradients or not (isinstance(rows, int) and isinstance(columns, int)):
        return None
    if op.is_packed and sums and node.args[1 + cast(int, op.bias)] is not None:
        return None
    block = rows_of_a_block(rows, columns, grad.device)
    if block is None:
        return None
    again = [user for user in data.users if user.target is op.forward.overload]  # one kernel reads the data for all
    if _is_dropped_out(node, again):
        return None
    if op.is_packed and sums:
        _sum_in_operator(node.graph, node, op, sums)
        sums = []
    return _Edit([node, *again], sums, block)


def _sum_in_operator(graph: Graph, node: Node, op: PointwiseOperator, sums: Sequence[Node]) -> None:
    """Have an operator sum packed gradients, for a bias of zeros: they are two buffers, which no sum reads whole."""
    bias, (grad, *rest, mask) = cast(int, op.bias), node.args
    value = cast(Node, rest[0]).meta["val"]
    with graph.inserting_before(node):
        zeros = graph.call_function(aten.full.default, ([value.shape[-1]], 0.0))
    zeros.kwargs, zeros.meta = {"dtype": value.dtype, "device": value.device}, {"val": value.new_zeros(value.shape[-1])}
    rest[bias] = zeros
    node.args = (grad, *rest, [wanted or i == bias for i, wanted in enumerate(cast(Sequence[bool], mask))])
    for total in sums:
        with graph.inserting_before(total):
            summed = graph.call_function(operator.getitem, (node, bias))
            summed.meta = {**total.meta, "val": zeros.meta["val"]}
            shaped = _call(graph, total, aten.reshape.default, summed, list(total.meta["val"].shape))
        total.replace_all_uses_with(shaped)
        graph.erase_node(total)


def _is_dropped_out(node: Node, again: Sequence[Node]) -> bool:
    """Tell whether a dropout stands between an activation and the GEMM behind it.

    Usually its loops, forward and backward, are in the activation's kernel. With blocks they would be kernels of their
    own: backward of two MLPs, 4096×1024→4096 with biases and dropouts, would move 1067 MiB instead of 875.
    """
    pending, source = list(again), cast(Node, node.args[0])
    while source.target in (*VIEWS, operator.getitem):
        source = cast(Node, source.args[0])
    while pending:
        for user in pending.pop().users:
            if user.target is fused.dropout_add.default:
                return True
            if user.target in VIEWS:
                pending.append(user)
    return source.target is fused.dropout_add_backward.default


def _sums(d: Node) -> list[Node]:
    """The sums over all rows of d."""
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
    d, value, call = cast(Node, total.args[0]), total.meta["val"], partial(_call, graph, total)
    with graph.inserting_before(total):
        wide = torch.float64 if value.dtype == torch.float64 else torch.float32
        blocks = call(aten.reshape.default, d, [-1, rows, d.meta["val"].shape[-1]])
        parts = call(aten.sum.dim_IntList, blocks, [1], dtype=wide)
        summed = call(aten.sum.dim_IntList, parts, [0])
        rounded = call(prims.convert_element_type.default, summed, value.dtype)
        result = call(aten.reshape.default, rounded, list(value.shape))
    total.replace_all_uses_with(result)
    graph.erase_node(total)
