"""Stage 1, recognise: find MLP activations in a captured graph by what they compute, and fuse each one.

``symbolic`` says what an expression means (the canonical form), ``prove`` which activation it is, ``graph`` reads an
FX graph in one vocabulary, ``normal`` brings it into an easier form and back, ``custom`` reads autograd functions,
``cone`` finds the calls that make an activation and checks that replacing them is sound, and ``rewrite`` edits the
graph. ``row_scale`` takes a factor of the rows along. ``dropout`` does both for the dropouts behind linear layers,
``gemms`` for the linear layers themselves, and ``tiles`` for an MLP as a whole. ``opaque`` names, for people, the calls
that hide what they compute.
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

from torch_fused_ops import capturing, functional
from torch_fused_ops.lowerings.partition import budgeted
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.reasons import NOT_AN_MLP, Kind, Reason, Refusal, excluded
from torch_fused_ops.recipes import RECIPES
from torch_fused_ops.sites import DROPOUT, Site
from torch_fused_ops.tiles import asked
from torch_fused_ops.virtual_gpu import stands_for
from torch_fused_ops.virtual_gpu.modules import module_stack

from . import dropout, gemms, opaque, row_scale, tiles
from .cone import Cone, examine, find, readers, results
from .graph import FREE, NONLINEAR, Facts, join, shown, tensor
from .normal import Normal
from .rewrite import fuse, operator_of, replace
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
        facts = Facts(graph, normal.calls)
        cones: dict[Node, Cone] = {}
        around: dict[Node, gemms.Linears] = {}
        refused: dict[Node, _Refused] = {}
        roots: dict[Node, Cone] = {}
        sites = list(find(facts))
        readers_of = dict(sites)
        for top, reading in sites:
            activation = None
            try:
                _check_readers(facts, top, reading)
                _check_known(facts, reading)
                _check_excluded(top, reading, policy)
                cone = examine(facts, top)
                if cone.root in roots:  # of two products with factors, or of one and a GEMM: one site
                    roots[cone.root].factors += cone.factors
                    continue
                activation = cone.verdict.activation
                _check_known(facts, list(gemms.producers(facts, cone.operands)))
                _check_freezing(cone)
                check_rounding(cone.root)
                cones[top] = cone
                roots[cone.root] = cone
            except Refusal as e:
                refused[top] = _Refused(e.reason, activation)
        _drop_shared(facts, cones, refused)
        for top, cone in cones.items():
            recipe = policy.gemm_of(enclosing_modules(_paths(top, readers_of[top])))
            if recipe in RECIPES:
                around[top] = gemms.linears(facts, cone.operands, results(facts, cone), recipe)
        called = list(_called(facts, policy))
        around.update((one.node, linears) for one, linears in called)
        free = not budgeted(graph)
        kept = {top: cone for top, cone in cones.items() if free and value_of(cone.root).requires_grad}  # for backward
        cut = {top: one for top, cone in kept.items() if (one := _tiling(facts, policy, cone, top, readers_of[top]))}
        cut = dict(zip(cut, tiles.apart(cut.values()), strict=True))
        recipes = {node: one.recipe for one in around.values() for node in one.found}
        moved = {top: _row_scale(facts, policy, cone, cut.get(top), recipes) for top, cone in kept.items()}
        scaled = {top: factor for top, factor in moved.items() if factor is not None}
        dropouts = _dropouts(facts, policy, cones)
        found = []
        for top, reading in sites:
            if top not in cones and top not in refused:
                continue
            site = _site(facts, normal, top, reading, cones.get(top) or refused[top])
            site = _with_linears(site, around[top]) if top in around else site
            site = replaced(site, memory=_level(policy, top, reading)) if top in kept else site
            site = replaced(site, reason=f"{site.reason}; {scaled[top]}") if top in scaled else site
            found.append((top, _with_tiles(site, cut[top]) if top in cut else site))
        found += [(one.node, _with_linears(_called_site(facts, one), linears)) for one, linears in called]
        found += [(site.node, _dropout_site(facts, site)) for site in dropouts]
        report = tuple(site for _, site in sorted(found, key=lambda one: facts.index[one[0]]))
        fused = [site for site in dropouts if site.reason is None]
        if apply:
            in_tiles = {top: one for top, one in cut.items() if one.tiles}
            whole = {top: cone for top, cone in cones.items() if top not in in_tiles}
            edits = [
                row_scale.fuse(graph, scaled[top]) if top in scaled else fuse(graph, cone)
                for top, cone in whole.items()
            ]
            edits += [*dropout.fuse(graph, fused), *gemms.fuse(graph, facts, recipes)]
            replace(graph, [*edits, *tiles.fuse(graph, in_tiles.values())])
            used.update(*(cone.calls for cone in cones.values()), *(site.calls for site in fused))
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
    facts, found = Facts(joined, normal.calls), []
    for node, call in facts.calls.items():
        if facts.passes(node) or not (node.users and _is_activation(facts, normal, node)):
            continue
        reading = list(readers(facts, node))
        if not reading:  # its pieces have taken its place
            continue
        gemms = [user for user in reading if facts.calls[user].gemm is not None]
        inside = any(facts.state[user] == NONLINEAR for user in reading)
        if facts.state[node] == NONLINEAR and not gemms and not inside:
            reason = Reason(Kind.NO_GEMM_READS, f"{NOT_AN_MLP}no GEMM reads it, but {_names(reading)}")
        elif facts.state[node] == FREE and gemms and call.name in RULES:
            sources = [facts.origin(a) for a in node.all_input_nodes]
            text = f"{NOT_AN_MLP}it reads {_names(sources)}, which no GEMM with weights has produced"
            reason = Reason(Kind.NO_GEMM_BEFORE, text)
        else:
            continue
        found.append(_site(facts, normal, node, gemms or [node], _Refused(reason)))
    tops = cache(_tops)
    for top, gemms in find(facts):
        own = copied[normal.spelled.get(top, top)][0]
        around = [copied[normal.spelled.get(part, part)][1] for part in _parts(facts, top, gemms)]
        cut = [operator for one in around for operator in one if not all(operator in other for other in around)]
        if cut and own not in tops(own.graph) and any(map(facts.weight_gemm, gemms)):
            reason = Reason(Kind.BOUNDARY, f"the boundary of {_names(cut)} lies between it and a GEMM")
            found.append(_site(facts, normal, top, gemms, _Refused(reason)))
    found += [_site(facts, normal, node, [node], _Refused(reason)) for node, reason in opaque.find(facts)]
    return tuple(found)


def _tops(graph: Graph) -> list[Node]:
    """The top calls of a graph's own sites, as the user has spelled them."""
    normal = Normal(graph)
    try:
        return [normal.spelled.get(top, top) for top, _ in find(Facts(graph, normal.calls))]
    finally:
        normal.restore()


