"""Partitioning, first half: the values of a training step that are saved for backward, and those recomputed there.

By default Inductor's partitioner saves both sides of an activation between two GEMMs: its rule is not to recompute a
value that backward must materialize anyway (the second GEMM's weight gradient reads the activation). Lifting that one
rule for the inputs of linear layers is enough (``memory="free"``): the kernel that computes the activation's gradient
recomputes the activation, from the same loads.

PyTorch's knob for this is ``torch._functorch.config.activation_memory_budget``, just below 1. It saves as little, and
costs more. It recomputes a softmax that is written out (a T5 block: pointwise work of 3.5 ms by bytes and instructions
on an H200, where plain and this have 2.4). It also drops the rule against recomputing values used far apart, so chains
of residual adds are recomputed (four Llama blocks, bf16: backward moves 1453 MiB by default, 1601 with the budget, 1529
here, and the budget adds kernels). Where no pointwise work is left it recomputes a *GEMM* (four linear layers: 9 GEMMs
in backward instead of 8). Here only pointwise work is ever recomputed, unless the policy asks for more. A budget that
the user sets decides.

Backward must not recompute from two kinds of value, as they may have changed by then:

* An input that forward writes. PyTorch's partitioner does not know (docs/upstream.md): backward reads a
  buffer that forward has updated as if it had not, whatever the budget. Here forward reads a copy of it. The copy is
  saved where backward needs it, and costs no kernel where backward does not.
* A result, or an argument. The caller has it and may write it, so the value that PyTorch would save in its place is
  saved. Of results with views PyTorch's own cut does not save enough (docs/upstream.md).
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.declaration import OPERATORS
from torch_fused_ops.graphs.gemm_registry import is_known
from torch_fused_ops.lowerings import compat

Graphs: TypeAlias = tuple[GraphModule, GraphModule]  # forward's, backward's

aten = torch.ops.aten

op_types = functools.cache(get_default_op_list)  # 0.4 ms a call, and passes ask for every node

# Families extend these three as their lowerings are imported: forward's operators that backward can recompute without a
# GEMM; GEMMs of linear layers, and of experts; and what marks a joint graph, given its nodes of backward and its
# results, and returns nodes to save.
RECOMPUTED = [op.name for op in OPERATORS.values() if op.pointwise]
LINEAR = {aten.mm, aten.addmm, aten._grouped_mm, aten._scaled_mm}
LINEAR |= {getattr(aten, name) for name in ("_scaled_mm_v2",) if hasattr(aten, name)}
MARKS: list[Callable[[Graph, Collection[Node], Collection[Node]], list[Node]]] = []
_OTHERS = {aten.bmm, aten.baddbmm}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def is_linear(node: Node) -> bool:
    """Tell whether a call is a GEMM of a linear layer, of PyTorch or registered (``gemm_registry``)."""
    return getattr(node.target, "overloadpacket", None) in LINEAR or is_known(node.target)


def is_gemm(node: Node) -> bool:
    """Tell whether a call is a GEMM of a linear layer, or a batch of GEMMs."""
    return is_linear(node) or getattr(node.target, "overloadpacket", None) in _OTHERS


def allow_recomputation() -> None:
    """Tell the partitioner that our forward operators are as cheap to recompute as aten's pointwise ones."""
    compat.allow_recomputation(getattr(torch.ops.fused, name) for name in RECOMPUTED)


def budgeted(graph: Graph) -> bool:
    """Tell whether the user has set a memory budget, process-wide or on nodes of this joint graph: then it decides."""
    return functorch_config.activation_memory_budget != 1 or any(map(compat.has_memory_budget, graph.nodes))


