"""``record``: what pick-up does in real compilations, told by the stage that does it."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx import Graph, GraphModule

from torch_fused_ops.capture import captured_graphs
from torch_fused_ops.fusion_events import observed_by, process_wide
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.breaks import Break, break_of
from torch_fused_ops.reports.figures import Capture, capture
from torch_fused_ops.reports.report import Recorded, Report, Site, unmatched

__all__ = ["record", "report_at_exit", "title_of"]

log = logging.getLogger("torch_fused_ops")


@contextmanager
def record(*, figures: bool = False) -> Iterator[Report]:
    """Report the compilations with pick-up that happen inside the block, in this thread (or async context).

    ::

        with tfo.record() as report:
            compiled(x).sum().backward()
        print(report)

    All ways of compiling count: ``backend="fused"``, ``enable()``, ``enabled()``, ``compile_options()``. Blocks may be
    nested: each gets everything inside. Code that comes out of a compile cache counts too.

    Args:
        figures: work out memory, traffic and kernels at the end of the block, as ``report.measure()`` does.

    Yields:
        A report, empty at first. An exception in the block propagates; the report keeps what it saw.
    """
    from torch_fused_ops import lowerings

    lowerings.require()
    recorder = _Recorder()
    before = captured_graphs()
    try:
        with observed_by(recorder):
            yield recorder.report
    finally:
        recorder.report.other_graphs = max(0, captured_graphs() - before - len(recorder.graphs))
    if figures and recorder.report.graphs:
        recorder.report.measure()


def report_at_exit(file: Path) -> None:
    """Record the compilations of all threads from here on, and write the report when this process exits.

    Args:
        file: its ending says the format: .json, .html, or else text.
    """
    recorder, process = _Recorder(), os.getpid()
    process_wide.append(recorder)

    def write() -> None:
        if os.getpid() != process:  # forked
            return
        report = recorder.report
        try:
            if file.suffix == ".html":
                report.to_html(file)
            else:
                file.write_text(report.to_json() if file.suffix == ".json" else f"{report}\n", encoding="utf-8")
        except OSError as error:
            print(f"torch_fused_ops: the report cannot be written to {file}: {error}", file=sys.stderr)
            return
        print(f"torch_fused_ops: {report.summary}; the report is in {file}", file=sys.stderr)

    atexit.register(write)


# ---- what the stage tells --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Graph:
    """A graph that pick-up has run on, or is running on."""

    graph: weakref.ref[Graph]
    capture: Capture
    title: str
    sites: tuple[Site, ...]  # those of its parts (checkpoint bodies) too, which come before it
    unread: tuple[Site, ...]
    broken: Break | None
    compilation: Any  # Dynamo's, and which attempt it was
    attempt: int
    code: object  # the same for what is compiled anew


class _Recorder:
    """What one block has seen. Threads that share its context (``asyncio.to_thread``) may tell it things at once."""

    def __init__(self) -> None:
        self.report = Recorded()
        self.graphs: list[_Graph] = []
        self.failures: tuple[str, ...] = ()
        self.lock = threading.Lock()

    def before(self, graph: Graph, policy: FusionPolicy) -> None:
        from torch_fused_ops.lowerings import recognize

        gm = graph.owning_module or GraphModule(torch.nn.Module(), graph)
        compilation = CompileContext.try_get()
        attempt = getattr(compilation, "attempt", 0)
        inner = {module.graph for module in gm.modules() if module is not gm and isinstance(module, GraphModule)}
        with self.lock:
            # Dynamo starts over where a number that it took for dynamic turns out to be fixed: what counts is the end.
            kept = [
                one
                for one in self.graphs
                if compilation is None or one.compilation is not compilation or one.attempt == attempt
            ]
            parts = [one for one in kept if one.graph() in inner]
            copies = {part.graph(): part.capture.graph.gm for part in parts if part.capture.graph}
            sites = tuple(site for part in parts for site in part.sites)
            unread = recognize.unread(graph)  # that of its parts, too
            captured = capture(gm, policy, copies)
            title, broken, code = title_of(graph), break_of(gm), _code_of(graph, compilation)
            new = _Graph(weakref.ref(graph), captured, title, sites, unread, broken, compilation, attempt, code)
            self.graphs = [*(one for one in kept if one not in parts), new]
            self.update()

    def tell(self, graph: Graph, sites: Sequence[Site]) -> None:
        with self.lock:
            for one in self.graphs:
                if one.graph() is graph:
                    one.sites += tuple(sites)
            self.update()

    def failed(self, reason: str) -> None:
        with self.lock:
            self.failures += (f"pick-up failed on a graph and left it as it was: {reason}",)
            self.update()

    def update(self) -> None:
        report = self.report
        graphs = list({one.code or one: one for one in self.graphs}.values())  # of what was compiled anew the last
        report.graphs, report.recompilations = len(graphs), len(self.graphs) - len(graphs)
        report.sites = tuple(site for one in graphs for site in one.sites)
        report.unread = tuple(site for one in graphs for site in one.unread)
        report.breaks = tuple(one.broken for one in graphs if one.broken is not None)
        report.title = ", ".join(dict.fromkeys(one.title for one in graphs if one.title))
        report.figures, report.figures_missing = None, ""
        report._captures = [one.capture for one in graphs]
        notes = (
            note
            for policy in report.policies
            for note in unmatched(policy, [s for one in graphs if one.capture.policy == policy for s in one.sites])
        )
        report.notes = (*dict.fromkeys(notes), *self.failures)


def _code_of(graph: Graph, compilation: Any) -> object:
    """What a graph is captured of: Dynamo's number of the code, and the parameters, as layers share their code.

    None where that is not known: nothing is the same then.
    """
    number = getattr(getattr(compilation, "compile_id", None), "frame_id", None)
    placed = [node.meta.get("grapharg") for node in graph.find_nodes(op="placeholder")]
    if number is None or None in placed:
        return None
    examples = [getattr(one, "example", None) for one in placed]
    return number, frozenset(id(one) for one in examples if isinstance(one, torch.nn.Parameter))


def title_of(graph: Graph) -> str:
    """The class of the model that is being compiled; "" if that is not known.

    It is the module that ``torch.compile`` returned, and whose call is going on; or, where a function was compiled, the
    outermost module that it calls, if that is the whole of it.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    frame: FrameType | None = sys._getframe()
    while frame is not None:
        compiled = frame.f_locals.get("self")
        if isinstance(compiled, OptimizedModule):
            return type(compiled._orig_mod).__name__
        frame = frame.f_back
    for node in graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name: str = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
            return name if re.fullmatch(r"[LG]\['\w+'\](\.\w+)?", path) else ""
    return ""
