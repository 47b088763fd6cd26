"""Memory levels in the partitioner: edits of a forward and a backward graph that save less for backward.

``recompute_linear_inputs`` applies to every level except "off". ``apply_levels`` applies the levels below "free":

``memory="fp8"``       An MLP's saved activation inputs become float8_e4m3fn with a scale per row. Forward computes both
                       in the activation's kernel. A tensor stays exact if backward also reads it outside of
                       activations and their derivatives: this reader would see the rounding.
``memory="input"``     Activation inputs are not saved. Backward repeats the GEMM that produced them, with the bias,
                       adapter and casts behind it, from inputs that are saved for the weight gradients anyway. MLPs
                       that the pre-grad pass could not tile (``"tiled"``, ``recognize/tiles.py``) get this level.
``attention="input"``  Backward recomputes queries, keys, values and the projected result of attention in the same way
                       (``attention.py`` finds them).

All levels edit a ``saved_tensors.SavedTensors``. All except "fp8" use a ``_Planner``.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
import operator
from collections import deque
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

from torch_fused_ops.graphs.modules import innermost, is_of_activation, marked_clamp, module_stack
from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.lowerings import attention, compat, offload
from torch_fused_ops.lowerings.partition import OPERATOR, Graphs, base, is_gemm, is_linear, is_pointwise
from torch_fused_ops.lowerings.saved_tensors import (
    DATA,
    SavedTensors,
    by_memory,
    nbytes,
    readers,
    views_and_readers,
)
from torch_fused_ops.operators import reference
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.settings import tiles

log = logging.getLogger("torch_fused_ops")

aten, fused = torch.ops.aten, torch.ops.fused

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

    * Inputs of linear layers, from tensors that are saved anyway. PyTorch's partitioner does this too, unless a GEMM
      also reads the same value. It then treats later readers as "used far apart" and saves their results. Examples: a
      frozen linear next to its adapter's dropout, and a router next to the gathering of tokens for experts.
    * Values inside an activation that is not replaced, because a setting requires eager's rounding.
    * Tensors that repeat a smaller tensor, such as keys and values under grouped-query attention. The smaller tensor is
      saved instead.

    Args:
        graphs: the result of ``partition``. It is not modified. Without an edit, it is returned.
        outputs: number of forward's results that belong to the user. The tensors saved for backward follow them.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.
    """
    original = SavedTensors(graphs[0].graph, graphs[1].graph, outputs, static_inputs)
    plans = (_plan_without_gemm(original, node) for node in original.saved())
    if not any(plans) and not any(_parts(original)):
        return graphs  # copying the graphs of twelve GPT blocks takes 0.37 s
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    for node in pair.saved():
        recomputation = _plan_without_gemm(pair, node)
        if recomputation is not None:
            _apply(pair, functools.partial(_replace, pair, node, recomputation), "memory='free'", node.name)
    return _finish(graphs, pair)


def _plan_without_gemm(pair: SavedTensors, node: Node) -> Recomputation | None:
    """Return how backward recomputes a saved tensor at ``memory="free"``; None if it must stay saved."""
    if not _may_be_replaced(pair, node):
        return None
    try:
        planner = _Planner(pair, node, gemms=False)
        recomputation = planner.plan()
    except Rejection:
        return None
    added = planner.bytes_added(recomputation)
    feeds_only_linear_layers = all(map(is_linear, readers(pair.in_backward[node])))
    if is_of_activation(node) or feeds_only_linear_layers:
        return None if added else recomputation
    saves_bytes = added < pair.cost([node], alongside=planner.remaining)
    return recomputation if saves_bytes and _repeats_a_smaller_tensor(recomputation) else None


def _repeats_a_smaller_tensor(recomputation: Recomputation) -> bool:
    """Return True if a recomputation reads one tensor, which has fewer bytes than the result. Sizes do not count."""
    *_, result = recomputation.calls
    read = set[Node]().union(*(call.all_input_nodes for call in recomputation.calls))
    read.difference_update(recomputation.calls)
    tensors = [node for node in read if isinstance(node.meta.get("val"), torch.Tensor)]
    return len(tensors) == 1 and nbytes(tensors[0]) < nbytes(result)


