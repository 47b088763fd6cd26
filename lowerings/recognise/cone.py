"""From a GEMM's input back to what it is computed of: the cone of an activation, and whether replacing it is sound.

A *site* is a value that a GEMM reads, through views, casts and dropout, maybe with other columns beside it, and that is
a nonlinear pointwise function of what GEMMs produced. Its *cone* is the calls between: from the *root*, whose value is
replaced, down to the *operands*, which the fused operator will read. ``find`` lists a graph's sites; ``examine`` walks
one and returns its cone, or raises ``Refusal``. A cone is replaced only where the graph's meaning stays; each check's
message says what it is for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from torch_fused_ops import activations
from torch_fused_ops.reasons import NOT_AN_MLP, Kind, Reason, Refusal

from .custom import forward_of
from .graph import AFFINE, CASTS, CONSTANTS, COPIES, DROPOUTS, FREE, NONLINEAR, PIECES, Facts, shown, statically, tensor
from .prove import Verdict, prove
from .symbolic import RULES, Ref, Step, Unprovable
from .values import FLOATING, check_plain, equal, is_contiguous, keeps_rows, same_shape, value_of

__all__ = ["Cone", "check_in_place_call", "examine", "find", "readers", "results"]

MAX_CALLS = 64  # the longest spelling of an activation met in 260 models has 14


@dataclass
class Cone:
    """An activation in the graph. ``calls`` is in graph order and ends with ``root``."""

    root: Node
    calls: list[Node] = field(default_factory=list)
    operands: list[Node] = field(default_factory=list)
    bypassed: list[Node] = field(default_factory=list)  # other nodes that the operator does not read any more
    dtype: torch.dtype = torch.float32  # what the operator computes in; root's own dtype may be narrower
    verdict: Verdict = field(default_factory=lambda: Verdict(None))
    packed: tuple[Node, str] | None = None  # gate and up as one tensor, and their layout
    order: tuple[int, ...] | None = None  # the axes as they lie in memory, where the result is not contiguous
    factors: list[Node] = field(default_factory=list)  # products with others' tensors on its way to the GEMMs


def find(facts: Facts) -> Iterator[tuple[Node, list[Node]]]:
    """Each site's top call and the GEMMs that read it, in graph order."""
    sites: dict[Node, dict[Node, None]] = {}
    for node, call in facts.calls.items():
        if call.gemm is None:
            continue
        for i, arg in enumerate(call.args):
            for read in _columns(facts, arg) if i in call.gemm and isinstance(arg, Node) else ():
                if facts.state[read] == NONLINEAR:
                    sites.setdefault(facts.origin(read), {})[node] = None
    for top in sorted(sites, key=facts.index.__getitem__):
        yield top, list(sites[top])


def _columns(facts: Facts, node: Node) -> list[Node]:
    """The node itself; or, where it is several tensors side by side, as in blocks whose attention and MLP share their
    last linear layer, these."""
    joined = node
    while _keeps_columns(facts, joined):
        joined = joined.all_input_nodes[0]
    return facts.joined(joined) or [node]


def _keeps_columns(facts: Facts, node: Node) -> bool:
    name = facts.calls[node].name
    return keeps_rows(facts, node) or name in CASTS or name in COPIES or name in DROPOUTS


def readers(facts: Facts, node: Node) -> Iterator[Node]:
    """Who reads the node's value in the end, each once: its users, and the users of its views, casts and dropout.

    Where it is put beside other columns, who reads all of them; a part of them may be without it.
    """
    seen, pending = set(), [(user, False) for user in reversed(node.users)]
    while pending:
        user, beside = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        joins = bool(facts.joined(user))
        moves = _keeps_columns(facts, user) if beside else facts.passes(user)
        if joins or (moves and not facts.calls[user].inplace):
            pending.extend((one, beside or joins) for one in reversed(user.users))
        else:
            yield user


