"""Stage 2, second half: what is saved for backward at ``memory="free"`` (``rebuild``) and below (``keep_less``).

What is left there, besides the GEMMs' own inputs, is what the activations read. Two levels go below that, by editing
the two graphs that the partitioner made (``saved_tensors.SavedTensors``): each saved tensor that an MLP's activation
reads becomes something smaller, from which the backward graph computes it again.

``"fp8"``    float8_e4m3fn and a scale for each row, made where forward computes the activation; backward's kernels read
             that. Only where nothing else in backward reads the tensor: whatever does would see the rounding.
``"input"``  nothing: the GEMM that made it (of an adapted linear layer the GEMMs and their sum) is computed again,
             from inputs that are kept for the weights' gradients anyway. So is what ``"tiled"`` has left whole: the
             tiles themselves are stage 1's (``recognize/tiles.py``), and keep nothing that could be kept smaller.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.declaration import PointwiseOperator, elementwise
from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.graphs.reasons import Kind, Rejection
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.partition import Graphs, base, is_gemm, is_linear, op_types
from torch_fused_ops.lowerings.saved_tensors import DATA, SAME_ELEMENTS, SavedTensors
from torch_fused_ops.operators import reference
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.settings import tiles

log = logging.getLogger("torch_fused_ops")

aten, fused = torch.ops.aten, torch.ops.fused

OPERATOR: dict[Any, PointwiseOperator] = {op.forward.overload: op for op in elementwise()}
SUMS = {aten.add.Tensor, aten.mul.Tensor}  # a bias, an adapter and its factor


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
    """Copies of both graphs in which backward rebuilds what linear layers read of what it is handed anyway.

    The partitioner does so, but for what a matrix product stands between: of two readers of a value, one behind a
    product that reads the value, too, the far one is kept ("used far apart"). It means a frozen layer's product beside
    its adapter's dropout, and a router's beside the tokens gathered for experts; and sees it or not by how the program
    is written: with tokens in three dimensions a view stands in front of the product, with two none does. Here
    nothing is rebuilt from what is not handed over for something else, but parameters and buffers.

    Args:
        graphs: what ``partition`` made; not touched, and handed back where there is nothing to do.
        outputs: how many of forward's results are the user's, before what is kept for backward.
        static_inputs: which of forward's inputs live on in any case: parameters and buffers.
    """
    as_it_is = SavedTensors(graphs[0].graph, graphs[1].graph, outputs, static_inputs)
    if not any(_again(as_it_is, node) for node in as_it_is.kept()):
        return graphs
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    both = SavedTensors(forward, backward, outputs, static_inputs)
    for node in both.kept():
        again = _again(both, node)
        if again:
            log.info("%s: backward recomputes it from saved tensors, %d bytes less", node.name, both.cost([node]))
            sources = dict.fromkeys(n for one in again for n in one.all_input_nodes)
            both.keep_instead(node, [n for n in sources if n in both.static and n not in both.same])
            _compute_again(both, node, again)
    return _finished(graphs, both)


def _again(both: SavedTensors, node: Node) -> list[Node]:
    """The calls that make a kept tensor of what backward has, for linear layers' products alone; none if it is kept."""
    if (
        node in both.static
        or node in both.returned()[: both.outputs]
        or isinstance(base(node).meta.get("recompute"), CheckpointPolicy)
        or not both.same[node].users
        or not all(map(is_linear, _readers(both.same[node])))
    ):
        return []
    again: list[Node] = []
    pending = [node]
    while pending:
        one = pending[-1]
        own = [n for n in one.all_input_nodes if n in both.static]  # a norm's bias: it is there in any case
        known = {node, *both.same, *own, *again}
        sources = [n for n in one.all_input_nodes if n not in known]
        if not _is_rebuilt(one) or len(again) + len(pending) > CALLS or any(n in both.stale for n in (base(one), *own)):
            return []
        pending += sources
        if not sources:
            again.append(pending.pop())
    return list(dict.fromkeys(again))


CALLS = 32  # as many as are rebuilt for one tensor: an activation that was left alone, not a model's residual sums


def _is_rebuilt(node: Node) -> bool:
    """True if a call is a view, is pointwise, picks rows or joins tensors: no sums, no random numbers."""
    kinds = op_types()
    if node.op != "call_function" or kinds.is_random(node):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in OPERATOR
    moves = node.target in (aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.cat.default)
    if node.target is operator.getitem:  # a part of what is split, as "tiled" splits tokens
        moves = node.all_input_nodes[0].target in SAME_ELEMENTS
    return pointwise or moves or node.target in SAME_ELEMENTS or node.target is fused.dropout_add.default


def _readers(node: Node) -> Iterator[Node]:
    """The readers of a tensor in backward, through views."""
    for user in node.users:
        if user.target in SAME_ELEMENTS:
            yield from _readers(user)
        else:
            yield user


