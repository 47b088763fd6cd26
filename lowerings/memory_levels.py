"""Memory levels in the partitioner: edits of a forward and a backward graph that save less for backward.

``recompute_linear_inputs`` applies to every level except "off". ``apply_levels`` applies the levels below "free":

``memory="fp8"``       An MLP's saved activation inputs become float8_e4m3fn with a scale per row. Forward computes both
                       in the activation's kernel. A tensor is not changed if backward also reads it outside of
                       activations, because these readers would see the rounding.
``memory="input"``     Activation inputs are not saved. Backward repeats the GEMM that produced them, with the bias,
                       adapter and casts behind it, from inputs that are saved for the weights' gradients anyway. MLPs
                       that the pre-grad pass could not tile (``"tiled"``, ``recognize/tiles.py``) get this level.
``attention="input"``  Backward recomputes queries, keys, values and the projected result of attention in the same way
                       (``attention.py`` finds them).

All levels edit a ``saved_tensors.SavedTensors``. All except "fp8" plan with ``_recomputation``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.declaration import PointwiseOperator, pointwise_operators
from torch_fused_ops.graphs.modules import innermost, module_stack
from torch_fused_ops.graphs.reasons import Kind, Rejection
from torch_fused_ops.lowerings import attention, compat, offload
from torch_fused_ops.lowerings.partition import Graphs, base, is_gemm, is_linear
from torch_fused_ops.lowerings.saved_tensors import DATA, SAME_ELEMENTS, SavedTensors, readers, views_and_readers
from torch_fused_ops.operators import reference
from torch_fused_ops.policy import FusionPolicy, UnfusedError, enclosing_modules
from torch_fused_ops.settings import tiles

log = logging.getLogger("torch_fused_ops")

aten, fused = torch.ops.aten, torch.ops.fused

OPERATOR: dict[Any, PointwiseOperator] = {op.forward.overload: op for op in pointwise_operators()}
_T = TypeVar("_T")
_LEVEL = "torch_fused_ops_memory"  # key of meta["custom"], which tracing copies: the level that an operator requests


def move_fp8_marks_to_meta(graph: Graph) -> None:
    """Replace calls of ``fused::keep_fp8`` in a pre-grad graph by a mark in the metadata of the operators that read it.

    The call itself saves the operator's input in float8, but the next GEMM still saves the operator's result. The mark
    requests ``memory="fp8"`` for the operator, at which backward also recomputes the result.
    """
    for node in list(graph.nodes):
        if node.target in (fused.keep_fp8, fused.keep_fp8.default):
            for reader in node.users:
                reader.meta["custom"] = {**reader.meta.get("custom", {}), _LEVEL: "fp8"}
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def requested_level(node: Node) -> str | None:
    """Return the memory level that an operator requests for itself; None if the policy decides."""
    level: str | None = node.meta.get("custom", {}).get(_LEVEL)
    return level


# ---- "free" --------------------------------------------------------------------------------------


def recompute_linear_inputs(graphs: Graphs, outputs: int, static_inputs: Sequence[int]) -> Graphs:
    """Return copies of both graphs in which backward recomputes more saved tensors, without a GEMM.

    * Inputs of linear layers, from tensors that are saved anyway. PyTorch's partitioner does this too, except across a
      GEMM: if a GEMM reads a value, the partitioner saves the results of that value's later readers ("used far apart").
      Examples are a frozen layer's GEMM next to its adapter's dropout, and a router's GEMM next to the tokens
      gathered for experts.
    * Tensors that repeat a smaller tensor, such as keys and values under grouped-query attention. The smaller tensor is
      saved instead.

    Args:
        graphs: the result of ``partition``. It is not modified. Without an edit, it is returned.
        outputs: number of forward's results that belong to the user. The tensors saved for backward follow them.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.
    """
    original = SavedTensors(graphs[0].graph, graphs[1].graph, outputs, static_inputs)
    if not any(_plan_without_gemm(original, node) for node in original.saved()):
        return graphs
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    for node in pair.saved():
        recomputation = _plan_without_gemm(pair, node)
        if recomputation is not None:
            saved_bytes = pair.cost([node]) - pair.cost(recomputation.to_save)
            log.info("%s: backward recomputes it from saved tensors, %d bytes less", node.name, saved_bytes)
            _replace(pair, node, recomputation)
    return _finish(graphs, pair)


def _plan_without_gemm(pair: SavedTensors, node: Node) -> Recomputation | None:
    """Return how backward recomputes a saved tensor at ``memory="free"``; None if it must stay saved."""
    if not _may_be_replaced(pair, node):
        return None
    try:
        recomputation = _recomputation(pair, node, gemms=False)
    except Rejection:
        return None
    if all(map(is_linear, readers(pair.in_backward[node]))):
        return None if pair.cost(recomputation.to_save) else recomputation
    read = {source for call in recomputation.calls for source in call.all_input_nodes}.difference(recomputation.calls)
    return recomputation if len(read) == 1 and pair.cost(read) < pair.cost([node]) else None


def _may_be_replaced(pair: SavedTensors, node: Node) -> bool:
    """True for a saved tensor that forward computes, unless the user gets it or a checkpoint asks to save it."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node not in pair.returned()[: pair.outputs]
        and not isinstance(base(node).meta.get("recompute"), CheckpointPolicy)
        and bool(pair.in_backward[node].users)
    )


