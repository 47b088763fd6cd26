"""Stage 1, recognize: find MLP activations in a captured graph by what they compute, and fuse each one.

``symbolic`` says what an expression means (the canonical form), ``prove`` which activation it is, ``graph`` reads an
FX graph in one vocabulary, ``canonical`` brings it into an easier form and back, ``autograd_functions`` reads these,
``subgraph`` finds the calls that make an activation and checks that replacing them is sound, and ``rewrite`` edits the
graph. ``per_row_scale`` takes a factor of the rows along. ``dropout`` does both for the dropouts behind linear layers,
``gemms`` for the linear layers themselves, and ``tiles`` for an MLP as a whole. ``unknown_calls`` names, for people,
the calls that hide what they compute.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace as replaced
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from torch_fused_ops import capture, functional
from torch_fused_ops.float8_recipes import RECIPES
from torch_fused_ops.lowerings.partition import budgeted
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.reasons import NOT_AN_MLP, Kind, Reason, Rejection, excluded
from torch_fused_ops.sites import DROPOUT, Site
from torch_fused_ops.tiles import asked
from torch_fused_ops.virtual_gpu import stands_for
from torch_fused_ops.virtual_gpu.modules import module_stack

from . import dropout, gemms, per_row_scale, tiles, unknown_calls
from .canonical import Normal
from .graph import CONVOLUTIONS, FREE, NONLINEAR, GraphAnalysis, join, shown, tensor
from .rewrite import fuse, operator_of, replace
from .subgraph import Subgraph, examine, find, readers, results
from .symbolic import RULES
from .values import check_rounding, value_of

__all__ = ["rewrite", "unread"]


class _Refused(NamedTuple):
    """Why a site is left alone, and which activation it was proved to be nonetheless."""

    reason: Reason
    activation: str | None = None


def rewrite(graph: Graph, policy: FusionPolicy, *, apply: bool = True) -> tuple[Site, ...]:
    """Find the graph's MLP activations, and replace those that are proved by fused operators, in place.

    Only this graph is read: Inductor calls its pre-grad passes for the subgraphs of higher-order operators itself
    (``torch._inductor.compile_fx._recursive_pre_grad_passes``, 2.11 to 2.15).

    Args:
        graph: a pre-grad graph from Dynamo or export, with recorded fake values.
        policy: what may be done.
        apply: False only says what would be done.

    Returns:
        Every site, fused or not, in graph order.

    Raises:
        Whatever goes wrong; the graph then is as it was.
    """
    normal = Normal(graph)
    used: set[Node] = set()
    try:
        analysis = GraphAnalysis(graph, normal.calls)
        subgraphs: dict[Node, Subgraph] = {}
        around: dict[Node, gemms.Linears] = {}
        refused: dict[Node, _Refused] = {}
        roots: dict[Node, Subgraph] = {}
        sites = list(find(analysis))
        readers_of = dict(sites)
        for top, reading in sites:
            activation = None
            try:
                _check_readers(analysis, top, reading)
                _check_known(analysis, reading)
                _check_excluded(top, reading, policy)
                subgraph = examine(analysis, top)
                if subgraph.root in roots:  # of two products with factors, or of one and a GEMM: one site
                    roots[subgraph.root].factors += subgraph.factors
                    continue
                activation = subgraph.match.activation
                _check_known(analysis, list(gemms.producers(analysis, subgraph.operands)))
                _check_freezing(subgraph)
                check_rounding(subgraph.root)
                subgraphs[top] = subgraph
                roots[subgraph.root] = subgraph
            except Rejection as e:
                refused[top] = _Refused(e.reason, activation)
        _drop_shared(analysis, subgraphs, refused)
        for top, subgraph in subgraphs.items():
            recipe = policy.gemm_of(enclosing_modules(_paths(top, readers_of[top])))
            if recipe in RECIPES:
                around[top] = gemms.linears(analysis, subgraph.operands, results(analysis, subgraph), recipe)
        called = list(_called(analysis, policy))
        around.update((one.node, linears) for one, linears in called)
        free = not budgeted(graph)
        kept = {
            top: subgraph for top, subgraph in subgraphs.items() if free and value_of(subgraph.root).requires_grad
        }  # for backward
        cut = {
            top: one
            for top, subgraph in kept.items()
            if (one := _tiling(analysis, policy, subgraph, top, readers_of[top]))
        }
        cut = dict(zip(cut, tiles.apart(cut.values()), strict=True))
        recipes = {node: one.recipe for one in around.values() for node in one.found}
        moved = {top: _row_scale(analysis, policy, subgraph, cut.get(top), recipes) for top, subgraph in kept.items()}
        scaled = {top: factor for top, factor in moved.items() if factor is not None}
        dropouts = _dropouts(analysis, policy, subgraphs)
        found = []
        for top, reading in sites:
            if top not in subgraphs and top not in refused:
                continue
            site = _site(analysis, normal, top, reading, subgraphs.get(top) or refused[top])
            site = _with_linears(site, around[top]) if top in around else site
            site = replaced(site, memory=_level(policy, top, reading)) if top in kept else site
            site = replaced(site, reason=f"{site.reason}; {scaled[top]}") if top in scaled else site
            found.append((top, _with_tiles(site, cut[top]) if top in cut else site))
        found += [(one.node, _with_linears(_called_site(analysis, one), linears)) for one, linears in called]
        found += [(site.node, _dropout_site(analysis, site)) for site in dropouts]
        report = tuple(site for _, site in sorted(found, key=lambda one: analysis.index[one[0]]))
        fused = [site for site in dropouts if site.reason is None]
        if apply:
            in_tiles = {top: one for top, one in cut.items() if one.tiles}
            whole = {top: subgraph for top, subgraph in subgraphs.items() if top not in in_tiles}
            edits = [
                per_row_scale.fuse(graph, scaled[top]) if top in scaled else fuse(graph, subgraph)
                for top, subgraph in whole.items()
            ]
            edits += [*dropout.fuse(graph, fused), *gemms.fuse(graph, analysis, recipes)]
            replace(graph, [*edits, *tiles.fuse(graph, in_tiles.values())])
            used.update(*(subgraph.calls for subgraph in subgraphs.values()), *(site.calls for site in fused))
        return report
    finally:
        normal.restore(used)


def unread(graph: Graph) -> tuple[Site, ...]:
    """Activations that are no sites, because no GEMM reads them, or because what they read is no GEMM's; and why.

    An activation before a norm is one, behind a convolution, or at either end of a graph. Higher-order operators'
    bodies are looked at together with the graph: what is cut by the boundary of one is listed, too; and so are calls
    between products that are not looked into. Nothing is changed.
    """
    joined, copied = join(graph)
    normal = Normal(joined)
    analysis, found = GraphAnalysis(joined, normal.calls), []
    for node, call in analysis.calls.items():
        if analysis.passes(node) or not (node.users and _is_activation(analysis, normal, node)):
            continue
        reading = list(readers(analysis, node))
        if not reading:  # its pieces have taken its place
            continue
        gemms = [user for user in reading if analysis.calls[user].gemm is not None]
        inside = any(analysis.state[user] == NONLINEAR for user in reading)
        if analysis.state[node] == NONLINEAR and not gemms and not inside:
            reason = Reason(Kind.NO_GEMM_READS, f"{NOT_AN_MLP}no GEMM reads it, but {_names(reading)}")
        elif analysis.state[node] == FREE and call.name in RULES and (gemms or _has_convolution(analysis, reading)):
            sources = [analysis.origin(a) for a in node.all_input_nodes]
            if not gemms and not _has_convolution(analysis, sources):
                continue
            text = f"{NOT_AN_MLP}it reads {_names(sources)}, which no GEMM with weights has produced"
            reason = Reason(Kind.NO_GEMM_BEFORE, text)
        else:
            continue
        found.append(_site(analysis, normal, node, gemms or [node], _Refused(reason)))
    tops = cache(_tops)
    for top, gemms in find(analysis):
        own = copied[normal.spelled.get(top, top)][0]
        around = [copied[normal.spelled.get(part, part)][1] for part in _parts(analysis, top, gemms)]
        cut = [operator for one in around for operator in one if not all(operator in other for other in around)]
        if cut and own not in tops(own.graph) and any(map(analysis.weight_gemm, gemms)):
            reason = Reason(Kind.BOUNDARY, f"the boundary of {_names(cut)} lies between it and a GEMM")
            found.append(_site(analysis, normal, top, gemms, _Refused(reason)))
    found += [_site(analysis, normal, node, [node], _Refused(reason)) for node, reason in unknown_calls.find(analysis)]
    return tuple(found)


def _tops(graph: Graph) -> list[Node]:
    """The top calls of a graph's own sites, as the user has spelled them."""
    normal = Normal(graph)
    try:
        return [normal.spelled.get(top, top) for top, _ in find(GraphAnalysis(graph, normal.calls))]
    finally:
        normal.restore()


