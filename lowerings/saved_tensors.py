"""The two graphs of a training step and the tensors saved between them: edited as one, checked after every edit.

A value of forward and the node that holds it in backward are paired once, when the graphs are split: saved values by
position, as the runtime passes them; recomputed values by proof, call by call. From then on identity decides. Names do
not, as an edit can introduce a name that the other graph has for another value.
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

aten, prims = torch.ops.aten, torch.ops.prims

# Positions of the arguments through which each operator reads its formula's data.
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


_UNCHECKED = (
    "saved_tensor_with_no_vc_check"  # torch's mark for tensors that an autograd.Function puts on its ctx itself
)


class UnsoundGraphs(RuntimeError):
    """A pair of graphs in which backward would not compute the gradient of forward's results."""


class SavedTensors:
    """A forward and a backward graph, edited in place.

    Args:
        forward: its results are ``outputs`` values for the user, then the values saved for backward.
        backward: saved values come first among its inputs, in the same order kind by kind (sizes, tensors, others).
        outputs: the number of forward's results that are the user's.
        static_inputs: the positions of forward's inputs that live on in any case: parameters and buffers.
    """

    def __init__(self, forward: Graph, backward: Graph, outputs: int, static_inputs: Sequence[int] = ()) -> None:
        self.forward, self.backward, self.outputs = forward, backward, outputs
        self.output = forward.output_node()
        inputs = forward.find_nodes(op="placeholder")
        self.static = {inputs[i] for i in static_inputs}  # saving these costs nothing
        self.stale = written(forward)  # inputs that have changed by the time that backward runs
        user = {base(node) for node in self.returned()[:outputs] if isinstance(node, Node)}
        self.callers = (
            user.union(inputs) - self.static
        )  # values that the caller has, and may write before backward runs
        self.same: dict[Node, Node] = dict(self._saved_pairs())  # a value of forward to the same value in backward
        self.made: set[Node] = set()  # backward's nodes that an edit has put in a saved value's place
        self.rounded: set[Node] = set()  # those of them that hold it rounded
        self._pair_recomputed()
        # Gradients, above all; nodes that do not depend on them are forward's values, recomputed.
        self.incoming = set(backward.find_nodes(op="placeholder")).difference(self.same.values())
        self.gradients = reached(self.incoming)

    # ---- reading ----

    def returned(self) -> list[Any]:
        """Forward's results: ``outputs`` values for the user, then the values saved for backward."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    def kept(self) -> list[Node]:
        """The values saved for backward."""
        return [node for node in self.returned()[self.outputs :] if isinstance(node, Node)]

    def kept_source(self, node: Any) -> Node | None:
        """The saved tensor that has ``node``'s elements; None where it is an input or a result, alive in any case."""
        user, saved = self.returned()[: self.outputs], self.kept()
        while isinstance(node, Node) and node not in saved:
            node = node.args[0] if node.target in SAME_ELEMENTS else None
        return node if isinstance(node, Node) and node.op != "placeholder" and node not in user else None

    def first_reader(self, node: Node) -> Node:
        """The first node in backward that reads ``node``, a saved tensor."""
        users = self.same[node].users
        first: Node = next(reader for reader in self.backward.nodes if reader in users)
        return first

    def nbytes(self) -> int:
        """Bytes saved for backward, without parameters and buffers."""
        return self.cost(self.kept())

    def cost(self, nodes: Iterable[Node]) -> int:
        """The bytes that saving these values takes."""
        values = [node.meta.get("val") for node in nodes if node not in self.static]
        return sum(compat.nbytes(v) for v in values if isinstance(v, torch.Tensor))

    def reader_of_rounding(self, node: Node) -> Node | None:
        """A reader in backward that must not read ``node`` rounded, if there is one.

        Activations and their derivatives may. So may pointwise work on an activation's result, which is that of the
        rounded input. A recomputed GEMM of forward may not, nor a recomputation that ``memory="input"`` has put there.
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
        """Save ``new``, tensors, in ``old``'s place; return backward's placeholders for them."""
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
        """Let backward read ``result`` where it read ``old``, which is no longer saved."""
        placeholder = self.same.pop(old)
        placeholder.replace_all_uses_with(result)
        self.backward.erase_node(placeholder)
        self.made.add(result)
        if rounded:
            self.rounded.add(result)
            changed = reached([result])  # and values recomputed from it are no longer the same
            self.same = {ours: theirs for ours, theirs in self.same.items() if theirs not in changed}
        else:
            self.same[old] = result

    def put_unchecked_last(self) -> None:
        """Save tensors without a version check behind the others: AOTAutograd counts them from the end."""
        tensors = [node for node in self.kept() if _kind(node) is torch.Tensor]
        ordered = sorted(tensors, key=lambda node: bool(node.meta.get(_UNCHECKED)))
        if ordered == tensors:
            return
        returned, replacement = self.returned(), dict(zip(tensors, ordered, strict=True))
        saved = [replacement.get(node, node) for node in returned[self.outputs :]]
        self.output.args = ((*returned[: self.outputs], *saved),)
        for before, node in itertools.pairwise(ordered):
            if node.meta.get(_UNCHECKED) and self.same[before].next is not self.same[node]:
                self.same[before].append(self.same[node])

    # ---- pairing ----

    def _saved_pairs(self) -> Iterator[tuple[Node, Node]]:
        """The saved values with backward's inputs for them: by position among sizes, tensors and other values."""
        saved: dict[type, list[Node]] = {}
        for node in self.kept():
            saved.setdefault(_kind(node), []).append(node)
        inputs: dict[type, list[Node]] = {}
        for node in self.backward.find_nodes(op="placeholder"):
            inputs.setdefault(_kind(node), []).append(node)
        for kind, nodes in saved.items():
            if len(nodes) != len(set(nodes)) or len(nodes) > len(inputs.get(kind, ())):
                raise UnsoundGraphs(
                    f"{len(nodes)} values are saved, and backward has {len(inputs.get(kind, ()))} inputs"
                )
            yield from zip(nodes, inputs[kind], strict=False)

    def _pair_recomputed(self) -> None:
        """Pair the values that backward recomputes: the partitioner has copied those nodes, names included."""
        named = {node.name: node for node in self.forward.nodes}
        paired = {theirs: ours for ours, theirs in self.same.items()}
        for node in self.backward.find_nodes(op="placeholder"):
            ours = paired.get(node)
            if named.get(node.name, ours) is not ours:
                raise UnsoundGraphs(f"forward saves {ours} as backward's {node}, which is another value")
        for node in self.backward.nodes:
            source = named.get(node.name)
            if source is not None and node.op in ("call_function", "get_attr") and self._is_same_call(source, node):
                self.same.setdefault(source, node)

    def _is_same_call(self, ours: Node, theirs: Node) -> bool:
        """Tell whether two calls are the same function of the same values."""
        if (ours.op, ours.target) != (theirs.op, theirs.target):
            return False
        mapped = map_arg((ours.args, ours.kwargs), lambda node: self.same.get(node, node))
        return bool(mapped == (theirs.args, theirs.kwargs))

    # ---- the invariant ----

    def check(self) -> None:
        """Assert that backward computes with forward's values.

        Forward saves each of backward's inputs that is not a gradient, once, and it is the same value. Recomputed
        values are the same function of the same values. No input is saved that changes before backward reads it.
        Rounded values are read only where they may be. Linear in the graphs.

        Raises:
            UnsoundGraphs: it does not, and where.
        """
        pairs = dict(self._saved_pairs())
        unknown = set(self.backward.find_nodes(op="placeholder")) - self.incoming - set(pairs.values())
        if unknown:
            raise UnsoundGraphs(f"backward reads {', '.join(map(str, unknown))}, which forward does not save")
        for ours, theirs in pairs.items():
            if self.same.get(ours) is not theirs:
                raise UnsoundGraphs(f"forward saves {ours} as backward's {theirs}, which is another value")
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
                raise UnsoundGraphs(f"{reader} reads {node}, which is rounded in backward")


def check(graphs: Graphs, outputs: int, static_inputs: Sequence[int] = ()) -> None:
    """``SavedTensors.check`` of a forward and a backward graph."""
    forward, backward = graphs
    SavedTensors(forward.graph, backward.graph, outputs, static_inputs).check()


def _kind(node: Node) -> type:
    value = node.meta.get("val")
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    kind = next((kind for kind in kinds if isinstance(value, kind)), object)
    return torch.SymInt if kind in kinds[1:] else kind


def _described(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {[str(n) for n in value.shape]}" if isinstance(value, torch.Tensor) else ""


def _other_arguments(node: Node) -> list[Node]:
    """The nodes that a call reads, without the data of one of our operators."""
    data = DATA.get(node.target, ())
    others: list[Node] = []
    map_arg((tuple(a for i, a in enumerate(node.args) if i not in data), node.kwargs), others.append)
    return others
