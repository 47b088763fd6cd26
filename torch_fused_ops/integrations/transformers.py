"""For transformers' ``Trainer``: ``Trainer(…, callbacks=[FusionCallback()])``."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from torch_fused_ops.integrations.first_step import FirstStep

__all__ = ["FusionCallback"]


class FusionCallback(FirstStep, TrainerCallback):  # type: ignore[misc]
    """Reports the fusions of the first step, with reasons and the policy, in the process that logs.

    Args:
        say, figures: as ``FirstStep``.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        self.end(state.is_world_process_zero)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trainer's hook."""
        self.end(state.is_world_process_zero)
