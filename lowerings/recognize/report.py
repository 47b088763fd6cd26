"""Sites for people: the place in the user's code, and the proof or the reason.

Nothing here decides what is fused.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import takewhile
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
from .graph import NONLINEAR, GraphAnalysis, shown
from .per_row_scale import RowScale
from .rewrite import operator_of
from .subgraph import Subgraph, readers, results
from .symbolic import RULES
from .tiles import Tiling


def modules_of(*nodes: Node) -> set[str]:
    """The paths of all modules that one of the nodes is in."""
    return enclosing_modules(path for node in nodes for path in module_stack(node))


@dataclass
class Candidate:
    """A site on its way to an edit and a report: its output node, the GEMMs that read it, and all that is decided.

    Attributes:
        subgraph: the proved activation; None where it is not fused.
        rejection: the reason it is not fused.
        activation: the name that was proved, fused or not.
        linears: the linear layers around it, where the policy asks for float8.
        memory: the memory level, where something is saved for backward.
        tiling: the tiles of its MLP, where the policy asks for tiles; or the reason that it stays whole.
    """

    node: Node
    gemms: list[Node]
    subgraph: Subgraph | None = None
    rejection: Reason | None = None
    activation: str | None = None
    linears: Linears | None = None
    memory: str = ""
    tiling: Tiling | Reason | None = None
    row_scale: RowScale | None = None


def site_of(analysis: GraphAnalysis, canonical: Canonical, candidate: Candidate) -> Site:
    """The report of a candidate."""
    subgraph, rejection, node = candidate.subgraph, candidate.rejection, candidate.node
    calls = subgraph.calls if subgraph else calls_of(analysis, node)
    users = results(analysis, subgraph) if subgraph else list(readers(analysis, node))
    names = [
        "autograd.Function" if analysis.custom(call) else shown(call)
        for call in dict.fromkeys(canonical.originals.get(call, call) for call in calls)
    ]
    fields = _source(subgraph.output if subgraph and subgraph.factors else node, candidate.gemms[0])
    fields |= {"users": tuple(map(shown, users)), "spelling": tuple(names)}
    if subgraph is None:
        assert rejection is not None
        return Site(None, candidate.activation, **_rejected(rejection), **fields)
    match = subgraph.match
    proof = f"proved from {', '.join(names)}"
    factors = [f"{factor:.7g}" for factor in (match.scale, match.gate_scale)]
    if factors != ["1", "1"]:
        inside, outside = (f"{factor}·" if factor != "1" else "" for factor in reversed(factors))
        proof += f", as {outside}{match.activation}({inside}x)"
    others = [user for user in users if analysis.calls[user].gemm is None]
    if others:
        proof += f"; also read by {names_of(others)}"
    if subgraph.factors:
        proof += f"; {names_of(subgraph.factors)} by another tensor stays behind it"
    if candidate.row_scale:
        proof += f"; {candidate.row_scale}"
    if isinstance(candidate.tiling, Tiling):
        fields["tiles"] = candidate.tiling.count
    elif candidate.tiling:
        fields |= {"tiles": 1, "tiles_reason": str(candidate.tiling), "tiles_kind": candidate.tiling.kind}
    fields |= _float8(candidate.linears) | {"memory": candidate.memory}
    return Site(f"fused::{operator_of(subgraph)}", match.activation, reason=proof, **fields)


def called_site(call: Called, linears: Linears) -> Site:
    """The report of an operator that the model calls itself, with linear layers that may become float8."""
    fields = _source(call.node, (call.users or [call.node])[0]) | _float8(linears)
    fields |= {"users": tuple(map(shown, call.users)), "spelling": (shown(call.node),)}
    return Site(f"fused::{call.op.name}", call.activation, reason="the model calls the operator itself", **fields)


def dropout_site(analysis: GraphAnalysis, site: dropout.Dropout) -> Site:
    """The report of a dropout."""
    calls = site.calls or [site.node]
    users = map(shown, readers(analysis, calls[-1]))
    fields = {"users": tuple(users), "spelling": tuple(map(shown, calls)), **_source(site.node, site.node)}
    if site.reason is not None:
        return Site(None, DROPOUT, **_rejected(site.reason), **fields)
    proof = "backward recomputes its mask from a seed"
    if site.left:
        proof += f"; the sum that reads it stays: {site.left}"
    return Site(dropout.OPERATOR, DROPOUT, reason=proof, **fields)


def names_of(nodes: list[Node]) -> str:
    return ", ".join(dict.fromkeys(map(shown, nodes))) or "nothing"


def _float8(linears: Linears | None) -> dict[str, Any]:
    """The linear layers' part of a Site's fields."""
    if linears is None:
        return {}
    reasons = "; ".join(dict.fromkeys(f"{shown(node)}: {reason}" for node, reason in linears.rejected))
    kind = linears.rejected[0][1].kind if linears.rejected else None
    return {"gemm": linears.recipe if linears.nodes else "", "gemm_reason": reasons, "gemm_kind": kind}


def _rejected(reason: Reason) -> dict[str, Any]:
    """A rejection's reason, as a Site's fields."""
    return {"reason": str(reason), "kind": reason.kind, "excluded_by": reason.excluded_by}


def calls_of(analysis: GraphAnalysis, output: Node) -> list[Node]:
    """The pointwise calls from GEMMs to a rejected site's output node, which `examine` would have walked."""
    calls, pending = {output}, [output]
    while pending and len(calls) < 32:
        for source in analysis.sources(pending.pop()):
            pointwise = analysis.calls[source].name in RULES or analysis.custom(source) is not None
            if source not in calls and analysis.state[source] == NONLINEAR and (pointwise or analysis.passes(source)):
                calls.add(source)
                pending.append(source)
    return sorted((node for node in calls if not analysis.passes(node)), key=analysis.index.__getitem__)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in .*\n(?: +([^\n]*))?')
_OURS = os.path.dirname(policy.__file__)
_OUR_FRAMES = (os.path.join(_OURS, "functional.py"), os.path.join(_OURS, "nn", ""))
_NOT_THE_USERS = (torch.__path__[0], capture.__file__, *_OUR_FRAMES)


def _source(node: Node, gemm: Node) -> dict[str, Any]:
    """The line of the user's code (or, in nn.Sequential, torch's own module) that calls a node, as a Site's fields.

    Its module is the innermost one that holds the node and the GEMM: the MLP.
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
