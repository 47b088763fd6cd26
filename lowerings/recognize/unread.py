"""List activations and opaque calls that are not sites, for reports. No decision is made here.

Opaque calls are custom operators, Triton kernels, and functions that Dynamo does not trace (``allow_in_graph``), also
inside a custom ``torch.autograd.Function``. An opaque call may be a GEMM, or an activation.
"""

from __future__ import annotations

from functools import cache
from itertools import chain, islice

import torch
from torch.fx import Graph, Node

from torch_fused_ops.graphs.gemm_registry import name_of
from torch_fused_ops.graphs.reasons import NOT_AN_MLP, Kind, Reason
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.lowerings import compat

from .canonical import Canonical
from .graph import (
    FREE,
    NONLINEAR,
    Call,
    GraphAnalysis,
    function_bodies,
    inline_bodies,
    label,
    names_of,
    reachable,
    tensor,
    tensor_positions,
)
from .report import Candidate, calls_of, site_of
from .subgraph import find_sites, readers
from .symbolic import RULES

# Namespaces of PyTorch's operators and ours. Operators that ``graph.py`` does not name are known not to be GEMMs.
_KNOWN = {
    *("aten", "prim", "prims", "fused", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    *("inductor", "inductor_prims", "rngprims", "debugprims", "export", "streams", "profiler"),
}


def unread(graph: Graph) -> tuple[Site, ...]:
    """List a graph's activations and opaque calls that are not sites, each with its reason. The graph is not changed.

    Such an activation is followed by a norm, for example, or follows a convolution, or begins or ends the graph. The
    bodies of higher-order operators are searched together with the graph, so that a site is listed if the boundary of
    an operator cuts it. An opaque call is listed if GEMMs surround it, or if it reads or produces an activation.
    """
    inlined, copied = inline_bodies(graph)
    canonical = Canonical(inlined)
    analysis = GraphAnalysis(inlined, canonical.calls)
    opaque = {node: name for node, call in analysis.calls.items() if (name := _opaque_name(node, call))}
    for node in opaque:
        analysis.calls[node].gemm = tensor_positions(node)
    analysis = GraphAnalysis(inlined, analysis.calls)  # opaque calls are assumed to be GEMMs
    sites: dict[Node, tuple[list[Node], Reason]] = {}
    for node, call in analysis.calls.items():
        if analysis.is_passthrough(node) or not (node.users and _is_activation(analysis, canonical, node)):
            continue
        users = list(readers(analysis, node))
        gemms = [user for user in users if analysis.calls[user].gemm is not None]
        inside = any(analysis.state[user] == NONLINEAR for user in users)
        if analysis.state[node] == NONLINEAR and users and not gemms and not inside:
            text = f"{NOT_AN_MLP}no GEMM reads it, but {names_of(users)}"
            sites[node] = gemms, Reason(Kind.NO_GEMM_READS, text)
        elif analysis.state[node] == FREE and call.name in RULES and gemms:
            sources = names_of([analysis.origin(a) for a in node.all_input_nodes])
            text = f"{NOT_AN_MLP}it reads {sources}, which no GEMM with weights has produced"
            sites[node] = gemms, Reason(Kind.NO_GEMM_BEFORE, text)
    own_outputs = cache(lambda graph: {output for output, _ in find_sites(GraphAnalysis(graph, {}))})
    for node, gemms in find_sites(analysis):
        parts = _parts(analysis, node, gemms)
        for part in (part for part in opaque if part in parts):
            text = f"{NOT_AN_MLP}it is not known whether {opaque[part]} is a GEMM"
            sites[part] = [], Reason(Kind.OPAQUE, text)
        if not (opaque.keys().isdisjoint(parts) and any(map(analysis.weight_gemm, gemms))):
            continue
        original = copied[canonical.originals.get(node, node)][0]
        around = [copied[canonical.originals.get(part, part)][1] for part in parts]
        operators = dict.fromkeys(chain.from_iterable(around))
        cut = [operator for operator in operators if any(operator not in enclosing for enclosing in around)]
        if cut and original not in own_outputs(original.graph):
            text = f"the boundary of {names_of(cut)} lies between it and a GEMM"
            sites[node] = gemms, Reason(Kind.BOUNDARY, text)
    for node, name in opaque.items():
        if node not in sites and _lies_between(analysis, node):
            sites[node] = [], Reason(Kind.OPAQUE, f"{NOT_AN_MLP}{name} lies between GEMMs and cannot be analyzed")
    return tuple(
        site_of(analysis, canonical, Candidate(node, gemms or [node], rejection=reason))
        for node, (gemms, reason) in sites.items()
    )


def _parts(analysis: GraphAnalysis, output: Node, gemms: list[Node]) -> list[Node]:
    """Return the nodes of a site, from the GEMMs that produce its inputs to the GEMMs that read it, inclusive."""

    def sources(node: Node) -> list[Node]:
        if analysis.calls[node].gemm is not None:
            return []
        return [source for source in analysis.sources(node) if analysis.state[source] != FREE]

    return [*gemms, *islice(reachable([output], sources), 64)]


def _is_activation(analysis: GraphAnalysis, canonical: Canonical, node: Node) -> bool:
    """Return True if one of the site's calls is an activation in torch. x² in a norm is not an activation."""
    return any(
        hasattr(torch.nn.functional, analysis.calls[call].name) or call in canonical.originals or analysis.custom(call)
        for call in calls_of(analysis, node)
    )


def _opaque_name(node: Node, call: Call) -> str:
    """Return the name of an opaque call; "" for other calls."""
    target = node.target
    if node.op != "call_function" or call.name or call.gemm is not None:
        return ""
    if isinstance(target, type) and not isinstance(node.meta.get("example_value"), torch.Tensor):
        return ""  # a constructor's object, such as torchao's configurations, is not a tensor
    namespace, separator, name = (name_of(target) or "").partition("::")
    if separator:
        return "" if namespace in _KNOWN else f"torch.ops.{namespace}.{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        inner = [inner for body in function_bodies(node)[:1] for inner in body.graph.nodes]
        is_opaque = label(node).startswith("triton_kernel_wrapper") or any(_opaque_name(n, Call(n)) for n in inner)
        return label(node) if is_opaque else ""
    if compat.traced_function(target) is not None:
        return label(node)
    module = str(getattr(target, "__module__", None) or "")
    return "" if module.partition(".")[0] in ("", "torch", "builtins", "math", "_operator") else label(node)


def _lies_between(analysis: GraphAnalysis, node: Node) -> bool:
    """Return True if a call reads a pointwise function of a GEMM's result, and a GEMM reads the call.

    A sum of two tensors does not count: it is a residual stream, and its reader is a norm.
    """
    users = list(readers(analysis, node))
    if isinstance(node.target, torch._ops.HigherOrderOperator):  # a Triton kernel may write its arguments
        users += [user for a in node.all_input_nodes for user in a.users if analysis.index[user] > analysis.index[node]]
    for source in map(analysis.origin, node.all_input_nodes):
        values = map(tensor, source.all_input_nodes)
        matrices = [value for value in values if value is not None and value.ndim > 1]
        is_sum = analysis.calls[source].name in ("add", "sub") and len(matrices) > 1
        if analysis.state[source] != FREE and not is_sum:
            return any(map(analysis.weight_gemm, users))
    return False
