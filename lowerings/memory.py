"""Stage 2: what a compiled training step keeps for backward.

By default Inductor's partitioner keeps both sides of an activation between two GEMMs: its rule is that what backward
must materialise anyway (the second GEMM's weight gradient reads the activation) is not rebuilt. Taking away that one
rule, for what linear layers read, is enough (``"free"``): the activation is rebuilt in the kernel that computes its
gradient, from the same loads.

Upstream's knob for this is ``torch._functorch.config.activation_memory_budget``, just below 1. It keeps as little,
and costs more: it rebuilds a softmax that is spelled out (a T5 block: pointwise work of 3.5 ms by bytes and
instructions on an H200, where plain and this have 2.4), it also drops the rule against rebuilding values used far
apart, so chains of residual adds are rebuilt (four Llama blocks, bf16: backward moves 1453 MiB by default, 1601 with
the budget, 1529 here, and the budget adds kernels), and where nothing pointwise is left to gain it rebuilds a *GEMM*
(four linear layers: 9 matrix products in backward instead of 8). Here nothing but pointwise work is ever rebuilt,
unless the policy asks for it.

What is left then, besides the GEMMs' own inputs, is what the activations read. Two levels go below that, by editing the
two graphs that the partitioner made: each tensor that an MLP's activation reads and that is kept becomes something
smaller, from which the backward graph makes it again.

``"fp8"``    float8_e4m3fn and a scale for each row, made where forward computes the activation; backward's kernels read
             that. Only where nothing else in backward reads the tensor: whatever does would see the rounding.
``"input"``  nothing: the GEMM that made it (of an adapted linear layer the GEMMs and their sum) is computed again,
             from inputs that are kept for the weights' gradients anyway.

A budget that the user sets is the user's: then this stage stands aside.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops import reference
from torch_fused_ops.lowerings import compat
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.report import module_stack

log = logging.getLogger("torch_fused_ops")

Graphs: TypeAlias = tuple[GraphModule, GraphModule]  # forward's, backward's

aten, prims, fused = torch.ops.aten, torch.ops.prims, torch.ops.fused

# What forward computes and backward can rebuild without a GEMM. A dropout is rebuilt from its seed: the same mask.
POINTWISE = ("bias_act", "glu", "bias_glu")
REBUILT = (*POINTWISE, "dropout_add")

# The arguments through which each operator reads the data that its activation works on.
DATA: dict[Any, tuple[int, ...]] = {
    fused.bias_act.default: (0,),
    fused.glu.default: (0, 1),
    fused.bias_glu.default: (0,),
    fused.bias_act_backward.default: (1,),
    fused.glu_backward.default: (1, 2),
    fused.bias_glu_backward.default: (1,),
}
FORWARD = [getattr(fused, name).default for name in POINTWISE]
STORING: dict[Any, Any] = {getattr(fused, f"{name}_fp8").default: getattr(fused, name).default for name in POINTWISE}
STORING_BACKWARD: dict[Any, Any] = {
    getattr(fused, f"{name}_fp8_backward").default: getattr(fused, f"{name}_backward").default for name in POINTWISE
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
LINEAR = {aten.mm.default, aten.addmm.default, aten._grouped_mm.default}  # GEMMs of linear layers, and of experts
GEMMS = LINEAR | {aten.bmm.default, aten.baddbmm.default}
SUMS = {aten.add.Tensor, aten.mul.Tensor}  # a bias, an adapter and its factor


def allow_recomputation() -> None:
    """Tell the partitioner that our forward operators are as cheap to rebuild as aten's pointwise ones. Idempotent."""
    compat.allow_recomputation(getattr(torch.ops.fused, name) for name in REBUILT)


def partition(gm: GraphModule, joint_inputs: Any, *, free: bool, **kwargs: Any) -> Graphs:
    """Upstream's min-cut partition of a joint graph; where ``free``, what linear layers read is rebuilt in backward."""
    if not free:
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    for node in _read_by_others(gm.graph):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # "if it is needed", to the partitioner
    with functorch_config.patch(ban_recompute_materialized_backward=False):
        graphs = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.meta.pop(_HELD, None):
                del node.meta["recompute"]
    return graphs


