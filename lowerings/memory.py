"""Stage 2: what a compiled training step keeps for backward.

By default Inductor's partitioner keeps both sides of an activation between two GEMMs: its rule is that what backward
must materialise anyway (the second GEMM's weight gradient reads the activation) is not rebuilt. Taking away that one
rule is enough: the activation is rebuilt inside the kernel that computes its gradient, from the same loads.

Upstream's knob for this is ``torch._functorch.config.activation_memory_budget``, just below 1. It keeps as little,
and costs more: it also drops the rule against rebuilding values used far apart, so chains of residual adds are
rebuilt (four Llama blocks, bf16: backward moves 1453 MiB by default, 1601 with the budget, 1529 here, and the budget
adds kernels), and where nothing pointwise is left to gain it rebuilds a *GEMM* (four linear layers: 9 matrix products
in backward instead of 8). Here nothing but pointwise work is ever rebuilt. A budget that the user sets is the user's:
then this stage stands aside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

from torch_fused_ops.lowerings import compat

# What forward computes and backward can rebuild without a GEMM.
POINTWISE = ("bias_act", "glu", "bias_glu")


def allow_recomputation() -> None:
    """Tell the partitioner that our forward operators are as cheap to rebuild as aten's pointwise ones. Idempotent."""
    compat.allow_recomputation(getattr(torch.ops.fused, name) for name in POINTWISE)


def partition(gm: torch.fx.GraphModule, joint_inputs: Any, *, free: bool, **kwargs: Any) -> Any:
    """Upstream's min-cut partition of a joint graph; where ``free``, pointwise work is rebuilt in backward, no GEMM.

    Where the user has set a memory budget, process-wide or on the graph's nodes, it is upstream's unchanged.
    """
    budgeted = functorch_config.activation_memory_budget != 1 or any("memory_budget" in n.meta for n in gm.graph.nodes)
    settings = {"ban_recompute_materialized_backward": False} if free and not budgeted else {}
    with functorch_config.patch(settings):
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