def _may_be_replaced(pair: SavedTensors, node: Node) -> bool:
    """Return True for a saved tensor that forward computes, unless the user gets it or a checkpoint saves it."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and node not in pair.returned()[: pair.num_outputs]
        and not isinstance(base(node).meta.get("recompute"), CheckpointPolicy)
        and bool(pair.in_backward[node].users)
    )


# ---- recomputation -------------------------------------------------------------------------------

_MAX_SEARCHED = 128  # calls that a plan considers
MAX_CALLS = 32  # enough for a norm and a rotary embedding, but not for a model's chain of residual adds


class Recomputation(NamedTuple):
    """The calls with which backward recomputes a saved tensor.

    Attributes:
        calls: forward's calls to repeat, in order; the last one computes the tensor.
        to_save: values to save for these calls.
        to_copy: values to save as copies, because the caller may modify them.
    """

    calls: tuple[Node, ...] = ()
    to_save: tuple[Node, ...] = ()
    to_copy: tuple[Node, ...] = ()

    @classmethod
    def union(cls, parts: Iterable[Recomputation]) -> Recomputation:
        """Return a recomputation with the calls and values of all parts."""
        united = (dict.fromkeys(itertools.chain(*field)) for field in zip(*parts, strict=True))
        return cls(*map(tuple, united))


class _Planner:
    """Plans how backward recomputes one saved tensor from values that backward has, or that can be saved for it.

    Views, pointwise calls and gathers are repeated. With ``gemms``, one layer of GEMMs is repeated as well, and all
    calls between these GEMMs and the tensor. Random numbers and sums are never repeated.

    ``_obtain`` decides for each value: backward has it, or repeats its call, or reads it from memory. The choice is
    greedy: it compares the bytes for this value alone.

    A value's *role* tells which operand of a repeated GEMM depends on it: "data", "weight" or "bias". It is "" for
    values between the GEMMs and the saved tensor, and for all values without ``gemms``.
    """

    def __init__(self, pair: SavedTensors, node: Node, *, gemms: bool) -> None:
        self.pair, self.node, self.gemms = pair, node, gemms
        self.remaining = [saved for saved in pair.saved() if saved is not node]
        self._available = pair.available_without(node)
        self._near = self._find_near()
        self._plans: dict[tuple[Node, str], Recomputation | Rejection] = {}

    def plan(self) -> Recomputation:
        """Return the recomputation.

        Raises:
            Rejection: a required value cannot be provided in backward.
        """
        result = self._obtain(self.node, "")
        if isinstance(result, Rejection):
            raise result
        return result

    def bytes_added(self, recomputation: Recomputation) -> int:
        """Return the bytes of memory that a recomputation adds to the other saved tensors."""
        return self.pair.cost(recomputation.to_save, self.remaining, recomputation.to_copy)

    def _obtain(self, value: Node, role: str) -> Recomputation | Rejection:
        """Return how backward gets a value, or why it cannot."""
        if value in self._available:
            return Recomputation()
        if (value, role) not in self._plans:
            self._plans[value, role] = self._choose(value, role)
        return self._plans[value, role]

    def _choose(self, value: Node, role: str) -> Recomputation | Rejection:
        """Choose the cheaper way to provide a value that backward does not have: repeat its call, or save it."""
        repeated = self._repeat(value, role)
        comes_after_gemms = self.gemms and not role
        if value is self.node or (comes_after_gemms and self._is_repeatable(value, role)):
            return repeated
        saved = self._save(value, role)
        if isinstance(repeated, Rejection):
            return saved
        if isinstance(saved, Rejection):
            return repeated
        added, bytes_saved = self.bytes_added(repeated), self.bytes_added(saved)
        is_view = base(value) is not value  # Inductor could expand a saved view in memory
        saves_bytes = added < bytes_saved or (is_view and added == bytes_saved)
        return repeated if not added or saves_bytes else saved

    def _repeat(self, call: Node, role: str) -> Recomputation | Rejection:
        """Return how backward repeats a call, with all operands that it does not have."""
        if not self._is_repeatable(call, role):
            return Rejection(Kind.NO_GEMM, "it is not the result of a GEMM")
        too_many = Rejection(Kind.MANY_RECOMPUTED, f"cannot recompute: it takes more than {MAX_CALLS} calls")
        if (call, role) not in self._near:
            return too_many
        parts: list[Recomputation] = []
        for operand in call.all_input_nodes:
            part = self._obtain(operand, role or self._operand_role(call, operand))
            if isinstance(part, Rejection):
                return part
            parts.append(part)
        united = Recomputation.union(parts)
        return too_many if len(united.calls) >= MAX_CALLS else united._replace(calls=(*united.calls, call))

    def _save(self, value: Node, role: str) -> Recomputation | Rejection:
        """Return how forward saves a value: itself, or a copy. Sizes cannot be saved.

        Parameters and buffers are saved themselves for pointwise calls, and for repeated GEMMs as weights. Autograd
        then checks that the caller has not modified them (docs/memory.md). It does not check views.
        Forward saves copies of views, arguments and results.
        """
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return Rejection(Kind.MADE_OF_SIZE, f"cannot recompute: the size {value} is not saved")
        checked = value in self.pair.static and (role == "weight" or not self.gemms)
        if checked and value not in self.pair.overwritten:
            return Recomputation(to_save=(value,))
        if self.pair.may_be_written(value):
            return Recomputation(to_copy=(value,))
        return Recomputation(to_save=(value,))

    def _is_repeatable(self, value: Node, role: str) -> bool:
        return _is_recomputable(value) or (self.gemms and not role and is_gemm(value))

    def _operand_role(self, call: Node, operand: Node) -> str:
        """Return the operand's role. The first operand is the weight if only it is a parameter: ``(W @ x.T).T``."""
        role = operand_role(call, operand)
        parameters = [node for node in call.all_input_nodes if base(node) in self.pair.static]
        return "weight" if role == "data" and parameters == [operand] else role

    def _find_near(self) -> set[tuple[Node, str]]:
        """Return repeatable calls with their roles, nearest first, so that the search ends early in a deep model."""
        near, pending = set[tuple[Node, str]](), deque([(self.node, "")])
        while pending and len(near) < _MAX_SEARCHED:
            call, role = pending.popleft()
            if call not in self._available and (call, role) not in near and self._is_repeatable(call, role):
                near.add((call, role))
                pending += [(n, role or self._operand_role(call, n)) for n in call.all_input_nodes]
        return near