def _read_by_others(graph: Graph) -> list[Node]:
    """Forward's values that something in backward needs in memory that is no GEMM of a linear layer.

    Attention's matrix products above all: rebuilding softmax, for the product with the values, moves much and saves
    little (a T5 block, 16×512 tokens: 26 kernels instead of 22, and 1.2 ms on top of 2.4 on an H200, on paper).
    """
    kinds, backward = get_default_op_list(), {n for n in graph.find_nodes(op="placeholder") if "tangents" in n.name}

    def needed(node: Node) -> bool:
        return any(
            needed(user) if kinds.is_view(user) else user in backward and not kinds.is_fusible(user)
            for user in node.users
            if user.target not in LINEAR
        )

    found = []
    for node in graph.nodes:
        backward.update(user for user in node.users if node in backward)
    for node in graph.nodes:
        ours = node.op == "call_function" and node not in backward and "recompute" not in node.meta
        if ours and not kinds.is_view(node) and needed(node):
            node.meta[_HELD] = True
            found.append(node)
    return found


_HELD = "torch_fused_ops_held"


def budgeted(graph: Graph) -> bool:
    """Whether the user has set a memory budget, process-wide or on nodes of this joint graph: then it decides."""
    return functorch_config.activation_memory_budget != 1 or any(map(compat.has_memory_budget, graph.nodes))


def unstore(graph: Graph) -> bool:
    """Take ``fused::bias_act_fp8`` and its like in a joint graph for what they ask for; whether there was any.

    Called directly, these operators hand float8 to backward, and the next GEMM's weight gradient the result beside it.
    As the plain operators, marked, they are treated as an MLP under ``memory="fp8"`` is: the result is rebuilt, too.
    """
    edits: list[tuple[Node, list[Node], list[Node]]] = []  # operator, its result, what reads what it stored
    for node in graph.nodes:
        if node.target in STORING:
            results = [item for item in node.users if item.args[1] == 0]
            readers = list(dict.fromkeys(user for item in node.users if item.args[1] != 0 for user in item.users))
            if results and all(reader.target in STORING_BACKWARD for reader in readers):
                edits.append((node, results, readers))
    for node, results, readers in edits:
        plain: Any = STORING[node.target]
        data = len(DATA[plain])
        with graph.inserting_before(node):
            instead = graph.call_function(plain, node.args)
        instead.meta = {**results[0].meta, _LEVEL: "fp8"}
        for reader in readers:
            grad, *rest = reader.args
            arguments = (grad, *node.args[:data], *rest[2 * data : -1 - data], rest[-1])
            with graph.inserting_before(reader):
                backward = graph.call_function(STORING_BACKWARD[reader.target], arguments)
            backward.meta = dict(reader.meta)
            reader.replace_all_uses_with(backward)
            graph.erase_node(reader)
        for result in results:
            result.replace_all_uses_with(instead)
        for old in (*node.users, node):
            graph.erase_node(old)
    return bool(edits)


_LEVEL = "torch_fused_ops_memory"  # a level that an operator asks for itself, in its node's meta

# ---- below "free" --------------------------------------------------------------------------------


class _Refusal(Exception):
    """Why a tensor stays as it is."""


def keep_less(graphs: Graphs, policy: FusionPolicy, *, num_fwd_outputs: int, static_inputs: Sequence[int]) -> Graphs:
    """Copies of a forward and a backward graph in which the one hands less to the other, as the policy says.

    Args:
        graphs: what ``partition`` made; not touched.
        policy: its memory levels.
        num_fwd_outputs: how many of forward's results are the user's, before what is kept for backward.
        static_inputs: which of forward's inputs live on in any case: parameters and buffers.
    """
    both = _Both(graphs, num_fwd_outputs, static_inputs)
    for node, level in _kept(both, policy):
        module, before = next(reversed(module_stack(node)), ""), both.nbytes()
        try:
            if isinstance(node.meta.get("recompute"), CheckpointPolicy):
                raise _Refusal("selective checkpointing has decided to keep it")
            _LEVELS[level](both, node)
            log.info("%s in %s: memory=%r, %d bytes less kept", node.name, module, level, before - both.nbytes())
        except _Refusal as reason:
            log.info("%s in %s: memory=%r, but %s; kept as it is", node.name, module, level, reason)
    return both.modules()


