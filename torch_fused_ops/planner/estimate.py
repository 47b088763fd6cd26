"""Estimate a step quickly: compile equal layers once.

This takes seconds; compiling the whole model takes minutes at each level. The estimate misses fusions across layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch._inductor import config

from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.planner.pieces import divided
from torch_fused_ops.planner.step import SegmentedStep, compiled_timeline, cut, policy_of
from torch_fused_ops.virtual_gpu import GPU

# Settings of torch._inductor.config. By default, auto_chunker splits a GEMM only if its result is more than 8 times
# the size of its operands. With 32,768 tokens, the result of Llama-3-8B's head is 6.4 times the operands' size.
CHUNKS = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 4}


@dataclass(frozen=True)
class Estimates:
    """Estimates a captured model's step on a GPU. ``loss`` and ``keep_logits`` are passed to ``divided``."""

    captured: CapturedModel
    gpu: GPU
    loss: str
    keep_logits: bool
    known: dict[Any, Any] = field(default_factory=dict, repr=False)  # cache for ``compiled_timeline``

    @cached_property
    def pieces(self) -> CapturedModel:
        """The model divided into pieces. Every piece is compiled, except a loss in eager mode."""
        return self.divided(self.captured)

    def divided(self, captured: CapturedModel) -> CapturedModel:
        return divided(captured, self.gpu, "pieces", self.loss, self.keep_logits)

    def step_at(
        self, levels: Mapping[str, str], pieces: CapturedModel | None = None, chunks: bool = False
    ) -> SegmentedStep:
        """Estimate the step's memory. All times are 0.

        Args:
            levels: the level of each unit.
            pieces: the model divided into pieces; by default ``self.pieces``.
            chunks: True to compute the loss in chunks, if PyTorch's ``auto_chunker`` accepts it.
        """
        pieces = pieces or self.pieces
        with config.patch(CHUNKS if chunks else {}):
            timeline, _ = compiled_timeline(pieces, self.gpu, policy_of(pieces.mlps, levels), self.known)
        return cut(timeline, pieces, lambda call: 0.0)
