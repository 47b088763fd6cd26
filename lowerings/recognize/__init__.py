"""Recognizer of the pre-grad pass: find MLP activations in a captured graph by their formulas, and fuse them.

``rewrite`` is the algorithm. ``canonical`` converts the graph to an easier form and back. ``graph`` gives each function
one name. ``subgraph`` finds an activation's calls and checks that replacing them is sound. ``symbolic`` and ``prove``
name the activation; ``autograd_functions`` reads custom functions for them. ``rewrite.py`` edits the graph. ``gemms``
handles an MLP's linear layers, and ``dropout`` the dropouts of their results. ``tiles`` splits an MLP's tokens.
``per_row_scale`` moves a factor of the rows through a GEMM. ``report`` and ``unread`` describe the result for people.

A proof is about more than the formula. *Derivatives*: torch's functions have different derivatives at a kink (at 0, the
derivative of relu is 0, of maximum 1/2), so each kink carries its derivative if a gradient is needed. *Rounding*: if
large terms of a sum cancel, mostly rounding error remains, so the sum is rejected. *Memory*: pre-grad graphs write in
place. So every value must equal the formula when it is read, and until backward if the operator saves it. A call
without a schema is assumed to write every argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.graphs.modules import mark_activation
from torch_fused_ops.graphs.reasons import NOT_AN_MLP, Kind, Reason, Rejection
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.graphs.target import target_device
from torch_fused_ops.lowerings import compat
from torch_fused_ops.lowerings.partition import budgeted
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.settings.tiles import requested_tiles

from . import dropout, gemms, per_row_scale, tiles
from .canonical import Canonical
from .graph import GraphAnalysis, label, tensor
from .report import Candidate, called_site, dropout_site, modules_of, site_of
from .rewrite import Edit, Snapshot, fuse, replace
from .subgraph import Subgraph, find_sites, match_site, results
from .tiles import Tiling
from .unread import unread
from .values import check_rounding, value_of

__all__ = ["rewrite", "unread"]


def rewrite(graph: Graph, policy: FusionPolicy, *, apply: bool = True) -> tuple[Site, ...]:
    """Find the graph's MLP activations, and replace proved activations by fused operators, in place.

    Subgraphs of higher-order operators are not read: Inductor calls its pre-grad passes for them
    (``torch._inductor.compile_fx._recursive_pre_grad_passes``, 2.11 to 2.15).

    Args:
        graph: a pre-grad graph from Dynamo or export, with recorded fake values.
        policy: the fusion policy.
        apply: False leaves the graph unchanged and only returns the sites.

    Returns:
        The sites in graph order, fused or not; then MLPs cut by DDPOptimizer whose activation ends here.

    Raises:
        Exception: any failure of the recognizer. The graph is then unchanged.
    """
    calls = {_call_of(node) for node in graph.nodes if node.op != "placeholder"}
    unsplit = compat.split_from(graph)
    before_split = [] if unsplit is None else _sites_before_split(unsplit, policy)  # may raise: the graph is unchanged
    sites = _rewrite(graph, policy, apply)
    calls -= {call for call, site in sites if site.is_mlp}
    cut = {call: site for call, site in before_split if call in calls}
    return (*(site for call, site in sites if call not in cut), *cut.values())


_unsplit_sites: WeakKeyDictionary[GraphModule, list[tuple[Any, Site]]] = WeakKeyDictionary()


def _call_of(node: Node) -> Any:
    """Return a captured call's identity. Copies of the graph share it, but rename nodes."""
    return id(node.meta.get("example_value")), node.target


def _sites_before_split(unsplit: GraphModule, policy: FusionPolicy) -> list[tuple[Any, Site]]:
    """Return (call, site) for each MLP of a graph before DDPOptimizer's split, refused as if the split cut it."""
    if unsplit not in _unsplit_sites:
        reason = Reason(Kind.DDP_BUCKET, "a boundary of DDP's buckets lies in the MLP, and torch.compile splits there")

        def as_cut(site: Site) -> Site:
            return dataclasses.replace(site, op=None, reason=str(reason), kind=reason.kind) if site.op else site

        sites = _rewrite(unsplit.graph, policy, apply=False)
        _unsplit_sites[unsplit] = [(call, as_cut(site)) for call, site in sites if site.is_mlp]
    return _unsplit_sites[unsplit]


