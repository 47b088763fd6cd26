"""For transformers' ``Trainer``: ``Trainer(…, callbacks=[FusionCallback()])``."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback

from torch_fused_ops.reports.recording import record
from torch_fused_ops.reports.report import Report

__all__ = ["FusionCallback"]

log = logging.getLogger("torch_fused_ops")


class FusionCallback(TrainerCallback):  # type: ignore[misc]
    """Prints the fusions of the first step, in which a model is compiled, with reasons and the policy.

    ``tfo.enable()`` turns fusion on. Only the process that logs prints. A warning says that nothing was fused.

    Attributes:
        report: the report on the first step; None before it begins.
    """

    def __init__(self) -> None:
        self.report: Report | None = None
        self._block: ExitStack | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        if self.report is None:
            self._block = ExitStack()
            self.report = self._block.enter_context(record())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        block, self._block = self._block, None
        if block is None or self.report is None:
            return
        block.close()
        if state.is_world_process_zero:
            policies = "".join(f"\n{policy}" for policy in self.report.policies)
            print(f"torch_fused_ops, the first step:{policies}\n{self.report}")
            if not any(site.op for site in self.report.sites):
                log.warning("nothing was fused in the first step: see docs/integrations.md")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        self.on_step_end(args, state, control)
