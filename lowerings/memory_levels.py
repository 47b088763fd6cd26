"""Memory levels in the partitioner: edits of a forward and a backward graph that save less for backward.

``rebuild`` applies to every level but "off". ``keep_less`` applies what the policy requests below "free":

``memory="fp8"``       An MLP's saved activation inputs become float8_e4m3fn with a scale per row. Forward computes both
                       in the activation's kernel. A tensor stays as it is if backward reads it in anything but
                       activations, which would see the rounding.
``memory="input"``     These tensors are not saved. Backward repeats the GEMM that produced them, with the bias, adapter
                       and casts behind it, from inputs that are saved for the weights' gradients anyway. MLPs that the
                       pre-grad pass could not tile (``"tiled"``, ``recognize/tiles.py``) are treated the same way.
``attention="input"``  Likewise for queries, keys, values and the projected result of attention (``attention.py``).

All of them use one recomputation (``_recomputation``), and one pair of graphs (``saved_tensors.SavedTensors``).
"""

from __future__ import annotations

import copy
import functools
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

from torch_fused_ops.declaration import PointwiseOperator, elementwise
from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.lowerings import attention, compat
from torch_fused_ops.lowerings.partition import Graphs, base, is_gemm, is_linear
from torch_fused_ops.lowerings.saved_tensors import DATA, SAME_ELEMENTS, SavedTensors
from torch_fused_ops.operators import reference
from torch_fused_ops.policy import FusionPolicy, UnfusedError, enclosing_modules
from torch_fused_ops.settings import tiles

log = logging.getLogger("torch_fused_ops")

aten, fused = torch.ops.aten, torch.ops.fused

OPERATOR: dict[Any, PointwiseOperator] = {op.forward.overload: op for op in elementwise()}
_T = TypeVar("_T")


_LEVEL = "torch_fused_ops_memory"  # a level that an operator asks for itself, in what tracing hands on of its node


def unmark(graph: Graph) -> None:
    """Take the marks of ``memory="fp8"`` (``fused::keep_fp8``) out of a pre-grad graph, and note them on the operators.

    As it is, a marked operator hands float8 to backward, and the next GEMM's weight gradient the result beside it.
    Noted, it is treated as an MLP under the policy's ``memory="fp8"`` is: the result is rebuilt, too.
    """
    for node in list(graph.nodes):
        if node.target in (fused.keep_fp8, fused.keep_fp8.default):
            for reader in node.users:
                reader.meta["custom"] = {**reader.meta.get("custom", {}), _LEVEL: "fp8"}
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def asked(node: Node) -> str | None:
    """The memory level that an operator asks for itself."""
    level: str | None = node.meta.get("custom", {}).get(_LEVEL)
    return level


# ---- "free" --------------------------------------------------------------------------------------


def rebuild(graphs: Graphs, *, outputs: int, static_inputs: Sequence[int]) -> Graphs:
    """Return copies of both graphs in which backward recomputes more saved tensors, without a GEMM.

    * Inputs of linear layers, from tensors that are saved anyway. PyTorch's partitioner does this too, except across a
      GEMM: if one of a value's readers comes after a GEMM that also reads the value, it saves that reader ("used far
      apart"). Examples are a frozen layer's GEMM beside its adapter's dropout, and a router's GEMM beside the tokens
      gathered for experts.
    * Tensors that repeat a smaller one, such as keys and values under grouped-query attention. The smaller tensor is
      saved instead.

    Args:
        graphs: the result of ``partition``. Not modified, and returned if there is nothing to do.
        outputs: number of forward's results that belong to the user. The tensors saved for backward follow them.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.
    """
    original = SavedTensors(graphs[0].graph, graphs[1].graph, outputs, static_inputs)
    if not any(_without_gemm(original, node) for node in original.kept()):
        return graphs
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    for node in pair.kept():
        recomputation = _without_gemm(pair, node)
        if recomputation is not None:
            less = pair.cost([node]) - pair.cost(recomputation.to_save)
            log.info("%s: backward recomputes it from saved tensors, %d bytes less", node.name, less)
            _replace(pair, node, recomputation)
    return _finished(graphs, pair)


