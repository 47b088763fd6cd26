"""The two graphs of a training step and what the one hands to the other: edited as one, and checked after every edit.

A value of forward and the node that holds it in backward are paired once, when the graphs are split: what is handed
over by position, as the runtime hands it over; what backward rebuilds by proof, call by call. From there on they are
matched by identity: names say nothing, as an edit can bring a name that the other graph has for another value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torch_fused_ops.declaration import elementwise
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.partition import Graphs, base, op_types, reached, written

__all__ = ["DATA", "SAME_ELEMENTS", "SavedTensors", "UnsoundGraphs", "check"]

aten, prims = torch.ops.aten, torch.ops.prims

# The arguments through which each operator reads the data that its formula is of.
DATA: dict[Any, tuple[int, ...]] = {
    signature.overload: tuple(range(first, first + op.data))
    for op in elementwise()
    for first, signature in enumerate((op.forward, op.backward))
}

# The same elements in another shape or dtype.
SAME_ELEMENTS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    prims.convert_element_type.default,
}


_UNCHECKED = "saved_tensor_with_no_vc_check"  # torch's mark for what an autograd.Function keeps on its ctx itself


class UnsoundGraphs(RuntimeError):
    """A pair of graphs in which backward would not compute the gradient of what forward has computed."""


class SavedTensors:
    """A forward and a backward graph, edited in place.

    Args:
        forward: its results are ``outputs`` values for the user, then what is kept for backward.
        backward: what is kept comes first among its inputs, in the same order kind by kind (sizes, tensors, others).
        outputs: how many of forward's results are the user's.
        static_inputs: which of forward's inputs live on in any case: parameters and buffers.
    """

    def __init__(self, forward: Graph, backward: Graph, outputs: int, static_inputs: Sequence[int] = ()) -> None:
        self.forward, self.backward, self.outputs = forward, backward, outputs
        self.output = forward.output_node()
        inputs = forward.find_nodes(op="placeholder")
        self.static = {inputs[i] for i in static_inputs}  # keeping these costs nothing
        self.stale = written(forward)  # inputs that hold something else by the time that backward runs
        user = {base(node) for node in self.returned()[:outputs] if isinstance(node, Node)}
        self.callers = user.union(inputs) - self.static  # what who calls it has, and may write before backward runs
        self.same: dict[Node, Node] = dict(self._handed_over())  # a value of forward, and the same in backward
        self.made: set[Node] = set()  # backward's nodes that an edit has put in a kept value's place
        self.rounded: set[Node] = set()  # those of them that hold it rounded
        self._pair_rebuilt()
        # Gradients, above all; what does not depend on them is forward's values, computed again.
        self.incoming = set(backward.find_nodes(op="placeholder")).difference(self.same.values())
        self.gradients = reached(self.incoming)

    # ---- reading ----

    def returned(self) -> list[Any]:
        """What forward returns: ``outputs`` values for the user, then what is kept for backward."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    def kept(self) -> list[Node]:
        """What is kept for backward."""
        return [node for node in self.returned()[self.outputs :] if isinstance(node, Node)]

    def kept_source(self, node: Any) -> Node | None:
        """The kept tensor that has ``node``'s elements; None where it is an input or a result, alive in any case."""
        user, kept = self.returned()[: self.outputs], self.kept()
        while isinstance(node, Node) and node not in kept:
            node = node.args[0] if node.target in SAME_ELEMENTS else None
        return node if isinstance(node, Node) and node.op != "placeholder" and node not in user else None

    def first_reader(self, node: Node) -> Node:
        """The first node in backward that reads ``node``, a kept tensor."""
        users = self.same[node].users
        first: Node = next(one for one in self.backward.nodes if one in users)
        return first

    def nbytes(self) -> int:
        """Bytes kept, without parameters and buffers."""
        return self.cost(self.kept())

    def cost(self, nodes: Iterable[Node]) -> int:
        """What keeping these takes, in bytes."""
        values = [node.meta.get("val") for node in nodes if node not in self.static]
        return sum(compat.nbytes(v) for v in values if isinstance(v, torch.Tensor))

    def reader_of_rounding(self, node: Node) -> Node | None:
        """What in backward must not read ``node`` rounded, if anything does.

        Activations and their derivatives may. So may pointwise work on an activation's result, as it is that of the
        rounded input; but nothing that computes a GEMM of forward again, or what ``memory="input"`` makes again.
        """
        gradients, kinds = self.gradients, op_types()

        def is_pointwise(node: Node) -> bool:
            return kinds.is_view(node) or kinds.is_fusible(node) or node.target is aten.cat.default

        def walk(node: Node, activated: bool) -> Iterator[Node]:
            for user in node.users:
                if (user, activated) in seen or (activated and (user in gradients or user.op == "output")):
                    continue
                seen.add((user, activated))
                if user in self.made:
                    yield user
                elif user.target in SAME_ELEMENTS or (activated and is_pointwise(user)):
                    yield from walk(user, activated)
                elif activated or node in _other_arguments(user):
                    yield user
                else:
                    yield from walk(user, True)

        seen: set[tuple[Node, bool]] = set()
        return next(walk(node, False), None)

    # ---- editing ----

    def keep_instead(self, old: Node, new: Sequence[Node]) -> list[Node]:
        """Keep ``new``, tensors, in ``old``'s place; returns backward's placeholders for them."""
        returned, placeholder = self.returned(), self.same[old]
        at = returned.index(old, self.outputs)
        self.output.args = (tuple([*returned[:at], *new, *returned[at + 1 :]]),)
        with self.backward.inserting_before(placeholder):
            for node in new:
                self.same[node] = self.backward.placeholder(node.name)
                self.same[node].target = self.same[node].name  # the generated function's parameter: unique, too
                self.same[node].meta.update(node.meta)
        return [self.same[node] for node in new]

    def make_again(self, old: Node, result: Node, *, rounded: bool = False) -> None:
        """Let backward read ``result`` where it read ``old``, which is kept no longer."""
        placeholder = self.same.pop(old)
        placeholder.replace_all_uses_with(result)
        self.backward.erase_node(placeholder)
        self.made.add(result)
        if rounded:
            self.rounded.add(result)
            changed = reached([result])  # and what was rebuilt from it is the same no longer
            self.same = {ours: theirs for ours, theirs in self.same.items() if theirs not in changed}
        else:
            self.same[old] = result

    def put_unchecked_last(self) -> None:
        """Keep tensors without a version check behind the others: AOTAutograd counts them, from the last one on."""
        tensors = [node for node in self.kept() if _kind(node) is torch.Tensor]
        ordered = sorted(tensors, key=lambda node: bool(node.meta.get(_UNCHECKED)))
        if ordered == tensors:
            return
        returned, moved = self.returned(), dict(zip(tensors, ordered, strict=True))
        kept = [moved.get(node, node) for node in returned[self.outputs :]]
        self.output.args = ((*returned[: self.outputs], *kept),)
        for before, node in itertools.pairwise(ordered):
            if node.meta.get(_UNCHECKED) and self.same[before].next is not self.same[node]:
                self.same[before].append(self.same[node])

    # ---- pairing ----

    def _handed_over(self) -> Iterator[tuple[Node, Node]]:
        """What is kept, and backward's inputs for it: position by position among sizes, tensors and other values."""
        kept: dict[type, list[Node]] = {}
        for node in self.kept():
            kept.setdefault(_kind(node), []).append(node)
        inputs: dict[type, list[Node]] = {}
        for node in self.backward.find_nodes(op="placeholder"):
            inputs.setdefault(_kind(node), []).append(node)
        for kind, nodes in kept.items():
            if len(nodes) != len(set(nodes)) or len(nodes) > len(inputs.get(kind, ())):
                raise UnsoundGraphs(
                    f"{len(nodes)} values are kept, and backward has {len(inputs.get(kind, ()))} inputs"
                )
            yield from zip(nodes, inputs[kind], strict=False)

    def _pair_rebuilt(self) -> None:
        """Pair what backward rebuilds: the partitioner has copied those nodes, names included."""
        named = {node.name: node for node in self.forward.nodes}
        paired = {theirs: ours for ours, theirs in self.same.items()}
        for node in self.backward.find_nodes(op="placeholder"):
            ours = paired.get(node)
            if named.get(node.name, ours) is not ours:
                raise UnsoundGraphs(f"forward hands {ours} over as backward's {node}, which is another value")
        for node in self.backward.nodes:
            source = named.get(node.name)
            if source is not None and node.op in ("call_function", "get_attr") and self._is_same_call(source, node):
                self.same.setdefault(source, node)

    def _is_same_call(self, ours: Node, theirs: Node) -> bool:
        """Whether two calls are the same function of the same values."""
        if (ours.op, ours.target) != (theirs.op, theirs.target):
            return False
        mapped = map_arg((ours.args, ours.kwargs), lambda node: self.same.get(node, node))
        return bool(mapped == (theirs.args, theirs.kwargs))

    # ---- the invariant ----

    def check(self) -> None:
        """Assert that backward computes with forward's values.

        Each of backward's inputs that is not a gradient's is handed over by forward, once, and is the same value; what
        is rebuilt is the same function of the same values; no input is kept that holds something else when backward
        reads it; what is rounded is read where it may be. Linear in the graphs.

        Raises:
            UnsoundGraphs: it does not, and where.
        """
        handed_over = dict(self._handed_over())
        unknown = set(self.backward.find_nodes(op="placeholder")) - self.incoming - set(handed_over.values())
        if unknown:
            raise UnsoundGraphs(f"backward reads {', '.join(map(str, unknown))}, which forward does not hand over")
        for ours, theirs in handed_over.items():
            if self.same.get(ours) is not theirs:
                raise UnsoundGraphs(f"forward hands {ours} over as backward's {theirs}, which is another value")
            if _described(ours) != _described(theirs):
                raise UnsoundGraphs(f"forward's {ours} is {_described(ours)}, backward's {theirs} {_described(theirs)}")
        for ours, theirs in self.same.items():
            if theirs.op != "placeholder" and not self._is_same_call(ours, theirs):
                raise UnsoundGraphs(f"backward's {theirs.format_node()} is not forward's {ours.format_node()}")
        for node in self.kept():
            if base(node) in self.stale and self.same[node].users:
                raise UnsoundGraphs(f"backward reads {node}, but forward writes {base(node)} after it has read it")
        for node in self.rounded:
            reader = self.reader_of_rounding(node)
            if reader is not None:
                raise UnsoundGraphs(f"{reader} reads what is rounded in backward")


def check(graphs: Graphs, outputs: int, static_inputs: Sequence[int] = ()) -> None:
    """``SavedTensors.check`` of a forward and a backward graph."""
    forward, backward = graphs
    SavedTensors(forward.graph, backward.graph, outputs, static_inputs).check()


def _kind(node: Node) -> type:
    value = node.meta.get("val")
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    found = next((kind for kind in kinds if isinstance(value, kind)), object)
    return torch.SymInt if found in kinds[1:] else found


def _described(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {[str(n) for n in value.shape]}" if isinstance(value, torch.Tensor) else ""


def _other_arguments(node: Node) -> list[Node]:
    """What a call reads but for the data that one of our operators works on."""
    data = DATA.get(node.target, ())
    found: list[Node] = []
    map_arg((tuple(a for i, a in enumerate(node.args) if i not in data), node.kwargs), found.append)
    return found
