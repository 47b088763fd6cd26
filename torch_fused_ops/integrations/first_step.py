"""What every trainer's callback does: record the first step, in which a model is compiled, and say what was fused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from torch_fused_ops.reports.recording import record
from torch_fused_ops.reports.report import Report

__all__ = ["FirstStep"]

log = logging.getLogger("torch_fused_ops")


class FirstStep:
    """Between ``begin`` and ``end``: what pick-up does is recorded; at the end it is said, once.

    It switches nothing on: ``tfo.enable()`` does, before the model is compiled. Where nothing was fused it warns.

    Args:
        say: takes the text: ``print``, a logger's ``info``, a run's notes.
        figures: also work out on paper what fusing saves (``Report.measure``): memory, bytes moved, kernels; takes
            seconds for each layer.

    Attributes:
        report: the report on the first step; None before it began.
    """

    def __init__(self, say: Callable[[str], object] = print, figures: bool = False) -> None:
        self.say, self.figures = say, figures
        self.report: Report | None = None
        self._block: ExitStack | None = None

    def begin(self) -> None:
        """Start recording, unless it is done already."""
        if self.report is None:
            self._block = ExitStack()
            self.report = self._block.enter_context(record(figures=self.figures))

    def end(self, speak: bool) -> None:
        """Stop recording, and, if this process is the one to speak, say what there is."""
        block, self._block = self._block, None
        if block is None or self.report is None:
            return
        block.close()
        if not speak:
            return
        policies = "".join(f"\n{policy}" for policy in self.report.policies)
        self.say(f"torch_fused_ops, the first step:{policies}\n{self.report}")
        if not any(site.op for site in self.report.sites):
            log.warning("nothing was fused in the first step; docs/integrations.md says what to look at")