# ---- recomputation -------------------------------------------------------------------------------

MAX_CALLS = 32  # enough for a norm and a rotary embedding, but not for a model's chain of residual adds


class Recomputation(NamedTuple):
    """The calls with which backward recomputes a saved tensor.

    Attributes:
        calls: forward's calls to repeat, in order; the last one computes the tensor.
        to_save: tensors that these calls read and that must be saved for them.
    """

    calls: tuple[Node, ...]
    to_save: tuple[Node, ...]


def _recomputation(pair: SavedTensors, node: Node, *, gemms: bool) -> Recomputation:
    """Return the cheapest recomputation of a saved tensor from values that backward has, or that can be saved for it.

    Views, pointwise calls and gathers are repeated. With ``gemms``, one layer of GEMMs is repeated as well, and all
    calls between these GEMMs and ``node``. Random numbers and sums are never repeated.

    Raises:
        Rejection: a required value cannot be saved, or may have changed before backward reads it.
    """
    exposed = pair.caller_owned.difference(map(base, pair.saved()))
    depth = 0

    @functools.cache
    def obtain(source: Node, role: str) -> Recomputation:
        """Choose the cheaper way to provide ``source`` in backward: repeat its call, or save it.

        ``role`` tells which operand of a repeated GEMM depends on ``source``: "data", "weight", or "" for neither.
        """
        if source is not node and source in pair.in_backward:
            return Recomputation((), ())
        if base(source) in pair.overwritten:
            raise Rejection(Kind.MADE_OF_WRITTEN, f"cannot recompute: forward writes {base(source)}")
        repeated, is_tensor = None, isinstance(source.meta.get("val"), torch.Tensor)
        if (_is_recomputable(source) or (gemms and not role and is_gemm(source))) and depth < MAX_CALLS:
            try:
                repeated = repeat(source, role)
            except Rejection:  # save it instead, unless it is ``node`` or a GEMM
                if source is node or (gemms and not role):
                    raise
        if repeated:
            must_repeat = source is node or (gemms and not role) or not is_tensor
            if must_repeat or not (added := pair.cost(repeated.to_save)) or added < pair.cost([source]):
                return repeated
        if source is node:
            raise Rejection(Kind.NO_GEMM, "it is not the result of a GEMM")
        if not is_tensor:
            raise Rejection(Kind.MADE_OF_SIZE, f"cannot recompute: the size {source} is not saved")
        if role != "weight" and base(source) in exposed:
            text = f"cannot recompute: the caller may modify {base(source)} before backward needs it"
            raise Rejection(Kind.MADE_OF_CALLERS, text)
        return Recomputation((), (source,))

    def repeat(call: Node, role: str) -> Recomputation:
        nonlocal depth
        depth += 1
        try:
            parts = [obtain(source, role or operand_role(call, source)) for source in call.all_input_nodes]
        finally:
            depth -= 1
        calls = dict.fromkeys((*(c for part in parts for c in part.calls), call))
        if len(calls) > MAX_CALLS:
            raise Rejection(Kind.MANY_RECOMPUTED, f"cannot recompute: it takes more than {MAX_CALLS} calls")
        return Recomputation(tuple(calls), tuple(dict.fromkeys(n for part in parts for n in part.to_save)))

    return obtain(node, "")


