"""Stage 2, first half: which of a training step's values are handed from forward to backward, and which rebuilt there.

By default Inductor's partitioner keeps both sides of an activation between two GEMMs: its rule is that what backward
must materialize anyway (the second GEMM's weight gradient reads the activation) is not rebuilt. Taking away that one
rule, for what linear layers read, is enough (``memory="free"``): the activation is rebuilt in the kernel that computes
its gradient, from the same loads.

Upstream's knob for this is ``torch._functorch.config.activation_memory_budget``, just below 1. It keeps as little,
and costs more: it rebuilds a softmax that is spelled out (a T5 block: pointwise work of 3.5 ms by bytes and
instructions on an H200, where plain and this have 2.4), it also drops the rule against rebuilding values used far
apart, so chains of residual adds are rebuilt (four Llama blocks, bf16: backward moves 1453 MiB by default, 1601 with
the budget, 1529 here, and the budget adds kernels), and where nothing pointwise is left to gain it rebuilds a *GEMM*
(four linear layers: 9 matrix products in backward instead of 8). Here nothing but pointwise work is ever rebuilt,
unless the policy asks for it. A budget that the user sets is the user's: then it decides.

Two kinds of value must not be what backward rebuilds from, as they may hold something else by then:

* An input that forward writes. Upstream's partitioner does not know (docs/upstream/written-inputs.md): a buffer that is
  updated in forward is read in backward as if it were not, whatever the budget. Here forward reads a copy of it, which
  is kept where backward needs it and is no kernel's work where it does not.
* A result, or an argument. The caller has it and may write it, so what PyTorch would keep in its place is kept. Of
  results that it has views of, PyTorch's own cut does not keep enough (docs/upstream/written-results.md).
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.declaration import OPERATORS
from torch_fused_ops.gemm_registry import is_known
from torch_fused_ops.lowerings import compat

__all__ = [
    "REBUILT",
    "Graphs",
    "allow_recomputation",
    "base",
    "budgeted",
    "is_gemm",
    "is_linear",
    "op_types",
    "partition",
    "reached",
    "upstream",
    "written",
]

Graphs: TypeAlias = tuple[GraphModule, GraphModule]  # forward's, backward's

aten = torch.ops.aten

op_types = functools.cache(get_default_op_list)  # 0.4 ms a call, and passes ask for every node

# What forward computes and backward can rebuild without a GEMM. A dropout is rebuilt from its seed: the same mask.
REBUILT = (*(op.name for op in OPERATORS.values() if op.pointwise), "quantize", "dequantize")
# GEMMs of linear layers, and of experts
_LINEAR = {aten.mm, aten.addmm, aten._grouped_mm, aten._scaled_mm}
_LINEAR |= {torch.ops.fused.scaled_mm, torch.ops.fused.scaled_grouped_mm}
_LINEAR |= {getattr(aten, name) for name in ("_scaled_mm_v2",) if hasattr(aten, name)}
_OTHERS = {aten.bmm, aten.baddbmm}


def is_linear(node: Node) -> bool:
    """Whether a call is a GEMM of a linear layer, of PyTorch or by name (``known_gemms``)."""
    return getattr(node.target, "overloadpacket", None) in _LINEAR or is_known(node.target)


def is_gemm(node: Node) -> bool:
    """Whether a call is a GEMM of a linear layer, or a batch of products."""
    return is_linear(node) or getattr(node.target, "overloadpacket", None) in _OTHERS


def allow_recomputation() -> None:
    """Tell the partitioner that our forward operators are as cheap to rebuild as aten's pointwise ones. Idempotent."""
    compat.allow_recomputation(getattr(torch.ops.fused, name) for name in REBUILT)


def budgeted(graph: Graph) -> bool:
    """Whether the user has set a memory budget, process-wide or on nodes of this joint graph: then it decides."""
    return functorch_config.activation_memory_budget != 1 or any(map(compat.has_memory_budget, graph.nodes))


