"""The edit: proved subgraphs become fused operators. Nothing is changed until everything is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from .graph import record, tensor
from .subgraph import Subgraph

__all__ = ["Edit", "dead_calls", "fuse", "insert", "operator_of", "replace"]


def operator_of(subgraph: Subgraph) -> str:
    """The name of the operator that replaces the subgraph."""
    if subgraph.match.up is None:
        return "bias_act"
    return "bias_glu" if subgraph.packed else "glu"


Edit: TypeAlias = tuple[Node, Callable[[list[Node]], Node], Collection[Node]]


def replace(graph: Graph, edits: Sequence[Edit]) -> None:
    """Make every edit, or none: where one fails, the graph is as it was before.

    All new nodes are made first. Then uses are redirected, and dead nodes erased; only those that the edits name, as
    ``eliminate_dead_code`` would break the side effects of pre-grad graphs.

    Args:
        graph: changed in place.
        edits: each a node, a function that makes its replacement (and appends each new node to its argument), and the
            nodes that may then be dead.
    """
    new: list[Node] = []
    pairs: list[tuple[Node, Node]] = []
    try:
        for node, make, _ in edits:
            pairs.append((node, make(new)))
        for node, result in pairs:
            node.replace_all_uses_with(result)
    except BaseException:
        for node, result in pairs:
            result.replace_all_uses_with(node)
        for node in reversed(new):
            graph.erase_node(node)
        raise
    dead = {node for _, _, nodes in edits for node in nodes}
    for node in reversed(graph.nodes):
        if node in dead and not node.users:
            graph.erase_node(node)


def fuse(graph: Graph, subgraph: Subgraph) -> Edit:
    """The edit that replaces a proved subgraph by one fused operator."""
    return subgraph.output, partial(insert, graph, subgraph), dead_calls(subgraph)


def dead_calls(subgraph: Subgraph) -> set[Node]:
    """The nodes that may be dead once the operator has taken the subgraph's place."""
    dead = {*subgraph.calls, *subgraph.bypassed}
    if subgraph.packed:  # the cuts of the packed tensor
        for node in subgraph.inputs:
            while node is not subgraph.packed[0]:
                dead.add(node)
                node = node.all_input_nodes[0]
    return dead


def insert(
    graph: Graph,
    subgraph: Subgraph,
    new: list[Node],
    place: Callable[[Node], Node] = lambda n: n,
    at: Node | None = None,
    token_scale: Node | None = None,
) -> Node:
    """Write the operator that replaces a proved subgraph into the graph.

    Args:
        graph: changed in place.
        subgraph: proved.
        new: each new node is appended.
        place: the node that it reads in place of an input (or of gate and up, packed).
        at: it is written before this node; by default the subgraph's output node.
        token_scale: a factor of each row, of the result's shape without its last axis.
    """
    output, match = subgraph.output, subgraph.match

    def call(target: Callable[..., Any], *args: Any) -> Node:
        node = graph.call_function(target, args)
        new.append(node)
        record(node, output)
        return node

    def cast(node: Node, dtype: torch.dtype) -> Node:
        value = tensor(node)
        return node if value is None or value.dtype == dtype else call(torch.ops.aten.to.dtype, node, dtype)

    def argument(i: int, scale: float = 1.0) -> Node:
        node = scaled(cast(place(subgraph.inputs[i]), subgraph.dtype), scale)
        return node if subgraph.order is None else call(torch.permute, node, subgraph.order)

    def scaled(node: Node, scale: float) -> Node:
        return node if scale == 1 else call(torch.mul, node, scale)

    ops = torch.ops.fused
    scalars = (match.up_offset, match.clamp)
    with graph.inserting_before(at or output):
        if subgraph.packed:
            base, layout = subgraph.packed
            base = cast(place(base), subgraph.dtype)
            result = call(ops.bias_glu.default, base, None, token_scale, match.activation, layout, *scalars)
        elif match.up is not None:
            gate, up = argument(match.gate, match.gate_scale), argument(match.up)
            result = call(ops.glu.default, gate, up, token_scale, match.activation, *scalars)
        else:
            gate = argument(match.gate, match.gate_scale)
            result = call(ops.bias_act.default, gate, None, token_scale, match.activation)
        result = scaled(result, match.scale)
        if subgraph.order is not None:
            result = call(torch.permute, result, tuple(map(subgraph.order.index, range(len(subgraph.order)))))
        value = tensor(output)
        return result if value is None else cast(result, value.dtype)
