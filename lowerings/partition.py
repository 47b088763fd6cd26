"""The partitioner: decide which values of a joint graph are saved for backward and which backward recomputes.

By default Inductor's partitioner saves both sides of an activation between two GEMMs: its rule is not to recompute a
value that backward must materialize anyway (the second GEMM's weight gradient reads the activation). ``memory="free"``
lifts only this rule, for the inputs of linear layers. The kernel for the activation's gradient then recomputes the
activation from the same loads.

PyTorch's setting for this is ``torch._functorch.config.activation_memory_budget``, just below 1. It saves equally few
bytes but costs more time:

* It recomputes a softmax that is written out (a T5 block on an H200: estimated step +4.5 %, +1.0 % with this pass).
* It drops the rule against recomputing values used far apart, so it recomputes chains of residual adds, with more
  kernels (four Llama blocks, bf16: backward moves 1453 MiB by default, 1601 with the budget, 1529 with this pass).
* If no pointwise work is left, it recomputes a *GEMM* (four linear layers: 9 GEMMs in backward instead of 8).

This pass only recomputes pointwise work, unless the policy requests more. A budget that the user sets has precedence.

Under such a budget PyTorch's partitioner also repeats random calls in backward, with other numbers (pytorch#190758).
This pass saves random numbers and seeds.

Backward must not recompute from two kinds of value, because they may have changed by then:

* An input that forward writes. PyTorch's partitioner ignores such writes (docs/upstream.md): at every budget, backward
  reads the updated buffer as if it still held the old value. With this pass, forward reads a copy of the input. The
  copy is saved if backward needs it, and costs no kernel otherwise.
* A result or an argument, which the caller has and may write. Values computed from it are saved if autograd would save
  them. PyTorch itself does not save enough if a result has views (docs/upstream.md).
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

from torch_fused_ops.declaration import OPERATORS, PointwiseOperator, pointwise_operators
from torch_fused_ops.graphs.gemm_registry import is_known
from torch_fused_ops.graphs.modules import is_of_activation
from torch_fused_ops.lowerings import compat

Graphs: TypeAlias = tuple[GraphModule, GraphModule]  # (forward, backward)

aten = torch.ops.aten

op_types = functools.cache(get_default_op_list)  # a call takes 0.4 ms, and passes need the list for every node

OPERATOR: dict[Any, PointwiseOperator] = {op.forward.overload: op for op in pointwise_operators()}
# A family extends these three tables when its lowerings are imported.
# Operators that the partitioner may recompute without a GEMM, and whose inputs need not be in memory. (If it did not
# know the backward operators, an activation's input would be saved besides the values that it is computed from.)
RECOMPUTABLE = [signature.name for op in OPERATORS.values() if op.pointwise for signature in op.signatures]
# GEMMs of linear layers and experts:
LINEAR = {aten.mm, aten.addmm, aten._grouped_mm, aten._scaled_mm}
LINEAR |= {getattr(aten, name) for name in ("_scaled_mm_v2",) if hasattr(aten, name)}
# Functions of a joint graph, its backward nodes and its results. They may edit the graph, and return nodes to save:
SAVE_HOOKS: list[Callable[[Graph, Collection[Node], Collection[Node]], list[Node]]] = []
_BATCHED_GEMMS = {aten.bmm, aten.baddbmm}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def is_linear(node: Node) -> bool:
    """Return True for a linear layer's GEMM, by PyTorch or registered (``gemm_registry``)."""
    return getattr(node.target, "overloadpacket", None) in LINEAR or is_known(node.target)


def is_gemm(node: Node) -> bool:
    """Return True for a linear layer's GEMM and for a batch of GEMMs."""
    return is_linear(node) or getattr(node.target, "overloadpacket", None) in _BATCHED_GEMMS


