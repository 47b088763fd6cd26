"""Find whole models in which nothing is fused, or in which a pattern of the policy matches no site.

Under ``strict``, such a model is an error. Otherwise each part of the policy without an effect causes a warning, and so
does a model in which nothing is fused if the compilation itself requests fusion. A single graph is not enough: graph
breaks cut a model into pieces, and the piece with the attention has linear layers but no site. So all graphs captured
in one call of a compiled function are judged together: when its first call ends, or at once if the function is one
graph and attention has no level.
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
from torch_fused_ops.graphs.listing import AttentionSite, merged_attention, site_lines
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.graphs.sites import DROPOUT, Site
from torch_fused_ops.lowerings import compat, recognize
from torch_fused_ops.lowerings.recognize.graph import CONVOLUTIONS, GraphAnalysis, function_bodies
from torch_fused_ops.operators.activation import CALLS
from torch_fused_ops.policy import FusionPolicy, UnfusedError, joined_each, unmatched

log = logging.getLogger("torch_fused_ops")


def check(
    graph: Graph,
    sites: Sequence[Site],
    policy: FusionPolicy,
    modules: Collection[str] = (),
    *,
    explicit: bool = True,
    in_checkpoint: bool = False,
) -> None:
    """Record the sites of a graph, and judge the model if this graph is all of it.

    Args:
        graph: the graph after the pre-grad pass. Bodies of higher-order operators are passed before their caller.
        sites: the sites of this graph.
        policy: the policy of the pre-grad pass.
        modules: the paths of the modules that contain the graph's nodes, listed before the pass edited the graph.
        explicit: True if this compilation requests fusion, as ``backend="fused"`` does; False if the process does.
        in_checkpoint: True if the graph is inside a checkpoint.

    Raises:
        UnfusedError: under ``strict``, the graphs have two or more linear layers or opaque calls, no site, and no
            operator of ours. (A single linear layer, such as a head, is not a missed MLP.) Or a pattern of the
            policy matches nothing, or a level has no effect.
    """
    call = compat.compiled_call()
    model = _model_of(call) or _Model(policy, explicit, call and call.function, graph)
    model.add(graph, sites, modules, in_checkpoint)
    if call is None:  # a graph of torch.export, which is whole, or of a compilation without a device
        return model.judge() if policy.strict else None
    if model not in call.at_its_end:
        call.at_its_end.append(model)
    ended = compat.why_it_ended(graph)
    model.graphs += ended is not None
    model.is_new |= _is_first(call.code, policy)
    # Attention is not known before the joint graph is partitioned.
    if ended is not None and call.is_whole and not ended.graph_break and policy.attention == "off":
        model.is_new = False  # judged now, so not at the end of the call
        if policy.strict or model.function not in _judged():
            model.judge()


def add_attention(policy: FusionPolicy, sites: Sequence[AttentionSite]) -> None:
    """Record the attention in a joint graph for which the policy requests a level."""
    model = _model_of(compat.compiled_call())
    if model is not None and model.policy == policy:
        model.attention = [*(model.attention or ()), *sites]


def _model_of(call: compat.CompiledCall | None) -> _Model | None:
    callbacks = call.at_its_end if call else ()
    return next((callback for callback in callbacks if isinstance(callback, _Model)), None)


def _judged() -> weakref.WeakSet[Any]:
    """Return the compiled functions whose first call has ended since the last reset, which clears contexts."""
    context: dict[str, weakref.WeakSet[Any]] = code_context.get_context(_judged.__code__)
    return context.setdefault("torch_fused_ops", weakref.WeakSet())


def _is_first(code: CodeType | None, policy: FusionPolicy) -> bool:
    """Record that code is compiled for a policy. Return True the first time since a reset, or for unknown code."""
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
        self.in_checkpoints: set[str] = set()  # paths of the modules inside checkpoints
        self.has_checkpoint = False
        self.attention: list[AttentionSite] | None = None  # stays None until a joint graph is partitioned
        self.has_ours, self.linears, self.graphs, self.is_new = False, 0, 0, False
        self.raised = sys.exc_info()[1]

    def add(self, graph: Graph, sites: Sequence[Site], modules: Collection[str], in_checkpoint: bool) -> None:
        self.sites += sites
        mlps = {site.module for site in sites if site.activation != DROPOUT}
        inside = tuple(f"{mlp}." if mlp else "" for mlp in mlps)
        self.modules.update(path for path in modules if f"{path}.".startswith(inside))
        self.all_modules.update(modules)
        self.in_checkpoints.update(modules if in_checkpoint else ())
        self.has_checkpoint |= in_checkpoint
        self.has_ours = self.has_ours or _has_ours(graph)
        if not self.has_sites:
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
        """Raise or warn if nothing is fused, or if a pattern or a level of the policy has no effect."""
        strict = self.policy.strict
        if not strict and fusion_events.is_unobserved():
            return
        nothing = self._nothing()
        if nothing and strict:
            raise UnfusedError(f"strict=True and nothing was fused in {self.title}: {nothing}")
        if nothing and self.warns_of_nothing:
            log.warning("nothing was fused in %s: %s", self.title, nothing)
        notes = self._without_effect()
        if notes and strict:
            raise UnfusedError(f"strict=True, but in {self.title}: {'; '.join(notes)}")
        for note in notes:
            log.warning("in %s a part of the policy has no effect: %s", self.title, note)

    def _nothing(self) -> str:
        """Return why no MLP was fused; "" if one was fused, or if the model has none."""
        missed = [site for site in self.sites if site.is_missed]
        effective = [site for site in self.attention or () if site.kind is None]
        linears = self.linears - sum(site.linears for site in effective)
        opaque = sum(site.kind is Kind.OPAQUE for site in self.unread)  # each may be a GEMM
        if not self.has_sites and linears + opaque > 1:
            between = f"{linears} linear layers" + (f" and {opaque} opaque calls" if opaque else "")
            where = "one graph" if self.graphs <= 1 else f"{self.graphs} graphs, and a site cannot span graphs"
            unread = "\n".join(("", *site_lines(self.unread)))
            text = f"no MLP was found between {between}, in {where}. {_EXPLAIN}{unread}"
            if self.policy.strict:
                return text
            return "" if effective else f"0 MLP sites; {text}"
        fused = self.has_ours or effective or any(site.op is not None for site in self.sites)
        if missed and not fused and not self.policy.strict:
            first = f"{missed[0].source}: {missed[0].reason}"
            return f"{len(missed)} MLP site{'s' * (len(missed) != 1)}, the first {first}. {_EXPLAIN}"
        return ""

    def _without_effect(self) -> list[str]:
        """Return a note on each part of the policy that has no effect on the model."""
        policy, attention = self.policy, self.attention
        inside = {"offload": self.all_modules}
        if self.has_checkpoint:
            inside["checkpoints"] = self.in_checkpoints
        if attention:
            inside["attention"] = {path for site in attention for path in site.modules}
        has_patterns = any(policy.patterns.values()) and (self.sites or attention is not None)
        notes = list(unmatched(policy, self.sites, self.modules, inside)) if has_patterns else []
        if attention == []:
            ending = "was found" if isinstance(policy.attention, str) else "matches its patterns"
            notes.append(f"{_setting(policy, 'attention')} has no effect: no attention {ending}")
        checkpointed = [site for site in self.sites if site.memory_kind is not None]
        if checkpointed:
            first, places = checkpointed[0], joined_each(site.module for site in checkpointed)
            notes.append(f"{places}: {first.level}; {first.refusals[-1].hint}")
        trains = any(site.memory for site in self.sites)
        if policy.checkpoints != "keep" and trains and not self.has_checkpoint:
            notes.append(
                f"{_setting(policy, 'checkpoints')} has no effect: no graph has a checkpoint. torch.compile does not "
                "capture a checkpoint around compiled code, or one written as a torch.autograd.Function"
            )
        without = (site for site in merged_attention(attention or ()) if site.kind is not None)
        return [*notes, *(f"attention='input' has no effect on {site.text}" for site in without)]


_EXPLAIN = "torch_fused_ops.explain(model, *args) lists every site"


def _setting(policy: FusionPolicy, name: str) -> str:
    value = getattr(policy, name)
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={dict(value)!r}"


def _linears(graph: Graph) -> int:
    """Return the number of GEMMs with weights in a graph, except convolutions."""
    analysis = GraphAnalysis(graph, {})
    return sum(analysis.weight_gemm(node) for node, call in analysis.calls.items() if call.name not in CONVOLUTIONS)


def _has_ours(graph: Graph) -> bool:
    """Return True if a graph, or a graph that it calls, has a fused activation, as in a model of FusedMLPs."""
    root = graph.owning_module
    graphs = [graph, *(m.graph for m in root.modules() if isinstance(m, GraphModule))] if root else [graph]
    return any(name_of(node.target) in CALLS for each in graphs for node in each.nodes if node.op == "call_function")
