"""A graph in a form that is easier to read, of which only the parts that a rewrite has used stay.

Three patterns lie between an activation and the GEMM that reads it:

* a call that works in place and whose result is dropped (``h.relu_()`` as a statement): the tensor's later readers
  read that result instead;
* several calls in one: ``F.glu`` becomes two cuts, a sigmoid and a multiplication;
* a cut behind an activation, of which one part alone goes on to a gate, as in gMLP (arXiv:2105.08050): the activation
  of the cut is the same, and the gate reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph import PIECES, REGIONS, Call, Modes, record, statically, tensor, write_call
from .symbolic import RULES


class Canonical:
    """The graph's canonical form, in place.

    Attributes:
        originals: the user's own call for each node that is a part of its expansion.
        calls: the call of each node that is not.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.originals: dict[Node, Node] = {}
        self.calls: dict[Node, Call] = {}
        self._expanded: list[tuple[Node, list[Node]]] = []  # a call and the parts that stand in its place
        self._region: dict[Node, int] = {}
        self._thread_and_expand()

    def fold(self, used: Collection[Node]) -> None:
        """Put the calls back whose expansions a rewrite has not used, and erase those whose expansions it has.

        Readers of in-place calls' results stay: it is the same tensor.

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

    def _thread_and_expand(self) -> None:
        written: dict[Node, Node] = {}  # a tensor, and the result of the call that wrote it in place next
        modes = Modes(self.graph)
        for node in list(self.graph.nodes):
            for a in [a for a in node.all_input_nodes if a in written]:
                last = written[a]
                while last in written:
                    last = written[last]
                written[a] = last  # else a thousand calls on one tensor take a million steps
                node.replace_input_with(a, last)
            call = self.calls[node] = Call(node)
            if call.name in REGIONS:
                modes.switch(call.name, node)
            self._region[node] = modes.region
            target = call.args[0] if call.args else None
            if call.inplace and call.name in RULES and isinstance(target, Node):
                if target.op not in ("placeholder", "get_attr"):
                    written[target] = node
            elif call.name == "glu":
                self._expand(node, call)
            elif call.name == "getitem":
                self._cut_before(node)

    def _cut_before(self, node: Node) -> None:
        """Replace a piece of an activation's result, all of which is cut, by the activation of a piece.

        Nothing else reads the result, so that a write into a piece reaches no other. The new calls stand at the
        activation's place, so that writes behind it are seen. All calls are of one region: a piece that is cut under
        ``no_grad`` has no gradient.
        """
        cut: Any = node.args[0]
        i = node.args[1]
        call = self.calls.get(cut) if isinstance(cut, Node) else None
        if call is None or call.name not in PIECES - {"unbind"} or not isinstance(i, int):
            return
        pieces = cut.meta.get("example_value", cut.meta.get("val"))
        if not isinstance(pieces, (tuple, list)) or not _is_taken_once(cut, i % len(pieces), len(pieces)):
            return
        act: Any = call.args[0] if call.args else None
        passed: list[Node] = []
        while (of := self.calls.get(act)) and of.name == "dropout" and not of.dropout_is_active():
            passed.append(act)
            act = of.args[0] if len(act.users) == 1 else None
        if of is None or of.name not in RULES or of.inplace or len(act.all_input_nodes) != 1 or len(act.users) != 1:
            return
        if any(self._region[other] != self._region[cut] for other in (*passed, act)):
            return
        source = act.all_input_nodes[0]
        value, whole = tensor(source), tensor(act)
        if value is None or whole is None or value.shape != whole.shape:
            return
        sizes = [[piece.shape[axis] for piece in pieces] for axis in range(whole.ndim)]
        cut_axes = [
            axis for axis in range(whole.ndim) if not all(statically(n == whole.shape[axis]) for n in sizes[axis])
        ]
        if len(cut_axes) != 1:
            return
        (axis,) = cut_axes
        start, length = sum(sizes[axis][: i % len(pieces)]), sizes[axis][i]
        if not (isinstance(start, int) and isinstance(length, int)):
            return
        with self.graph.inserting_before(act.next):
            piece = write_call(source, torch.narrow, source, axis, start, length)
            copy = self.graph.node_copy(act, lambda node: piece if node is source else node)
            record(copy, act)
        self._expand_to(node, [piece, copy])
        self.originals[copy] = act

    def _expand(self, node: Node, call: Call) -> None:
        arguments = dict(zip(("input", "dim"), call.args, strict=False)) | call.kwargs
        source, axis = arguments.get("input"), arguments.get("dim", -1)
        value = tensor(source) if isinstance(source, Node) else None
        if value is None or not isinstance(axis, int) or not isinstance(value.shape[axis], int):
            return  # a symbolic size would have to be computed in the graph
        half = value.shape[axis] // 2
        with self.graph.inserting_before(node.next):
            up, gate = (write_call(node, torch.narrow, source, axis, start, half) for start in (0, half))
            weight = write_call(node, torch.sigmoid, gate)
            self._expand_to(node, [up, gate, weight, write_call(node, torch.mul, up, weight)])

    def _expand_to(self, node: Node, parts: list[Node]) -> None:
        self.originals.update(dict.fromkeys(parts, node))
        self._expanded.append((node, parts))
        node.replace_all_uses_with(parts[-1])


def _is_taken_once(cut: Node, i: int, count: int) -> bool:
    """True where a piece is read through one node alone: all its readers then see a write into it."""
    taken = [user.args[1] for user in cut.users if user.target is operator.getitem and user.args[0] is cut]
    numbers = [number % count for number in taken if isinstance(number, int)]
    return len(numbers) == len(cut.users) and numbers.count(i) == 1