def is_pointwise(node: Node) -> bool:
    """Return True for a pointwise call of PyTorch."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def allow_recomputation() -> None:
    """Have the partitioner treat the fused operators as pointwise operators, which are cheap to recompute."""
    compat.allow_recomputation(getattr(torch.ops.fused, name) for name in RECOMPUTABLE)
    op_types.cache_clear()  # the list may have been read before


def budgeted(graph: Graph) -> bool:
    """Return True if the user has set a memory budget, for the process or for nodes of this joint graph."""
    return functorch_config.activation_memory_budget != 1 or any(map(compat.has_memory_budget, graph.nodes))


def partition(gm: GraphModule, joint_inputs: Any, *, free: bool, **kwargs: Any) -> Graphs:
    """Partition a joint graph with PyTorch's min-cut. Gradients are correct even if forward writes its inputs.

    Args:
        gm: the joint graph. It is edited: forward reads copies of inputs that it overwrites.
        joint_inputs: passed through to PyTorch's partitioner.
        free: recompute inputs of linear layers in backward.
        **kwargs: passed through to PyTorch's partitioner.
    """
    outputs = kwargs["num_fwd_outputs"]
    tangents = [node for node in gm.graph.find_nodes(op="placeholder") if "tangents" in node.name]
    # Backward's nodes are the returned gradients, and all nodes that depend on a tangent.
    gradients = [node for node in _returned(gm.graph)[outputs:] if isinstance(node, Node)]
    backward = with_dependents([*tangents, *gradients])
    must_save = _copies_of_written(gm.graph, backward)
    for saveable_copies in SAVE_HOOKS:
        must_save += saveable_copies(gm.graph, backward, _returned(gm.graph)[:outputs])
    if free:
        must_save += _saved_by_default(gm.graph, backward)
        must_save += _inputs_of_activations(gm.graph, backward)
    if budgeted(gm.graph):
        must_save += _random_values(gm.graph, backward)
    names = {node.name for node in must_save}  # the partitioner replaces the nodes of gm's graph
    while True:
        graphs = _run_min_cut(gm, joint_inputs, names, free=free, **kwargs)
        unsafe = _unsafe_to_recompute(gm, graphs, joint_inputs, free=free, **kwargs)
        new = {node.name for node in unsafe} - names
        if not new:
            break
        names |= new  # so every round saves more of the graph's values, and the loop ends
    _drop_copies(graphs[0])
    return graphs


def _run_min_cut(
    gm: GraphModule, joint_inputs: Any, must_save: Collection[str], *, free: bool, **kwargs: Any
) -> Graphs:
    """Partition with PyTorch's min-cut. It saves the nodes named in ``must_save`` if backward needs them."""
    for node in gm.graph.nodes:
        if node.name in must_save:  # the partitioner treats MUST_SAVE as "save if backward needs it"
            node.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, _MUST_SAVE: True})
    settings: dict[str, Any] = {"ban_recompute_materialized_backward": False} if free else {}
    if must_save and functorch_config.activation_memory_budget == 0:  # at 0 the partitioner ignores MUST_SAVE
        settings["activation_memory_budget"] = 1e-6
    graphs: tuple[GraphModule, ...] = ()
    try:
        with functorch_config.patch(settings):
            graphs = forward, backward = partition_like_pytorch(gm, joint_inputs, **kwargs)
    finally:
        for graph in (gm, *graphs):
            for node in graph.graph.nodes:
                if node.meta.pop(_MUST_SAVE, None):
                    del node.meta["recompute"]
    return forward, backward


def partition_like_pytorch(gm: GraphModule, joint_inputs: Any, *, budget: float | None = None, **kwargs: Any) -> Graphs:
    """Partition as PyTorch does. ``budget``, if not None, replaces the process-wide memory budget."""
    with functorch_config.patch({} if budget is None else {"activation_memory_budget": budget}):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)


_MUST_SAVE = "torch_fused_ops_must_save"
_COPY = "torch_fused_ops_copy"


def with_dependents(nodes: Iterable[Node]) -> set[Node]:
    """Return these nodes and all nodes that depend on them, except the graph's output node."""
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
    """Return the node whose memory a view shares. For any other node, return the node itself."""
    while node.all_input_nodes:
        source = node.all_input_nodes[0]
        call = source if node.target is operator.getitem else node  # getitem selects one of a call's results
        if not _is_view(call.target):
            break
        node = source
    return node


@functools.lru_cache(1024)
def _is_view(target: Any) -> bool:
    """Return True if a call's schema allows views of its first argument. (PyTorch's list of views is incomplete.)"""
    schema = getattr(target, "_schema", None)
    if target is aten._unsafe_view.default:
        return True
    return bool(schema and not schema.is_mutable and any(result.alias_info is not None for result in schema.returns))


def _destinations(node: Node) -> list[Node]:
    """Return the arguments that a call writes, by its schema."""
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


