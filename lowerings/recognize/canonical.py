"""Bring a graph into a form that is easier to read, and undo all changes that no rewrite has used.

* If the result of an in-place call is dropped (``h.relu_()`` as a statement), later readers of the tensor read that
  result instead.
* ``F.glu`` becomes two slices, a sigmoid and a multiplication.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from .graph import Call, tensor, write_call
from .symbolic import RULES


class Canonical:
    """Brings a graph into canonical form in place, and can undo this.

    Attributes:
        originals: the user's call for each node of its expansion.
        calls: the ``Call`` of each original node.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.originals: dict[Node, Node] = {}
        self.calls: dict[Node, Call] = {}
        self._expanded: list[tuple[Node, list[Node]]] = []  # each call with its replacement
        self._redirect_and_expand()

    def restore(self, used: Collection[Node]) -> None:
        """Erase the calls whose expansions a rewrite has used, and restore the others.

        Nodes that now read an in-place call's result are not restored, since the result is the same tensor.

        Args:
            used: the nodes that the rewrite has replaced.
        """
        for node, parts in reversed(self._expanded):
            if parts[-1] in used:
                self.graph.erase_node(node)
            else:
                parts[-1].replace_all_uses_with(node)
                for part in reversed(parts):
                    self.graph.erase_node(part)

    def _redirect_and_expand(self) -> None:
        written: dict[Node, Node] = {}  # each tensor with the result of the next call that writes it in place
        for node in list(self.graph.nodes):
            for a in [a for a in node.all_input_nodes if a in written]:
                last = written[a]
                while last in written:
                    last = written[last]
                written[a] = last  # otherwise a thousand calls on one tensor take a million steps
                node.replace_input_with(a, last)
            call = self.calls[node] = Call(node)
            target = call.args[0] if call.args else None
            if call.inplace and call.name in RULES and isinstance(target, Node):
                if target.op not in ("placeholder", "get_attr"):
                    written[target] = node
            elif call.name == "glu":
                self._expand(node, call)

    def _expand(self, node: Node, call: Call) -> None:
        arguments = dict(zip(("input", "dim"), call.args, strict=False)) | call.kwargs
        source, axis = arguments.get("input"), arguments.get("dim", -1)
        value = tensor(source) if isinstance(source, Node) else None
        if value is None or not isinstance(axis, int) or not isinstance(value.shape[axis], int):
            return  # the graph would have to compute half of a symbolic size
        half = value.shape[axis] // 2
        with self.graph.inserting_before(node.next):
            up, gate = (write_call(node, torch.narrow, source, axis, start, half) for start in (0, half))
            weight = write_call(node, torch.sigmoid, gate)
            parts = [up, gate, weight, write_call(node, torch.mul, up, weight)]
        self.originals.update(dict.fromkeys(parts, node))
        self._expanded.append((node, parts))
        node.replace_all_uses_with(parts[-1])
