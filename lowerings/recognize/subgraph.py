"""Find an activation's subgraph, from a GEMM's input back to the GEMMs before it; check that replacing it is sound.

A *site* is a nonlinear pointwise function of GEMM results that feeds another GEMM. Views, casts, dropout or a
concatenation may lie between. Its *subgraph* is the calls from the *output node*, whose value is replaced, back to the
*inputs*, which the fused operator will read. ``find_sites`` lists a graph's sites. ``match_site`` walks one
site and returns its subgraph, or raises ``Rejection``. A subgraph is replaced only if the graph computes the same
afterwards. Each check's message explains its purpose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from torch_fused_ops import activations
from torch_fused_ops.graphs.reasons import NOT_AN_MLP, Kind, Reason, Rejection

from .autograd_functions import forward_of
from .graph import (
    AFFINE,
    CASTS,
    CONSTANTS,
    COPIES,
    DROPOUTS,
    FREE,
    NONLINEAR,
    PIECES,
    GraphAnalysis,
    is_mask,
    label,
    reachable,
    tensor,
)
from .prove import Match, prove
from .symbolic import RULES, Ref, Step
from .values import FLOATING, check_plain, equal, is_contiguous, keeps_rows, same_shape, value_of

MAX_CALLS = 64  # the longest spelling in tests/lowerings/test_recognize.py has 9 calls


@dataclass
class Subgraph:
    """An activation in the graph. ``calls`` is in graph order and ends with ``output``."""

    output: Node
    calls: list[Node] = field(default_factory=list)
    inputs: list[Node] = field(default_factory=list)
    bypassed: list[Node] = field(default_factory=list)  # nodes outside ``calls`` that the operator makes unnecessary
    dtype: torch.dtype = torch.float32  # the dtype of the operator's result; the output node may have a narrower dtype
    match: Match = field(default_factory=lambda: Match(None))
    packed: tuple[Node, str] | None = None  # the tensor with both gate and up, and its layout, or None
    order: tuple[int, ...] | None = None  # the axes in memory order; None if the result is contiguous
    factors: list[Node] = field(default_factory=list)  # multiplications by other tensors, between output node and GEMMs

    @property
    def replaced(self) -> set[Node]:
        """Return the nodes that may be dead after the operator has replaced the subgraph."""
        return {*self.calls, *self.bypassed}


def find_sites(analysis: GraphAnalysis) -> Iterator[tuple[Node, list[Node]]]:
    """Yield each site's output node and the GEMMs that read it, in graph order."""
    sites: dict[Node, dict[Node, None]] = {}
    for node, call in analysis.calls.items():
        if call.gemm is None:
            continue
        for i, arg in enumerate(call.args):
            for read in _columns(analysis, arg) if i in call.gemm and isinstance(arg, Node) else ():
                if analysis.state[read] == NONLINEAR:
                    sites.setdefault(analysis.origin(read), {})[node] = None
    for output in sorted(sites, key=analysis.index.__getitem__):
        yield output, list(sites[output])


def _columns(analysis: GraphAnalysis, node: Node) -> list[Node]:
    """Return the tensors that are concatenated into the node, through views, casts and dropout; otherwise [node]."""
    source = node
    while _keeps_columns(analysis, source):
        source = source.all_input_nodes[0]
    return analysis.concat_inputs(source) or [node]


def _keeps_columns(analysis: GraphAnalysis, node: Node) -> bool:
    name = analysis.calls[node].name
    return keeps_rows(analysis, node) or name in CASTS or name in COPIES or name in DROPOUTS


def readers(analysis: GraphAnalysis, node: Node, through: Collection[Node] = ()) -> Iterator[Node]:
    """Yield the final readers of the node's value, each once: its users, and the users of its views, casts and dropout.

    A call that reads a part of a concatenation, such as a slice, is yielded itself, not its users: the part may lack
    this value.

    Args:
        analysis: the graph's analysis.
        node: the node.
        through: calls to look through: their readers are yielded in their place.
    """
    seen, pending = set(), [(user, False) for user in reversed(node.users)]
    while pending:
        user, is_concatenated = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        concatenates = bool(analysis.concat_inputs(user))
        moves = _keeps_columns(analysis, user) if is_concatenated else analysis.is_passthrough(user)
        if concatenates or user in through or (moves and not analysis.calls[user].inplace):
            pending.extend((reader, is_concatenated or concatenates) for reader in reversed(user.users))
        else:
            yield user