def _compute_again(both: SavedTensors, node: Node, again: Sequence[Node]) -> None:
    """Let backward make ``node``, kept until now, by copies of forward's calls, the last of which is ``node``."""
    first = both.first_reader(node)
    copies: dict[Node, Node] = {}
    with both.backward.inserting_before(first):
        for one in again:
            copies[one] = both.backward.node_copy(one, lambda n: copies.get(n) or both.same[n])
            copies[one].meta["autograd_backward"] = True
    both.make_again(node, copies.pop(node))
    both.same.update(copies)


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
    both = SavedTensors(forward, backward, outputs, static_inputs)
    for node, level in _kept(both, policy):
        module, before = next(reversed(module_stack(node)), ""), both.nbytes()
        try:
            if isinstance(node.meta.get("recompute"), CheckpointPolicy):
                raise Rejection(Kind.CHECKPOINTED, "selective checkpointing saves it")
            _LEVELS[level](both, node)
            log.info("%s in %s: memory=%r, %d bytes less saved", node.name, module, level, before - both.nbytes())
        except Rejection as refusal:
            log.info("%s in %s: memory=%r has no effect: %s", node.name, module, level, refusal)
    return _finished(graphs, both)


def _finished(graphs: Graphs, both: SavedTensors) -> Graphs:
    """The edited graphs, in order and checked, as modules like those they were copied from."""
    from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

    for graph in (both.forward, both.backward):
        stable_topological_sort(graph)
        graph.lint()
    both.put_unchecked_last()
    both.check()
    return _make_graph_module(graphs[0], both.forward), _make_graph_module(graphs[1], both.backward)


def _kept(both: SavedTensors, policy: FusionPolicy) -> list[tuple[Node, str]]:
    """The tensors that activations read and that are kept for backward, with their memory levels."""
    found: dict[Node, str] = {}
    for node in both.forward.nodes:
        if node.target not in OPERATOR:
            continue
        level = asked(node) or policy.memory_of(enclosing_modules(module_stack(node)))
        level = "input" if tiles.asked(level) is not None else level  # what stage 1 has not cut into tiles
        for source in (both.kept_source(node.args[i]) for i in DATA[node.target]) if level in _LEVELS else ():
            if source is not None:
                found.setdefault(source, level)
    return list(found.items())


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


def _keep_fp8(both: SavedTensors, node: Node) -> None:
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


def _keep_input(both: SavedTensors, node: Node) -> None:
    again: list[Node] = []  # forward's nodes to compute again in backward, in order
    keep: list[Node] = []  # and those to keep for that
    _plan(both, node, None, again, keep)
    if not any(map(is_gemm, again)):
        raise Rejection(Kind.NO_GEMM, "it is not the result of a GEMM")
    more, less = both.cost(keep), both.cost([node])
    if more >= less:
        raise Rejection(Kind.COSTS_MORE, f"cannot recompute: its inputs take {more} bytes and are not saved otherwise")
    both.keep_instead(node, keep)
    _compute_again(both, node, again)


def _plan(both: SavedTensors, node: Node, operand: str | None, again: list[Node], keep: list[Node]) -> None:
    """List the calls that recompute ``node`` in backward: GEMMs, sums of them, and views of saved tensors.

    ``operand``: its role in the GEMM that reads it, "data" or "weight" (or bias), if one does.
    """
    for source in node.all_input_nodes:
        inside = operand or (None if not is_gemm(node) else "data" if source is _data(node) else "weight")
        if source in again or source in keep or source in both.same:
            continue
        if base(source) in both.stale:
            raise Rejection(Kind.MADE_OF_WRITTEN, f"cannot recompute: forward writes {base(source)}")
        if not isinstance(source.meta.get("val"), torch.Tensor) and not _is_quantized(source):
            raise Rejection(Kind.MADE_OF_SIZE, f"cannot recompute: the size {source} is not saved")
        product = not inside and (is_gemm(source) or source.target in SUMS)
        if source.target in SAME_ELEMENTS or _is_quantized(source) or product:
            _plan(both, source, inside, again, keep)
        elif inside != "weight" and base(source) in both.callers.difference(map(base, both.kept())):
            text = f"cannot recompute: the caller may modify {base(source)} before backward needs it"
            raise Rejection(Kind.MADE_OF_CALLERS, text)
        else:
            keep.append(source)
    again.append(node)


def _data(gemm: Node) -> Any:
    """The operand of a GEMM beside its weight: a bias comes before it."""
    return gemm.args[1] if getattr(gemm.target, "overloadpacket", None) in (aten.addmm, aten.baddbmm) else gemm.args[0]


def _is_quantized(node: Node) -> bool:
    """True for a weight in float8, or a part of it: that is a pass over the weight."""
    made = node.args[0] if node.target is operator.getitem else node
    return isinstance(made, Node) and made.target is fused.quantize.default


_LEVELS: dict[str, Callable[[SavedTensors, Node], None]] = {"fp8": _keep_fp8, "input": _keep_input}
