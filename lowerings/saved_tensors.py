"""Edit and check a training step's forward and backward graph, together with the tensors saved between them.

The invariant: if the caller may write a value's memory (arguments, results, parameters, buffers, and views of them), an
edit saves a copy, or the parameter or buffer itself, because autograd checks its version.

Each saved or recomputed value of forward is paired with the node that has this value in backward. Saved values are
paired by position, as the runtime passes them. Recomputed values are paired if backward's call is the same function of
paired values. Later edits rely on these pairs, not on names, because an edit can add a name that the other graph uses
for another value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from torch_fused_ops.declaration import pointwise_operators
from torch_fused_ops.graphs.modules import is_of_activation
from torch_fused_ops.lowerings.partition import base, op_types, overwritten_inputs, with_dependents

aten, prims = torch.ops.aten, torch.ops.prims

# For each operator, the positions of its data arguments.
DATA: dict[Any, tuple[int, ...]] = {
    signature.overload: tuple(range(first, first + op.num_data))
    for op in pointwise_operators()
    for first, signature in enumerate((op.forward, op.backward))
}

# PyTorch's mark for a tensor that an autograd.Function stores as an attribute of its ctx.
_UNCHECKED = "saved_tensor_with_no_vc_check"


class UnsoundGraphs(RuntimeError):
    """Backward would not compute the gradient of forward's results."""