def operand_role(call: Node, source: Node) -> str:
    """Return the role of an operand in a GEMM: "data", "bias" or "weight" (also for scales). For other calls, ""."""
    if not is_gemm(call):
        return ""
    has_bias = getattr(call.target, "overloadpacket", None) in (aten.addmm, aten.baddbmm)
    if has_bias and source is call.args[0]:
        return "bias"
    return "data" if source is call.args[1 if has_bias else 0] else "weight"


def _is_recomputable(node: Node) -> bool:
    """True if a call is a view, is pointwise, picks rows, joins tensors, or quantizes a weight."""
    # For getitem, judge the call that produced the tuple: a split into tiles, or quantize's values and scales.
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()):
        return False
    # as_strided depends on its source's strides.
    is_view = base(node) is not node and call.target is not aten.as_strided.default
    return is_pointwise(call) or call.target in _RECOMPUTABLE or is_view


_RECOMPUTABLE = {
    *OPERATOR,
    *(aten.index.Tensor, aten.gather.default, aten.index_select.default, aten.cat.default),
    fused.dropout_add.default,  # its mask is a function of a seed
    fused.quantize.default,  # takes one pass over the weight
}


def _replace(pair: SavedTensors, node: Node, recomputation: Recomputation) -> None:
    """Recompute a saved tensor in backward, and save the values that the recomputation needs."""
    available = pair.available_without(node)
    needed = {n: n for n in recomputation.to_save if n not in available}
    needed |= {n: pair.copied(n) for n in recomputation.to_copy if n not in available}
    available |= zip(needed, pair.save_instead(node, list(needed.values())), strict=True)
    with pair.backward.inserting_before(pair.first_reader(node)):
        for call in (c for c in recomputation.calls if c not in available):
            available[call] = pair.backward.node_copy(call, available.__getitem__)
            available[call].meta["autograd_backward"] = True
    pair.replace_in_backward(node, available[node])
    pair.in_backward |= available


