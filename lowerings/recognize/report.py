"""Describe sites for reports: the place in the user's code, and the proof or the reason. No decision is made here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from torch.fx import Node

from torch_fused_ops import policy
from torch_fused_ops.graphs import capture
from torch_fused_ops.graphs.modules import module_stack
from torch_fused_ops.graphs.reasons import Reason
from torch_fused_ops.graphs.sites import DROPOUT, Site
from torch_fused_ops.policy import enclosing_modules

from . import dropout
from .canonical import Canonical
from .gemms import Called, Linears
from .graph import NONLINEAR, GraphAnalysis, label, names_of, reachable
from .per_row_scale import RowScale
from .rewrite import operator_of
from .subgraph import Subgraph, readers, results
from .symbolic import RULES
from .tiles import Tiling


def modules_of(*nodes: Node) -> set[str]:
    """Return the paths of all modules that contain one of the nodes."""
    return enclosing_modules(path for node in nodes for path in module_stack(node))


@dataclass
class Candidate:
    """A site before its edit and its report: the output node, the GEMMs that read it, and the decisions about it.

    Attributes:
        subgraph: the proved activation; None if the site is not fused.
        rejection: the reason why the site is not fused; None if it is fused.
        unrounded: the proved activation if only a setting that requires eager's rounding prevents fusion, or None.
        activation: the name of the proved activation, fused or not; None if no activation is proved.
        linears: the linear layers of its MLP, if the policy requests float8; else None.
        memory: the memory level of a fused or ``unrounded`` activation, if something is saved for backward; else "".
        tiling: the tiles of its MLP, or the reason why it is not tiled; None if the policy requests no tiles.
        row_scale: the per-row scale that is moved through the next GEMM, or None.
    """

    node: Node
    gemms: list[Node]
    subgraph: Subgraph | None = None
    rejection: Reason | None = None
    unrounded: Subgraph | None = None
    activation: str | None = None
    linears: Linears | None = None
    memory: str = ""
    tiling: Tiling | Reason | None = None
    row_scale: RowScale | None = None


def site_of(analysis: GraphAnalysis, canonical: Canonical, candidate: Candidate) -> Site:
    """Describe a candidate."""
    subgraph, rejection, node = candidate.subgraph, candidate.rejection, candidate.node
    calls = subgraph.calls if subgraph else calls_of(analysis, node)
    users = results(analysis, subgraph) if subgraph else list(readers(analysis, node))
    originals = dict.fromkeys(canonical.originals.get(call, call) for call in calls)
    names = ["autograd.Function" if analysis.custom(call) else label(call) for call in originals]
    located = subgraph.output if subgraph and subgraph.factors else node
    fields = _source(located, candidate.gemms[0])
    fields |= {"users": tuple(map(label, users)), "spelling": tuple(names), "memory": candidate.memory}
    fields |= _float8(candidate.linears)
    if subgraph is None:
        assert rejection is not None
        return Site(None, candidate.activation, **fields, **_rejected(rejection))
    match = subgraph.match
    proof = f"proved from {', '.join(names)}"
    factors = [f"{factor:.7g}" for factor in (match.scale, match.gate_scale)]
    if factors != ["1", "1"]:
        inside, outside = (f"{factor}·" if factor != "1" else "" for factor in reversed(factors))
        proof += f", as {outside}{match.activation}({inside}x)"
    other_readers = [user for user in users if analysis.calls[user].gemm is None]
    if other_readers:
        proof += f"; also read by {names_of(other_readers)}"
    if subgraph.factors:
        proof += f"; {names_of(subgraph.factors)} by another tensor stays behind it"
    if candidate.row_scale:
        proof += f"; {candidate.row_scale}"
    if isinstance(candidate.tiling, Tiling):
        fields["tiles"] = candidate.tiling.count
    elif candidate.tiling:
        fields |= {"tiles": 1, "tiles_reason": str(candidate.tiling), "tiles_kind": candidate.tiling.kind}
    return Site(f"fused::{operator_of(subgraph)}", match.activation, reason=proof, **fields)


def called_site(call: Called, linears: Linears) -> Site:
    """Describe an operator that the model calls itself, with linear layers that may become float8."""
    fields = _source(call.node, (call.users or [call.node])[0]) | _float8(linears)
    fields |= {"users": tuple(map(label, call.users)), "spelling": (label(call.node),)}
    return Site(f"fused::{call.op.name}", call.activation, reason="the model calls the operator itself", **fields)


def dropout_site(analysis: GraphAnalysis, site: dropout.Dropout) -> Site:
    """Describe a dropout."""
    users = tuple(map(label, readers(analysis, site.node)))
    fields = {"users": users, "spelling": (label(site.node),), **_source(site.node, site.node)}
    if site.reason is not None:
        return Site(None, DROPOUT, **_rejected(site.reason), **fields)
    return Site(dropout.OPERATOR, DROPOUT, reason="backward recomputes its mask from a seed", **fields)


def _float8(linears: Linears | None) -> dict[str, Any]:
    """Return the Site fields that describe its linear layers."""
    if linears is None:
        return {}
    reasons = "; ".join(dict.fromkeys(f"{label(node)}: {reason}" for node, reason in linears.rejected))
    kind = linears.rejected[0][1].kind if linears.rejected else None
    return {"gemm": linears.recipe if linears.nodes else "", "gemm_reason": reasons, "gemm_kind": kind}


def _rejected(reason: Reason) -> dict[str, Any]:
    """Return a rejection's reason as Site fields."""
    return {"reason": str(reason), "kind": reason.kind, "excluded_by": reason.excluded_by}


def calls_of(analysis: GraphAnalysis, output: Node) -> list[Node]:
    """Return the pointwise calls from GEMMs to a rejected site's output node."""

    def sources(node: Node) -> Iterator[Node]:
        for source in analysis.sources(node):
            is_pointwise = analysis.calls[source].name in RULES or analysis.custom(source) is not None
            if analysis.state[source] == NONLINEAR and (is_pointwise or analysis.is_passthrough(source)):
                yield source

    calls = (node for node in islice(reachable([output], sources), 32) if not analysis.is_passthrough(node))
    return sorted(calls, key=analysis.index.__getitem__)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(?: +([^\n]*))?')
_OURS = os.path.dirname(policy.__file__)
_OUR_FRAMES = (os.path.join(_OURS, "functional.py"), os.path.join(_OURS, "nn", ""))
_NOT_THE_USERS = (torch.__path__[0], capture.__file__, *_OUR_FRAMES)


def _source(node: Node, gemm: Node) -> dict[str, Any]:
    """Return Site fields with the line of user code that calls a node; in nn.Sequential, with the torch module.

    The field ``module`` is the innermost module that contains both the node and the GEMM: the MLP.
    """
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    pairs = zip(module_stack(node), module_stack(gemm), strict=False)
    common = [path for path, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    module = path = common[-1] if common else ""
    location = code = ""
    if frames:
        file, line, code = frames[-1]
        location = f"{file}:{line}"
        where = location.rsplit("/", 1)[-1]
    elif node.meta.get("nn_module_stack"):
        _, kind = list(node.meta["nn_module_stack"].values())[-1]
        where, path = f"nn.{getattr(kind, '__name__', kind)}", path or module_stack(node)[-1]
    else:
        where = "unknown"
    source = f"{where} in {path}" if path else where
    return {"source": source, "module": module, "location": location, "code": code.strip()}