class SavedTensors:
    """A forward and a backward graph, edited in place.

    Args:
        forward: returns ``num_outputs`` results for the user, then the values saved for backward.
        backward: its first inputs are the saved values, in forward's order for each kind (sizes, tensors, others).
        num_outputs: number of forward's results that the user gets.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.

    Attributes:
        overwritten: forward's inputs that change before backward runs.
        caller_owned: values that the caller has and may write before backward runs.
        in_backward: maps a value of forward to the node that has the same value in backward.
        substitutes: backward's nodes that edits have put in place of saved values.
        rounded: the substitutes with a rounded value.
        reloaded: backward's nodes with values copied from the host.
        incoming: backward's inputs that are not saved: mainly gradients.
        gradients: the nodes that depend on ``incoming``. All other nodes are values of forward, saved or recomputed.
    """

    def __init__(self, forward: Graph, backward: Graph, num_outputs: int, static_inputs: Sequence[int] = ()) -> None:
        self.forward, self.backward, self.num_outputs = forward, backward, num_outputs
        self.output_node = forward.output_node()
        inputs = forward.find_nodes(op="placeholder")
        self.static = {inputs[i] for i in static_inputs}
        self.overwritten = overwritten_inputs(forward)
        user = {base(node) for node in self.returned()[:num_outputs] if isinstance(node, Node)}
        self.caller_owned = user.union(inputs) - self.static
        self.in_backward: dict[Node, Node] = dict(self._saved_pairs())
        self._as_partitioned = set(self.in_backward)
        self.substitutes: set[Node] = set()
        self.rounded: set[Node] = set()
        self.reloaded: set[Node] = set()
        self._pair_recomputed()
        self.incoming = set(backward.find_nodes(op="placeholder")).difference(self.in_backward.values())
        self.gradients = with_dependents(self.incoming)

    # ---- reading ----

    def returned(self) -> list[Any]:
        """Return forward's results: ``num_outputs`` values for the user, then the values saved for backward."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def saved(self) -> list[Node]:
        """Return the values saved for backward."""
        return [node for node in self.returned()[self.num_outputs :] if isinstance(node, Node)]

    def saved_source(self, node: Any) -> Node | None:
        """Return the saved tensor with ``node``'s elements; None if not saved, or if it is an input or a result."""
        user, saved = self.returned()[: self.num_outputs], self.saved()
        while isinstance(node, Node) and node not in saved:
            node = node.all_input_nodes[0] if has_same_elements(node) else None
        return node if isinstance(node, Node) and node.op != "placeholder" and node not in user else None

    def available_without(self, node: Node) -> dict[Node, Node]:
        """Return the pairs of ``in_backward`` without those of a saved tensor: itself, and the source of a copy."""
        return {value: pair for value, pair in self.in_backward.items() if pair is not self.in_backward[node]}

    def first_reader(self, node: Node) -> Node:
        """Return the first node in backward that reads ``node``, a saved tensor."""
        users = self.in_backward[node].users
        first: Node = next(reader for reader in self.backward.nodes if reader in users)
        return first

    def may_be_written(self, node: Node) -> bool:
        """Return True if a value is in memory that forward or the caller may write before backward reads it."""
        source = base(node)
        return source in self.caller_owned or source in self.static

    def cost(self, nodes: Iterable[Node], alongside: Iterable[Node] = (), copied: Iterable[Node] = ()) -> int:
        """Return the bytes of memory that saving these values, and copies of ``copied``, takes.

        A saved view needs its whole base. Parameters and buffers take none, nor does memory that the saved values
        ``alongside`` need as well.
        """
        storages = dict.fromkeys(map(base, nodes))
        free = {*map(base, alongside), *self.static} if storages else ()
        return sum(nbytes(node) for node in storages if node not in free) + sum(map(nbytes, copied))

    def can_shrink(self, nodes: Sequence[Node]) -> bool:
        """Return True if copies of these saved views of one base take less memory than the base.

        Inductor removes a copy if it has the same strides, as for the first rows.
        """
        values = [node.meta.get("val") for node in nodes]
        if not all(isinstance(value, torch.Tensor) and value.stride() != _copy(value).stride() for value in values):
            return False
        return sum(map(nbytes, nodes)) < nbytes(base(nodes[0])) and not any(n.meta.get(_UNCHECKED) for n in nodes)

    def reader_of_rounding(self, node: Node) -> Node | None:
        """Return a node in backward that would see the rounding if ``node`` were rounded, or None.

        Activations, their derivatives and pointwise work on an activation's result may read the rounded value. A
        recomputed GEMM of forward and a recomputation added by ``memory="input"`` must not.
        """
        gradients, types = self.gradients, op_types()

        def is_pointwise(node: Node) -> bool:
            return types.is_view(node) or types.is_fusible(node) or node.target is aten.cat.default

        def walk(node: Node, activated: bool) -> Iterator[Node]:
            for user in node.users:
                if (user, activated) in seen or (activated and (user in gradients or user.op == "output")):
                    continue
                seen.add((user, activated))
                if user in self.substitutes:
                    yield user
                elif has_same_elements(user) or (activated and is_pointwise(user)):
                    yield from walk(user, activated)
                elif activated or node in _other_arguments(user):
                    yield user
                else:
                    yield from walk(user, True)

        seen: set[tuple[Node, bool]] = set()
        return next(walk(node, False), None)

    # ---- editing ----

    def copied(self, node: Node) -> Node:
        """Insert a copy of a value into forward, and return it."""
        place = node if node.op != "placeholder" else self.forward.find_nodes(op="placeholder")[-1]
        with self.forward.inserting_after(place):
            copied = self.forward.call_function(aten.clone.default, (node,))
        copied.meta = {**node.meta, "val": _copy(node.meta["val"])}
        return copied

    def save_instead(self, old: Node, new: Sequence[Node]) -> list[Node]:
        """Save the tensors ``new`` instead of ``old``. Return backward's placeholders for them."""
        returned, placeholder = self.returned(), self.in_backward[old]
        position = returned.index(old, self.num_outputs)
        self.output_node.args = (tuple([*returned[:position], *new, *returned[position + 1 :]]),)
        names = {node.name for node in self.backward.nodes}
        with self.backward.inserting_before(placeholder):
            for node in new:
                if node.name in names:  # a pair shares its name, which no other value of either graph may have
                    node._rename(f"saved_{node.name}")
                self.in_backward[node] = self.backward.placeholder(node.name)
                # The generated function names its parameter by the target, so the target must be unique as well.
                self.in_backward[node].target = self.in_backward[node].name
                self.in_backward[node].meta.update(node.meta)
        return [self.in_backward[node] for node in new]

    def replace_in_backward(self, old: Node, result: Node, *, rounded: bool = False) -> None:
        """Have backward read ``result`` instead of ``old``, which is no longer saved."""
        placeholder = self.in_backward[old]
        placeholder.replace_all_uses_with(result)
        self.backward.erase_node(placeholder)
        self.substitutes.add(result)
        # If a copy is saved, its source is paired with the same placeholder.
        pairs = {value: result if node is placeholder else node for value, node in self.in_backward.items()}
        if rounded:
            self.rounded.add(result)
            changed = with_dependents([result])  # values that backward recomputes from a rounded value
            pairs = {value: node for value, node in pairs.items() if node not in changed}
        self.in_backward = pairs

    def put_unchecked_last(self) -> None:
        """Save the tensors that have no version check last: AOTAutograd counts them from the end."""
        tensors = [node for node in self.saved() if _kind(node) is torch.Tensor]
        ordered = sorted(tensors, key=lambda node: bool(node.meta.get(_UNCHECKED)))
        if ordered == tensors:
            return
        returned, replacement = self.returned(), dict(zip(tensors, ordered, strict=True))
        saved = [replacement.get(node, node) for node in returned[self.num_outputs :]]
        self.output_node.args = ((*returned[: self.num_outputs], *saved),)
        for before, node in itertools.pairwise(ordered):
            if node.meta.get(_UNCHECKED) and self.in_backward[before].next is not self.in_backward[node]:
                self.in_backward[before].append(self.in_backward[node])

    # ---- pairing ----

    def _saved_pairs(self) -> Iterator[tuple[Node, Node]]:
        """Yield each saved value with backward's input for it, by position among sizes, tensors and other values."""
        saved: dict[type, list[Node]] = {}
        for node in self.saved():
            saved.setdefault(_kind(node), []).append(node)
        inputs: dict[type, list[Node]] = {}
        for node in self.backward.find_nodes(op="placeholder"):
            inputs.setdefault(_kind(node), []).append(node)
        for kind, nodes in saved.items():
            if len(nodes) != len(set(nodes)):
                raise UnsoundGraphs(f"forward saves one of {', '.join(map(str, nodes))} twice")
            if len(nodes) > len(inputs.get(kind, ())):
                raise UnsoundGraphs(
                    f"{len(nodes)} values are saved, and backward has {len(inputs.get(kind, ()))} inputs"
                )
            yield from zip(nodes, inputs[kind], strict=False)

    def _pair_recomputed(self) -> None:
        """Pair the values that backward recomputes. The partitioner has copied these nodes with their names."""
        named = {node.name: node for node in self.forward.nodes}
        paired = {placeholder: value for value, placeholder in self.in_backward.items()}
        for node in self.backward.find_nodes(op="placeholder"):
            value = paired.get(node)
            if named.get(node.name, value) is not value:
                raise UnsoundGraphs(f"forward saves {value} as backward's {node}, which is another value")
        for placeholder, value in paired.items():
            if value.target is aten.clone.default:  # its source has the same value
                self.in_backward.setdefault(value.all_input_nodes[0], placeholder)
        for node in self.backward.nodes:
            source = named.get(node.name)
            if source is not None and node.op in ("call_function", "get_attr") and self._is_same_call(source, node):
                self.in_backward.setdefault(source, node)

    def _is_same_call(self, node: Node, copied: Node) -> bool:
        """Return True if ``copied``, a call in backward, is the same function of the same values as ``node``.

        A copy has the value of its source.
        """
        if (node.op, node.target) != (copied.op, copied.target):
            return False
        mapped = map_arg((node.args, node.kwargs), lambda value: _source(self.in_backward.get(value, value)))
        return bool(mapped == map_arg((copied.args, copied.kwargs), _source))

    # ---- the invariant ----

    def check(self) -> None:
        """Check that backward uses the values that forward computed.

        * Each input of backward, except gradients, is saved exactly once, as the same value.
        * Recomputed values are the same function of the same values as in forward.
        * No saved input changes before backward reads it.
        * Edits save memory that the caller may write only as parameters or buffers themselves.
        * Rounded values have no reader that would see the rounding.

        Raises:
            UnsoundGraphs: a condition is false. The message names the node.
        """
        pairs = dict(self._saved_pairs())
        unknown = set(self.backward.find_nodes(op="placeholder")) - self.incoming - set(pairs.values())
        if unknown:
            raise UnsoundGraphs(f"backward reads {', '.join(map(str, unknown))}, which forward does not save")
        for node, placeholder in pairs.items():
            if self.in_backward.get(node) is not placeholder:
                raise UnsoundGraphs(f"forward saves {node} as backward's {placeholder}, which is another value")
            descriptions = _described(node), _described(placeholder)
            if descriptions[0] != descriptions[1]:
                raise UnsoundGraphs(
                    f"forward's {node} is {descriptions[0]}, backward's {placeholder} {descriptions[1]}"
                )
        for node, copied in self.in_backward.items():
            if copied.op != "placeholder" and copied not in self.reloaded and not self._is_same_call(node, copied):
                raise UnsoundGraphs(f"backward's {copied.format_node()} is not forward's {node.format_node()}")
        allowed = self._as_partitioned | self.static
        for node in self.saved():
            if base(node) in self.overwritten and self.in_backward[node].users:
                raise UnsoundGraphs(f"backward reads {node}, but forward has overwritten {base(node)}")
            if node not in allowed and self.may_be_written(node):
                raise UnsoundGraphs(f"forward saves {node} without a copy, but the caller may modify {base(node)}")
        for node in self.rounded:
            reader = self.reader_of_rounding(node)
            if reader is not None:
                raise UnsoundGraphs(f"{reader} reads {node}, which is rounded in backward")