def _parts(analysis: GraphAnalysis, top: Node, gemms: list[Node]) -> list[Node]:
    """What lies between the GEMMs that a site's operands come from and those that read it, these included."""
    found, pending = dict.fromkeys([top, *gemms]), [top]
    while pending and len(found) < 64:
        for source in analysis.sources(pending.pop()):
            if source not in found and analysis.state[source] != FREE:
                found[source] = None
                if analysis.calls[source].gemm is None:
                    pending.append(source)
    return list(found)


def _is_activation(analysis: GraphAnalysis, normal: Normal, node: Node) -> bool:
    """Whether torch has the function, or one under it, as an activation: it is not x² in a norm."""
    return any(
        hasattr(torch.nn.functional, analysis.calls[call].name) or call in normal.spelled or analysis.custom(call)
        for call in _calls(analysis, node)
    )


def _has_convolution(analysis: GraphAnalysis, nodes: list[Node]) -> bool:
    return any(analysis.calls[node].name in CONVOLUTIONS for node in nodes if node in analysis.calls)


def _names(nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys(map(shown, nodes))) or "nothing"


def _check_readers(analysis: GraphAnalysis, top: Node, gemms: list[Node]) -> None:
    if not any(analysis.weight_gemm(gemm) for gemm in gemms):
        text = f"{NOT_AN_MLP}read by a product of two computed tensors, as in attention"
        raise Rejection(Kind.COMPUTED_PRODUCT, text)


