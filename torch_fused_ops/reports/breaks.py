"""List graph breaks, with their locations in the user's code and their reasons, as Dynamo records them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fused_ops.graphs.listing import explained
from torch_fused_ops.graphs.reasons import Kind, Reason

if TYPE_CHECKING:
    from torch.fx import GraphModule


@dataclass(frozen=True)
class Break:
    """The end of a graph in the middle of a model. A site cannot reach across it."""

    kind: Kind  # ``GRAPH_BREAK``, or a more specific kind
    reason: str  # Dynamo's own message, for people
    source: str = ""  # "file.py:line in function"; "" if Dynamo recorded no location
    location: str = ""  # "/full/path/file.py:line", or ""
    code: str = ""  # the text of this line, or ""


def break_lines(breaks: Iterable[Break]) -> list[str]:
    """Return lines on graph breaks: the place and its code, then the reason and the advice."""
    lines: list[str] = []
    for graph_break, times in Counter(breaks).items():
        where = f"{graph_break.source or 'somewhere in the model'}{f' ×{times}' if times > 1 else ''}"
        lines.append(f"{where}: {graph_break.code}" if graph_break.code else where)
        lines += explained(graph_break.reason, graph_break.kind)
    return lines


def break_of(gm: GraphModule) -> Break | None:
    """Return the graph break that ends a graph; None if the graph ends with its function, or without a recorded reason.

    Args:
        gm: a graph from Dynamo. Dynamo records the reason in every graph (torch 2.11 to 2.15).
    """
    from torch_fused_ops.lowerings import compat

    stopped = compat.why_it_ended(gm.graph)
    if stopped is None or not stopped.graph_break:
        return None
    reason = Reason(Kind.GRAPH_BREAK, f"a graph break: {_said(stopped.reason)}")
    if compat.split_from(gm.graph) is not None:
        reason = Reason(Kind.DDP_BUCKET, f"a split between DDP's buckets: {_said(stopped.reason)}")
    if not stopped.user_stack:
        return Break(reason.kind, str(reason))
    frame = stopped.user_stack[-1]
    where = f"{frame.filename}:{frame.lineno}"
    source = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return Break(reason.kind, str(reason), source, where, (frame.line or "").strip())


def reasons_noted() -> Mapping[str, int]:
    """Return Dynamo's counts of this process's graph breaks by reason, including breaks without a graph."""
    from torch._dynamo.utils import counters

    return {**counters["unimplemented"], **counters["graph_break"]}


def since(before: Mapping[str, int]) -> tuple[Break, ...]:
    """Return the graph breaks since ``before``, an earlier ``reasons_noted()``. Dynamo did not record locations."""
    new = [_said(reason) for reason, times in reasons_noted().items() if times > before.get(reason, 0)]
    reasons = [Reason(Kind.GRAPH_BREAK, f"a graph break: {text}") for text in dict.fromkeys(new)]
    return tuple(Break(reason.kind, str(reason)) for reason in reasons)


def _said(text: str) -> str:
    """Shorten Dynamo's message to its headline and explanation, in one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    explained = [line.removeprefix("Explanation:").strip() for line in lines[1:2] if line.startswith("Explanation:")]
    return ": ".join((lines[0], *explained))