def _rewrite(graph: Graph, policy: FusionPolicy, apply: bool) -> list[tuple[Any, Site]]:
    """Rewrite one graph; return each site with the identity of its call."""
    before = Snapshot(graph)
    try:
        canonical = Canonical(graph)
        analysis = GraphAnalysis(graph, canonical.calls)
        candidates = _candidates(analysis, policy)
        proved = [(candidate, candidate.subgraph) for candidate in candidates if candidate.subgraph]
        _choose(analysis, policy, candidates, saves=not budgeted(graph))
        called = list(_called(analysis, policy))
        around = [*(candidate.linears for candidate, _ in proved), *(linears for _, linears in called)]
        recipes: dict[Node, str] = {}
        for linears in filter(None, around):
            recipes |= dict.fromkeys(linears.nodes, linears.recipe)
        if policy.memory != "off":  # otherwise PyTorch chooses the values saved for backward
            for candidate, subgraph in proved:
                if candidate.memory and not isinstance(candidate.tiling, Tiling):
                    candidate.row_scale = per_row_scale.find(analysis, subgraph, recipes)
        dropouts = dropout.find(analysis, policy)
        sites = [(candidate.node, site_of(analysis, canonical, candidate)) for candidate in candidates]
        sites += [(call.node, called_site(call, linears)) for call, linears in called]
        sites += [(site.node, dropout_site(analysis, site)) for site in dropouts]
        fused = [site for site in dropouts if site.reason is None]
        edits = [*_edits(proved), *dropout.fuse(fused), *gemms.fuse(analysis, recipes)] if apply else []
        unrounded = [candidate.unrounded for candidate in candidates if candidate.unrounded]
        for subgraph in unrounded if apply else ():
            for node in subgraph.calls:
                mark_activation(canonical.originals.get(node, node), subgraph.match.clamp)
        if edits:
            replace(graph, edits)
            replaced = {site.node for site in fused}.union(*(subgraph.calls for _, subgraph in proved))
            canonical.restore(replaced)
        else:
            before.restore()
    except BaseException:
        before.restore()
        raise
    in_order = sorted(sites, key=lambda pair: analysis.index[pair[0]])
    return [(_call_of(canonical.originals.get(node, node)), site) for node, site in in_order]


def _edits(proved: list[tuple[Candidate, Subgraph]]) -> Iterator[Edit]:
    for candidate, subgraph in proved:
        if isinstance(candidate.tiling, Tiling):
            yield tiles.fuse(candidate.tiling)
        else:
            yield per_row_scale.fuse(candidate.row_scale) if candidate.row_scale else fuse(subgraph)


def _candidates(analysis: GraphAnalysis, policy: FusionPolicy) -> list[Candidate]:
    """Return every site, with its subgraph or the reason it is not fused."""
    candidates: list[Candidate] = []
    by_output: dict[Node, Subgraph] = {}
    for node, users in find_sites(analysis):
        candidate = Candidate(node, users)
        try:
            if not any(map(analysis.weight_gemm, users)):
                text = f"{NOT_AN_MLP}read by a GEMM of two computed tensors, as in attention"
                raise Rejection(Kind.COMPUTED_PRODUCT, text)
            if (pattern := policy.excluding(modules_of(node, users[0]))) is not None:
                raise Rejection(Kind.EXCLUDED, f"the policy excludes {pattern!r}", pattern)
            subgraph = match_site(analysis, node)
            if subgraph.output in by_output:  # two factors, or a factor and a GEMM, read the same activation
                by_output[subgraph.output].factors += subgraph.factors
                continue
            candidate.activation = subgraph.match.activation
            _check_freezing(subgraph)
            candidate.unrounded = subgraph
            check_rounding(subgraph.output)
            candidate.unrounded = None
            candidate.subgraph = by_output[subgraph.output] = subgraph
        except Rejection as rejection:
            candidate.rejection = rejection.reason
        candidates.append(candidate)
    _drop_shared(candidates)
    return candidates


