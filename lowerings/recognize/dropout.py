"""Dropouts of linear layers: ``F.dropout(linear(x), p)`` becomes ``fused::dropout_add``, without a residual.

Its mask is a function of a seed, so backward recomputes the mask. Autograd would save a byte for each element. A *site*
is an active dropout. A dropout is fused only if it reads a linear layer's result, or a pointwise function of such
results. Dropouts of attention probabilities, embeddings and norms (in LoRA) stay, with a reason. A fused dropout and
``F.dropout`` drop different elements for the same ``torch.manual_seed``, with the same distribution;
``fallback_random`` and ``align_random_eager`` preserve eager's numbers. Inductor draws the seeds: one launch for all
random calls of a device.

A reentrant checkpoint compiles a function twice. It runs forward without gradients, and recomputes it with gradients.
Both must drop the same elements, so neither the sites nor the order of their seeds may depend on gradients. A site does
not depend on a proof: the activation before it may be proved in only one of the two graphs.

A sum with a residual stays in the graph. Inductor fuses it with the operator's pointwise node: the kernel has the same
loads, stores and instructions as for an operator with the residual, and rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch._inductor import inductor_prims
from torch.fx import Node

from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.graphs.reasons import Kind, Reason, Rejection
from torch_fused_ops.graphs.sites import DROPOUT
from torch_fused_ops.lowerings import compat
from torch_fused_ops.policy import FusionPolicy, enclosing_modules

from .graph import DROPOUTS, FREE, Call, GraphAnalysis, inline_bodies, label, names_of, tensor, write_call
from .rewrite import Edit
from .subgraph import check_in_place_call
from .values import check_plain, check_rounding, is_contiguous, value_of

_ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)
OPERATOR = f"fused::{DROPOUT}_add"


@dataclass
class Dropout:
    """A dropout in the graph."""

    node: Node
    p: float = 0.5
    copies: bool = False  # True if it overwrites a tensor from another grad mode, whose gradient must not change
    reason: Reason | None = None  # why the dropout is not fused; None if it is fused


def find(analysis: GraphAnalysis, policy: FusionPolicy) -> list[Dropout]:
    """Return every site in graph order."""
    sites, states = [], _states(analysis)
    for node, call in analysis.calls.items():
        if tensor(node) is None or not _drops(node, call):
            continue
        site = Dropout(node)
        try:
            if call.name != DROPOUT:
                raise Rejection(Kind.OTHER_DROPOUT, f"{label(node)} does not drop elements of its input one by one")
            source = call.args[0]
            assert isinstance(source, Node)
            if states[node] == FREE:
                names = names_of(map(analysis.origin, node.all_input_nodes))
                text = f"it reads {names}, not a linear layer's result or a pointwise function of one"
                raise Rejection(Kind.OTHER_DROPOUT, text)
            _examine(analysis, policy, site, source)
        except Rejection as rejection:
            site.reason = rejection.reason
        sites.append(site)
    return sites


def _drops(node: Node, call: Call) -> bool:
    """Return True for an active dropout of any kind, also inside attention."""
    if node.target in _ATTENTION:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    of_tensor = call.name in DROPOUTS and bool(call.args) and isinstance(call.args[0], Node)
    return of_tensor and call.dropout_is_active()


def _states(analysis: GraphAnalysis) -> Mapping[Node, int]:
    """Return nodes' states as if autograd functions were inlined. Dynamo inlines them if no gradients are recorded."""
    if all(node.target is not torch.ops.higher_order.autograd_function_apply for node in analysis.calls):
        return analysis.state
    graph, copied = inline_bodies(next(iter(analysis.calls)).graph, autograd_functions=True)
    inlined = GraphAnalysis(graph, {})
    return {node: inlined.state[copy] for copy, (node, inside) in copied.items() if not inside}


def _examine(analysis: GraphAnalysis, policy: FusionPolicy, site: Dropout, source: Node) -> None:
    node, call, value = site.node, analysis.calls[site.node], value_of(site.node)
    if (pattern := policy.excluding(enclosing_modules(module_stack(node)))) is not None:
        raise Rejection(Kind.EXCLUDED, f"the policy excludes {pattern!r}", pattern)
    if not policy.dropout:
        raise Rejection(Kind.DROPOUT_POLICY, "the policy does not fuse dropouts (dropout=False)")
    if setting := compat.eager_random():
        raise Rejection(Kind.FALLBACK_RANDOM, f"inductor's {setting} requires eager's random numbers")
    check_rounding(node)
    if not isinstance(p := call.dropout_arguments()["p"], (int, float)):
        raise Rejection(Kind.PROBABILITY, "its probability is not a constant")
    check_plain(node)
    check_plain(source)
    if not (value.ndim and is_contiguous(value)):
        raise Rejection(Kind.ORDER, "the operator does not support the memory order of its result")
    if call.inplace:
        check_in_place_call(analysis, node, node, [node])
        site.copies = not analysis.is_of_region(node)
    site.p = float(p)


# ---- the edit --------------------------------------------------------------------------------------------------------


def fuse(sites: Sequence[Dropout]) -> list[Edit]:
    """Return the edits that replace each site by one ``fused::dropout_add``."""

    def write(site: Dropout) -> Node:
        node, x, device = site.node, site.node.all_input_nodes[0], value_of(site.node).device
        make = partial(torch.empty, (), dtype=torch.int64, device=device)
        seed = write_call(node, inductor_prims.seed, device, make=make)
        result = write_call(node, torch.ops.fused.dropout_add.default, x, None, None, seed, site.p)
        return write_call(node, torch.ops.aten.copy_.default, x, result) if site.copies else result

    return [(site.node, partial(write, site), [site.node]) for site in sites]
