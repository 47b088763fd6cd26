"""``checkpoints="replace"``: memory levels in the place of activation checkpoints.

AOTAutograd marks each call inside a checkpoint in the joint graph: ``meta["ac_graph_id"]`` is the number of the
outermost checkpoint, and ``meta["recompute"]`` the decision of its policy. PyTorch's partitioner then saves nothing
inside a checkpoint, so levels change nothing. Without the marks, it partitions the graph as if the model had no
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.graphs.modules import is_of_activation, module_stack
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.memory_levels import are_checkpointed, attention_with_level, requested_level
from torch_fused_ops.lowerings.partition import OPERATOR
from torch_fused_ops.policy import FusionPolicy, enclosing_modules, modules_of_site

log = logging.getLogger("torch_fused_ops")

_NUMBER, _MARK = "ac_graph_id", "recompute"
# torch.compile may override these policies, by their definition, but not the policies MUST_….
_PREFERENCES = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTED = (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_RECOMPUTE)


def drop(graph: Graph, policy: FusionPolicy) -> None:
    """Remove the marks of the checkpoints that a policy's levels replace.

    A checkpoint is replaced if it contains an MLP or attention with a level. All its calls lose their marks, including
    norms and residual sums, unless the policy selects only some modules.

    Args:
        graph: the joint graph. Its nodes' metadata is edited.
        policy: the fusion policy.
    """
    numbers = {node.meta[_NUMBER] for node in _with_level(graph, policy) if _NUMBER in node.meta}
    dropped = [
        node
        for node in graph.nodes
        if node.meta.get(_NUMBER) in numbers
        and node.meta.get(_MARK) in _PREFERENCES
        and policy.replaces_checkpoints(_modules(node))
    ]
    for node in dropped:
        number = node.meta.pop(_NUMBER)
        del node.meta[_MARK]
        # A tensor from one checkpoint to the next is saved. If other code reads it, the partitioner would repeat it.
        for source in node.all_input_nodes:
            if source.meta.get(_MARK) in _RECOMPUTED and source.meta.get(_NUMBER) != number:
                source.meta[_MARK] = CheckpointPolicy.MUST_SAVE
    if dropped:
        log.info("%d checkpoints are replaced by memory levels", len(numbers))


def _with_level(graph: Graph, policy: FusionPolicy) -> Iterator[Node]:
    """Yield the activations of MLPs and the linear layers of attention whose level takes a checkpoint's place."""
    if policy.checkpoints == "keep":
        return
    for node in graph.nodes:
        if node.target in OPERATOR or is_of_activation(node):
            modules = _modules(node)
            has_level = requested_level(node) or policy.names_level(modules)
            if has_level and policy.replaces_checkpoints(modules):
                yield node
    for _, linears in attention_with_level(graph, policy):
        yield from (linear for linear in linears if policy.replaces_checkpoints(_modules(linear)))


def attention_inside(graph: Graph, policy: FusionPolicy) -> dict[str, set[Node]]:
    """Return the linear layers of each attention whose level has no effect inside a checkpoint, by its module.

    Args:
        graph: the joint graph, after ``drop``. Partitioning hides attention that may draw random numbers.
        policy: the fusion policy.
    """
    sites = attention_with_level(graph, policy)  # a module has two: attention and its gradient
    return {site.module: linears for site, linears in sites if are_checkpointed(linears)}


def _modules(node: Node) -> set[str]:
    return enclosing_modules(module_stack(node))


def bodies(gm: GraphModule) -> list[GraphModule]:
    """Return the bodies of the checkpoints in a captured graph, without those inside other bodies."""
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    return [getattr(gm, call.args[0].target) for call in calls]


def around_pass() -> Kind | None:
    """Return the kind of the checkpoint around the graph that the pre-grad pass edits; None without a checkpoint."""
    is_body = any(inner in bodies(caller) for inner, caller in pairwise(compat.graphs_in_pre_grad_passes()))
    return Kind.IN_CHECKPOINT if is_body else around_call()


def around_call() -> Kind | None:
    """Return ``OUTER_CHECKPOINT`` if a checkpoint outside of compiled code calls the code that is being compiled."""
    return Kind.OUTER_CHECKPOINT if compat.is_called_from("torch.utils.checkpoint") else None


def without_effect(site: Site, kind: Kind | None, policy: FusionPolicy) -> Site:
    """Return a site inside a checkpoint: its memory level has no effect, unless it replaces the checkpoint.

    Args:
        site: a site of the pre-grad pass.
        kind: the kind of the checkpoint, as ``around_pass`` returns it.
        policy: the fusion policy.
    """
    is_replaced = kind is Kind.IN_CHECKPOINT and policy.replaces_checkpoints(modules_of_site(site))
    return replace(site, memory_kind=kind) if site.memory in ("fp8", "input") and not is_replaced else site