def _parts(facts: Facts, top: Node, gemms: list[Node]) -> list[Node]:
    """What lies between the GEMMs that a site's operands come from and those that read it, these included."""
    found, pending = dict.fromkeys([top, *gemms]), [top]
    while pending and len(found) < 64:
        for source in facts.sources(pending.pop()):
            if source not in found and facts.state[source] != FREE:
                found[source] = None
                if facts.calls[source].gemm is None:
                    pending.append(source)
    return list(found)


def _is_activation(facts: Facts, normal: Normal, node: Node) -> bool:
    """Whether torch has the function, or one under it, as an activation: it is not x² in a norm."""
    return any(
        hasattr(torch.nn.functional, facts.calls[call].name) or call in normal.spelled or facts.custom(call)
        for call in _calls(facts, node)
    )


def _names(nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys(map(shown, nodes))) or "nothing"


def _check_readers(facts: Facts, top: Node, gemms: list[Node]) -> None:
    if not any(facts.weight_gemm(gemm) for gemm in gemms):
        text = f"{NOT_AN_MLP}read by a product of two computed tensors, as in attention"
        raise Refusal(Kind.COMPUTED_PRODUCT, text)


def _paths(top: Node, gemms: list[Node]) -> Iterator[str]:
    """The modules that a site is in."""
    return (path for node in (top, gemms[0]) for path in module_stack(node))


def _check_excluded(top: Node, gemms: list[Node], policy: FusionPolicy) -> None:
    """A pattern excludes a site by the path of any module that it is in; ``"encoder.*"`` means the encoder, too."""
    pattern = policy.excluding(enclosing_modules(_paths(top, gemms)))
    if pattern is not None:
        raise Refusal(*excluded(pattern))


def _check_known(facts: Facts, products: list[Node]) -> None:
    """Of what stands on one side of an activation one function at least must be known to be a product."""
    if products and all(facts.calls[node].unknown for node in products):
        name = shown(products[0])
        text = f"it is not known whether {name}, a custom autograd.Function, is a matrix product"
        raise Refusal(Kind.UNKNOWN_PRODUCT, text)


def _check_freezing(cone: Cone) -> None:
    import torch._inductor.config as inductor

    value = tensor(cone.root)
    on_cpu = value is not None and stands_for(value.device).type == "cpu"
    if inductor.freezing and not torch.is_grad_enabled() and on_cpu:
        raise Refusal(Kind.FREEZING, "CPU inference under freezing: oneDNN's fused linear and activation is kept")


def _drop_shared(facts: Facts, cones: dict[Node, Cone], refused: dict[Node, _Refused]) -> None:
    """Take out the cones whose inner values stay alive for others: the operator would come on top of what is there.

    An inner value may be another fused cone's too (two products of one activation), or its root.
    """
    while True:
        fused = {node for cone in cones.values() for node in cone.calls}
        roots = {cone.root for cone in cones.values()}
        outside: dict[Node, tuple[Node, Node]] = {}
        for top, cone in cones.items():
            for node in cone.calls:
                for user in node.users if node not in roots else ():
                    if user not in fused:
                        outside.setdefault(top, (node, user))
        if not outside:
            return
        for top, (node, user) in outside.items():
            text = f"{shown(user)} also reads the result of {shown(node)} inside the activation"
            refused[top] = _Refused(Reason(Kind.INNER_READER, text), cones.pop(top).verdict.activation)


