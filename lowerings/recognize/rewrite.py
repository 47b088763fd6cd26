"""Edit the graph: proved subgraphs become fused operators. The graph changes only after all edits are planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch.fx import Graph, Node

from .graph import tensor, write_call
from .subgraph import Subgraph


def operator_of(subgraph: Subgraph) -> str:
    """Return the name of the operator that replaces the subgraph."""
    if subgraph.match.up is None:
        return "bias_act"
    return "bias_glu" if subgraph.packed else "glu"


Edit: TypeAlias = tuple[Node, Callable[[], Node], Collection[Node]]


class Snapshot:
    """A graph's nodes and their arguments, to undo changes. Erased nodes are not restored."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._arguments = {node: (node.args, node.kwargs) for node in graph.nodes}

    def restore(self) -> None:
        """Erase new nodes, and restore the arguments of all other nodes."""
        for node, arguments in self._arguments.items():
            if (node.args, node.kwargs) != arguments:
                node.args, node.kwargs = arguments
        for node in reversed(self.graph.nodes):
            if node not in self._arguments:
                self.graph.erase_node(node)


def replace(graph: Graph, edits: Sequence[Edit]) -> None:
    """Apply every edit. If an edit fails, ``Snapshot`` can undo the others, because nodes are erased last.

    First all new nodes are written. Then uses are redirected, and dead nodes are erased if an edit names them:
    ``eliminate_dead_code`` would break the side effects of pre-grad graphs.

    Args:
        graph: the graph, which is modified.
        edits: tuples of a node, a function that writes its replacement in front of the node, and the nodes that may
            then be dead.
    """
    pairs: list[tuple[Node, Node]] = []
    for node, write, _ in edits:
        with graph.inserting_before(node):
            pairs.append((node, write()))
    for node, result in pairs:
        node.replace_all_uses_with(result)
    dead = {node for _, _, nodes in edits for node in nodes}
    for node in reversed(graph.nodes):
        if node in dead and not node.users:
            graph.erase_node(node)


def fuse(subgraph: Subgraph) -> Edit:
    """Return the edit that replaces a proved subgraph by one fused operator."""
    return subgraph.output, partial(insert, subgraph), subgraph.replaced


def insert(subgraph: Subgraph, remap: Callable[[Node], Node] = lambda n: n, token_scale: Node | None = None) -> Node:
    """Write the operator that replaces a proved subgraph at its graph's insertion point.

    Args:
        subgraph: the proved subgraph.
        remap: maps an input (or the packed tensor of gate and up) to the node that the operator reads instead.
        token_scale: a factor for each row, shaped as the result without its last axis; None if there is none.
    """
    output, match, ops = subgraph.output, subgraph.match, torch.ops.fused
    add = partial(write_call, output)

    def cast(node: Node, dtype: torch.dtype) -> Node:
        value = tensor(node)
        return node if value is None or value.dtype == dtype else add(torch.ops.aten.to.dtype, node, dtype)

    def scaled(node: Node, scale: float) -> Node:
        return node if scale == 1 else add(torch.mul, node, scale)

    def argument(i: int, scale: float = 1.0) -> Node:
        node = scaled(cast(remap(subgraph.inputs[i]), subgraph.dtype), scale)
        return node if subgraph.order is None else add(torch.permute, node, subgraph.order)

    scalars = (match.up_offset, match.clamp)
    if subgraph.packed:
        base, layout = subgraph.packed
        base = cast(remap(base), subgraph.dtype)
        result = add(ops.bias_glu.default, base, None, token_scale, match.activation, layout, *scalars)
    elif match.up is not None:
        gate, up = argument(match.gate, match.gate_scale), argument(match.up)
        result = add(ops.glu.default, gate, up, token_scale, match.activation, *scalars)
    else:
        gate = argument(match.gate, match.gate_scale)
        result = add(ops.bias_act.default, gate, None, token_scale, match.activation)
    result = scaled(result, match.scale)
    if subgraph.order is not None:
        result = add(torch.permute, result, tuple(map(subgraph.order.index, range(len(subgraph.order)))))
    value = tensor(output)
    return result if value is None else cast(result, value.dtype)
