"""Join the sums over rows that ``memory="tiled"`` splits, in the post-grad pass: a bias's gradients from all tiles.

Inductor would fuse a chain of additions with the sums and their inputs, so that every tile's hidden layer stays in
memory for this kernel (a GELU MLP with biases, 65536×4096→16384 in bf16, in eight tiles: 7000 MiB). One sum over a
tensor with a row for each tile reads only the tiles' results.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from torch_fused_ops.declaration import pointwise_operators
from torch_fused_ops.graphs.modules import insert_call
from torch_fused_ops.lowerings.partition import VIEWS

aten = torch.ops.aten


def join(graph: Graph) -> None:
    """Replace each chain of additions of a bias's gradients, from several tiles or uses, with one sum."""
    operators = {op.backward.overload for op in pointwise_operators()}
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        _join(graph, node, operators)


def _join(graph: Graph, total: Node, operators: Container[Any]) -> None:
    value = total.meta["val"]
    if value.ndim != 1 or value.device.type != "cuda" or any(user.target is aten.add.Tensor for user in total.users):
        return
    parts = _parts(total)
    matches = [(part.meta["val"].shape, part.meta["val"].dtype) == (value.shape, value.dtype) for part in parts]
    if not all(matches) or not all(_is_bias_gradient(part, operators) for part in parts):
        return
    with graph.inserting_before(total):
        rows = [insert_call(graph, aten.reshape.default, part, [1, -1], like=total) for part in parts]
        gathered = insert_call(graph, aten.cat.default, rows, like=total)
        result = insert_call(graph, aten.sum.dim_IntList, gathered, [0], like=total)
    total.replace_all_uses_with(result)
    added = [total]
    while added:
        node = added.pop()
        added += [part for part in node.all_input_nodes if part not in parts]
        graph.erase_node(node)


def _parts(total: Node) -> list[Node]:
    """Return a sum's terms, through nested additions. For any other node, return the node as the only term."""
    if total.target is not aten.add.Tensor or total.kwargs or not all(isinstance(part, Node) for part in total.args):
        return [total]
    parts = cast(Sequence[Node], total.args)
    return [term for part in parts for term in (_parts(part) if len(part.users) == 1 else [part])]


def _is_bias_gradient(node: Node, operators: Container[Any]) -> bool:
    """Return True for a sum over the rows of an activation's gradient, also if it is reshaped."""
    through, sums = (*VIEWS, aten.sum.dim_IntList, operator.getitem), 0
    while node.target in through:
        sums += node.target is aten.sum.dim_IntList
        node = cast(Node, node.args[0])
    return sums == 1 and node.target in operators