def operand_role(call: Node, source: Node) -> str:
    """Return the role of an operand in a GEMM: "data", or "weight" (also for a bias). Return "" for other calls."""
    if not is_gemm(call):
        return ""
    has_bias = getattr(call.target, "overloadpacket", None) in (aten.addmm, aten.baddbmm)
    return "data" if source is call.args[1 if has_bias else 0] else "weight"


def _is_recomputable(node: Node) -> bool:
    """True if a call is a view, is pointwise, picks rows, joins tensors, or quantizes a weight."""
    # For one of a call's results, the call decides: "tiled" splits tokens, and a float8 weight has scales.
    target = node.all_input_nodes[0].target if node.target is operator.getitem else node.target
    tags = getattr(target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
        return False
    return torch.Tag.pointwise in tags or target in _RECOMPUTABLE


_RECOMPUTABLE = SAME_ELEMENTS.union(
    OPERATOR,
    {aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.cat.default},
    {fused.dropout_add.default},  # its mask is a function of a seed
    {fused.quantize.default},  # takes one pass over the weight
)


def _replace(pair: SavedTensors, node: Node, recomputation: Recomputation) -> None:
    """Recompute a saved tensor in backward, and save the tensors that the recomputation needs."""
    pair.save_instead(node, [n for n in recomputation.to_save if n not in pair.in_backward])
    first = pair.first_reader(node)
    copies: dict[Node, Node] = {}
    with pair.backward.inserting_before(first):
        for call in (c for c in recomputation.calls if c is node or c not in pair.in_backward):
            copies[call] = pair.backward.node_copy(call, lambda n: copies.get(n) or pair.in_backward[n])
            copies[call].meta["autograd_backward"] = True
    pair.replace_in_backward(node, copies.pop(node))
    pair.in_backward.update(copies)


# ---- below "free" --------------------------------------------------------------------------------


def apply_levels(
    graphs: Graphs,
    policy: FusionPolicy,
    outputs: int,
    static_inputs: Sequence[int],
    on_edit: Callable[[Edit, int, str], None] = lambda *_: None,
) -> Graphs:
    """Return copies of both graphs that save less for backward, at the policy's memory levels below "free".

    Args:
        graphs: the partitioned graphs. Not modified.
        policy: the fusion policy with the memory levels.
        outputs: number of forward's results that belong to the user. The tensors saved for backward follow them.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.
        on_edit: called for each edit, with the bytes that are no longer saved, and the reason if it has no effect.
    """
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    for edit in itertools.chain(_mlp_edits(pair, policy), _attention_edits(pair, policy)):
        before = pair.cost(pair.saved())
        try:
            edit.apply()
            fewer = before - pair.cost(pair.saved())
            log.info("%s: %s, %d bytes less saved", edit.place, edit.setting, fewer)
            on_edit(edit, fewer, "")
        except Rejection as rejection:
            log.info("%s: %s has no effect: %s", edit.place, edit.setting, rejection)
            on_edit(edit, 0, str(rejection))
            if policy.strict and edit.is_site:
                text = f"strict=True and {edit.setting} has no effect on {edit.place}: {rejection}"
                raise UnfusedError(text) from rejection
    _save_copies_of_biases(pair)
    offload.move_to_host(pair, policy)
    return _finish(graphs, pair)


def _save_copies_of_biases(pair: SavedTensors) -> None:
    """Save a copy of each bias that backward reads only in recomputed GEMMs.

    Without a level, backward does not read the bias, so the caller may modify it in place between forward and backward.
    If a level made backward read the bias itself, autograd would raise an error that does not name the tensor.
    """
    for bias in pair.saved():
        if bias not in pair.static or bias.meta["val"].dim() != 1:
            continue
        reads = list(views_and_readers(pair.in_backward[bias]))
        if reads and all(operand_role(reader, view) == "weight" for view, reader in reads):
            with pair.forward.inserting_after(bias):
                copied = pair.forward.call_function(aten.clone.default, (bias,))
            copied.meta["val"] = bias.meta["val"].clone()
            pair.replace_in_backward(bias, *pair.save_instead(bias, [copied]))


class Edit(NamedTuple):
    """An edit that the policy requests.

    Attributes:
        setting: the policy's field and value, for the log.
        place: the tensors or the module, for the log.
        apply: edits the graphs, or raises a Rejection.
        is_site: True if a rejection is an error under ``strict``.
    """

    setting: str
    place: str
    apply: Callable[[], None]
    is_site: bool = False


def _finish(graphs: Graphs, pair: SavedTensors) -> Graphs:
    """Sort and check the edited graphs. Return them as modules with the attributes of the original ones."""
    from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

    for graph in (pair.forward, pair.backward):
        stable_topological_sort(graph)
        graph.lint()
    pair.put_unchecked_last()
    pair.check()
    return _make_graph_module(graphs[0], pair.forward), _make_graph_module(graphs[1], pair.backward)


def _mlp_edits(pair: SavedTensors, policy: FusionPolicy) -> Iterator[Edit]:
    """Yield the edits at the policy's memory levels, for the saved tensors that activations of MLPs read."""
    seen = set[Node]()
    for node in pair.forward.nodes:
        if node.target not in OPERATOR:
            continue
        level = requested_level(node) or policy.memory_of(enclosing_modules(module_stack(node)))
        if tiles.requested_tiles(level) is not None:  # the pre-grad pass could not tile this MLP
            level = "input"
        if level not in _EDITS:
            continue
        sources = dict.fromkeys(pair.saved_source(node.args[i]) for i in DATA[node.target])
        nodes = [source for source in sources if source is not None and source not in seen]
        seen.update(nodes)
        if nodes:
            place = f"{', '.join(n.name for n in nodes)} in {innermost(node)}"
            yield Edit(f"memory={level!r}", place, functools.partial(_EDITS[level], pair, nodes))


def _attention_edits(pair: SavedTensors, policy: FusionPolicy) -> Iterator[Edit]:
    """Yield the edits for the policy's ``attention="input"``, one for each attention of the graph."""
    if policy.attention == "off":
        return
    for site in attention.find(pair.forward):
        stacks = {linear: enclosing_modules(module_stack(linear)) for linear in site.linears}
        linears = {n for n, modules in stacks.items() if policy.attention_of(modules) == "input"}
        linears = {n for n in linears if policy.excluding(stacks[n]) is None}
        if linears:
            nodes = [node for node in pair.saved() if node in site.values and _may_be_replaced(pair, node)]
            edit = functools.partial(_save_inputs, pair, nodes, linears)
            yield Edit("attention='input'", site.module or "the model", edit, is_site=True)


# ---- "fp8" ---------------------------------------------------------------------------------------


_without_fp8_rounding: ContextVar[bool] = ContextVar("torch_fused_ops_unrounded", default=False)


@contextmanager
def without_fp8_rounding(on: bool = True) -> Iterator[None]:
    """Inside this block ``memory="fp8"`` edits the graphs but saves exact values, so that results compare exactly."""
    token = _without_fp8_rounding.set(on)
    try:
        yield
    finally:
        _without_fp8_rounding.reset(token)


def _save_fp8(pair: SavedTensors, node: Node) -> Node:
    """Save a tensor as float8. Return backward's node that reads it.

    Raises:
        Rejection: the tensor must stay exact, or it or the device does not allow float8.
    """
    value, exact = node.meta["val"], _without_fp8_rounding.get()
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32) and not exact:
        raise Rejection(Kind.FP8_DTYPE, f"it is {value.dtype}")
    if not compat.converts_to_fp8(value.device) and not exact:
        raise Rejection(Kind.FP8_DEVICE, "this GPU cannot convert to float8_e4m3fn")
    other = pair.reader_of_rounding(pair.in_backward[node])
    if other is not None:
        raise Rejection(Kind.ALSO_READ, f"backward also reads it in {other.target}")
    stored, scale = _store_fp8(pair.forward, node, exact)
    first = pair.first_reader(node)
    low = pair.save_instead(node, [stored, scale])
    load = (lambda x, scale: x * scale) if exact else functools.partial(reference.load_fp8, dtype=value.dtype)
    with pair.backward.inserting_before(first):
        loaded = _inline(pair.backward, load, *low)
    pair.replace_in_backward(node, loaded, rounded=True)
    return loaded  # type: ignore[no-any-return]