def _kept(both: _Both, policy: FusionPolicy) -> list[tuple[Node, str]]:
    """The tensors that activations read and that are kept for backward, with their memory levels."""
    found: dict[Node, str] = {}
    for node in both.forward.nodes:
        if node.target not in FORWARD:
            continue
        level = node.meta.get(_LEVEL) or policy.memory_of(enclosing_modules(module_stack(node)))
        for source in (both.kept_source(node.args[i]) for i in DATA[node.target]) if level in _LEVELS else ():
            if source is not None:
                found.setdefault(source, level)
    return list(found.items())


class _Both:
    """Copies of a forward and a backward graph, and what the one hands to the other: the same names in both."""

    def __init__(self, graphs: Graphs, outputs: int, static_inputs: Sequence[int]) -> None:
        self._modules = graphs
        self.forward, self.backward = (copy.deepcopy(module.graph) for module in graphs)
        self.outputs = outputs
        self.output = self.forward.output_node()
        inputs = self.forward.find_nodes(op="placeholder")
        self.free = {inputs[i] for i in static_inputs}  # keeping these costs nothing
        self.in_backward = {node.name: node for node in self.backward.nodes}

    def modules(self) -> tuple[GraphModule, GraphModule]:
        """New modules around the edited graphs."""
        from torch._inductor.pattern_matcher import stable_topological_sort  # not earlier: it imports the lowerings

        made = []
        for module, graph in zip(self._modules, (self.forward, self.backward), strict=True):
            stable_topological_sort(graph)
            graph.lint()
            made.append(_make_graph_module(module, graph))
        return made[0], made[1]

    def returned(self) -> list[Any]:
        """What forward returns: ``outputs`` values for the user, then what is kept for backward."""
        return list(self.output.args[0])  # type: ignore[arg-type]

    def kept_source(self, node: Any) -> Node | None:
        """The kept tensor that has ``node``'s elements; None where it is an input or a result, alive in any case."""
        returned = self.returned()
        user, kept = returned[: self.outputs], returned[self.outputs :]
        while isinstance(node, Node) and node not in kept:
            node = node.args[0] if node.target in SAME_ELEMENTS else None
        return node if isinstance(node, Node) and node.op != "placeholder" and node not in user else None

    def first_reader(self, node: Node) -> Node:
        """The first node in backward that reads ``node``, a kept tensor."""
        users = self.in_backward[node.name].users
        first: Node = next(one for one in self.backward.nodes if one in users)
        return first

    def keep_instead(self, old: Node, new: Sequence[Node]) -> list[Node]:
        """Keep ``new`` in ``old``'s place; returns backward's placeholders for them."""
        returned, old_placeholder = self.returned(), self.in_backward[old.name]
        at = returned.index(old, self.outputs)
        self.output.args = (tuple([*returned[:at], *new, *returned[at + 1 :]]),)
        placeholders = []
        with self.backward.inserting_before(old_placeholder):
            for node in new:
                placeholders.append(self.backward.placeholder(node.name))
                placeholders[-1].meta.update(node.meta)
                self.in_backward[node.name] = placeholders[-1]
        return placeholders

    def make_again(self, old: Node, result: Node) -> None:
        """Let backward read ``result`` where it read ``old``, which is kept no longer."""
        placeholder = self.in_backward.pop(old.name)
        placeholder.replace_all_uses_with(result)
        self.backward.erase_node(placeholder)

    def nbytes(self) -> int:
        """Bytes kept, without parameters and buffers."""
        return self.cost(node for node in self.returned()[self.outputs :] if isinstance(node, Node))

    def cost(self, nodes: Iterable[Node]) -> int:
        """What keeping these takes, in bytes."""
        values = [node.meta.get("val") for node in nodes if node not in self.free]
        return sum(compat.nbytes(v) for v in values if isinstance(v, torch.Tensor))


