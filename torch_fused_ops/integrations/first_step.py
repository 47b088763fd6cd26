"""The base of every trainer's callback: record the first step, in which a model is compiled, and report it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from torch_fused_ops.reports.recording import record
from torch_fused_ops.reports.report import Report

__all__ = ["FirstStep"]

log = logging.getLogger("torch_fused_ops")


class FirstStep:
    """Record the fusions between ``begin`` and ``end``, and report them once.

    Fusion itself is enabled by ``tfo.enable()``, before the model is compiled. A warning says that nothing was fused.

    Args:
        say: receives the text: ``print``, a logger's ``info``, a run's notes.
        figures: also estimate the savings (``Report.measure``): memory, bytes moved, kernels; takes seconds for each
            layer.

    Attributes:
        report: the report on the first step; None before it begins.
    """

    def __init__(self, say: Callable[[str], object] = print, figures: bool = False) -> None:
        self.say, self.figures = say, figures
        self.report: Report | None = None
        self._block: ExitStack | None = None

    def begin(self) -> None:
        """Start recording the first step."""
        if self.report is None:
            self._block = ExitStack()
            self.report = self._block.enter_context(record(figures=self.figures))

    def end(self, speak: bool) -> None:
        """Stop recording; report if this process is to ``speak``."""
        block, self._block = self._block, None
        if block is None or self.report is None:
            return
        block.close()
        if not speak:
            return
        policies = "".join(f"\n{policy}" for policy in self.report.policies)
        self.say(f"torch_fused_ops, the first step:{policies}\n{self.report}")
        if not any(site.op for site in self.report.sites):
            log.warning("nothing was fused in the first step: see docs/integrations.md")