# ---- below "free" --------------------------------------------------------------------------------


def apply_levels(
    graphs: Graphs,
    policy: FusionPolicy,
    outputs: int,
    static_inputs: Sequence[int],
    on_attention: Callable[[str, Collection[Node], int, Reason | None], None] = lambda *_: None,
) -> Graphs:
    """Return copies of both graphs that save less for backward, at the policy's memory levels below "free".

    Args:
        graphs: the partitioned graphs. Not modified.
        policy: the fusion policy with the memory levels.
        outputs: number of forward's results that belong to the user. The tensors saved for backward follow them.
        static_inputs: positions of forward's parameters and buffers, which stay in memory anyway.
        on_attention: called for each attention outside of checkpoints for which the policy requests a level, with its
            module, its linear layers, the number of bytes freed, and the reason if the level has no effect.
    """
    forward, backward = (copy.deepcopy(module.graph) for module in graphs)
    pair = SavedTensors(forward, backward, outputs, static_inputs)
    seen = set[Node]()
    for node in filter(_activation_inputs, list(forward.nodes)):
        _apply_to_mlp(pair, policy, node, seen)
    for site, linears in list(attention_with_level(forward, policy)):
        if not are_checkpointed(linears):
            nodes = [node for node in pair.saved() if node in site.values and _may_be_replaced(pair, node)]
            edit = functools.partial(_recompute_with_gemms, pair, nodes, linears)
            bytes_freed, reason = _apply(pair, edit, "attention='input'", site.module or "the model")
            on_attention(site.module, linears, bytes_freed, reason)
    _save_copies_of_biases(pair)
    offload.move_to_host(pair, policy)
    return _finish(graphs, pair)


def _save_copies_of_biases(pair: SavedTensors) -> None:
    """Save a copy of each saved tensor that backward reads only as a bias of repeated GEMMs, as ``_Planner`` does.

    These are the biases of MLPs in tiles: PyTorch saves them to repeat the tiles.
    """
    for node in filter(pair.may_be_written, pair.saved()):
        reads = list(views_and_readers(pair.in_backward[node]))
        if reads and all(operand_role(reader, view) == "bias" for view, reader in reads):
            pair.replace_in_backward(node, *pair.save_instead(node, [pair.copied(node)]))


def _apply(pair: SavedTensors, edit: Callable[[], Any], setting: str, place: str) -> tuple[int, Reason | None]:
    """Edit the graphs, and log the effect. Return the number of bytes freed, and the reason if there is no effect."""
    before = pair.cost(pair.saved())
    try:
        edit()
    except Rejection as rejection:
        log.info("%s: %s has no effect: %s. %s", place, setting, rejection, rejection.reason.kind.hint)
        return 0, rejection.reason
    bytes_freed = before - pair.cost(pair.saved())
    log.info("%s: %s, %d bytes less saved", place, setting, bytes_freed)
    return bytes_freed, None


