"""``record``: report the sites that the fusion pass handles in real compilations."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._guards import CompileContext
from torch.fx import Graph, GraphModule

from torch_fused_ops.graphs.capture import title_of
from torch_fused_ops.graphs.fusion_events import observed_by, process_wide
from torch_fused_ops.graphs.listing import AttentionSite
from torch_fused_ops.graphs.sites import Site
from torch_fused_ops.policy import FusionPolicy, unmatched
from torch_fused_ops.reports.breaks import Break, break_of
from torch_fused_ops.reports.report import Report, not_sites

log = logging.getLogger("torch_fused_ops")


@contextmanager
def record() -> Iterator[Report]:
    """Record the compilations with fusion in this block and this thread (or async context).

    ::

        with tfo.record() as report:
            compiled(x).sum().backward()
        print(report)

    It records ``backend="fused"``, ``enable()``, ``enabled()`` and ``compile_options()``, also if the code comes from a
    compile cache. Blocks may be nested; each records all compilations inside it.

    Yields:
        A report, empty at first. If the block raises, the exception propagates, and the report stays valid.
    """
    from torch_fused_ops import lowerings

    lowerings.require()
    recorder = _Recorder()
    with observed_by(recorder):
        yield recorder.report


def report_at_exit(file: Path) -> None:
    """Record the compilations of all threads from now on, and write the report when this process exits.

    Args:
        file: the report's file; its suffix selects the format: .json, .html, or text for others.
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
        except (OSError, ValueError) as error:
            print(f"torch_fused_ops: the report cannot be written to {file}: {error}", file=sys.stderr)
            return
        print(f"torch_fused_ops: {report.summary}; the report is in {file}", file=sys.stderr)

    atexit.register(write)


# ---- recording -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Graph:
    """A graph in the fusion pass, finished or in progress."""

    graph: weakref.ref[Graph]
    policy: FusionPolicy
    title: str
    sites: tuple[Site, ...]  # sites of its subgraphs (checkpoint bodies) first
    unread: tuple[Site, ...]
    broken: Break | None
    compilation: Any  # Dynamo's compile context
    attempt: int  # number of the attempt at this compilation
    code: object  # equal for recompilations of the same code; None if unknown


class _Recorder:
    """Records one block. Threads that share its context (``asyncio.to_thread``) may call it concurrently."""

    def __init__(self) -> None:
        self.report = Report((), 0, _is_recorded=True)
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
            # Dynamo restarts if a dynamic number turns out to be static: only the last attempt counts.
            current = [
                entry
                for entry in self.graphs
                if compilation is None or entry.compilation is not compilation or entry.attempt == attempt
            ]
            parts = [entry for entry in current if entry.graph() in inner]
            sites = tuple(site for part in parts for site in part.sites)
            unread = recognize.unread(graph)  # including its subgraphs
            title, broken, code = title_of(graph), break_of(gm), _code_of(graph, compilation)
            new = _Graph(weakref.ref(graph), policy, title, sites, unread, broken, compilation, attempt, code)
            self.graphs = [*(entry for entry in current if entry not in parts), new]
            self.update()

    def tell(self, graph: Graph, sites: Sequence[Site]) -> None:
        with self.lock:
            for entry in self.graphs:
                if entry.graph() is graph:
                    entry.sites += tuple(sites)
            self.update()

    def attention(self, sites: Sequence[AttentionSite]) -> None:
        with self.lock:  # each layer's last recompilation
            self.report._attention.update((site.module, site) for site in sites)

    def failed(self, reason: str) -> None:
        with self.lock:
            self.failures += (f"fusion failed on a graph and left it unchanged: {reason}",)
            self.update()

    def update(self) -> None:
        report = self.report
        graphs = list({entry.code or entry: entry for entry in self.graphs}.values())  # each code's last recompilation
        report.graphs, report.recompilations = len(graphs), len(self.graphs) - len(graphs)
        report.sites = tuple(site for entry in graphs for site in entry.sites)
        report.unread = not_sites((site for entry in graphs for site in entry.unread), report.sites)
        report.breaks = tuple(entry.broken for entry in graphs if entry.broken is not None)
        report.title = ", ".join(dict.fromkeys(entry.title for entry in graphs if entry.title))
        report.policies = tuple(dict.fromkeys(entry.policy for entry in graphs))
        notes: list[str] = []
        for policy in report.policies:
            sites = [site for entry in graphs if entry.policy == policy for site in entry.sites]
            notes += unmatched(policy, sites)
        report.notes = (*dict.fromkeys(notes), *self.failures)


def _code_of(graph: Graph, compilation: Any) -> object:
    """Return a key for a graph's source: Dynamo's number of the code, and the parameters, because layers share code.

    Return None if the key is unknown; the graph then does not count as a recompilation.
    """
    number = getattr(getattr(compilation, "compile_id", None), "frame_id", None)
    placed = [node.meta.get("grapharg") for node in graph.find_nodes(op="placeholder")]
    if number is None or None in placed:
        return None
    examples = [getattr(value, "example", None) for value in placed]
    return number, frozenset(id(value) for value in examples if isinstance(value, torch.nn.Parameter))