def _without_gemm(pair: SavedTensors, node: Node) -> Recomputation | None:
    """Return how backward recomputes a saved tensor at ``memory="free"``; None if it must stay saved."""
    if not _may_be_replaced(pair, node):
        return None
    try:
        recomputation = _recomputation(pair, node, gemms=False)
    except Rejection:
        return None
    if all(map(is_linear, _readers(pair.same[node]))):
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
        and bool(pair.same[node].users)
    )


def _readers(node: Node) -> Iterator[Node]:
    """The readers of a tensor in backward, through views."""
    return (reader for _, reader in _read_by(node))


def _read_by(node: Node) -> Iterator[tuple[Node, Node]]:
    """The readers of a tensor in backward, through views; each with the view that it reads."""
    for user in node.users:
        if user.target in SAME_ELEMENTS:
            yield from _read_by(user)
        else:
            yield node, user


# ---- recomputation -------------------------------------------------------------------------------

MAX_CALLS = 32  # enough for a norm and a rotary embedding, too few for a model's chain of residual adds


class Recomputation(NamedTuple):
    """The calls with which backward computes a saved tensor again.

    Attributes:
        calls: forward's calls to repeat, in order; the last one computes the tensor.
        to_save: tensors that these calls read and that must be saved for them.
    """

    calls: tuple[Node, ...]
    to_save: tuple[Node, ...]


def _recomputation(pair: SavedTensors, node: Node, *, gemms: bool) -> Recomputation:
    """Return the cheapest recomputation of a saved tensor from values that backward has, or that can be saved for it.

    Views, pointwise calls and gathers are repeated. With ``gemms`` so is one layer of GEMMs, and everything between it
    and ``node``. Random numbers and sums are never repeated.

    Raises:
        Rejection: a value that it needs cannot be saved, or may have changed before backward reads it.
    """
    exposed = pair.callers.difference(map(base, pair.kept()))
    depth = 0

    @functools.cache
    def obtain(source: Node, role: str) -> Recomputation:
        """The cheaper of two ways to have ``source`` in backward: repeat its call, or save it.

        ``role``: of ``source`` in the repeated GEMM that depends on it, "data" or "weight"; "" if there is none.
        """
        if source is not node and source in pair.same:
            return Recomputation((), ())
        if base(source) in pair.stale:
            raise Rejection(Kind.MADE_OF_WRITTEN, f"cannot recompute: forward writes {base(source)}")
        repeated = None
        if (_is_rebuilt(source) or (gemms and not role and is_gemm(source))) and depth < MAX_CALLS:
            try:
                repeated = repeat(source, role)
            except Rejection:  # save it instead, except where a GEMM was to be repeated
                if source is node or (gemms and not role):
                    raise
        if repeated and (source is node or (gemms and not role) or _is_cheaper(pair, repeated, source)):
            return repeated
        if source is node:
            raise Rejection(Kind.NO_GEMM, "it is not the result of a GEMM")
        if not isinstance(source.meta.get("val"), torch.Tensor):
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


def _is_cheaper(pair: SavedTensors, repeated: Recomputation, source: Node) -> bool:
    more = pair.cost(repeated.to_save)
    return not more or not isinstance(source.meta.get("val"), torch.Tensor) or more < pair.cost([source])


def operand_role(call: Node, source: Node) -> str:
    """The role of an operand in a GEMM: "data" or "weight" (a bias, too); "" in other calls."""
    if not is_gemm(call):
        return ""
    has_bias = getattr(call.target, "overloadpacket", None) in (aten.addmm, aten.baddbmm)
    return "data" if source is call.args[1 if has_bias else 0] else "weight"