def partition(gm: GraphModule, joint_inputs: Any, *, free: bool, **kwargs: Any) -> Graphs:
    """Upstream's min-cut partition of a joint graph, sound where forward writes its inputs.

    Args:
        gm: the joint graph; it is edited.
        joint_inputs: as for upstream's.
        free: whether what linear layers read is rebuilt in backward.
        **kwargs: as for upstream's.
    """

    _leave_to_backward(gm.graph, kwargs["num_fwd_outputs"])

    def divide(held: Collection[Node]) -> Graphs:
        for node in held:  # upstream reads it as "if it is needed"
            node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, _HELD: True})
        settings: dict[str, Any] = {"ban_recompute_materialized_backward": False} if free else {}
        if held and functorch_config.activation_memory_budget == 0:  # upstream then keeps inputs and nothing else
            settings["activation_memory_budget"] = 1e-6
        with functorch_config.patch(settings):
            graphs = upstream(gm, joint_inputs, **kwargs)
        for graph in graphs:
            for node in graph.graph.nodes:
                if node.meta.pop(_HELD, None):
                    del node.meta["recompute"]
        return graphs

    backward = _backward(gm.graph, kwargs["num_fwd_outputs"])
    held = _copies_of_written(gm.graph, backward) + _scales_of_weights(gm.graph)
    if free:
        held += _kept_by_upstream(gm.graph, backward)
    graphs = divide(held)
    while exposed := _exposed(gm, graphs, joint_inputs, free=free, **kwargs):
        graphs = divide(exposed)  # the joint graph's nodes have the marks of before
    _drop_copies(graphs[0])
    return graphs


def _leave_to_backward(graph: Graph, outputs: int) -> None:
    """Let backward make what only it reads of a linear layer's quantized input: what is kept is that input as it is.

    Along the tokens it takes as much room, and more where the other form is kept anyway, for a product made again.
    """
    backward, results = _backward(graph, outputs), set(_returned(graph)[:outputs])
    for node in graph.find_nodes(op="call_function", target=torch.ops.fused.dequantize.default):
        made = reached([node])
        if made.isdisjoint(results):
            for one in made - backward:
                one.meta["partitioner_tag"] = "must_be_in_backward"


def _scales_of_weights(graph: Graph) -> list[Node]:
    """What finds the scales that backward stores a weight by: it would find them again, in a pass over the weight.

    Upstream takes that for free, as backward has the weight anyway. What is kept is 4 bytes.
    """
    found = dict[Node, None]()
    for node in graph.find_nodes(op="call_function", target=torch.ops.fused.quantize_by.default):
        source = node.args[1]
        while isinstance(source, Node) and source.args and source.target is not torch.ops.fused.quantize.default:
            source = source.args[0]
        if isinstance(source, Node) and source.op == "call_function" and "recompute" not in source.meta:
            found[source] = None
    return [] if budgeted(graph) else list(found)


def upstream(gm: GraphModule, joint_inputs: Any, *, budget: float | None = None, **kwargs: Any) -> Graphs:
    """Upstream's partition; with ``budget`` in place of the memory budget that is set process-wide."""
    with functorch_config.patch({} if budget is None else {"activation_memory_budget": budget}):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


_HELD = "torch_fused_ops_held"
_COPY = "torch_fused_ops_copy"


def _backward(graph: Graph, outputs: int) -> set[Node]:
    """The nodes of a joint graph that need a tangent, and those that it gives as gradients."""
    tangents = [node for node in graph.find_nodes(op="placeholder") if "tangents" in node.name]
    return reached([*tangents, *(node for node in _returned(graph)[outputs:] if isinstance(node, Node))])


def reached(nodes: Iterable[Node]) -> set[Node]:
    """These nodes and all that is made of them; not the graph's output."""
    found, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and node.op != "output":
            found.add(node)
            pending.extend(node.users)
    return found