def _store_fp8(graph: Graph, node: Node, exact: bool) -> Sequence[Node]:
    """Add ``reference.store_fp8(node)`` to forward, where Inductor fuses it with the activation. Return its results."""
    readers = [user for user in node.users if user.target in OPERATOR and user.args[0] is node]
    halves = any(OPERATOR[reader.target].reads_halves(reader.args) for reader in readers)

    def store(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.clone(), torch.ones_like(x[..., :1])) if exact else reference.store_fp8(x, halves=halves)

    with graph.inserting_before(node.next):
        return _inline(graph, store, node)  # type: ignore[no-any-return]


def _inline(graph: Graph, fn: Callable[..., Any], *nodes: Node) -> Any:
    """Insert aten's calls for ``fn(*nodes)``, with fake values, at the graph's insertion point. Return the results."""
    with torch.no_grad():
        traced = make_fx(fn, decomposition_table=select_decomp_table())(*(node.meta["val"] for node in nodes))
    environment = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    result = graph.graph_copy(traced.graph, environment)
    origin = {key: nodes[0].meta[key] for key in _ORIGIN if key in nodes[0].meta}
    for node in list(environment.values())[len(nodes) :]:
        node.meta.update(origin)
    return result


_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "autograd_backward")


# ---- "input" -------------------------------------------------------------------------------------