def _is_rebuilt(node: Node) -> bool:
    """True if a call is a view, is pointwise, picks rows, joins tensors, or quantizes a weight."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
        return False
    pointwise = torch.Tag.pointwise in tags or node.target in OPERATOR
    moves = node.target in _MOVES
    if node.target is operator.getitem:  # a part of what is split, as "tiled" splits tokens
        moves = node.all_input_nodes[0].target in SAME_ELEMENTS
    return pointwise or moves or node.target in SAME_ELEMENTS or _is_quantized(node)


_MOVES = {
    aten.index.Tensor,
    aten.gather.default,
    aten.index_select.default,
    aten.cat.default,
    fused.dropout_add.default,  # its mask is a function of a seed
}


def _is_quantized(node: Node) -> bool:
    """True for a weight in float8, or a part of it: that is a pass over the weight."""
    made = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, Node) and made.target is fused.quantize.default


def _replace(pair: SavedTensors, node: Node, recomputation: Recomputation) -> None:
    """Recompute a saved tensor in backward, and save what that needs."""
    pair.keep_instead(node, [n for n in recomputation.to_save if n not in pair.same])
    first = pair.first_reader(node)
    copies: dict[Node, Node] = {}
    with pair.backward.inserting_before(first):
        for call in recomputation.calls:
            copies[call] = pair.backward.node_copy(call, lambda n: copies.get(n) or pair.same[n])
            copies[call].meta["autograd_backward"] = True
    pair.make_again(node, copies.pop(node))
    pair.same.update(copies)


# ---- below "free" --------------------------------------------------------------------------------


def keep_less(graphs: Graphs, policy: FusionPolicy, *, outputs: int, static_inputs: Sequence[int]) -> Graphs:
    """Copies of a forward and a backward graph in which the one hands less to the other, as the policy says.

    Args:
        graphs: what ``partition`` made; not touched.
        policy: its memory levels.
        outputs: how many of forward's results are the user's, before what is kept for backward.
        static_inputs: which of forward's inputs live on in any case: parameters and buffers.
    """
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    for edit in (*_mlp_edits(pair, policy), *_attention_edits(pair, policy)):
        before = pair.nbytes()
        try:
            edit.apply()
            log.info("%s: %s, %d bytes less saved", edit.place, edit.setting, before - pair.nbytes())
        except Rejection as rejection:
            log.info("%s: %s has no effect: %s", edit.place, edit.setting, rejection)
            if policy.strict and edit.is_site:
                text = f"strict=True and {edit.setting} has no effect on {edit.place}: {rejection}"
                raise UnfusedError(text) from rejection
    _save_copies_of_biases(pair)
    return _finished(graphs, pair)


def _save_copies_of_biases(pair: SavedTensors) -> None:
    """Save a copy of each bias that backward reads only in recomputed GEMMs.

    Without a level, backward does not read it, so the caller may modify it in place between forward and backward.
    Autograd would then raise an error that names no tensor.
    """
    for bias in pair.kept():
        if bias not in pair.static or bias.meta["val"].dim() != 1:
            continue
        readers = list(_read_by(pair.same[bias]))
        if readers and all(operand_role(reader, view) == "weight" for view, reader in readers):
            with pair.forward.inserting_after(bias):
                copied = pair.forward.call_function(aten.clone.default, (bias,))
            copied.meta["val"] = bias.meta["val"].clone()
            pair.make_again(bias, *pair.keep_instead(bias, [copied]))


class _Edit(NamedTuple):
    """An edit that the policy asks for.

    Attributes:
        setting: the policy's field and value, for the log.
        place: the tensors or the module, for the log.
        apply: edits the graphs, or raises a Rejection.
        is_site: ``strict`` counts a rejection.
    """

    setting: str
    place: str
    apply: Callable[[], None]
    is_site: bool = False


def _finished(graphs: Graphs, both: SavedTensors) -> Graphs:
    """The edited graphs, in order and checked, as modules like those they were copied from."""
    from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

    for graph in (both.forward, both.backward):
        stable_topological_sort(graph)
        graph.lint()
    both.put_unchecked_last()
    both.check()
    return _make_graph_module(graphs[0], both.forward), _make_graph_module(graphs[1], both.backward)


def _mlp_edits(pair: SavedTensors, policy: FusionPolicy) -> Iterator[_Edit]:
    """The policy's memory levels for the saved tensors that MLPs' activations read."""
    seen = set[Node]()
    for node in pair.forward.nodes:
        if node.target not in OPERATOR:
            continue
        level = asked(node) or policy.memory_of(enclosing_modules(module_stack(node)))
        level = "input" if tiles.asked(level) is not None else level  # an MLP that the pre-grad pass could not tile
        if level not in _EDITS:
            continue
        sources = dict.fromkeys(pair.kept_source(node.args[i]) for i in DATA[node.target])
        nodes = [source for source in sources if source is not None and source not in seen]
        seen.update(nodes)
        if nodes:
            place = f"{', '.join(n.name for n in nodes)} in {next(reversed(module_stack(node)), '')}"
            yield _Edit(f"memory={level!r}", place, functools.partial(_EDITS[level], pair, nodes))


def _attention_edits(pair: SavedTensors, policy: FusionPolicy) -> Iterator[_Edit]:
    """The policy's ``attention="input"``, for each attention of the graph."""
    if policy.attention == "off":
        return
    for site in attention.find(pair.forward):
        stacks = {linear: enclosing_modules(module_stack(linear)) for linear in site.linears}
        linears = {n for n, modules in stacks.items() if policy.attention_of(modules) == "input"}
        linears = {n for n in linears if policy.excluding(stacks[n]) is None}
        if linears:
            edit = functools.partial(_save_attention_inputs, pair, site.values, linears)
            yield _Edit("attention='input'", site.module or "the model", edit, is_site=True)


