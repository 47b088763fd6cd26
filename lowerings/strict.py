"""Find whole models in which nothing is fused, or in which a pattern of the policy matches no site.

Such a model is an error under ``strict``, otherwise one warning. A single graph is not enough: graph breaks cut a model
into pieces, and the piece with the attention has linear layers but no site. So all graphs captured in one call of a
compiled function are judged together: immediately if the function is captured whole, otherwise when its first call
ends.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Collection, Sequence
from types import CodeType
from typing import Any

from torch._dynamo.code_context import code_context
from torch.fx import Graph, GraphModule

from torch_fused_ops.graphs import fusion_events
from torch_fused_ops.graphs.capture import title_of
from torch_fused_ops.graphs.gemm_registry import name_of
from torch_fused_ops.graphs.listing import grouped, unread_lines
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import DROPOUT, Site
from torch_fused_ops.lowerings import compat
from torch_fused_ops.operators.activation import CALLS
from torch_fused_ops.policy import FusionPolicy, UnfusedError, unmatched

log = logging.getLogger("torch_fused_ops")


def check(
    graph: Graph, sites: Sequence[Site], policy: FusionPolicy, modules: Collection[str] = (), *, explicit: bool = True
) -> None:
    """Record the sites of a graph, and judge the model if this is its last graph.

    Args:
        graph: the graph after the pre-grad pass. Bodies of higher-order operators are passed before their caller.
        sites: the sites of this graph.
        policy: the policy of the pre-grad pass.
        modules: the paths of the modules that contain the graph's nodes, listed before the pass edited the graph.
        explicit: True if this compilation requests fusion, as ``backend="fused"`` does; False if the process does.

    Raises:
        UnfusedError: under ``strict``, the graphs have two or more linear layers or opaque calls, no site, and no
            operator of ours. (A single linear layer, such as a head, is not a missed MLP.) Or they have sites, and
            a pattern of the policy matches none.
    """
    call = compat.compiled_call()
    if call is None:  # a graph of torch.export, which is whole, or of a compilation without a device
        exported = _Model(policy, explicit, None, graph)
        exported.add(graph, sites, modules)
        return exported.judge() if policy.strict else None
    model = next((callback for callback in call.at_its_end if isinstance(callback, _Model)), None)
    if model is None:
        call.at_its_end.append(model := _Model(policy, explicit, call.function, graph))
    model.add(graph, sites, modules)
    ended = compat.why_it_ended(graph)
    model.graphs += ended is not None
    model.is_new |= _is_first(call.code, policy)
    if ended is not None and call.is_whole and not ended.graph_break:
        model.is_new = False  # judged now, so not at the end of the call
        if policy.strict or model.function not in _judged():
            model.judge()


def _judged() -> weakref.WeakSet[Any]:
    """Return the compiled functions whose first call was judged since the last reset, which clears contexts."""
    context: dict[str, weakref.WeakSet[Any]] = code_context.get_context(_judged.__code__)
    return context.setdefault("torch_fused_ops", weakref.WeakSet())


def _is_first(code: CodeType | None, policy: FusionPolicy) -> bool:
    """Record that code is compiled for a policy; return True the first time since the last reset."""
    if code is None or fusion_events.is_unobserved():
        return True
    policies: set[FusionPolicy] = code_context.get_context(code).setdefault("torch_fused_ops", set())
    is_first = policy not in policies
    policies.add(policy)
    return is_first


class _Model:
    """All graphs captured in one call of a compiled function. Torch calls this object when the call ends.

    A later call of the function recompiles only some of its parts, and a function that shares code with it compiles
    only the remaining parts. The sites in such parts say nothing about the whole model.
    """

    def __init__(self, policy: FusionPolicy, explicit: bool, function: Any, graph: Graph) -> None:
        self.policy, self.function = policy, function
        self.warns_of_nothing = explicit and policy.memory != "off"
        self.title = title_of(graph) or "a compiled function"
        self.sites: list[Site] = []
        self.unread: tuple[Site, ...] = ()
        self.modules: set[str] = set()  # paths inside the sites' modules
        self.all_modules: set[str] = set()
        self.has_ours, self.linears, self.graphs, self.is_new = False, 0, 0, False
        self.raised = sys.exc_info()[1]

    def add(self, graph: Graph, sites: Sequence[Site], modules: Collection[str]) -> None:
        self.sites += sites
        mlps = {site.module for site in sites if site.activation != DROPOUT}
        inside = tuple(f"{mlp}." if mlp else "" for mlp in mlps)
        self.modules.update(path for path in modules if f"{path}.".startswith(inside))
        self.all_modules.update(modules)
        self.has_ours = self.has_ours or _has_ours(graph)
        if not self.has_sites:
            from torch_fused_ops.lowerings import recognize
            from torch_fused_ops.lowerings.recognize.graph import function_bodies

            # An autograd function counts as at most one linear layer. Its bodies, counted before, have several GEMMs.
            bodies = [body.graph for node in graph.nodes for body in function_bodies(node)]
            self.linears = max(0, self.linears - sum(map(_linears, bodies))) + _linears(graph)
            self.unread += recognize.unread(graph) if self.policy.strict else ()

    @property
    def has_sites(self) -> bool:
        return self.has_ours or any(site.activation != DROPOUT for site in self.sites)

    def __call__(self) -> None:
        failed = sys.exc_info()[1] is not self.raised
        is_new = self.is_new and self.function not in _judged()
        _judged().add(self.function)
        if is_new and not failed:
            self.judge()

    def judge(self) -> None:
        """Raise or warn if nothing is fused, or if a pattern matches no site."""
        strict, nothing = self.policy.strict, ""
        if not strict and fusion_events.is_unobserved():
            return
        missed = [site for site in self.sites if site.is_missed]
        fused = self.has_ours or any(site.op is not None for site in self.sites)
        opaque = sum(site.kind is Kind.OPAQUE for site in self.unread)  # each may be a GEMM
        if not self.has_sites and self.linears + opaque > 1:
            between = f"{self.linears} linear layers" + (f" and {opaque} opaque calls" if opaque else "")
            where = "one graph" if self.graphs <= 1 else f"{self.graphs} graphs, and a site does not reach between them"
            place = f"between {between}, in {where}. torch_fused_ops.explain(model, *args) lists all"
            if strict:
                unread = "\n".join(("", *unread_lines(grouped(self.unread))))
                raise UnfusedError(f"strict=True and no MLP was found {place}{unread}")
            nothing = f"0 MLP sites; no MLP was found {place}"
        elif missed and not fused and not strict:
            first = f"{missed[0].source}: {missed[0].reason}"
            sites = f"{len(missed)} MLP site{'s' * (len(missed) != 1)}, the first {first}"
            nothing = f"{sites}. torch_fused_ops.explain(model, *args) lists all"
        if nothing and self.warns_of_nothing:
            log.warning("nothing was fused in %s: %s", self.title, nothing)
        if self.sites and any(self.policy.patterns.values()):
            notes = unmatched(self.policy, self.sites, self.modules, self.all_modules)
            if notes and strict:
                raise UnfusedError(f"strict=True and in {self.title} {'; '.join(notes)}")
            for note in notes:
                log.warning("in %s a pattern of the policy has no effect: %s", self.title, note)


def _linears(graph: Graph) -> int:
    """Return the number of GEMMs with weights in a graph, except convolutions."""
    from torch_fused_ops.lowerings.recognize.graph import CONVOLUTIONS, GraphAnalysis

    analysis = GraphAnalysis(graph, {})
    return sum(analysis.weight_gemm(node) for node, call in analysis.calls.items() if call.name not in CONVOLUTIONS)


def _has_ours(graph: Graph) -> bool:
    """Return True if a graph, or a graph that it calls, has a fused activation, as in a model of FusedMLPs."""
    root = graph.owning_module
    graphs = [graph, *(m.graph for m in root.modules() if isinstance(m, GraphModule))] if root else [graph]
    return any(name_of(node.target) in CALLS for each in graphs for node in each.nodes if node.op == "call_function")
