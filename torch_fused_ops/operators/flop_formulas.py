"""Count the FLOP of our GEMM operators for ``torch.utils.flop_counter``.

That module imports Triton (0.2 to 0.5 s), which ``import torch_fused_ops`` must not do. So this module stores formulas
until a program imports ``flop_counter``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

_formulas: dict[torch._ops.OpOverloadPacket, Callable[..., int]] = {}


def count(op: torch._ops.OpOverload, formula: Callable[..., int]) -> None:
    """Let ``FlopCounterMode`` count op. ``formula`` is called with op's arguments, with shapes in place of tensors."""
    _formulas[op.overloadpacket] = formula
    if "torch.utils.flop_counter" in sys.modules:
        register()


def register() -> None:
    """Register all formulas that ``flop_counter`` does not have yet."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for packet, formula in _formulas.items():
        if packet not in flop_registry:
            register_flop_formula(packet)(formula)


def rows_times_columns(a: Sequence[int], b: Sequence[int], **out: Any) -> int:
    """Return 2 · t · n · k: each of a's t rows (k,) is multiplied by a matrix (n, k) of b, which may be a stack."""
    return 2 * a[0] * a[1] * b[-2]