def partition(gm: GraphModule, joint_inputs: Any, *, free: bool, **kwargs: Any) -> Graphs:
    """Partition a joint graph by PyTorch's min-cut, soundly where forward writes its inputs.

    Args:
        gm: the joint graph; it is edited.
        joint_inputs: as for PyTorch's.
        free: recompute inputs of linear layers in backward.
        **kwargs: as for PyTorch's.
    """

    def divide(to_save: Collection[Node]) -> Graphs:
        for node in to_save:  # the partitioner reads it as "if it is needed"
            node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, _TO_SAVE: True})
        settings: dict[str, Any] = {"ban_recompute_materialized_backward": False} if free else {}
        if to_save and functorch_config.activation_memory_budget == 0:  # then the partitioner saves inputs alone
            settings["activation_memory_budget"] = 1e-6
        with functorch_config.patch(settings):
            graphs = upstream(gm, joint_inputs, **kwargs)
        for graph in graphs:
            for node in graph.graph.nodes:
                if node.meta.pop(_TO_SAVE, None):
                    del node.meta["recompute"]
        return graphs

    outputs = kwargs["num_fwd_outputs"]
    tangents = [node for node in gm.graph.find_nodes(op="placeholder") if "tangents" in node.name]
    # The nodes that depend on a tangent, and those that are returned as gradients.
    backward = reached([*tangents, *(node for node in _returned(gm.graph)[outputs:] if isinstance(node, Node))])
    to_save = _copies_of_written(gm.graph, backward)
    for mark in MARKS:
        to_save += mark(gm.graph, backward, _returned(gm.graph)[:outputs])
    if free:
        to_save += _saved_by_default(gm.graph, backward)
    graphs = divide(to_save)
    while exposed := _exposed(gm, graphs, joint_inputs, free=free, **kwargs):
        graphs = divide(exposed)  # the joint graph's nodes have the marks of before
    _drop_copies(graphs[0])
    return graphs


def upstream(gm: GraphModule, joint_inputs: Any, *, budget: float | None = None, **kwargs: Any) -> Graphs:
    """Partition as PyTorch does; ``budget`` replaces the process-wide memory budget."""
    with functorch_config.patch({} if budget is None else {"activation_memory_budget": budget}):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


_TO_SAVE = "torch_fused_ops_to_save"
_COPY = "torch_fused_ops_copy"


