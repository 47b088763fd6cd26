"""A quick estimate of a step: one of several equal layers is compiled, and what stands before and behind them.

It takes seconds, where the whole model takes minutes at each level. Kernels that the compiler fuses across layers are
not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch._inductor import config

from torch_fused_ops.planner.model import LOSS, CapturedModel
from torch_fused_ops.planner.pieces import divided
from torch_fused_ops.planner.step import Parts, compiled_timeline, cut, policy_of
from torch_fused_ops.virtual_gpu import GPU

# Settings of torch._inductor.config. By default a GEMM is cut only if its result is more than 8 times as large as its
# operands; that of Llama-3-8B's head is 6.4 times as large with 32,768 tokens.
CHUNKS = {"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 4}


@dataclass(frozen=True)
class Estimates:
    """Estimates of a captured model's step on a GPU. ``loss`` and ``keep_logits`` are those of ``divided``."""

    captured: CapturedModel
    gpu: GPU
    loss: str
    keep_logits: bool
    known: dict[Any, Any] = field(default_factory=dict, repr=False)  # compiled pieces

    @cached_property
    def pieces(self) -> CapturedModel:
        """The model in pieces, all of them compiled but for a loss in eager mode."""
        return self.divided(self.captured)

    def divided(self, captured: CapturedModel) -> CapturedModel:
        pieces = divided(captured, self.gpu, "layers", self.loss, self.keep_logits)
        return replace(pieces, eager=frozenset(i for i in pieces.eager if pieces.pieces[i] == LOSS))

    def parts(self, levels: Mapping[str, str], pieces: CapturedModel | None = None, chunks: bool = False) -> Parts:
        """The step at levels by unit, without times.

        Args:
            levels: levels by unit.
            pieces: another model in pieces.
            chunks: let PyTorch compute the loss in chunks, if it can.
        """
        pieces = pieces or self.pieces
        with config.patch(CHUNKS if chunks else {}):
            timeline, _ = compiled_timeline(pieces, self.gpu, policy_of(pieces.mlps, levels), self.known)
        return cut(timeline, pieces, lambda call: 0.0)