def _finish(graphs: Graphs, pair: SavedTensors) -> Graphs:
    """Sort and check the edited graphs. Return them as modules with the attributes of the original ones."""
    from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

    for node in list(_parts(pair)):
        pair.replace_in_backward(node, *pair.save_instead(node, [pair.copied(node)]))
    for graph in (pair.forward, pair.backward):
        stable_topological_sort(graph)
        graph.lint()
    pair.put_unchecked_last()
    pair.check()
    return _make_graph_module(graphs[0], pair.forward), _make_graph_module(graphs[1], pair.backward)


def _parts(pair: SavedTensors) -> Iterator[Node]:
    """Yield saved views that are smaller than the memory behind them, if nothing else needs this memory."""
    for source, nodes in by_memory(pair.saved()).items():
        if not pair.may_be_written(source) and pair.can_shrink(nodes):
            yield from nodes


def _apply_to_mlp(pair: SavedTensors, policy: FusionPolicy, node: Node, seen: set[Node]) -> None:
    """Apply the policy's memory level to the saved tensors that an activation reads.

    Args:
        pair: the graphs, after the edits for earlier operators.
        policy: the fusion policy.
        node: a call in forward, see ``_activation_inputs``.
        seen: saved tensors that an earlier operator reads. Those of this operator are added.
    """
    level = requested_level(node) or policy.memory_of(enclosing_modules(module_stack(node)))
    if tiles.requested_tiles(level) is not None:  # the pre-grad pass could not tile this MLP
        level = "input"
    if level not in _EDITS:
        return
    sources = dict.fromkeys(map(pair.saved_source, _activation_inputs(node)))
    nodes = [source for source in sources if source is not None and source not in seen]
    seen.update(nodes)
    if nodes:
        place = f"{', '.join(n.name for n in nodes)} in {innermost(node)}"
        _apply(pair, functools.partial(_EDITS[level], pair, nodes), f"memory={level!r}", place)


def _activation_inputs(node: Node) -> list[Any]:
    """Return the inputs of an MLP's activation that a node reads; [] for other nodes.

    The node is an operator, or a call of an activation that is not replaced, since a setting requires eager's rounding.
    """
    if node.target in OPERATOR:
        return [node.args[i] for i in DATA[node.target]]
    if not is_of_activation(node):
        return []
    return [source for source in node.all_input_nodes if not is_of_activation(source)]


def are_checkpointed(nodes: Iterable[Node]) -> bool:
    """Return True if all calls of forward among these nodes are inside checkpoints."""
    forward = [node for node in nodes if node.meta.get("partitioner_tag") != "is_backward"]
    return bool(forward) and all("ac_graph_id" in node.meta for node in forward)


def attention_with_level(graph: Graph, policy: FusionPolicy) -> Iterator[tuple[attention.Attention, set[Node]]]:
    """Yield a graph's attention with ``attention="input"``, with the linear layers that have this level."""
    if policy.attention == "off":
        return
    for site in attention.find(graph):
        stacks = {linear: enclosing_modules(module_stack(linear)) for linear in site.linears}
        linears = {n for n, modules in stacks.items() if policy.attention_of(modules) == "input"}
        linears = {n for n in linears if policy.excluding(stacks[n]) is None}
        if linears:
            yield site, linears


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


TIGHT_CLAMP = 2.0  # from here down, gradients of data with deviation 1 or 2 are 12 to 21 % off; without a clamp 4 %