def examine(facts: Facts, top: Node) -> Cone:
    """The proved cone under a site's top call, or, where that is a product with another's tensor, under its other side.

    A learnable scale of the columns, a routing weight or a mask of the rows stays where it is, behind the operator.

    Raises:
        Refusal: it is no activation of the table, or replacing it could change what the graph computes.
    """
    try:
        return _examine(facts, top)
    except Refusal as refusal:
        inner = _scaled(facts, top) if refusal.reason.kind in _SCALES else None
        if inner is None:
            raise
    cone = examine(facts, inner)
    cone.factors.append(top)
    return cone


_SCALES = (Kind.PARAMETER, Kind.ANOTHER_TENSOR, Kind.MASK)


def _scaled(facts: Facts, top: Node) -> Node | None:
    """What a product multiplies with a tensor that no GEMM has produced."""
    if facts.calls[top].name not in ("mul", "div") or facts.calls[top].inplace:
        return None
    sides = [a for a in facts.calls[top].args[:2] if isinstance(a, Node)]
    own = [a for a in sides if facts.state[a] == NONLINEAR]
    given = [a for a in sides if facts.state[a] == FREE and not facts.fed[a]]
    if (len(own), len(given)) != (1, 1) or (facts.calls[top].name == "div" and own[0] is not sides[0]):
        return None
    return facts.origin(own[0])


def results(facts: Facts, cone: Cone) -> list[Node]:
    """Who reads the cone's value in the end, each once: its ``readers``, and for a factor among them the factor's."""
    found: dict[Node, None] = {}
    pending = list(reversed(list(readers(facts, cone.root))))
    while pending:
        reader = pending.pop()
        if reader in cone.factors:
            pending.extend(reversed(list(readers(facts, reader))))
        else:
            found[reader] = None
    return list(found)


def _examine(facts: Facts, top: Node) -> Cone:
    cone = Cone(_root(facts, top))
    _walk(facts, cone)
    steps, result = _steps(facts, cone)
    cone.verdict = prove(steps, result, len(cone.operands), differentiable=value_of(cone.root).requires_grad)
    if cone.verdict.activation is None:
        for operand in cone.operands:  # x·w: maybe the weight belongs to the activation, as in xIELU
            if facts.calls[operand].name in ("mul", "div"):
                _refuse_foreign(facts, cone, [a for a in operand.all_input_nodes if facts.state[a] == FREE])
        assert cone.verdict.reason is not None
        raise Refusal(*cone.verdict.reason)
    _check_values(facts, cone)
    _check_writes(facts, cone)
    _check_results(facts, cone)
    _find_packed(facts, cone)
    return cone


def _root(facts: Facts, top: Node) -> Node:
    """A single cast right after the top call belongs to the cone: the operator rounds to that dtype itself.

    Not one to a wider dtype, in front of a product in float32 for example: what is rounded before it stays rounded.
    """
    users = list(top.users)
    if len(users) == 1 and facts.calls[users[0]].name in CASTS and facts.region[users[0]] == facts.region[top]:
        value = tensor(users[0])
        own = value_of(top)
        widens = value is not None and value.dtype != own.dtype and not _loses(own.dtype, value.dtype)
        if value is not None and value.dtype in FLOATING and value.device == own.device and not widens:
            return users[0]
    return top