# ---- "fp8" ---------------------------------------------------------------------------------------


def _keep_fp8(both: _Both, node: Node) -> None:
    value = node.meta["val"]
    if value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise _Refusal(f"it is {value.dtype}")
    if not compat.converts_to_fp8(value.device):
        raise _Refusal("this GPU has no instruction that makes float8_e4m3fn")
    other = next(_other_readers(both.in_backward[node.name]), None)
    if other is not None:
        raise _Refusal(f"backward reads it in {other.target}, too")
    stored, scale = _stored(both.forward, node)
    first = both.first_reader(node)
    low = both.keep_instead(node, [stored, scale])
    with both.backward.inserting_before(first):
        loaded = _inline(both.backward, lambda q, s: reference.load_fp8(q, s, value.dtype), *low)
    both.make_again(node, loaded)


def _stored(graph: Graph, node: Node) -> Sequence[Node]:
    """What ``reference.store_fp8`` makes of ``node``, in forward.

    Inductor fuses it with the activation, in one loop over the row, but where gate and up are packed, rows of 2n
    beside rows of n. There the operator that does both takes the activation's place.
    """
    reader = next((user for user in node.users if user.target is fused.bias_glu.default), None)
    if reader is None or reader.args[0] is not node:
        with graph.inserting_before(node.next):
            return _inline(graph, reference.store_fp8, node)  # type: ignore[no-any-return]

    def both(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return fused.bias_glu_fp8(*(next(rest) if isinstance(a, Node) else a for a in reader.args))

    with graph.inserting_before(reader):
        result, *stored = _inline(graph, both, *(a for a in reader.args if isinstance(a, Node)))
        result.meta.update(reader.meta)
    reader.replace_all_uses_with(result)
    graph.erase_node(reader)
    return list(stored)


def _other_readers(node: Node) -> Iterator[Node]:
    """What reads these elements, through views and casts, and is not one of our operators working on them."""
    for user in node.users:
        if user.target in SAME_ELEMENTS:
            yield from _other_readers(user)
        elif any(a is node and i not in DATA.get(user.target, ()) for i, a in enumerate(user.args)):
            yield user


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


def _keep_input(both: _Both, node: Node) -> None:
    again: list[Node] = []  # forward's nodes to compute again in backward, in order
    keep: list[Node] = []  # and those to keep for that
    _plan(both, node, False, again, keep)
    if not any(one.target in GEMMS for one in again):
        raise _Refusal("no GEMM made it")
    more, less = both.cost(keep), both.cost([node])
    if more >= less:
        raise _Refusal(f"what it is made of takes {more} bytes, and is not kept otherwise")
    first = both.first_reader(node)
    both.keep_instead(node, keep)
    copies: dict[Node, Node] = {}
    with both.backward.inserting_before(first):
        for one in again:
            copies[one] = both.backward.node_copy(one, lambda n: copies.get(n) or both.in_backward[n.name])
            copies[one].meta["autograd_backward"] = True
    both.make_again(node, copies[node])


def _plan(both: _Both, node: Node, operand: bool, again: list[Node], keep: list[Node]) -> None:
    """What it takes to have ``node`` in backward: GEMMs, sums of them, and views of what is there or kept for it."""
    for source in node.all_input_nodes:
        inside = operand or node.target in GEMMS
        if source in again or source in keep or source.name in both.in_backward:
            continue
        if source.target in SAME_ELEMENTS or (not inside and source.target in GEMMS | SUMS):
            _plan(both, source, inside, again, keep)
        else:
            keep.append(source)
    again.append(node)


_LEVELS: dict[str, Callable[[_Both, Node], None]] = {"fp8": _keep_fp8, "input": _keep_input}