def _paths(top: Node, gemms: list[Node]) -> Iterator[str]:
    """The modules that a site is in."""
    return (path for node in (top, gemms[0]) for path in module_stack(node))


def _check_excluded(top: Node, gemms: list[Node], policy: FusionPolicy) -> None:
    """A pattern excludes a site by the path of any module that it is in; ``"encoder.*"`` means the encoder, too."""
    pattern = policy.excluding(enclosing_modules(_paths(top, gemms)))
    if pattern is not None:
        raise Rejection(*excluded(pattern))


def _check_known(analysis: GraphAnalysis, products: list[Node]) -> None:
    """Of what stands on one side of an activation one function at least must be known to be a product."""
    if products and all(analysis.calls[node].unknown for node in products):
        name = shown(products[0])
        text = f"it is not known whether {name}, a custom autograd.Function, is a matrix product"
        raise Rejection(Kind.UNKNOWN_PRODUCT, text)


def _check_freezing(subgraph: Subgraph) -> None:
    import torch._inductor.config as inductor

    value = tensor(subgraph.root)
    on_cpu = value is not None and stands_for(value.device).type == "cpu"
    if inductor.freezing and not torch.is_grad_enabled() and on_cpu:
        raise Rejection(Kind.FREEZING, "CPU inference under freezing: oneDNN's fused linear and activation is kept")


def _drop_shared(analysis: GraphAnalysis, subgraphs: dict[Node, Subgraph], refused: dict[Node, _Refused]) -> None:
    """Take out the subgraphs whose inner values stay alive for others: the operator would come on top of what is there.

    An inner value may be another fused subgraph's too (two products of one activation), or its root.
    """
    while True:
        fused = {node for subgraph in subgraphs.values() for node in subgraph.calls}
        roots = {subgraph.root for subgraph in subgraphs.values()}
        outside: dict[Node, tuple[Node, Node]] = {}
        for top, subgraph in subgraphs.items():
            for node in subgraph.calls:
                for user in node.users if node not in roots else ():
                    if user not in fused:
                        outside.setdefault(top, (node, user))
        if not outside:
            return
        for top, (node, user) in outside.items():
            text = f"{shown(user)} also reads the result of {shown(node)} inside the activation"
            refused[top] = _Refused(Reason(Kind.INNER_READER, text), subgraphs.pop(top).match.activation)


