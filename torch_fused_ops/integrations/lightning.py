"""For Lightning's ``Trainer``: ``Trainer(callbacks=[FusionCallback()])``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torch_fused_ops.integrations.first_step import FirstStep
from torch_fused_ops.reports.report import Report

__all__ = ["FusionCallback"]


class FusionCallback(Callback):  # type: ignore[misc]
    """Says after the first batch, in the process of rank 0, what was fused, what was not and why, and by which policy.

    It switches nothing on: ``tfo.enable()`` does, before the module is compiled. Where nothing was fused it warns.

    Args:
        say: takes the text; ``print`` by default.
        figures: also work out on paper what fusing saves; takes seconds for each layer.
    """

    def __init__(self, say: Callable[[str], object] = print, figures: bool = False) -> None:
        self._first = FirstStep(say, figures)

    @property
    def report(self) -> Report | None:
        """The report on the first batch; None before it began."""
        return self._first.report

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's."""
        self._first.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Lightning's."""
        self._first.end(trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning's."""
        self._first.end(trainer.is_global_zero)
