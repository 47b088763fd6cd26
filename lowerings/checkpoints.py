"""``checkpoints="replace"``: memory levels in the place of activation checkpoints.

AOTAutograd marks each call inside a checkpoint in the joint graph: ``meta["ac_graph_id"]`` is the number of the
outermost checkpoint, and ``meta["recompute"]`` the decision of its policy. PyTorch's partitioner then saves nothing
inside a checkpoint, so a level finds nothing to change. Without the marks, it divides the graph as if the model had no
checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.lowerings import attention
from torch_fused_ops.lowerings.memory_levels import OPERATOR, requested_level
from torch_fused_ops.policy import FusionPolicy, enclosing_modules

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
        and policy.replaces_checkpoints(enclosing_modules(module_stack(node)))
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
        if node.target in OPERATOR:
            modules = enclosing_modules(module_stack(node))
            if (requested_level(node) or policy.names_level(modules)) and policy.replaces_checkpoints(modules):
                yield node
    for site in attention.find(graph) if policy.attention != "off" else ():
        for linear in site.linears:
            modules = enclosing_modules(module_stack(linear))
            if policy.attention_of(modules) == "input" and policy.replaces_checkpoints(modules):
                yield linear
