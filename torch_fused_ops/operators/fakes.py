"""Declared operators' fake kernels: shapes, dtypes and devices of results, without data; wrong arguments raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.formulas import Gradients, room

__all__ = ["backward", "forward"]


def forward(op: PointwiseOperator, check: Callable[..., None]) -> Callable[..., Tensor]:
    """The fake kernel of the operator; ``check`` raises for arguments that are not accepted."""

    def fake(*args: Any) -> Tensor:
        check(*args)
        first: Tensor = args[0]
        return first.new_empty((*first.shape[:-1], first.shape[-1] // 2) if op.is_packed else first.shape)

    return fake


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """The fake kernel of its backward operator."""

    def fake(grad: Tensor, *args: Any) -> Gradients:
        return tuple(room(t, wanted) for t, wanted in zip(args, args[-1], strict=False))

    return fake