def overwritten_inputs(graph: Graph, backward: Iterable[Node] = ()) -> dict[Node, list[Node]]:
    """Return the inputs that forward overwrites after reading them, with the readers of the old values.

    Forward itself writes an input in place (``copy_``, at its end), or AOTAutograd writes it afterwards, from a result.

    Args:
        graph: a joint graph, or a forward graph.
        backward: the nodes of backward in a joint graph.
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
    overwritten: dict[Node, list[Node]] = {}
    for node, end in first.items():
        old_value_users = [user for user in node.users if order[user] < end or user in after]
        readers = [user for user in old_value_users if node not in _destinations(user)]
        if readers:
            overwritten[node] = readers
    return overwritten


def _copies_of_written(graph: Graph, backward: set[Node]) -> list[Node]:
    """Copy each input that forward writes and backward needs. Its readers read the copy. Return the copies."""
    copies: list[Node] = []
    last = graph.find_nodes(op="placeholder")[-1]
    for node, readers in overwritten_inputs(graph, backward).items():
        if not isinstance(node.meta.get("val"), torch.Tensor) or with_dependents(readers).isdisjoint(backward):
            continue
        with graph.inserting_after(last):
            copied = graph.call_function(aten.clone.default, (node,))
        with torch.no_grad():
            copied.meta = {"val": node.meta["val"].clone(), "partitioner_tag": "is_forward", _COPY: True}
        for reader in readers:
            reader.replace_input_with(node, copied)
        copies.append(copied)
    return copies


def _drop_copies(forward: GraphModule) -> None:
    """Remove copies that are not saved: forward reads the inputs themselves."""
    saved = forward.graph.output_node().all_input_nodes
    for node in [node for node in forward.graph.nodes if node.meta.pop(_COPY, False)]:
        if node not in saved and not any(base(value) is node for value in saved):
            node.replace_all_uses_with(node.all_input_nodes[0])
            forward.graph.erase_node(node)
    forward.recompile()


# ---- values that stay saved at "free" --------------------------------------------------------------------------------


def _saved_by_default(graph: Graph, backward: set[Node]) -> list[Node]:
    """Return forward's values that backward needs in memory for readers other than GEMMs of linear layers.

    These readers are mainly attention's GEMMs: recomputing softmax for the second GEMM costs traffic and saves little
    memory (a T5 block of 16×512 tokens: 26 kernels instead of 22).
    """
    types = op_types()

    def needs_memory(reader: Node) -> bool:
        if is_linear(reader):
            return False
        if types.is_view(reader):
            return any(map(needs_memory, reader.users))
        return reader in backward and not types.is_fusible(reader)

    candidates = (node for node in graph.nodes if _can_be_saved(node) and node not in backward)
    return [node for node in candidates if any(map(needs_memory, node.users))]


def _inputs_of_activations(graph: Graph, backward: set[Node]) -> list[Node]:
    """Return the pointwise inputs of activations, except those that follow from values that backward reads anyway.

    Memory levels replace saved inputs. Without this rule, the partitioner may save a GEMM's result instead of its sum
    with a bias.
    """
    inputs: dict[Node, None] = {}
    available: set[Node] = set()  # values that backward reads, and values that follow from these
    for node in graph.nodes:
        is_read = node.op == "placeholder" or any(user in backward for user in node.users)
        if is_read or (is_pointwise(node) and available.issuperset(node.all_input_nodes)):
            available.add(node)
        if (is_of_activation(node) or node.target in OPERATOR) and node not in backward:
            for source in node.all_input_nodes:
                while (source := base(source)).target is torch.ops.prims.convert_element_type.default:
                    source = source.all_input_nodes[0]
                follows = available.issuperset(source.all_input_nodes)
                if not follows and not is_of_activation(source) and is_pointwise(source):
                    inputs[source] = None
    return list(filter(_can_be_saved, inputs))


def _random_values(graph: Graph, backward: set[Node]) -> list[Node]:
    """Return forward's random numbers and seeds, which must be saved under a budget.

    PyTorch's partitioner repeats random calls in backward, so dropout's gradient has a different mask than forward
    (pytorch#190758, torch 2.13 and 2.15).
    """
    return [node for node in graph.nodes if node not in backward and _can_be_saved(node) and _is_random(node)]


def _is_random(node: Node) -> bool:
    """Return True if a call draws random numbers. Attention without dropout does not, although its operator can."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    dropout_p = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(dropout_p != 0.0)


def _can_be_saved(node: Node) -> bool:
    return node.op == "call_function" and "recompute" not in node.meta and not op_types().is_view(node)


# ---- values that the caller may write --------------------------------------------------------------------------------


def _unsafe_to_recompute(
    gm: GraphModule, graphs: Graphs, joint_inputs: Any, *, free: bool, **kwargs: Any
) -> list[Node]:
    """Return values to save because backward would recompute them from values that the caller may have written.

    ``h = linear(x); return linear(relu(h)), h.view(-1)``: autograd saves relu's result, so the caller may write ``h``.

    The caller must not write a tensor that autograd would save, nor a result or argument that is saved without a copy.
    Torch's version check protects such a tensor but not its views (docs/upstream.md). With ``free``, if backward needs
    recomputed values in memory, values are recomputed from such a tensor only if PyTorch would save it too, so this
    pass adds no version check. Parameters and buffers are safe: the caller must not write them before backward
    (docs/memory.md).
    """
    outputs: int = kwargs["num_fwd_outputs"]
    forward = graphs[0].graph
    static = kwargs.get("static_lifetime_input_indices") or ()
    arguments = {n for i, n in enumerate(forward.find_nodes(op="placeholder")) if i not in static}
    caller_owned = arguments.union(n for n in _returned(forward)[:outputs] if isinstance(n, Node))
    recomputed = _recomputed_from(_saved_memory_of(caller_owned, forward, outputs), graphs)
    if not recomputed:
        return []
    read, in_memory = _read_by_backward(gm.graph, outputs)
    read_names = {node.name for node in read}
    # The caller may write these saved tensors: autograd would not save them, and torch does not check views.
    unchecked = {n for n in recomputed if n not in caller_owned and base(n).name not in read_names}
    must_save = _values_from(unchecked, recomputed, read)
    if free and _values_from(recomputed, recomputed, in_memory):  # rare: partition a copy to see PyTorch's choice
        plain, _ = partition_like_pytorch(GraphModule(gm, copy.deepcopy(gm.graph)), joint_inputs, **kwargs)
        by_default = {node.name for node in _returned(plain.graph)[outputs:]}  # a view's version is not checked
        newly_checked = {n for n in recomputed if by_default.isdisjoint((n.name, base(n).name))}
        must_save += _values_from(newly_checked, recomputed, read)
    return list(dict.fromkeys(must_save))


def _saved_memory_of(caller_owned: Collection[Node], forward: Graph, outputs: int) -> list[Node]:
    """Return the saved floating-point tensors that share memory with these values."""
    bases = set(map(base, caller_owned))
    saved = [n for n in _returned(forward)[outputs:] if isinstance(n, Node) and base(n) in bases]
    values = {n: n.meta.get("val") for n in saved}
    return [n for n, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _values_from(sources: Iterable[Node], recomputed: dict[Node, set[str]], values: Iterable[Node]) -> list[Node]:
    """Return the ``values`` of the joint graph that backward recomputes from the sources, and that can be saved."""
    names = set[str]().union(*(recomputed[source] for source in sources))
    return [node for node in values if node.name in names and _can_be_saved(node)]


def _recomputed_from(saved: Sequence[Node], graphs: Graphs) -> dict[Node, set[str]]:
    """Return, for each of these saved values, the names of the values that backward recomputes from it."""
    forward, backward = ({node.name: node for node in module.graph.nodes} for module in graphs)
    recomputed: dict[Node, set[str]] = {}
    for source in saved:
        dependents = with_dependents([backward[source.name]]) if source.name in backward else ()
        names = {node.name for node in dependents if node.name in forward} - {source.name}
        if names:
            recomputed[source] = names
    return recomputed


def _read_by_backward(graph: Graph, outputs: int) -> tuple[dict[Node, None], dict[Node, None]]:
    """Return forward's values that backward reads in a joint graph, and its subset that backward needs in memory.

    The former are the tensors that autograd saves. Nodes that no forward result depends on also count as backward.
    """
    types = op_types()
    forward = {node for node in _returned(graph)[:outputs] if isinstance(node, Node)}
    for node in reversed(graph.nodes):
        if node in forward:
            forward.update(node.all_input_nodes)
    read, in_memory = dict[Node, None](), dict[Node, None]()  # sets in the graph's order
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in forward:
            forward.add(node)
        elif node not in forward and node.op != "output" and base(node) is node:
            sources = dict.fromkeys(source for source in map(base, node.all_input_nodes) if source in forward)
            read.update(sources)
            if not types.is_fusible(node):
                in_memory.update(sources)
    return read, in_memory