def _save_inputs(pair: SavedTensors, nodes: Sequence[Node], linears: Collection[Node] | None = None) -> None:
    """Recompute saved tensors in backward by GEMMs, from inputs that are saved for the weights' gradients anyway.

    Args:
        pair: the graphs.
        nodes: the saved tensors.
        linears: linear layers that may be repeated; None for all. Tensors that need other linear layers stay saved.

    Raises:
        Rejection: no tensor can be recomputed, or the inputs take as many bytes.
    """

    def plan(node: Node) -> Recomputation | None:
        recomputation = _recomputation(pair, node, gemms=True)
        repeats_others = linears is not None and any(is_gemm(c) and c not in linears for c in recomputation.calls)
        return None if repeats_others else recomputation

    plans = _apply_to_each(plan, nodes)
    if not plans:
        return
    if not any(is_gemm(call) for plan in plans.values() for call in plan.calls):
        raise _record_rejection(Rejection(Kind.NO_GEMM, "it is not the result of a GEMM"), plans)
    added = pair.cost({source for plan in plans.values() for source in plan.to_save})
    if added >= pair.cost(plans):
        text = f"cannot recompute: its inputs take {added} bytes and are not saved otherwise"
        raise _record_rejection(Rejection(Kind.COSTS_MORE, text), plans)
    for node, recomputation in plans.items():
        _replace(pair, node, recomputation)


_EDITS: dict[str, Callable[[SavedTensors, Sequence[Node]], Any]] = {
    "fp8": lambda pair, nodes: _apply_to_each(functools.partial(_save_fp8, pair), nodes),
    "input": _save_inputs,
}


def _apply_to_each(fn: Callable[[Node], _T | None], nodes: Sequence[Node]) -> dict[Node, _T]:
    """Return the results of ``fn`` that are not None. If there are none, raise the first rejection."""
    results: dict[Node, _T] = {}
    rejections: list[Rejection] = []
    for node in nodes:
        try:
            if isinstance(node.meta.get("recompute"), CheckpointPolicy):
                raise Rejection(Kind.CHECKPOINTED, "selective checkpointing saves it")
            result = fn(node)
            if result is not None:
                results[node] = result
        except Rejection as rejection:
            log.info("%s: %s", node.name, rejection)
            rejections.append(_record_rejection(rejection, [node]))
    if rejections and not results:
        raise rejections[0]
    return results


REJECTED = "torch_fused_ops_rejected"  # key of the reason why a tensor stays saved although the policy has a level


def _record_rejection(rejection: Rejection, nodes: Iterable[Node]) -> Rejection:
    """Record on saved tensors why a level does not apply to them."""
    for node in nodes:
        node.meta[REJECTED] = rejection.reason
    return rejection