def _site(analysis: GraphAnalysis, normal: Normal, top: Node, gemms: list[Node], found: Subgraph | _Refused) -> Site:
    where = _source(found.root if isinstance(found, Subgraph) and found.factors else top, gemms[0])
    reading = results(analysis, found) if isinstance(found, Subgraph) else list(readers(analysis, top))
    calls = found.calls if isinstance(found, Subgraph) else _calls(analysis, top)
    own = dict.fromkeys(normal.spelled.get(node, node) for node in calls)
    spelling = tuple("autograd.Function" if analysis.custom(node) else shown(node) for node in own)
    users = tuple(map(shown, reading))
    if isinstance(found, _Refused):
        return Site(None, found.activation, users=users, spelling=spelling, **_fields(found.reason), **where)
    proof = f"proved from {', '.join(spelling)}"
    factors = [f"{factor:.7g}" for factor in (found.match.scale, found.match.gate_scale)]
    if factors != ["1", "1"]:
        inside, outside = (f"{factor}·" if factor != "1" else "" for factor in reversed(factors))
        proof += f", as {outside}{found.match.activation}({inside}x)"
    others = [shown(user) for user in reading if analysis.calls[user].gemm is None]
    if others:
        proof += f"; {', '.join(dict.fromkeys(others))} keeps the value too"
    if found.factors:
        proof += f"; {_names(found.factors)} by another tensor stays behind it"
    op, activation = f"fused::{operator_of(found)}", found.match.activation
    return Site(op, activation, reason=proof, users=users, spelling=spelling, **where)


def _called(analysis: GraphAnalysis, policy: FusionPolicy) -> Iterator[tuple[gemms.Called, gemms.Linears]]:
    """The activations that are operators already, with linear layers around that the policy wants in float8."""
    for one in gemms.called(analysis):
        modules = enclosing_modules(_paths(one.node, one.reading or [one.node]))
        recipe = policy.gemm_of(modules)
        if recipe in RECIPES and policy.excluding(modules) is None:
            linears = gemms.linears(analysis, one.operands, one.reading, recipe)
            if linears.found or linears.refused:
                yield one, linears


def _called_site(analysis: GraphAnalysis, one: gemms.Called) -> Site:
    where, users = _source(one.node, (one.reading or [one.node])[0]), tuple(map(shown, one.reading))
    reason = "the model calls the operator itself"
    return Site(
        f"fused::{one.op.name}", one.activation, reason=reason, users=users, spelling=(shown(one.node),), **where
    )


def _with_linears(site: Site, linears: gemms.Linears) -> Site:
    refused = "; ".join(dict.fromkeys(f"{shown(node)}: {reason}" for node, reason in linears.refused))
    kind = linears.refused[0][1].kind if linears.refused else None
    return replaced(site, gemm=linears.recipe if linears.found else "", gemm_reason=refused, gemm_kind=kind)


def _level(policy: FusionPolicy, top: Node, reading: list[Node]) -> str:
    """The policy's memory level for a site."""
    return policy.memory_of(enclosing_modules(_paths(top, reading)))


def _tiling(
    analysis: GraphAnalysis, policy: FusionPolicy, subgraph: Subgraph, top: Node, reading: list[Node]
) -> tiles.Tiling | None:
    """How an MLP is cut into tiles, or why not; None where none are asked for."""
    count = asked(_level(policy, top, reading))
    if count is None:
        return None
    if policy.gemm_of(enclosing_modules(_paths(top, reading))) in RECIPES:
        return tiles.Tiling(reason=Reason(Kind.TILE_FP8, "its linear layers are in float8"))
    return tiles.tiling(analysis, subgraph, count)