def match_site(analysis: GraphAnalysis, node: Node) -> Subgraph:
    """Return the proved subgraph that ends with a site's output node.

    If that node multiplies an activation by another tensor, or masks it, the subgraph ends with the activation. A
    learnable scale of the columns, a routing weight or a mask of the rows then reads the operator's result.

    Raises:
        Rejection: the site is not a supported activation, or replacing it could change results.
    """
    try:
        return _match(analysis, node)
    except Rejection as rejection:
        inner = _value_before_factor(analysis, node) if rejection.reason.kind in _FACTOR_KINDS else None
        if inner is None:
            raise
    subgraph = match_site(analysis, inner)
    subgraph.factors.append(node)
    return subgraph


_FACTOR_KINDS = (Kind.PARAMETER, Kind.ANOTHER_TENSOR, Kind.MASK)


def _value_before_factor(analysis: GraphAnalysis, node: Node) -> Node | None:
    """Return the value that a node masks, or multiplies by a tensor that depends on no GEMM; None for other nodes."""
    if analysis.calls[node].inplace:
        return None
    mask = analysis.mask(node)
    if mask is not None:
        masked = [a for a in node.all_input_nodes if a is not mask]
        return analysis.origin(masked[0]) if len(masked) == 1 and analysis.state[masked[0]] == NONLINEAR else None
    if analysis.calls[node].name not in ("mul", "div"):
        return None
    sides = [a for a in analysis.calls[node].args[:2] if isinstance(a, Node)]
    values = [a for a in sides if analysis.state[a] == NONLINEAR]
    free = [a for a in sides if analysis.state[a] == FREE]
    factors = [a for a in free if not analysis.follows_gemm[a] or is_mask(analysis.origin(a))]
    if (len(values), len(factors)) != (1, 1) or (analysis.calls[node].name == "div" and values[0] is not sides[0]):
        return None
    return analysis.origin(values[0])


def results(analysis: GraphAnalysis, subgraph: Subgraph) -> list[Node]:
    """Return the final readers of a subgraph's value, each once. A factor's readers count instead of the factor."""
    return list(readers(analysis, subgraph.output, subgraph.factors))


def _match(analysis: GraphAnalysis, node: Node) -> Subgraph:
    subgraph = Subgraph(_output(analysis, node))
    _walk(analysis, subgraph)
    steps, result = _steps(analysis, subgraph)
    subgraph.match = prove(steps, result, len(subgraph.inputs), differentiable=value_of(subgraph.output).requires_grad)
    if subgraph.match.activation is None:
        for source in subgraph.inputs:  # x·w: the weight may belong to the activation, as in xIELU
            if analysis.calls[source].name in ("mul", "div"):
                _reject_non_gemm(analysis, subgraph, [a for a in source.all_input_nodes if analysis.state[a] == FREE])
        assert subgraph.match.reason is not None
        raise Rejection(*subgraph.match.reason)
    _check_values(analysis, subgraph)
    _check_writes(analysis, subgraph)
    _check_results(analysis, subgraph)
    _find_packed(analysis, subgraph)
    return subgraph


def _output(analysis: GraphAnalysis, node: Node) -> Node:
    """Return the site's output node. If its only reader is a cast to the same or a narrower dtype, return the cast.

    The operator rounds to that dtype. Before a cast to a wider dtype, as for a GEMM in float32, the value is rounded.
    """
    user, *others = node.users or (node,)
    if not others and analysis.calls[user].name in CASTS and analysis.region[user] == analysis.region[node]:
        source, value = value_of(node), tensor(user)
        if value is not None and value.dtype in FLOATING and value.device == source.device:
            return user if value.dtype == source.dtype or _rounds(source.dtype, value.dtype) else node
    return node