def _source(node: Node) -> Node:
    """Return the value that a call copies, or the node."""
    while node.target is aten.clone.default:
        (node,) = node.all_input_nodes
    return node


def nbytes(node: Node) -> int:
    """Return the bytes of a value's elements; 0 if it is not a tensor. Symbolic sizes count by their hints."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    numel: int | torch.SymInt = value.numel()
    return int((numel.node.hint if isinstance(numel, torch.SymInt) else numel) or 0) * value.element_size()


def by_memory(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Group values by the node whose memory they share."""
    views: dict[Node, list[Node]] = {}
    for node in nodes:
        views.setdefault(base(node), []).append(node)
    return views


def storage_shares(nodes: Iterable[Node]) -> dict[Node, int]:
    """Return the bytes of memory that each of these saved values occupies. Views of one base share its bytes."""
    shares: dict[Node, int] = {}
    for source, parts in by_memory(nodes).items():
        total, seen, shared = sum(map(nbytes, parts)), 0, 0
        for part in parts:
            seen += nbytes(part)
            shares[part] = nbytes(source) * seen // max(total, 1) - shared
            shared += shares[part]
    return shares


def _copy(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.clone()


def _kind(node: Node) -> type:
    value = node.meta.get("val")
    types = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    kind = next((type_ for type_ in types if isinstance(value, type_)), object)
    return torch.SymInt if kind in types[1:] else kind


def _described(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {[str(n) for n in value.shape]}" if isinstance(value, torch.Tensor) else ""


def views_and_readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """Yield the readers of a tensor, through views and casts, each with the view that it reads."""
    for user in node.users:
        if has_same_elements(user):
            yield from views_and_readers(user)
        else:
            yield node, user


def readers(node: Node) -> Iterator[Node]:
    """Yield the readers of a tensor, through views and casts."""
    return (reader for _, reader in views_and_readers(node))


def has_same_elements(node: Node) -> bool:
    """Return True if a call only views or casts a tensor."""
    return node.target is prims.convert_element_type.default or base(node) is not node


def _other_arguments(node: Node) -> list[Node]:
    """Return the nodes that a call reads, except the data arguments of a fused operator or a marked activation."""
    data = range(len(node.args)) if is_of_activation(node) else DATA.get(node.target, ())
    nodes: list[Node] = []
    map_arg((tuple(a for i, a in enumerate(node.args) if i not in data), node.kwargs), nodes.append)
    return nodes