def _choose(analysis: GraphAnalysis, policy: FusionPolicy, candidates: list[Candidate], *, saves: bool) -> None:
    """Apply the policy to each proved activation: linear layers in float8, a memory level, tiles.

    If eager's rounding is required, only the levels without tiles apply, and not to an autograd function: tracing does
    not copy marks into its body.
    """
    in_tiles = set[Node]()
    for candidate in candidates:
        subgraph = candidate.subgraph or candidate.unrounded
        if subgraph is None:
            continue
        modules = modules_of(candidate.node, candidate.gemms[0])
        recipe = policy.gemm_of(modules)
        if recipe in RECIPES and candidate.rejection:
            candidate.linears = gemms.Linears(recipe, rejected=[(candidate.gemms[0], candidate.rejection)])
        elif recipe in RECIPES:
            candidate.linears = gemms.linears(analysis, subgraph.inputs, results(analysis, subgraph), recipe)
        is_unmarked = bool(candidate.rejection) and any(map(analysis.custom, subgraph.calls))
        if is_unmarked or not (saves and value_of(subgraph.output).requires_grad):
            continue
        candidate.memory = policy.memory_of(modules)
        count = requested_tiles(candidate.memory)
        if candidate.rejection:
            candidate.memory = candidate.memory if count is None else "input"
            continue
        try:
            if count is not None and recipe in RECIPES:
                raise Rejection(Kind.TILE_FP8, "its linear layers are in float8")
            candidate.tiling = None if count is None else tiles.tiling(analysis, subgraph, count, in_tiles)
        except Rejection as rejection:
            candidate.tiling = rejection.reason


def _check_freezing(subgraph: Subgraph) -> None:
    import torch._inductor.config as inductor

    value = tensor(subgraph.output)
    on_cpu = value is not None and target_device(value.device).type == "cpu"
    if inductor.freezing and not torch.is_grad_enabled() and on_cpu:
        raise Rejection(Kind.FREEZING, "CPU inference under freezing: oneDNN fuses the linear layer and the activation")


def _drop_shared(candidates: list[Candidate]) -> None:
    """Reject the subgraphs whose inner values other nodes read, since these values would be computed anyway.

    Readers in fused subgraphs (two multiplications by one activation) and values that are outputs are exempt.
    """
    dropped = True
    while dropped:
        dropped = False
        proved = [(candidate, candidate.subgraph) for candidate in candidates if candidate.subgraph]
        fused = {node for _, subgraph in proved for node in subgraph.calls}
        outputs = {subgraph.output for _, subgraph in proved}
        for candidate, subgraph in proved:
            inner = [node for node in subgraph.calls if node not in outputs]
            outside = [(node, user) for node in inner for user in node.users if user not in fused]
            if outside:
                node, user = outside[0]
                text = f"{label(user)} also reads the result of {label(node)} inside the activation"
                candidate.subgraph, candidate.rejection = None, Reason(Kind.INNER_READER, text)
                dropped = True


def _called(analysis: GraphAnalysis, policy: FusionPolicy) -> Iterator[tuple[gemms.Called, gemms.Linears]]:
    """Yield the activations that are already operators, with the linear layers for which the policy requests float8."""
    for call in gemms.called(analysis):
        modules = modules_of(call.node, (call.users or [call.node])[0])
        recipe = policy.gemm_of(modules)
        if recipe in RECIPES and policy.excluding(modules) is None:
            linears = gemms.linears(analysis, call.inputs, call.users, recipe)
            if linears.nodes or linears.rejected:
                yield call, linears
