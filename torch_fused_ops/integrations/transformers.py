"""For transformers' ``Trainer``: ``Trainer(…, callbacks=[FusionCallback()])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from torch_fused_ops.integrations.first_step import FirstStep
from torch_fused_ops.reports.report import Report

__all__ = ["FusionCallback"]


class FusionCallback(TrainerCallback):  # type: ignore[misc]
    """Says after the first step, in the process that logs, what was fused, what was not and why, and by which policy.

    It switches nothing on: ``tfo.enable()`` does, before the Trainer is made. Where nothing was fused it warns.

    Args:
        say: takes the text; ``print`` by default.
        figures: also work out on paper what fusing saves; takes seconds for each layer.
    """

    def __init__(self, say: Callable[[str], object] = print, figures: bool = False) -> None:
        self._first = FirstStep(say, figures)

    @property
    def report(self) -> Report | None:
        """The report on the first step; None before it began."""
        return self._first.report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's."""
        self._first.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's."""
        self._first.end(state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's."""
        self._first.end(state.is_world_process_zero)