def _row_scale(
    analysis: GraphAnalysis,
    policy: FusionPolicy,
    subgraph: Subgraph,
    cut: tiles.Tiling | None,
    in_float8: Collection[Node],
) -> per_row_scale.RowScale | None:
    """The factor of the rows behind an MLP's last product that is taken in front of it.

    Under ``memory="off"`` what is kept is upstream's choice; a product in tiles, or in float8, is made anew by others.
    """
    found = per_row_scale.find(analysis, subgraph) if policy.memory != "off" and not (cut and cut.tiles) else None
    return None if found is None or found.product in in_float8 else found


def _with_tiles(site: Site, found: tiles.Tiling) -> Site:
    if found.reason is None:
        return replaced(site, tiles=found.tiles)
    return replaced(site, tiles=1, tiles_reason=str(found.reason), tiles_kind=found.reason.kind)


def _dropouts(analysis: GraphAnalysis, policy: FusionPolicy, subgraphs: dict[Node, Subgraph]) -> list[dropout.Dropout]:
    sites = dropout.find(analysis, policy, {subgraph.root for subgraph in subgraphs.values()})
    for site in sites:
        try:
            _check_excluded(site.node, [site.node], policy)
        except Rejection as e:
            site.reason = e.reason
    return sites


def _dropout_site(analysis: GraphAnalysis, site: dropout.Dropout) -> Site:
    last = site.calls[-1] if site.calls else site.node
    users, spelling = tuple(map(shown, readers(analysis, last))), tuple(map(shown, site.calls or [site.node]))
    where = _source(site.node, site.node)
    if site.reason is not None:
        return Site(None, DROPOUT, users=users, spelling=spelling, **_fields(site.reason), **where)
    done = "its mask is made again from a seed"
    if site.left:
        done += f"; the sum that reads it stays: {site.left}"
    return Site(dropout.OPERATOR, DROPOUT, reason=done, users=users, spelling=spelling, **where)


def _fields(reason: Reason) -> dict[str, Any]:
    """A refusal's reason, as a Site's fields."""
    return {"reason": str(reason), "kind": reason.kind, "excluded_by": reason.excluded_by}


def _calls(analysis: GraphAnalysis, top: Node) -> list[Node]:
    """The pointwise calls from GEMMs to a site that was refused, for people: what `examine` would have walked."""
    found, pending = {top}, [top]
    while pending and len(found) < 32:
        for source in analysis.sources(pending.pop()):
            pointwise = analysis.calls[source].name in RULES or analysis.custom(source) is not None
            if source not in found and analysis.state[source] == NONLINEAR and (pointwise or analysis.passes(source)):
                found.add(source)
                pending.append(source)
    return sorted((node for node in found if not analysis.passes(node)), key=analysis.index.__getitem__)


def _module(root: Node, gemm: Node) -> str:
    """The path of the innermost module that holds both the activation and the GEMM that reads it: the MLP."""
    paths = [module_stack(node) for node in (root, gemm)]
    common = []
    for a, b in zip(*paths, strict=False):
        if a != b:
            break
        common.append(a)
    return common[-1] if common else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(?: +([^\n]*))?')
_OURS = os.path.dirname(functional.__file__)
_NOT_THE_USERS = (torch.__path__[0], capture.__file__, functional.__file__, os.path.join(_OURS, "nn", ""))


def _source(root: Node, gemm: Node) -> dict[str, Any]:
    """Where the user's code calls it (or, in nn.Sequential, torch's own module), as a Site's fields."""
    frames = _FRAME.findall(root.meta.get("stack_trace") or "")
    frames = [f for f in frames if not f[0].startswith(_NOT_THE_USERS)]
    module = path = _module(root, gemm)
    location = code = ""
    if frames:
        file, line, code = frames[-1]
        location = f"{file}:{line}"
        where = location.rsplit("/", 1)[-1]
    elif root.meta.get("nn_module_stack"):
        _, kind = list(root.meta["nn_module_stack"].values())[-1]
        where, path = f"nn.{getattr(kind, '__name__', kind)}", path or module_stack(root)[-1]
    else:
        where = "unknown"
    source = f"{where} in {path}" if path else where
    return {"source": source, "module": module, "location": location, "code": code.strip()}