def _returned(graph: Graph) -> Sequence[Any]:
    return graph.output_node().args[0]  # type: ignore[return-value]


# ---- what forward writes -----------------------------------------------------------------------------------------


def base(node: Node) -> Node:
    """The node whose memory a view is of; any other node itself."""
    while node.all_input_nodes:
        source = node.all_input_nodes[0]
        call = source if node.target is operator.getitem else node  # one of a call's results
        if not _is_view(call.target):
            break
        node = source
    return node


@functools.lru_cache(1024)
def _is_view(target: Any) -> bool:
    """Whether a call's results may be views of its first argument, as its schema says. (Upstream's list lacks some.)"""
    schema = getattr(target, "_schema", None)
    if target is aten._unsafe_view.default:
        return True
    return bool(schema and not schema.is_mutable and any(one.alias_info is not None for one in schema.returns))


def _destinations(node: Node) -> list[Node]:
    """What a call writes, as its schema says."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    found = []
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Node)]
    return found


def written(graph: Graph, backward: Iterable[Node] = ()) -> dict[Node, list[Node]]:
    """The inputs that do not hold after a forward what it reads of them: the readers of each, before it is written.

    Forward writes an input in place (``copy_``, at its end), or AOTAutograd does afterwards, from a result.

    Args:
        graph: a joint graph, or a forward one.
        backward: nodes that are none of forward's.
    """
    after, first = set(backward), dict[Node, int]()
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node not in after and node.op == "call_function":
            for destination in map(base, _destinations(node)):
                if destination.op == "placeholder":
                    first.setdefault(destination, order[node])
    for node in compat.written_afterwards(graph):
        first.setdefault(node, len(order))
    return {
        node: readers
        for node, end in first.items()
        if (readers := [u for u in node.users if (order[u] < end or u in after) and node not in _destinations(u)])
    }


def _copies_of_written(graph: Graph, backward: set[Node]) -> list[Node]:
    """Copies of the inputs that forward writes and that backward's values are made of, read in their place."""
    copies: list[Node] = []
    for node, readers in written(graph, backward).items():
        if not isinstance(node.meta.get("val"), torch.Tensor) or reached(readers).isdisjoint(backward):
            continue
        with graph.inserting_after(node):
            copied = graph.call_function(aten.clone.default, (node,))
        with torch.no_grad():
            copied.meta = {"val": node.meta["val"].clone(), "partitioner_tag": "is_forward", _COPY: True}
        for reader in readers:
            reader.replace_input_with(node, copied)
        copies.append(copied)
    last = graph.find_nodes(op="placeholder")[-1]
    for copied in copies:  # inputs come first
        last.append(copied)
    return copies


def _drop_copies(forward: GraphModule) -> None:
    """Let forward read its inputs themselves where no copy of them is kept."""
    kept = forward.graph.output_node().all_input_nodes
    for node in [node for node in forward.graph.nodes if node.meta.pop(_COPY, False)]:
        if node not in kept and not any(base(one) is node for one in kept):
            node.replace_all_uses_with(node.all_input_nodes[0])
            forward.graph.erase_node(node)
    forward.recompile()


# ---- what upstream keeps, and "free" keeps too ------------------------------------------------------------------


def _kept_by_upstream(graph: Graph, backward: set[Node]) -> list[Node]:
    """Forward's values that backward needs in memory, and that it is to find there and not to rebuild.

    Those that something reads there that is no GEMM of a linear layer. Attention's matrix products above all:
    rebuilding softmax, for the product with the values, moves much and saves little (a T5 block, 16×512 tokens: 26
    kernels instead of 22, and 1.2 ms on top of 2.4 on an H200, on paper).
    """
    kinds = op_types()

    def needed(node: Node) -> bool:
        return any(
            needed(user) if kinds.is_view(user) else user in backward and not kinds.is_fusible(user)
            for user in node.users
            if not is_linear(user)
        )

    return [node for node in graph.nodes if _can_be_held(node) and node not in backward and needed(node)]


