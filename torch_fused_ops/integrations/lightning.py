"""For Lightning's ``Trainer``: ``Trainer(callbacks=[FusionCallback()])``."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from torch_fused_ops.integrations.first_step import FirstStep

__all__ = ["FusionCallback"]


class FusionCallback(FirstStep, Callback):  # type: ignore[misc]
    """Reports the fusions of the first batch, with reasons and the policy, in the process of rank 0.

    Args:
        say, figures: as ``FirstStep``.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's hook."""
        self.begin()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Lightning's hook."""
        self.end(trainer.is_global_zero)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning's hook."""
        self.end(trainer.is_global_zero)
