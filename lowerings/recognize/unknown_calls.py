"""Calls that cannot be analyzed and lie between GEMMs, listed for people, who may register them.

They are custom operators, Triton kernels and functions that Dynamo does not trace (``allow_in_graph``). A custom
``torch.autograd.Function`` that Dynamo traces is read (``autograd_functions.py``), and is a site or a GEMM
(``graph.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch
from torch.fx import Node

from torch_fused_ops.graphs.reasons import NOT_AN_MLP, Kind, Reason
from torch_fused_ops.lowerings import compat

from .graph import GraphAnalysis, reached, shown, tensor
from .symbolic import LINEAR, RULES

# Namespaces of PyTorch's operators and ours: those without a name in ``graph.py`` are known not to be GEMMs.
_KNOWN = {
    *("aten", "prim", "prims", "fused", "c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    *("inductor", "inductor_prims", "rngprims", "debugprims", "export", "streams", "profiler"),
}
_LONGEST = 64  # nodes that are looked at around a call


def find(analysis: GraphAnalysis) -> Iterator[tuple[Node, Reason]]:
    """List the calls of a graph that cannot be analyzed and lie between GEMMs, or beside an activation."""
    hidden = {node: name for node in analysis.calls if (name := _name(analysis, node))}

    def is_gemm(node: Node) -> bool:
        return node in hidden or analysis.weight_gemm(node)

    for node, name in hidden.items():
        before = _gemms_around(analysis, node.all_input_nodes, is_gemm, lambda n: n.all_input_nodes)
        after = _gemms_around(analysis, _readers(analysis, node), is_gemm, lambda n: n.users)
        if True in before or True in after:
            text = f"{NOT_AN_MLP}it is not known whether {name} is a GEMM"
        elif before and after:
            text = f"{NOT_AN_MLP}{name} lies between GEMMs and cannot be analyzed"
        else:
            continue
        yield node, Reason(Kind.OPAQUE, text)


def _name(analysis: GraphAnalysis, node: Node) -> str:
    """The name of a call that cannot be analyzed; "" for one that can."""
    call, target = analysis.calls[node], node.target
    if node.op != "call_function" or call.name or call.gemm is not None:
        return ""
    if isinstance(target, type) and not isinstance(node.meta.get("example_value"), torch.Tensor):
        return ""  # a constructor's object, torchao's configurations say, is no product
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        namespace, _, name = packet._qualified_op_name.partition("::")
        return "" if namespace in _KNOWN else f"torch.ops.{namespace}.{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "a Triton kernel" if shown(node).startswith("triton_kernel_wrapper") else ""
    if compat.traced_function(target) is not None:
        return shown(node)
    module = str(getattr(target, "__module__", None) or "")
    return "" if module.partition(".")[0] in ("", "torch", "builtins", "math", "_operator") else shown(node)


def _readers(analysis: GraphAnalysis, node: Node) -> list[Node]:
    """The readers of a call's result; for a Triton kernel all later readers of its tensors, which it may write."""
    readers = list(node.users)
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        users = [user for a in node.all_input_nodes for user in a.users]
        readers += [user for user in users if analysis.index[user] > analysis.index[node]]
    return readers


def _gemms_around(
    analysis: GraphAnalysis,
    start: Iterable[Node],
    is_gemm: Callable[[Node], bool],
    on: Callable[[Node], Iterable[Node]],
) -> set[bool]:
    """Follow views and pointwise functions to GEMMs; return True for a path with a nonlinear function, False without.

    A sum of two tensors, as in a residual stream, ends the path: a norm's input is not an activation's.
    """

    def neighbors(place: tuple[Node, bool]) -> Iterator[tuple[Node, bool]]:
        node, bent = place
        name = analysis.calls[node].name
        matrices = [a for a in node.all_input_nodes if (value := tensor(a)) is not None and value.ndim > 1]  # no biases
        is_pointwise = name in RULES and not (name in ("add", "sub") and len(matrices) > 1)
        if not is_gemm(node) and (analysis.passes(node) or is_pointwise):
            bent |= not analysis.passes(node) and name not in LINEAR
            yield from ((neighbor, bent) for neighbor in on(node))

    places = islice(reached([(node, False) for node in start], neighbors), _LONGEST)
    return {bent for node, bent in places if is_gemm(node)}
