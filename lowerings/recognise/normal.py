"""A graph in a form that is easier to read, and back: nothing of it stays but what a rewrite has used.

Two spellings stand between an activation and the GEMM that reads it. A call that works in place and whose result is
dropped (``h.relu_()`` as a statement): here the tensor's later readers read that result. And a call that is several in
one: ``F.glu`` becomes two cuts, a sigmoid and a product.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph import Call, record, tensor
from .symbolic import RULES

__all__ = ["Normal"]


class Normal:
    """The graph's normal form, made in place.

    Attributes:
        spelled: the user's own call for each node that is a part of its expansion.
        calls: the call of each node that is not.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.spelled: dict[Node, Node] = {}
        self.calls: dict[Node, Call] = {}
        self._edits: list[tuple[Node, list[Node] | tuple[Any, Any]]] = []  # an expansion's parts, or arguments before
        try:
            self._thread_and_expand()
        except BaseException:
            self.restore()
            raise

    def restore(self, used: Collection[Node] = ()) -> None:
        """Undo it.

        Args:
            used: the nodes that a rewrite has replaced. Expansions that are among them stay; so does, if there are any,
                who reads what in-place calls return: it is the same tensor.
        """
        for node, edit in reversed(self._edits):
            if isinstance(edit, tuple):
                if not used:
                    node.args, node.kwargs = edit
            elif edit[-1] in used:
                self.graph.erase_node(node)
            else:
                edit[-1].replace_all_uses_with(node)
                for part in reversed(edit):
                    self.graph.erase_node(part)
        self._edits.clear()

    def _thread_and_expand(self) -> None:
        written: dict[Node, Node] = {}  # a tensor, and the result of the call that wrote it in place next
        for node in list(self.graph.nodes):
            stale = [a for a in node.all_input_nodes if a in written]
            if stale:
                self._edits.append((node, (node.args, node.kwargs)))
                for a in stale:
                    last = written[a]
                    while last in written:
                        last = written[last]
                    written[a] = last  # so that a thousand calls on one tensor are not a million steps
                    node.replace_input_with(a, last)
            call = self.calls[node] = Call(node)
            target = call.args[0] if call.args else None
            if call.inplace and call.name in RULES and isinstance(target, Node):
                if target.op not in ("placeholder", "get_attr"):
                    written[target] = node
            elif call.name == "glu":
                self._expand(node, call)

    def _expand(self, node: Node, call: Call) -> None:
        given = dict(zip(("input", "dim"), call.args, strict=False)) | call.kwargs
        source, axis = given.get("input"), given.get("dim", -1)
        value = tensor(source) if isinstance(source, Node) else None
        if value is None or not isinstance(axis, int) or not isinstance(value.shape[axis], int):
            return  # a symbolic size would have to be computed in the graph
        half = value.shape[axis] // 2
        parts: list[Node] = []

        def add(target: Any, *args: Any) -> Node:
            part = self.graph.call_function(target, args)
            parts.append(part)
            self.spelled[part] = node
            record(part, node)
            return part

        try:
            with self.graph.inserting_before(node.next):
                up, gate = (add(torch.narrow, source, axis, start, half) for start in (0, half))
                product = add(torch.mul, up, add(torch.sigmoid, gate))
        except BaseException:
            for part in reversed(parts):
                self.graph.erase_node(part)
            raise
        self._edits.append((node, parts))
        node.replace_all_uses_with(product)
