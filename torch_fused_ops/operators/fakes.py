"""Declared operators' fake kernels: shapes, dtypes and devices of results, without data; wrong arguments raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.formulas import FP8, Gradients, room

__all__ = ["backward", "forward", "fp8", "fp8_backward"]


def forward(op: PointwiseOperator, check: Callable[..., None]) -> Callable[..., Tensor]:
    """Of the operator; ``check`` raises for what it does not accept."""

    def fake(*args: Any) -> Tensor:
        check(*args)
        first: Tensor = args[0]
        return first.new_empty((*first.shape[:-1], first.shape[-1] // 2) if op.is_packed else first.shape)

    return fake


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """Of its backward operator."""

    def fake(grad: Tensor, *args: Any) -> Gradients:
        return tuple(room(t, wanted) for t, wanted in zip(args, args[-1], strict=False))

    return fake


def fp8(op: PointwiseOperator, check: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
    """Of the operator that also stores its data."""
    plain = forward(op, check)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        stored = [
            t.new_empty(shape, dtype=dtype)
            for t in args[: op.data]
            for shape, dtype in ((t.shape, FP8), (t.shape[:-1], torch.float32))
        ]
        return plain(*args), *stored

    return fake


def fp8_backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """Of that one's backward operator."""

    def fake(*args: Any) -> Gradients:
        given = op.stored(args)
        of_data = zip(given.data, given.output_mask, given.dtypes, strict=False)
        of_others = zip(given.others, given.output_mask[op.data :], strict=True)
        return (
            *(room(stored, wanted, dtype) for (stored, _), wanted, dtype in of_data),
            *(room(t, wanted) for t, wanted in of_others),
        )

    return fake