def _save_fp8(pair: SavedTensors, node: Node) -> Node:
    """Save a tensor as float8. Return backward's node that reads it.

    Raises:
        Rejection: the tensor must stay exact, or its dtype or device does not support float8.
    """
    value, exact = node.meta["val"], _without_fp8_rounding.get()
    clamp = min(_clamps(node), default=math.inf)
    if clamp <= TIGHT_CLAMP and not exact:
        raise Rejection(Kind.FP8_CLAMP, f"rounding would move values across clamp={clamp:g}")
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32) and not exact:
        raise Rejection(Kind.FP8_DTYPE, f"it is {value.dtype}")
    if not compat.converts_to_fp8(value.device) and not exact:
        raise Rejection(Kind.FP8_DEVICE, "this GPU cannot convert to float8_e4m3fn")
    other = pair.reader_of_rounding(pair.in_backward[node])
    if other is not None:
        raise Rejection(Kind.ALSO_READ, f"backward also reads it in {other.target}")
    stored, scale = _store_fp8(pair.forward, node, exact)
    first = pair.first_reader(node)
    stored_inputs = pair.save_instead(node, [stored, scale])
    load = (lambda x, scale: x * scale) if exact else functools.partial(reference.load_fp8, dtype=value.dtype)
    with pair.backward.inserting_before(first):
        loaded = _inline(pair.backward, load, *stored_inputs)
    pair.replace_in_backward(node, loaded, rounded=True)
    return loaded  # type: ignore[no-any-return]


def _clamps(node: Node) -> Iterator[float]:
    """Yield the clamps of all activations that read a saved tensor, through views and casts, if they are numbers."""
    for user in readers(node):
        op = OPERATOR.get(user.target)
        clamp = marked_clamp(user)
        if op is not None and "clamp" in op.scalars:
            scalars = op.with_defaults(user.args)[len(op.tensors) :]
            clamp = dict(zip(op.scalars, scalars, strict=True))["clamp"]
        if isinstance(clamp, int | float):
            yield clamp


def _store_fp8(graph: Graph, node: Node, exact: bool) -> Sequence[Node]:
    """Add ``reference.store_fp8(node)`` to forward, where Inductor fuses it with the activation. Return its results."""
    activations = [user for user in node.users if user.target in OPERATOR and user.args[0] is node]
    halves = any(OPERATOR[activation.target].reads_halves(activation.args) for activation in activations)

    def store(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.clone(), torch.ones_like(x[..., :1])) if exact else reference.store_fp8(x, halves=halves)

    with graph.inserting_before(node.next):
        return _inline(graph, store, node)  # type: ignore[no-any-return]


def _inline(graph: Graph, fn: Callable[..., Any], *nodes: Node) -> Any:
    """Trace ``fn`` on the nodes' fake values, and insert the ATen calls at the insertion point. Return the results."""
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


def _recompute_with_gemms(pair: SavedTensors, nodes: Sequence[Node], linears: Collection[Node] | None = None) -> None:
    """Recompute saved tensors in backward by GEMMs, from inputs that are saved for the weight gradients anyway.

    Args:
        pair: the graphs.
        nodes: the saved tensors.
        linears: linear layers that may be repeated; None for all. Tensors that need other linear layers stay saved.

    Raises:
        Rejection: no tensor can be recomputed, or the inputs take as many bytes.
    """

    def plan(node: Node) -> Recomputation | None:
        recomputation = _Planner(pair, node, gemms=True).plan()
        repeats_others = linears is not None and any(is_gemm(c) and c not in linears for c in recomputation.calls)
        return None if repeats_others else recomputation

    plans = _apply_to_each(plan, nodes)
    if not plans:
        raise Rejection(Kind.NOTHING_SAVED, "no saved tensor can be recomputed by its linear layers alone")
    every = Recomputation.union(plans.values())
    if not any(map(is_gemm, every.calls)):
        raise _record_rejection(Rejection(Kind.NO_GEMM, "it is not the result of a GEMM"), plans)
    remaining = [node for node in pair.saved() if node not in plans]
    added = pair.cost(every.to_save, remaining, every.to_copy)
    if added >= pair.cost(plans, alongside=remaining):
        text = f"cannot recompute: its inputs take {added} bytes and are not saved otherwise"
        raise _record_rejection(Rejection(Kind.COSTS_MORE, text), plans)
    for node, recomputation in plans.items():
        _replace(pair, node, recomputation)


_EDITS: dict[str, Callable[[SavedTensors, Sequence[Node]], Any]] = {
    "fp8": lambda pair, nodes: _apply_to_each(functools.partial(_save_fp8, pair), nodes),
    "input": _recompute_with_gemms,
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