def _loses(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast from source to target rounds."""
    return torch.promote_types(source, target) != target


# The walk


def _is_call(facts: Facts, node: Node) -> bool:
    """Whether the walk goes through the node (else it is an operand)."""
    call, state = facts.calls[node], facts.state[node]
    if state == FREE:
        return False
    moves = call.name in CASTS or call.name in COPIES or (call.name in DROPOUTS and not call.dropout_is_active())
    if state == AFFINE:
        if call.name in CASTS and _loses(value_of(node.all_input_nodes[0]).dtype, value_of(node).dtype):
            return False  # the activation is applied to the rounded tensor
        return not facts.sum_of_gemms(node) and (moves or call.name in RULES)
    if call.name in DROPOUTS and not moves:
        raise Refusal(Kind.DROPOUT_INSIDE, "an active dropout stands inside the activation")
    if not moves and call.name not in RULES and facts.custom(node) is None:
        raise Refusal(Kind.STANDS_BETWEEN, f"{shown(node)} stands between the activation's parts")
    return True


def _walk(facts: Facts, cone: Cone) -> None:
    seen = {cone.root}
    pending = [cone.root]
    while pending:
        node = pending.pop()
        cone.calls.append(node)
        if len(cone.calls) > MAX_CALLS:
            raise Refusal(Kind.MANY_CALLS, f"more than {MAX_CALLS} pointwise calls lie between the GEMMs")
        for source in facts.sources(node):
            if source not in seen:
                seen.add(source)
                if _is_call(facts, source):
                    pending.append(source)
                elif facts.calls[source].name in CONSTANTS and same_shape(source, cone.root):
                    cone.bypassed.append(source)
                else:
                    cone.operands.append(source)
    cone.calls.sort(key=facts.index.__getitem__)
    cone.operands.sort(key=facts.index.__getitem__)
    _refuse_foreign(facts, cone, [operand for operand in cone.operands if facts.state[operand] == FREE])


_TELLING = (Kind.PARAMETER, Kind.ANOTHER_TENSOR, Kind.MASK, Kind.OTHER_OPERAND)  # the most telling reason first


def _refuse_foreign(facts: Facts, cone: Cone, operands: Sequence[Node]) -> None:
    """Refuse what no GEMM has produced; of several operands, for the one that says most."""
    reasons = [_foreign(facts, cone, operand) for operand in operands]
    if reasons:
        raise Refusal(*min(reasons, key=lambda reason: _TELLING.index(reason.kind)))


def _foreign(facts: Facts, cone: Cone, operand: Node) -> Reason:
    """Why an operand that no GEMM has produced takes no part in an MLP's activation."""
    source = facts.origin(operand)
    gated = Reason(
        Kind.OTHER_OPERAND,
        f"{NOT_AN_MLP}combined with the result of {shown(source)}, which no GEMM with weights has produced",
    )
    whole = source.op not in ("placeholder", "get_attr") and same_shape(operand, cone.root)
    if facts.fed[source] and whole and not _is_mask(source):
        return gated
    pending, seen = [operand], {operand}
    while pending and not facts.fed[operand]:
        node = pending.pop()
        if isinstance(tensor(node), torch.nn.Parameter):
            # The activation's own, as in xIELU; in a whole tensor of data, as a norm makes one, it is a gate on that.
            if whole:
                return gated
            if value_of(node).requires_grad:
                return Reason(Kind.PARAMETER, f"a learnable parameter takes part: {shown(node)}")
            return Reason(Kind.PARAMETER, f"a parameter takes part: {shown(node)}")
        new = [a for a in node.all_input_nodes if a not in seen]
        seen.update(new)
        pending.extend(new)
    if _is_mask(source):
        return Reason(Kind.MASK, f"a mask takes part: {shown(source)}")
    return Reason(Kind.ANOTHER_TENSOR, f"another tensor takes part: {shown(source)}")


def _is_mask(node: Node) -> bool:
    value = tensor(node)
    return value is not None and value.dtype == torch.bool


def _merge(facts: Facts, cone: Cone) -> dict[Node, Node]:
    """Operands that are the same view taken twice (``h[:, :n] * sigmoid(h[:, :n])``) are one: each one's first."""
    same: dict[Node, Node] = {}  # a node, and the first that is the same view of the same tensor
    views: dict[Any, Node] = {}
    first: dict[Node, Node] = {}

    def fixed(node: Node) -> bool:
        written = (facts.writes.get(facts.storage(one)) for one in (node, *node.all_input_nodes))
        return facts.passes(node) and facts.calls[node].name not in DROPOUTS and not any(written)

    def key(argument: Any) -> Any:
        if isinstance(argument, Node):
            return same[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(map(key, argument))
        return repr(argument)

    pending = list(cone.operands)  # no recursion: chains of views may be long, and join again
    while pending:
        node = pending[-1]
        below = [a for a in node.all_input_nodes if a not in same] if node not in same and fixed(node) else []
        if below:
            pending.extend(below)
            continue
        pending.pop()
        if node not in same:
            call = facts.calls[node]
            view = (
                (call.name, key(call.args), key(tuple(sorted(call.kwargs.items()))), facts.region[node])
                if fixed(node)
                else node
            )
            same[node] = views.setdefault(view, node)

    merged = {operand: first.setdefault(same[operand], operand) for operand in cone.operands}
    cone.operands = list(first.values())
    cone.bypassed += [node for node in merged if node not in cone.operands]
    return merged


def _steps(facts: Facts, cone: Cone) -> tuple[tuple[Step, ...], Ref]:
    merged = _merge(facts, cone)
    known = {node: Ref("operand", cone.operands.index(first)) for node, first in merged.items()}
    steps: list[Step] = []

    def given(argument: Any) -> Any:
        if isinstance(argument, Node):
            return known[argument] if argument in known else CONSTANTS[facts.calls[argument].name]
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        raise Refusal(Kind.ARGUMENT, f"an argument of type {type(argument).__name__} takes part")

    for node in cone.calls:
        call, function = facts.calls[node], facts.custom(node)
        if function is not None:
            known[node] = _inline(function, list(map(given, function.args[2:])), steps)
            cone.bypassed += [function, *(a for a in function.args[:2] if isinstance(a, Node))]
        elif call.name in RULES:
            if call.name.startswith("clamp") and len(node.all_input_nodes) > 1:  # another gradient at the bounds
                raise Refusal(Kind.TENSOR_BOUND, "a tensor is a clamp's bound")
            kwargs = tuple((k, given(v)) for k, v in sorted(call.kwargs.items()))
            steps.append((call.name, tuple(map(given, call.args)), kwargs))
            known[node] = Ref("value", len(steps) - 1)
        else:
            known[node] = known[node.all_input_nodes[0]]
    return tuple(steps), known[cone.root]


def _inline(function: Node, arguments: list[Any], steps: list[Step]) -> Ref:
    """Append what a custom autograd.Function computes."""
    if any(user.args[1] != 0 for user in function.users):
        raise Refusal(Kind.CUSTOM_FUNCTION, "a custom autograd.Function has other results that are read")
    try:
        forward, result = forward_of(function)
    except Unprovable as e:
        raise Refusal(*e.reason) from e
    start = len(steps)

    def moved(argument: Any) -> Any:
        if not isinstance(argument, Ref):
            return argument
        return arguments[argument.i] if argument.kind == "operand" else Ref("value", start + argument.i)

    for name, args, kwargs in forward:
        steps.append((name, tuple(map(moved, args)), tuple((k, moved(v)) for k, v in kwargs)))
    return moved(result)  # type: ignore[no-any-return]


# What must hold besides the formula


def _check_values(facts: Facts, cone: Cone) -> None:
    root = value_of(cone.root)
    top = value_of(cone.root.all_input_nodes[0]) if facts.calls[cone.root].name in CASTS else root
    for node in cone.operands + cone.calls:
        check_plain(node)
        device = value_of(node).device
        if device != root.device:
            raise Refusal(Kind.DEVICES, f"it is computed on {device} and on {root.device}")
    for node in cone.operands:
        value = value_of(node)
        if facts.origin(node) in facts.inference and cone.root not in facts.inference:
            text = f"the result of {shown(facts.origin(node))}, from inference mode, cannot be saved for backward"
            raise Refusal(Kind.INFERENCE_MODE, text)
        if not (value.ndim and same_shape(node, cone.root)):
            text = f"a broadcast changes the shape: {tuple(value.shape)} to {tuple(root.shape)}"
            raise Refusal(Kind.BROADCAST, text)
        if facts.calls[node].name in CASTS and (_loses(top.dtype, value.dtype) or _loses(root.dtype, value.dtype)):
            text = f"it works in {value.dtype} on {value_of(node.all_input_nodes[0]).dtype} values"
            raise Refusal(Kind.NARROW_CAST, text)
    widest: dict[Node, torch.dtype] = {}  # of the operands that a call's value is made of
    for node in cone.calls:
        if facts.region[node] != facts.region[cone.root]:
            raise Refusal(Kind.REGION, "autocast or grad mode is switched between its parts")
        sources = [widest.get(source, value_of(source).dtype) for source in facts.sources(node)]
        widest[node] = max(sources, key=lambda dtype: dtype.itemsize)
        dtype = value_of(node).dtype
        if node is not cone.root and any(_loses(source, dtype) for source in sources):
            raise Refusal(Kind.NARROW_CAST, f"it works in {dtype} on {widest[node]} values")
    # The operator computes in float32 whatever it reads, and rounds once: a last cast to less is its own rounding.
    cone.dtype = root.dtype if _loses(top.dtype, root.dtype) else top.dtype
    for node in cone.operands:
        cone.dtype = torch.promote_types(cone.dtype, value_of(node).dtype)
    cone.order = _order(root)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the slowest to the fastest, where the value is dense but not contiguous as the operator's is."""
    if is_contiguous(value):
        return None
    strides = value.stride()
    if all(isinstance(stride, int) for stride in strides):
        order = tuple(sorted(range(value.ndim), key=lambda axis: -strides[axis]))
        if is_contiguous(value, order):
            return order
    raise Refusal(Kind.ORDER, "its result is laid out in memory in another order than the operator's")


def _check_writes(facts: Facts, cone: Cone) -> None:
    """Pre-grad graphs write in place: each value must be what the formula says where it is read, and at the root."""
    calls, at = set(cone.calls), facts.index

    def writers_after(node: Node) -> Iterator[Node]:
        return (w for w in facts.writes.get(facts.storage(node), ()) if at[w] > at[node])

    for node in cone.calls:
        for source in facts.sources(node):
            for writer in writers_after(source):
                if at[writer] < at[node]:
                    raise Refusal(Kind.WRITTEN, f"{shown(writer)} writes into it in place before it is read")
    # After the root too: the operator keeps its input for backward, where relu and others keep their result.
    for operand in cone.operands:
        for writer in writers_after(operand):
            if writer not in calls:
                raise Refusal(Kind.WRITTEN, f"{shown(writer)} writes into its input in place")
    for writer in writers_after(cone.root):
        if facts.calls[writer].name not in DROPOUTS:  # a dropout on top stays
            raise Refusal(Kind.WRITTEN, f"{shown(writer)} writes into its result in place")
    for node in cone.calls:
        if facts.calls[node].inplace:
            check_in_place_call(facts, node, cone.root, cone.calls)


def check_in_place_call(facts: Facts, node: Node, root: Node, calls: Collection[Node]) -> None:
    """Made functional, the call no longer changes its argument: nothing may read that later, but through the root.

    Args:
        facts: of the graph.
        node: a call that works in place.
        root: the node whose value the operator will give.
        calls: those that the operator replaces.

    Raises:
        Refusal: something does, or the argument is the caller's.
    """
    if facts.region[node.all_input_nodes[0]] != facts.region[node]:  # under no_grad it would lose the gradient
        text = f"{shown(node)} works in place in another grad mode or autocast region than its argument's"
        raise Refusal(Kind.IN_PLACE_REGION, text)
    of_result = {root}  # and its views
    for alias in facts.aliases[facts.storage(node)]:
        if alias.op in ("placeholder", "get_attr"):
            raise Refusal(Kind.WRITES_INPUT, f"{shown(node)} writes in place into {shown(alias)}")
        if alias is root or (facts.passes(alias) and alias.all_input_nodes[0] in of_result):
            of_result.add(alias)
            continue
        for user in alias.users:
            if facts.index[user] > facts.index[node] and user not in calls:
                text = f"{shown(node)} works in place, and {shown(user)} reads the tensor afterwards"
                raise Refusal(Kind.READ_AFTERWARDS, text)


def _check_results(facts: Facts, cone: Cone) -> None:
    """What the graph hands out its caller may write: the operator may keep it for backward where PyTorch does, too."""
    name = cone.verdict.activation
    keeps_result = cone.verdict.up is None and name is not None and activations.get(name).gradient_from_output
    if keeps_result or not value_of(cone.root).requires_grad:
        return
    results = {facts.storage(node) for node in cone.root.graph.output_node().all_input_nodes}
    handed_out = results & {facts.storage(node) for node in cone.operands}
    if handed_out and not handed_out <= {facts.storage(node) for node in _kept_by_torch(facts, cone)}:
        text = "its input is a result of the graph, which may be written before backward needs it"
        raise Refusal(Kind.GRAPH_RESULT, text)


def _kept_by_torch(facts: Facts, cone: Cone) -> set[Node]:
    """The operands that autograd keeps for the spelling as it is: seen by running it, on tensors without data."""
    kept: set[int] = set()
    values: dict[Node, torch.Tensor] = {}

    def stand_in(node: Node) -> torch.Tensor:
        if node not in values:
            known = value_of(node)
            leaf = torch.empty(2, 2, dtype=known.dtype, device="meta", requires_grad=known.requires_grad)
            values[node] = leaf.clone()  # what is written in place must not be a leaf
        return values[node]

    def storage(t: torch.Tensor) -> int:
        return int(t.untyped_storage()._cdata)

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.add(storage(t))
        return t

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            for node in cone.calls:
                args, kwargs = map_arg((node.args, node.kwargs), stand_in)
                target: Any = node.target
                called = getattr(torch.Tensor, target) if node.op == "call_method" else target
                values[node] = called(*args, **kwargs)
    except Exception:  # a custom function, say: nothing is known of it
        return set()
    return {node for node in cone.operands if storage(stand_in(node)) in kept}


# Gate and up in one tensor


@dataclass(frozen=True)
class _Cut:
    base: Node
    axis: int
    start: Any
    step: int
    length: Any  # None: the axis is dropped


def _find_packed(facts: Facts, cone: Cone) -> None:
    if cone.verdict.up is None or cone.order is not None or cone.verdict.gate_scale != 1:
        return
    gate = _cut(facts, cone.operands[cone.verdict.gate])
    up = _cut(facts, cone.operands[cone.verdict.up])
    if gate is None or up is None or gate.base is not up.base or gate.axis != up.axis:
        return
    base, last = gate.base, value_of(gate.base).ndim - 1
    size = value_of(base).shape[gate.axis]
    layout = None
    if gate.length is None or up.length is None:  # one row of a pair each, [..., 0] and [..., 1]
        swapped = (gate.start, up.start) == (1, 0)
        pair = swapped or (gate.start, up.start) == (0, 1)
        if statically(size == 2) and pair and facts.calls[base].name in _SPLITS_LAST:
            whole = base.all_input_nodes[0]
            shape, packed = value_of(base).shape, value_of(whole).shape
            leading = len(packed) + 1 == len(shape) and all(map(equal, packed[:-1], shape[:-2]))
            if leading and statically(packed[-1] == shape[-1] * shape[-2]):
                layouts = {(last, False): "interleaved", (last - 1, False): "halves", (last - 1, True): "swapped"}
                base, layout = whole, layouts.get((gate.axis, swapped))
    elif gate.axis != last:
        raise Refusal(Kind.CUT_AXIS, f"gate and up are cut on axis {gate.axis} of {last + 1}, not on the last")
    elif statically(size == 2 * gate.length) and statically(size == 2 * up.length):
        starts = {"halves": (1, 0, gate.length), "interleaved": (2, 0, 1), "swapped": (1, gate.length, 0)}
        for name, (step, gate_start, up_start) in starts.items():
            if (
                gate.step == up.step == step
                and statically(gate.start == gate_start)
                and statically(up.start == up_start)
            ):
                layout = name
    if layout is None:
        return  # the operator then reads the two views
    bypassed = set(cone.operands)
    for node in cone.operands:
        while (node := node.all_input_nodes[0]) is not base:
            bypassed.add(node)
    if all(facts.region[node] == facts.region[cone.root] for node in bypassed) and not any(
        facts.index[base] < facts.index[writer] < facts.index[cone.root] and writer not in cone.calls
        for writer in facts.writes.get(facts.storage(base), ())
    ):
        cone.packed = (base, layout)


_SPLITS_LAST = frozenset({"view", "reshape", "unflatten", "_unsafe_view"})


def _cut(facts: Facts, node: Node) -> _Cut | None:
    """The part of another tensor that the node is, where it is one by slicing along one axis."""
    call = facts.calls[node]
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is None:
        return None
    if call.name == "getitem" and facts.calls[source].name in PIECES:
        return _piece(facts, source, call.args[1])
    value = tensor(source)
    if value is None:
        return None
    args = dict(zip(("input", "dim", "start", "end", "step"), call.args, strict=False)) | call.kwargs
    axis = args.get("dim", 0)
    if call.name == "getitem":
        return _indexed(source, value, call.args[1])
    if not isinstance(axis, int):
        return None
    axis %= value.ndim
    if call.name == "narrow":
        return _Cut(source, axis, args.get("start"), 1, args.get("end", args.get("length")))
    if call.name == "select":
        return _Cut(source, axis, args.get("start", args.get("index")), 1, None)
    if call.name == "slice":
        return _sliced(source, value, axis, slice(args.get("start"), args.get("end"), args.get("step")))
    return None


def _piece(facts: Facts, source: Node, i: Any) -> _Cut | None:
    call = facts.calls[source]
    base = source.all_input_nodes[0]
    pieces = source.meta.get("example_value", source.meta.get("val"))
    position = 1 if call.name == "unbind" else 2
    axis = call.kwargs.get("dim", call.args[position] if len(call.args) > position else 0)
    if not isinstance(i, int) or not isinstance(axis, int) or not isinstance(pieces, (tuple, list)):
        return None
    axis, i = axis % value_of(base).ndim, i % len(pieces)
    if call.name == "unbind":
        return _Cut(base, axis, i, 1, None)
    start: Any = 0
    for piece in pieces[:i]:
        start = start + piece.shape[axis]
    return _Cut(base, axis, start, 1, pieces[i].shape[axis])


def _indexed(source: Node, value: torch.Tensor, index: Any) -> _Cut | None:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, Node) or i is None or isinstance(i, (list, bool)) for i in index):
        return None
    if index.count(Ellipsis):
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (value.ndim - len(index) + 1), *index[at + 1 :])
    cuts = [(axis, i) for axis, i in enumerate(index) if i != slice(None)]
    if len(cuts) != 1:
        return None
    ((axis, i),) = cuts
    if isinstance(i, int):
        return _Cut(source, axis, i % 2 if statically(value.shape[axis] == 2) else i, 1, None)
    return _sliced(source, value, axis, i) if isinstance(i, slice) else None


def _sliced(source: Node, value: torch.Tensor, axis: int, cut: slice) -> _Cut | None:
    size = value.shape[axis]
    if any(isinstance(bound, Node) for bound in (cut.start, cut.stop, cut.step)):
        return None
    start, stop, step = cut.start or 0, size if cut.stop is None else cut.stop, cut.step or 1
    if statically(start < 0):
        start = size + start
    if statically(stop < 0):
        stop = size + stop
    elif not statically(stop < size):
        stop = size
    return _Cut(source, axis, start, step, (stop - start + step - 1) // step)
