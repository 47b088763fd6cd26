"""Judgments on a whole model: that nothing in it is fused, or that a pattern of the policy fits none of its sites.

Errors under ``strict``, else warnings, one for each model. A graph alone does not tell: a model whose graph breaks is
captured in pieces, and that of its attention has linear layers and no site. So the graphs that one call of a compiled
function is captured in are judged together: at once where it is captured whole, else when its first call ends.
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
from torch_fused_ops.graphs.sites import DROPOUT, Site
from torch_fused_ops.lowerings import compat
from torch_fused_ops.operators.activation import CALLS
from torch_fused_ops.policy import FusionPolicy, UnfusedError, unmatched

log = logging.getLogger("torch_fused_ops")


def check(
    graph: Graph, sites: Sequence[Site], policy: FusionPolicy, modules: Collection[str] = (), *, explicit: bool = True
) -> None:
    """Note what was found in a graph, and judge the model if it is the last.

    Args:
        graph: as the pre-grad pass left it; of a higher-order operator's body, too, which comes before what calls it.
        sites: of this graph.
        policy: what they were found by.
        modules: the paths of the modules that the graph was captured in, before it was edited.
        explicit: whether this compilation was asked to fuse, as by ``backend="fused"``, and not the process.

    Raises:
        UnfusedError: under ``strict``, the graphs have two linear layers or more, no site, and no operator of ours.
            (One linear layer alone, a head behind something else, is not a missed MLP.) Or they have sites, and
            a pattern of the policy fits none.
    """
    call = compat.compiled_call()
    if call is None:  # torch.export's graphs, which are whole; or graphs that are compiled without a device
        whole = _Model(policy, explicit, None, graph)
        whole.add(graph, sites, modules)
        return whole.judge() if policy.strict else None
    model = next((one for one in call.at_its_end if isinstance(one, _Model)), None)
    if model is None:
        call.at_its_end.append(model := _Model(policy, explicit, call.function, graph))
    model.add(graph, sites, modules)
    ended = compat.why_it_ended(graph)
    model.graphs += ended is not None
    model.is_new |= _is_first(call.code, policy)
    if ended is not None and call.is_whole and not ended.graph_break:
        model.is_new = False  # judged here, and not once more when the call ends
        if policy.strict or model.function not in _judged():
            model.judge()


def _judged() -> weakref.WeakSet[Any]:
    """The compiled functions whose first call was judged since ``torch._dynamo.reset()``, which clears contexts."""
    context: dict[str, weakref.WeakSet[Any]] = code_context.get_context(_judged.__code__)
    return context.setdefault("torch_fused_ops", weakref.WeakSet())


def _is_first(code: CodeType | None, policy: FusionPolicy) -> bool:
    """Note that code is compiled for a policy; True if it was not since the last reset."""
    if code is None or fusion_events.is_unobserved():
        return True
    policies: set[FusionPolicy] = code_context.get_context(code).setdefault("torch_fused_ops", set())
    is_first = policy not in policies
    policies.add(policy)
    return is_first


class _Model:
    """The graphs of one call of a compiled function; called when it ends.

    Later calls of the same function compile parts of it anew, and so does another function that shares code with one:
    what is found in those parts says nothing of the others.
    """

    def __init__(self, policy: FusionPolicy, explicit: bool, function: Any, graph: Graph) -> None:
        self.policy, self.function = policy, function
        self.warns_of_nothing = explicit and policy.memory != "off"
        self.title = title_of(graph) or "a compiled function"
        self.sites: list[Site] = []
        self.unread: tuple[Site, ...] = ()
        self.modules: set[str] = set()  # inside the sites' modules
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

            self.linears += _linears(graph)
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
        """Raise, or warn, if there is anything to say."""
        if not self.policy.strict and fusion_events.is_unobserved():
            return
        missed = [site for site in self.sites if site.is_missed]
        fused = self.has_ours or any(site.op is not None for site in self.sites)
        if not self.has_sites and self.linears > 1:
            self._say_that_nothing_is_there()
        elif missed and not fused and self.warns_of_nothing and not self.policy.strict:
            log.warning(
                "nothing was fused in %s: %d MLP site%s, the first %s: %s. torch_fused_ops.explain(model, *args) lists "
                "all",
                *(self.title, len(missed), "s" * (len(missed) != 1), missed[0].source, missed[0].reason),
            )
        if self.sites and any(self.policy.patterns.values()):
            self._compare_patterns()

    def _say_that_nothing_is_there(self) -> None:
        where = "one graph" if self.graphs <= 1 else f"{self.graphs} graphs, and a site does not reach between them"
        nothing = f"no MLP was found between {self.linears} linear layers, in {where}"
        if self.policy.strict:
            lines = "".join(f"\n{line}" for line in unread_lines(grouped(self.unread)))
            raise UnfusedError(
                f"strict=True and {nothing}. torch_fused_ops.explain(model, *args) lists graph breaks, too{lines}"
            )
        if self.warns_of_nothing:
            log.warning(
                "nothing was fused in %s: 0 MLP sites; %s. torch_fused_ops.explain(model, *args) lists all that lies "
                "between them",
                *(self.title, nothing),
            )

    def _compare_patterns(self) -> None:
        notes = unmatched(self.policy, self.sites, self.modules, self.all_modules)
        if notes and self.policy.strict:
            raise UnfusedError(f"strict=True and in {self.title} {'; '.join(notes)}")
        for note in notes:
            log.warning("in %s a pattern of the policy has no effect: %s", self.title, note)


def _linears(graph: Graph) -> int:
    """The products with weights, but convolutions, in a graph."""
    from torch_fused_ops.lowerings.recognize.graph import CONVOLUTIONS, GraphAnalysis

    analysis = GraphAnalysis(graph, {})
    return sum(analysis.weight_gemm(node) for node, call in analysis.calls.items() if call.name not in CONVOLUTIONS)


def _has_ours(graph: Graph) -> bool:
    """True if a graph, or one that it calls, has an activation's operator already, as in a model of FusedMLPs."""
    root = graph.owning_module
    graphs = [graph, *(m.graph for m in root.modules() if isinstance(m, GraphModule))] if root else [graph]
    return any(name_of(node.target) in CALLS for one in graphs for node in one.nodes if node.op == "call_function")