def _rounds(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a cast from source to target rounds."""
    return torch.promote_types(source, target) != target


# The walk


def _is_call(analysis: GraphAnalysis, node: Node) -> bool:
    """Return True if the node belongs to the subgraph, False if it is an input."""
    call, state = analysis.calls[node], analysis.state[node]
    if state == FREE:
        return False
    moves = call.name in CASTS or call.name in COPIES or (call.name in DROPOUTS and not call.dropout_is_active())
    if state == AFFINE:
        if call.name in CASTS and _rounds(value_of(node.all_input_nodes[0]).dtype, value_of(node).dtype):
            return False  # the activation is applied to the rounded tensor
        # Affine functions of several tensors are inputs: sums (bias, adapter, residual), products, masked tensors.
        return moves or (call.name in RULES and len(node.all_input_nodes) == 1)
    if call.name in DROPOUTS and not moves:
        raise Rejection(Kind.DROPOUT_INSIDE, "the activation contains an active dropout")
    if not moves and call.name not in RULES and analysis.custom(node) is None:
        raise Rejection(Kind.STANDS_BETWEEN, f"{label(node)} stands between the activation's parts")
    return True


def _walk(analysis: GraphAnalysis, subgraph: Subgraph) -> None:
    seen = {subgraph.output}
    pending = [subgraph.output]
    while pending:
        node = pending.pop()
        subgraph.calls.append(node)
        if len(subgraph.calls) > MAX_CALLS:
            raise Rejection(Kind.MANY_CALLS, f"more than {MAX_CALLS} pointwise calls lie between the GEMMs")
        for source in analysis.sources(node):
            if source not in seen:
                seen.add(source)
                if _is_call(analysis, source):
                    pending.append(source)
                elif analysis.calls[source].name in CONSTANTS and same_shape(source, subgraph.output):
                    subgraph.bypassed.append(source)
                else:
                    subgraph.inputs.append(source)
    subgraph.calls.sort(key=analysis.index.__getitem__)
    subgraph.inputs.sort(key=analysis.index.__getitem__)
    _reject_non_gemm(analysis, subgraph, [source for source in subgraph.inputs if analysis.state[source] == FREE])


_PRECEDENCE = (Kind.PARAMETER, Kind.ANOTHER_TENSOR, Kind.MASK, Kind.OTHER_OPERAND)  # the most specific kind first


def _reject_non_gemm(analysis: GraphAnalysis, subgraph: Subgraph, inputs: Sequence[Node]) -> None:
    """Reject inputs that no GEMM has produced, with the most specific reason."""
    reasons = [_non_gemm_reason(analysis, subgraph, source) for source in inputs]
    if reasons:
        raise Rejection(*min(reasons, key=lambda reason: _PRECEDENCE.index(reason.kind)))


def _non_gemm_reason(analysis: GraphAnalysis, subgraph: Subgraph, foreign: Node) -> Reason:
    """Explain why an input that no GEMM produced prevents fusion."""
    source = analysis.origin(foreign)
    gated = Reason(
        Kind.OTHER_OPERAND,
        f"{NOT_AN_MLP}combined with the result of {label(source)}, which no GEMM with weights has produced",
    )
    is_full_size = source.op not in ("placeholder", "get_attr") and same_shape(foreign, subgraph.output)
    if analysis.follows_gemm[source] and is_full_size and not is_mask(source):
        return gated
    roots = [] if analysis.follows_gemm[foreign] else [foreign]
    for node in reachable(roots, lambda node: node.all_input_nodes):
        if isinstance(tensor(node), torch.nn.Parameter):
            # A parameter of the activation, as in xIELU. A full-size result that uses one, such as a norm, is a gate.
            if is_full_size:
                return gated
            if value_of(node).requires_grad:
                return Reason(Kind.PARAMETER, f"a learnable parameter takes part: {label(node)}")
            return Reason(Kind.PARAMETER, f"a parameter takes part: {label(node)}")
    if is_mask(source):
        return Reason(Kind.MASK, f"a mask takes part: {label(source)}")
    return Reason(Kind.ANOTHER_TENSOR, f"another tensor takes part: {label(source)}")


def _merge(analysis: GraphAnalysis, subgraph: Subgraph) -> dict[Node, Node]:
    """Merge equal views (``h[:, :n] * sigmoid(h[:, :n])``); return the first equal view for each input."""
    first: dict[Any, Node] = {}
    merged = {source: first.setdefault(_path(analysis, source), source) for source in subgraph.inputs}
    subgraph.inputs = list(first.values())
    subgraph.bypassed += [node for node in merged if node not in subgraph.inputs]
    return merged


def _path(analysis: GraphAnalysis, node: Node) -> tuple[Any, ...]:
    """Return a node's base and its views, up to a view that is written. Nodes with equal paths have equal values."""
    path: list[Any] = []
    while analysis.is_passthrough(node) and analysis.calls[node].name not in DROPOUTS:
        call, source = analysis.calls[node], node.all_input_nodes[0]
        if any(map(analysis.writers, (node, *node.all_input_nodes))):
            break
        arguments = [a for a in call.args if a is not source], {k: v for k, v in call.kwargs.items() if v is not source}
        path.append((call.name, repr(arguments), analysis.region[node]))
        node = source
    return node, *path


def _steps(analysis: GraphAnalysis, subgraph: Subgraph) -> tuple[tuple[Step, ...], Ref]:
    merged = _merge(analysis, subgraph)
    known = {node: Ref("operand", subgraph.inputs.index(first)) for node, first in merged.items()}
    steps: list[Step] = []

    def as_step(argument: Any) -> Any:
        if isinstance(argument, Node):
            return known[argument] if argument in known else CONSTANTS[analysis.calls[argument].name]
        if argument is None or isinstance(argument, (bool, int, float, str)):
            return argument
        raise Rejection(Kind.ARGUMENT, f"an argument of type {type(argument).__name__} takes part")

    for node in subgraph.calls:
        call, function = analysis.calls[node], analysis.custom(node)
        if function is not None:
            known[node] = _inline(function, list(map(as_step, function.args[2:])), steps)
            subgraph.bypassed += [function, *(a for a in function.args[:2] if isinstance(a, Node))]
        elif call.name in RULES:
            if call.name.startswith("clamp") and len(node.all_input_nodes) > 1:  # its gradient at the bounds differs
                raise Rejection(Kind.TENSOR_BOUND, "a tensor is a clamp's bound")
            kwargs = tuple((k, as_step(v)) for k, v in sorted(call.kwargs.items()))
            steps.append((call.name, tuple(map(as_step, call.args)), kwargs))
            known[node] = Ref("value", len(steps) - 1)
        else:
            known[node] = known[node.all_input_nodes[0]]
    return tuple(steps), known[subgraph.output]


def _inline(function: Node, arguments: list[Any], steps: list[Step]) -> Ref:
    """Append the steps of a custom autograd.Function; return its result."""
    if any(user.args[1] != 0 for user in function.users):
        raise Rejection(Kind.CUSTOM_FUNCTION, "a custom autograd.Function has other results that are read")
    forward, result = forward_of(function)
    start = len(steps)

    def shifted(argument: Any) -> Any:
        if not isinstance(argument, Ref):
            return argument
        return arguments[argument.i] if argument.kind == "operand" else Ref("value", start + argument.i)

    for name, args, kwargs in forward:
        steps.append((name, tuple(map(shifted, args)), tuple((k, shifted(v)) for k, v in kwargs)))
    return shifted(result)  # type: ignore[no-any-return]


# Conditions other than the formula


def _check_values(analysis: GraphAnalysis, subgraph: Subgraph) -> None:
    output = value_of(subgraph.output)
    is_cast = analysis.calls[subgraph.output].name in CASTS
    uncast = value_of(subgraph.output.all_input_nodes[0]) if is_cast else output
    for node in subgraph.inputs + subgraph.calls:
        check_plain(node)
        device = value_of(node).device
        if device != output.device:
            raise Rejection(Kind.DEVICES, f"it is computed on {device} and on {output.device}")
    for node in subgraph.inputs:
        value = value_of(node)
        if analysis.is_inference(analysis.origin(node)) and not analysis.is_inference(subgraph.output):
            text = f"the result of {label(analysis.origin(node))}, from inference mode, cannot be saved for backward"
            raise Rejection(Kind.INFERENCE_MODE, text)
        if not (value.ndim and same_shape(node, subgraph.output)):
            text = f"a broadcast changes the shape: {tuple(value.shape)} to {tuple(output.shape)}"
            raise Rejection(Kind.BROADCAST, text)
        if analysis.calls[node].name in CASTS and any(_rounds(v.dtype, value.dtype) for v in (uncast, output)):
            text = f"it works in {value.dtype} on {value_of(node.all_input_nodes[0]).dtype} values"
            raise Rejection(Kind.NARROW_CAST, text)
    widest: dict[Node, torch.dtype] = {}  # by call: the widest dtype of the inputs that the call depends on
    for node in subgraph.calls:
        if analysis.region[node] != analysis.region[subgraph.output]:
            raise Rejection(Kind.REGION, "autocast or grad mode is switched between its parts")
        sources = [widest.get(source, value_of(source).dtype) for source in analysis.sources(node)]
        widest[node] = max(sources, key=lambda dtype: dtype.itemsize)
        dtype = value_of(node).dtype
        if node is not subgraph.output and any(_rounds(source, dtype) for source in sources):
            raise Rejection(Kind.NARROW_CAST, f"it works in {dtype} on {widest[node]} values")
    # The operator computes in float32 and rounds once. A last cast to a narrower dtype becomes this rounding.
    subgraph.dtype = output.dtype if _rounds(uncast.dtype, output.dtype) else uncast.dtype
    for node in subgraph.inputs:
        subgraph.dtype = torch.promote_types(subgraph.dtype, value_of(node).dtype)
    subgraph.order = _order(output)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return a dense value's axes from the slowest to the fastest; None if the value is contiguous."""
    if is_contiguous(value):
        return None
    strides = value.stride()
    if all(isinstance(stride, int) for stride in strides):
        order = tuple(sorted(range(value.ndim), key=lambda axis: -strides[axis]))
        if is_contiguous(value, order):
            return order
    raise Rejection(Kind.ORDER, "the operator does not support the memory order of its result")


def _check_writes(analysis: GraphAnalysis, subgraph: Subgraph) -> None:
    """Reject in-place writes that change a value between its call and its readers, or the output node's value."""
    for node in subgraph.calls:
        for source in analysis.sources(node):
            for writer in analysis.writers(source, source, node):
                raise Rejection(Kind.WRITTEN, f"{label(writer)} writes into it in place before it is read")
    # Later writes also count: for backward the operator saves its input, or its result as relu does.
    for source in subgraph.inputs:
        for writer in analysis.writers(source, source):
            if writer not in subgraph.calls:
                raise Rejection(Kind.WRITTEN, f"{label(writer)} writes into its input in place")
    for writer in analysis.writers(subgraph.output, subgraph.output):
        if analysis.calls[writer].name not in DROPOUTS:  # a dropout of the result stays
            raise Rejection(Kind.WRITTEN, f"{label(writer)} writes into its result in place")
    for node in subgraph.calls:
        if analysis.calls[node].inplace:
            if not analysis.is_of_region(node):
                text = f"{label(node)} is in place, but its argument is from a different grad mode or autocast region"
                raise Rejection(Kind.IN_PLACE_REGION, text)
            check_in_place_call(analysis, node, subgraph.output, subgraph.calls)


def check_in_place_call(analysis: GraphAnalysis, node: Node, output: Node, calls: Collection[Node]) -> None:
    """Reject an in-place call if its argument is read later, since the operator will not change that argument.

    Args:
        analysis: the graph's analysis.
        node: a call that works in place.
        output: the node whose value the operator will compute. It may be read later.
        calls: the calls that the operator replaces.

    Raises:
        Rejection: another node reads the argument later, backward needs it, or it is an input of the graph.
    """
    of_result = {output}  # the output and its views
    aliases = analysis.aliases[analysis.storage(node)]
    for call in dict.fromkeys(call for alias in aliases for call in (alias, *alias.users)):
        value = tensor(call)
        may_save = value is not None and value.requires_grad and analysis.calls[call].name != ""
        is_earlier = analysis.index[call] < analysis.index[node]
        if may_save and is_earlier and _saved_by_autograd(call) & set(aliases):
            text = f"{label(node)} writes in place what backward of {label(call)} needs: without fusion, it raises"
            raise Rejection(Kind.WRITTEN, text)
    for alias in aliases:
        if alias.op in ("placeholder", "get_attr"):
            raise Rejection(Kind.WRITES_INPUT, f"{label(node)} writes in place into {label(alias)}")
        if alias is output or (analysis.is_passthrough(alias) and alias.all_input_nodes[0] in of_result):
            of_result.add(alias)
            continue
        for user in alias.users:
            if analysis.index[user] > analysis.index[node] and user not in calls:
                text = f"{label(node)} works in place, and {label(user)} reads the tensor afterwards"
                raise Rejection(Kind.READ_AFTERWARDS, text)


def _check_results(analysis: GraphAnalysis, subgraph: Subgraph) -> None:
    """Reject inputs that the graph returns, since the caller may write them, unless PyTorch also saves them."""
    name = subgraph.match.activation
    saves_output = subgraph.match.up is None and name is not None and activations.get(name).gradient_from_output
    if saves_output or not value_of(subgraph.output).requires_grad:
        return
    results = {analysis.storage(node) for node in subgraph.output.graph.output_node().all_input_nodes}
    returned = results & {analysis.storage(node) for node in subgraph.inputs}
    saved = set[Node]().union(*map(_saved_by_autograd, subgraph.calls)) if returned else ()
    if not returned.issubset(map(analysis.storage, saved)):
        text = "its input is a result of the graph, which may be written before backward needs it"
        raise Rejection(Kind.GRAPH_RESULT, text)


def _saved_by_autograd(node: Node) -> set[Node]:
    """Return the arguments of a call, and the call itself, that autograd saves. It is called on meta tensors."""
    saved: set[int] = set()
    values: dict[Node, Any] = {}

    def on_meta(source: Node) -> Any:
        value = tensor(source)
        assert value is not None
        sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        leaf = torch.empty(sizes, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)
        return values.setdefault(source, leaf.clone())  # in-place calls must not write into a leaf

    def storage(t: torch.Tensor) -> int:
        return int(t.untyped_storage()._cdata)

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.add(storage(t))
        return t

    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            args, kwargs = map_arg((node.args, node.kwargs), on_meta)
            target: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            values[node] = target(*args, **kwargs)
    except Exception:  # for example a custom function
        return set()
    return {source for source, t in values.items() if isinstance(t, torch.Tensor) and storage(t) in saved}


# Gate and up in one tensor


def _find_packed(analysis: GraphAnalysis, subgraph: Subgraph) -> None:
    """Set ``packed`` if gate and up are halves of one tensor's rows in a layout that ``bias_glu`` supports."""
    match = subgraph.match
    if match.up is None or subgraph.order is not None or match.gate_scale != 1:
        return
    gate, up = subgraph.inputs[match.gate], subgraph.inputs[match.up]
    of_gate, of_up = _views(analysis, gate), _views(analysis, up)
    for base in (node for node in of_gate[1:] if node in of_up[1:] and tensor(node) is not None):
        layout = _layout(value_of(base), value_of(gate), value_of(up))
        cuts = {node for views in (of_gate, of_up) for node in views[: views.index(base)]}
        one_region = all(analysis.region[node] == analysis.region[subgraph.output] for node in cuts)
        if any(t.dtype != value_of(base).dtype for t in map(tensor, cuts) if t is not None):
            return  # a view as another dtype has no gradient, or other values
        if layout and one_region and set(analysis.writers(base, base, subgraph.output)) <= set(subgraph.calls):
            subgraph.packed = (base, layout)
            subgraph.bypassed += cuts
            return


_CUTS = PIECES | {"getitem", "narrow", "select", "slice", "view", "reshape", "unflatten", "_unsafe_view"}


def _views(analysis: GraphAnalysis, node: Node) -> list[Node]:
    """Return the node and its bases, through cuts and reshapes, the nearest first."""
    views = [node]
    while analysis.calls[views[-1]].name in _CUTS:
        views.append(views[-1].all_input_nodes[0])
    return [view for view in views if tensor(view) is None or analysis.storage(view) == analysis.storage(node)]


def _layout(base: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> str:
    """Return the operator's name for the layout of both views in each row of ``base``; "" for other layouts."""
    if base.ndim != gate.ndim or not equal(base.shape[-1], 2 * gate.shape[-1]):
        return ""
    for part in (gate, up):
        if not all(map(equal, (*part.shape[:-1], *part.stride()[:-1]), (*base.shape[:-1], *base.stride()[:-1]))):
            return ""
    n, unit = gate.shape[-1], base.stride(-1)
    for layout, step, gate_start, up_start in (("halves", 1, 0, n), ("interleaved", 2, 0, 1), ("swapped", 1, n, 0)):
        strides = all(equal(part.stride(-1), step * unit) for part in (gate, up))
        starts = ((gate, gate_start), (up, up_start))
        if strides and all(equal(t.storage_offset() - base.storage_offset(), start * unit) for t, start in starts):
            return layout
    return ""