def _can_be_held(node: Node) -> bool:
    return node.op == "call_function" and "recompute" not in node.meta and not op_types().is_view(node)


# ---- what the caller may write -----------------------------------------------------------------------------------


def _exposed(gm: GraphModule, graphs: Graphs, joint_inputs: Any, *, free: bool, **kwargs: Any) -> list[Node]:
    """What backward must find in memory, as it is rebuilt from what the caller may have written by then.

    ``h = linear(x); return linear(relu(h)), h.view(-1)``: autograd keeps relu's result, and the caller may write ``h``.
    It may not write what autograd keeps, which is what backward reads of forward. Nor a result or an argument that is
    handed over as it is: torch's version check stands over it, but not over a view (docs/upstream/written-results.md).
    With ``free`` that is not enough: it must be handed over by upstream, too, so that no check is pick-up's.

    Parameters and buffers are not meant: those must not be written before backward (docs/memory.md).
    """
    outputs: int = kwargs["num_fwd_outputs"]
    forward = graphs[0].graph
    static = kwargs.get("static_lifetime_input_indices") or ()
    arguments = [n for i, n in enumerate(forward.find_nodes(op="placeholder")) if i not in static]
    results = [n for n in _returned(forward)[:outputs] if isinstance(n, Node)]
    theirs = {base(n) for n in results}.union(arguments)
    kept = [n for n in _returned(forward)[outputs:] if isinstance(n, Node) and base(n) in theirs and _is_floating(n)]
    rebuilt = _rebuilt_from(kept, graphs)
    if not rebuilt:
        return []
    read = _read_by_backward(gm.graph, outputs)

    def held(sources: Iterable[Node], materialized: bool) -> list[Node]:
        names = set[str]().union(*(rebuilt[source] for source in sources))
        needed = [node for node, in_memory in read.items() if node.name in names and in_memory >= materialized]
        return list(filter(_can_be_held, needed))

    by_autograd = {node.name for node in read}
    exposed = [n for n in rebuilt if not (base(n).name in by_autograd or n in arguments or n in results)]
    found = held(exposed, False)
    if free and held(rebuilt, True):  # seldom: a second cut, of a copy, says what upstream hands over
        plain, _ = upstream(GraphModule(gm, copy.deepcopy(gm.graph)), joint_inputs, **kwargs)
        by_upstream = {base(node).name for node in _returned(plain.graph)[outputs:]}
        found += held([n for n in rebuilt if base(n).name not in by_upstream], True)
    return list(dict.fromkeys(found))


def _rebuilt_from(kept: Sequence[Node], graphs: Graphs) -> dict[Node, set[str]]:
    """The names of what backward computes again from each of these, which forward hands over."""
    forward, backward = ({node.name: node for node in module.graph.nodes} for module in graphs)
    rebuilt: dict[Node, set[str]] = {}
    for source in kept:
        found, pending = set[str](), [backward[source.name]] if source.name in backward else []
        while pending:
            made = [user for user in pending.pop().users if user.name in forward and user.name not in found]
            found.update(node.name for node in made)
            pending += made
        if found:
            rebuilt[source] = found
    return rebuilt


def _read_by_backward(graph: Graph, outputs: int) -> dict[Node, bool]:
    """What of forward's backward reads, in a joint graph; whether it must be in memory then.

    Autograd's formulas read what autograd keeps. What needs no gradient and no result is backward's, too.
    """
    kinds = op_types()
    forward = {node for node in _returned(graph)[:outputs] if isinstance(node, Node)}
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    read: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
        elif node not in forward and node.op != "output" and base(node) is node:
            for source in map(base, node.all_input_nodes):
                if source in forward:
                    read[source] = read.get(source, False) or not kinds.is_fusible(node)
    return read


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