def reached(nodes: Iterable[Node]) -> set[Node]:
    """These nodes and all that depend on them, without the graph's output."""
    dependents, pending = set[Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in dependents and node.op != "output":
            dependents.add(node)
            pending.extend(node.users)
    return dependents


def _returned(graph: Graph) -> Sequence[Any]:
    return graph.output_node().args[0]  # type: ignore[return-value]


# ---- inputs that forward writes --------------------------------------------------------------------------------------


def base(node: Node) -> Node:
    """The node whose memory a view shares; any other node itself."""
    while node.all_input_nodes:
        source = node.all_input_nodes[0]
        call = source if node.target is operator.getitem else node  # one of a call's results
        if not _is_view(call.target):
            break
        node = source
    return node


@functools.lru_cache(1024)
def _is_view(target: Any) -> bool:
    """Tell from the schema whether a call's results may be views of its first argument. (PyTorch's list lacks some.)"""
    schema = getattr(target, "_schema", None)
    if target is aten._unsafe_view.default:
        return True
    return bool(schema and not schema.is_mutable and any(result.alias_info is not None for result in schema.returns))


def _destinations(node: Node) -> list[Node]:
    """The arguments that a call writes, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    destinations: list[Node] = []
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else [value]
            destinations += [v for v in values if isinstance(v, Node)]
    return destinations


def written(graph: Graph, backward: Iterable[Node] = ()) -> dict[Node, list[Node]]:
    """The inputs that forward overwrites after it has read them, with the readers of the old values.

    Forward writes an input in place (``copy_``, at its end), or AOTAutograd does afterwards, from a result.

    Args:
        graph: a joint graph, or a forward one.
        backward: nodes that are not forward's.
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
    """Let readers of the inputs that forward writes, and that backward depends on, read copies of them."""
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
    """Let forward read its inputs themselves where no copy of them is saved."""
    saved = forward.graph.output_node().all_input_nodes
    for node in [node for node in forward.graph.nodes if node.meta.pop(_COPY, False)]:
        if node not in saved and not any(base(value) is node for value in saved):
            node.replace_all_uses_with(node.all_input_nodes[0])
            forward.graph.erase_node(node)
    forward.recompile()


# ---- values saved by default, and at "free" too ---------------------------------------------------------------


def _saved_by_default(graph: Graph, backward: set[Node]) -> list[Node]:
    """Forward's values that backward needs in memory, for readers that are not GEMMs of linear layers.

    Attention's GEMMs above all: recomputing softmax for the GEMM with the values moves much and saves little (a T5
    block, 16×512 tokens: 26 kernels instead of 22, and an estimated 1.2 ms on top of 2.4 on an H200).
    """
    kinds = op_types()

    def needed(node: Node) -> bool:
        return any(
            needed(user) if kinds.is_view(user) else user in backward and not kinds.is_fusible(user)
            for user in node.users
            if not is_linear(user)
        )

    return [node for node in graph.nodes if _can_be_saved(node) and node not in backward and needed(node)]


def _can_be_saved(node: Node) -> bool:
    return node.op == "call_function" and "recompute" not in node.meta and not op_types().is_view(node)


# ---- values that the caller may write --------------------------------------------------------------------------------


def _exposed(gm: GraphModule, graphs: Graphs, joint_inputs: Any, *, free: bool, **kwargs: Any) -> list[Node]:
    """Values that must be saved, as backward would recompute them from values that the caller may have written.

    ``h = linear(x); return linear(relu(h)), h.view(-1)``: autograd saves relu's result, and the caller may write ``h``.
    The caller must not write a tensor that autograd saves, which is one that backward reads. Nor a result or an
    argument that is saved as it is: torch's version check guards it, but not a view of it
    (docs/upstream.md). With ``free`` PyTorch itself must save it too, so that no check is ours alone.

    Parameters and buffers do not count: they must not be written before backward (docs/memory.md).
    """
    outputs: int = kwargs["num_fwd_outputs"]
    forward = graphs[0].graph
    static = kwargs.get("static_lifetime_input_indices") or ()
    arguments = [n for i, n in enumerate(forward.find_nodes(op="placeholder")) if i not in static]
    results = [n for n in _returned(forward)[:outputs] if isinstance(n, Node)]
    theirs = {base(n) for n in results}.union(arguments)
    values = {n: n.meta.get("val") for n in _returned(forward)[outputs:] if isinstance(n, Node) and base(n) in theirs}
    saved = [n for n, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    recomputed = _recomputed_from(saved, graphs)
    if not recomputed:
        return []
    read = _read_by_backward(gm.graph, outputs)

    def to_save(sources: Iterable[Node], materialized: bool) -> list[Node]:
        names = set[str]().union(*(recomputed[source] for source in sources))
        needed = [node for node, in_memory in read.items() if node.name in names and in_memory >= materialized]
        return list(filter(_can_be_saved, needed))

    by_autograd = {node.name for node in read}
    exposed = [n for n in recomputed if not (base(n).name in by_autograd or n in arguments or n in results)]
    must_be_saved = to_save(exposed, False)
    if free and to_save(recomputed, True):  # seldom: a second cut, of a copy, shows the values that PyTorch saves
        plain, _ = upstream(GraphModule(gm, copy.deepcopy(gm.graph)), joint_inputs, **kwargs)
        by_default = {base(node).name for node in _returned(plain.graph)[outputs:]}
        must_be_saved += to_save([n for n in recomputed if base(n).name not in by_default], True)
    return list(dict.fromkeys(must_be_saved))


def _recomputed_from(saved: Sequence[Node], graphs: Graphs) -> dict[Node, set[str]]:
    """The names of the values that backward recomputes from each of these saved ones."""
    forward, backward = ({node.name: node for node in module.graph.nodes} for module in graphs)
    recomputed: dict[Node, set[str]] = {}
    for source in saved:
        names, pending = set[str](), [backward[source.name]] if source.name in backward else []
        while pending:
            copies = [user for user in pending.pop().users if user.name in forward and user.name not in names]
            names.update(node.name for node in copies)
            pending += copies
        if names:
            recomputed[source] = names
    return recomputed


def _read_by_backward(graph: Graph, outputs: int) -> dict[Node, bool]:
    """Forward's values that backward reads in a joint graph, and whether they must be in memory then.

    Autograd's formulas read the tensors that autograd saves. A node that no result depends on is backward's, too.
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