# ---- "fp8" ---------------------------------------------------------------------------------------


_unrounded: ContextVar[bool] = ContextVar("torch_fused_ops_unrounded", default=False)


@contextmanager
def unrounded(on: bool = True) -> Iterator[None]:
    """Compilations inside keep for ``"fp8"`` what they would keep, but as it is: all else can be compared exactly."""
    token = _unrounded.set(on)
    try:
        yield
    finally:
        _unrounded.reset(token)


def _save_fp8(both: SavedTensors, nodes: Sequence[Node]) -> None:
    """Save tensors as float8, except those that cannot be.

    Raises:
        Rejection: none of them can be.
    """
    _each(functools.partial(_save_one_fp8, both), nodes)


def _save_one_fp8(both: SavedTensors, node: Node) -> None:
    _check_not_checkpointed(node)
    value, exact = node.meta["val"], _unrounded.get()
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32) and not exact:
        raise Rejection(Kind.FP8_DTYPE, f"it is {value.dtype}")
    if not compat.converts_to_fp8(value.device) and not exact:
        raise Rejection(Kind.FP8_DEVICE, "this GPU cannot convert to float8_e4m3fn")
    other = both.reader_of_rounding(both.same[node])
    if other is not None:
        raise Rejection(Kind.ALSO_READ, f"backward also reads it in {other.target}")
    stored, scale = _stored(both.forward, node, exact)
    first = both.first_reader(node)
    low = both.keep_instead(node, [stored, scale])
    load = (lambda x, scale: x * scale) if exact else functools.partial(reference.load_fp8, dtype=value.dtype)
    with both.backward.inserting_before(first):
        loaded = _inline(both.backward, load, *low)
    both.make_again(node, loaded, rounded=True)


def _stored(graph: Graph, node: Node, exact: bool) -> Sequence[Node]:
    """The nodes of ``reference.store_fp8`` of ``node``, in forward, which Inductor fuses with the activation."""
    readers = [user for user in node.users if user.target in OPERATOR and user.args[0] is node]
    halves = any(OPERATOR[reader.target].reads_halves(reader.args) for reader in readers)

    def store(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.clone(), torch.ones_like(x[..., :1])) if exact else reference.store_fp8(x, halves=halves)

    with graph.inserting_before(node.next):
        return _inline(graph, store, node)  # type: ignore[no-any-return]


