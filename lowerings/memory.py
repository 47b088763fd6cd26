"""Stage 2: what a compiled training step keeps for backward.

Inductor's partitioner saves both sides of an activation between two GEMMs, because a kernel of its own that rebuilds one
costs more than it saves *by its default estimate*. With a memory budget just below 1 it rebuilds whatever costs no FLOPs:
for a GELU MLP (bf16, 8192 tokens, 4096→16384→4096) 320 MiB are kept instead of 576. The budget is set per graph, on the
joint graph's nodes: the process-wide knob (``torch._functorch.config.activation_memory_budget``) is the user's, and
tagging nodes for recomputation instead makes checkpointed models keep *more* (two checkpointed MLPs would keep both
products).
"""

from __future__ import annotations

import torch
import torch._functorch.config as functorch_config

# Between 0.99 and 0.7 the partitioner's choice is the same on transformer blocks; the nearest to 1 asks least of its search.
BUDGET = 0.99


def set_budget(graph: torch.fx.Graph) -> bool:
    """Ask the partitioner to rebuild in backward what costs only pointwise work. False where the user set a budget."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if functorch_config.activation_memory_budget != 1 or any("memory_budget" in node.meta for node in calls):
        return False
    for node in calls:
        node.meta["memory_budget"] = BUDGET
    return True
