"""Count the FLOP of float8 GEMMs for ``torch.utils.flop_counter``. It imports Triton, so ``register`` runs after it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch


@functools.cache
def register() -> None:
    """Let ``FlopCounterMode`` count the GEMMs. Idempotent."""
    from torch.utils.flop_counter import register_flop_formula

    fused = torch.ops.fused
    register_flop_formula([fused.scaled_mm, fused.scaled_mm_tiled, fused.scaled_grouped_mm])(_rows_times_columns)


def _rows_times_columns(a: Sequence[int], a_scales: Any, b: Sequence[int], *args: Any, **options: Any) -> int:
    """Return 2 · t · n · k: each of a's t rows (k,) is multiplied by a matrix (n, k) of b, which may be a stack."""
    return 2 * a[0] * a[1] * b[-2]