def _site(facts: Facts, normal: Normal, top: Node, gemms: list[Node], found: Cone | _Refused) -> Site:
    where = _source(found.root if isinstance(found, Cone) and found.factors else top, gemms[0])
    reading = results(facts, found) if isinstance(found, Cone) else list(readers(facts, top))
    calls = found.calls if isinstance(found, Cone) else _calls(facts, top)
    own = dict.fromkeys(normal.spelled.get(node, node) for node in calls)
    spelling = tuple("autograd.Function" if facts.custom(node) else shown(node) for node in own)
    users = tuple(map(shown, reading))
    if isinstance(found, _Refused):
        return Site(None, found.activation, users=users, spelling=spelling, **_fields(found.reason), **where)
    proof = f"proved from {', '.join(spelling)}"
    factors = [f"{factor:.7g}" for factor in (found.verdict.scale, found.verdict.gate_scale)]
    if factors != ["1", "1"]:
        inside, outside = (f"{factor}·" if factor != "1" else "" for factor in reversed(factors))
        proof += f", as {outside}{found.verdict.activation}({inside}x)"
    others = [shown(user) for user in reading if facts.calls[user].gemm is None]
    if others:
        proof += f"; {', '.join(dict.fromkeys(others))} keeps the value too"
    if found.factors:
        proof += f"; {_names(found.factors)} by another tensor stays behind it"
    op, activation = f"fused::{operator_of(found)}", found.verdict.activation
    return Site(op, activation, reason=proof, users=users, spelling=spelling, **where)


def _called(facts: Facts, policy: FusionPolicy) -> Iterator[tuple[gemms.Called, gemms.Linears]]:
    """The activations that are operators already, with linear layers around that the policy wants in float8."""
    for one in gemms.called(facts):
        modules = enclosing_modules(_paths(one.node, one.reading or [one.node]))
        recipe = policy.gemm_of(modules)
        if recipe in RECIPES and policy.excluding(modules) is None:
            linears = gemms.linears(facts, one.operands, one.reading, recipe)
            if linears.found or linears.refused:
                yield one, linears


def _called_site(facts: Facts, one: gemms.Called) -> Site:
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


def _tiling(facts: Facts, policy: FusionPolicy, cone: Cone, top: Node, reading: list[Node]) -> tiles.Tiling | None:
    """How an MLP is cut into tiles, or why not; None where none are asked for."""
    count = asked(_level(policy, top, reading))
    if count is None:
        return None
    if policy.gemm_of(enclosing_modules(_paths(top, reading))) in RECIPES:
        return tiles.Tiling(reason=Reason(Kind.TILE_FP8, "its linear layers are in float8"))
    return tiles.tiling(facts, cone, count)


def _row_scale(
    facts: Facts, policy: FusionPolicy, cone: Cone, cut: tiles.Tiling | None, in_float8: Collection[Node]
) -> row_scale.RowScale | None:
    """The factor of the rows behind an MLP's last product that is taken in front of it.

    Under ``memory="off"`` what is kept is upstream's choice; a product in tiles, or in float8, is made anew by others.
    """
    found = row_scale.find(facts, cone) if policy.memory != "off" and not (cut and cut.tiles) else None
    return None if found is None or found.product in in_float8 else found


def _with_tiles(site: Site, found: tiles.Tiling) -> Site:
    if found.reason is None:
        return replaced(site, tiles=found.tiles)
    return replaced(site, tiles=1, tiles_reason=str(found.reason), tiles_kind=found.reason.kind)


def _dropouts(facts: Facts, policy: FusionPolicy, cones: dict[Node, Cone]) -> list[dropout.Dropout]:
    sites = dropout.find(facts, policy, {cone.root for cone in cones.values()})
    for site in sites:
        try:
            _check_excluded(site.node, [site.node], policy)
        except Refusal as e:
            site.reason = e.reason
    return sites


def _dropout_site(facts: Facts, site: dropout.Dropout) -> Site:
    last = site.calls[-1] if site.calls else site.node
    users, spelling = tuple(map(shown, readers(facts, last))), tuple(map(shown, site.calls or [site.node]))
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


def _calls(facts: Facts, top: Node) -> list[Node]:
    """The pointwise calls from GEMMs to a site that was refused, for people: what `examine` would have walked."""
    found, pending = {top}, [top]
    while pending and len(found) < 32:
        for source in facts.sources(pending.pop()):
            pointwise = facts.calls[source].name in RULES or facts.custom(source) is not None
            if source not in found and facts.state[source] == NONLINEAR and (pointwise or facts.passes(source)):
                found.add(source)
                pending.append(source)
    return sorted((node for node in found if not facts.passes(node)), key=facts.index.__getitem__)


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
_NOT_THE_USERS = (torch.__path__[0], capturing.__file__, functional.__file__, os.path.join(_OURS, "nn", ""))


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