def _inline(graph: Graph, fn: Callable[..., Any], *nodes: Node) -> Any:
    """Write ``fn(*nodes)`` into ``graph`` at its insertion point, as aten's calls with their fake values."""
    with torch.no_grad():
        traced = make_fx(fn, decomposition_table=select_decomp_table())(*(node.meta["val"] for node in nodes))
    environment = dict(zip(traced.graph.find_nodes(op="placeholder"), nodes, strict=True))
    made = len(environment)
    result = graph.graph_copy(traced.graph, environment)
    origin = {key: nodes[0].meta[key] for key in _ORIGIN if key in nodes[0].meta}
    for node in list(environment.values())[made:]:
        node.meta.update(origin)
    return result


_ORIGIN = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "autograd_backward")


# ---- "input" -------------------------------------------------------------------------------------


def _save_inputs(pair: SavedTensors, nodes: Sequence[Node]) -> None:
    """Recompute saved tensors in backward by GEMMs, from inputs that are saved for the weights' gradients anyway.

    Raises:
        Rejection: none of them can be recomputed, or the inputs take as many bytes.
    """
    planned = dict(_each(functools.partial(_with_gemms, pair), nodes))
    if not any(is_gemm(call) for each in planned.values() for call in each.calls):
        raise _noted(Rejection(Kind.NO_GEMM, "it is not the result of a GEMM"), planned)
    more = pair.cost({source for each in planned.values() for source in each.to_save})
    if more >= pair.cost(planned):
        text = f"cannot recompute: its inputs take {more} bytes and are not saved otherwise"
        raise _noted(Rejection(Kind.COSTS_MORE, text), planned)
    for node in planned:
        _replace(pair, node, _with_gemms(pair, node))


def _save_attention_inputs(pair: SavedTensors, values: Collection[Node], linears: Collection[Node]) -> None:
    """``_save_inputs`` for the ``values`` of one attention that these linear layers alone compute."""

    def computed_by_others(node: Node) -> bool:
        return any(is_gemm(call) and call not in linears for call in _with_gemms(pair, node).calls)

    nodes = [node for node in pair.kept() if node in values and _may_be_replaced(pair, node)]
    others = dict.fromkeys(node for node, answer in _each(computed_by_others, nodes) if answer)
    if len(others) < len(nodes):
        _save_inputs(pair, [node for node in nodes if node not in others])


def _with_gemms(pair: SavedTensors, node: Node) -> Recomputation:
    _check_not_checkpointed(node)
    return _recomputation(pair, node, gemms=True)


_EDITS: dict[str, Callable[[SavedTensors, Sequence[Node]], None]] = {"fp8": _save_fp8, "input": _save_inputs}


def _check_not_checkpointed(node: Node) -> None:
    if isinstance(node.meta.get("recompute"), CheckpointPolicy):
        raise Rejection(Kind.CHECKPOINTED, "selective checkpointing saves it")


def _each(fn: Callable[[Node], _T], nodes: Sequence[Node]) -> list[tuple[Node, _T]]:
    """Return the results of ``fn`` for the nodes that it does not reject. If it rejects all, raise the first reason."""
    results: list[tuple[Node, _T]] = []
    rejections: list[Rejection] = []
    for node in nodes:
        try:
            results.append((node, fn(node)))
        except Rejection as rejection:
            log.info("%s: %s", node.name, rejection)
            rejections.append(_noted(rejection, [node]))
    if rejections and not results:
        raise rejections[0]
    return results


_REFUSED = "torch_fused_ops_refused"


def _noted(rejection: Rejection, nodes: Iterable[Node]) -> Rejection:
    """Record on saved tensors why a level does not apply to them."""
    for node in nodes:
        node.meta[_REFUSED] = rejection.reason
    return rejection


def refused(node: Node) -> Reason | None:
    """The reason why a tensor that forward saves stays saved at a level of the policy; None if no level applies."""
    reason: Reason | None = node.meta.get(_REFUSED)
    return reason
