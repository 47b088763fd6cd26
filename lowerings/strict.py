"""``strict`` where no site is found at all: linear layers, and nothing between them that is an MLP's activation.

One graph does not tell. A model whose graph breaks is captured in pieces, and that of its attention has linear layers
and no site. So the graphs that one call of a compiled function is captured in are judged together: at once where it is
captured whole, else when its first call ends.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from torch_fused_ops.gemm_registry import name_of
from torch_fused_ops.lowerings import compat
from torch_fused_ops.operators.activation import CALLS
from torch_fused_ops.policy import UnfusedError
from torch_fused_ops.sites import DROPOUT, Site

__all__ = ["check"]

_called: weakref.WeakSet[Any] = weakref.WeakSet()  # compiled functions whose first call has been judged


def check(graph: Graph, sites: Sequence[Site]) -> None:
    """Note what was found in a graph, and judge if it is the last.

    Args:
        graph: as stage 1 left it; of a higher-order operator's body, too, which comes before what calls it.
        sites: of this graph.

    Raises:
        UnfusedError: the graphs have two linear layers or more, no site, and no operator of ours. (One linear layer
            alone, a head behind something else, is no MLP that was missed.)
    """
    call = compat.compiled_call()
    found = any(site.activation != DROPOUT for site in sites) or _has_ours(graph)
    linears = 0 if found else _linears(graph)
    if call is None:  # torch.export's graphs, which are whole
        return _judge(found, linears, 1)
    judge = next((one for one in call.at_its_end if isinstance(one, _AtTheEnd)), None)
    if judge is None:
        call.at_its_end.append(judge := _AtTheEnd(call.function))
    judge.found |= found
    judge.linears += linears
    ended = compat.why_it_ended(graph)
    judge.graphs += ended is not None
    judge.is_new |= call.is_first
    if ended is not None and call.is_whole and not ended.graph_break:
        judge.is_new = False  # said here, and not once more when the exception ends the call
        _judge(judge.found, judge.linears, 1)


class _AtTheEnd:
    """What is known of the graphs of a call; called when it ends.

    Later calls of the same function compile parts of it anew, and so does another function that shares code with one:
    what is found in those parts says nothing of the others.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.found, self.linears, self.graphs, self.is_new = False, 0, 0, False
        self.raised = sys.exc_info()[1]

    def __call__(self) -> None:
        failed = sys.exc_info()[1] is not self.raised
        if self.is_new and self.function not in _called and not failed:
            _called.add(self.function)
            _judge(self.found, self.linears, self.graphs)
        _called.add(self.function)


def _judge(found: bool, linears: int, graphs: int) -> None:
    if not found and linears > 1:
        where = "one graph" if graphs == 1 else f"{graphs} graphs, and a site does not reach from one to another"
        raise UnfusedError(
            f"strict=True and no MLP was found between {linears} linear layers, in {where}. "
            "torch_fused_ops.explain(model, ...) names what stands between them: graph breaks with their lines, calls "
            "that are not looked into, activations that are no sites (docs/recognition.md, Where no site is listed)"
        )


def _linears(graph: Graph) -> int:
    """The products with weights, but convolutions, in a graph."""
    from torch_fused_ops.lowerings.recognize.graph import CONVOLUTIONS, GraphAnalysis

    analysis = GraphAnalysis(graph, {})
    return sum(analysis.weight_gemm(node) for node, call in analysis.calls.items() if call.name not in CONVOLUTIONS)


def _has_ours(graph: Graph) -> bool:
    """Whether a graph, or one that it calls, has an activation's operator already: a model of FusedMLPs has."""
    root = graph.owning_module
    graphs = [graph, *(m.graph for m in root.modules() if isinstance(m, GraphModule))] if root else [graph]
    return any(name_of(node.target) in CALLS for one in graphs for node in one.nodes if node.op == "call_function")
