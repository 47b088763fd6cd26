"""Gather a row per token and expert for a mixture of experts, and sum each token's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def readable(t: Tensor) -> bool:
    """Return True if t's values can be checked without waiting for a device."""
    from torch._subclasses.fake_tensor import FakeTensor

    real = t.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(t, FakeTensor)
    return real and not torch._C._functorch.is_functorch_wrapped_tensor(t)


class _Gather(torch.autograd.Function):
    """Compute rows[i] = tokens[token_of_row[i]]; backward sums each token's rows, without atomics."""

    @staticmethod
    def forward(tokens: Tensor, token_of_row: Tensor, order: Tensor) -> Tensor:
        return tokens.index_select(0, token_of_row)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Compute tokens[t], the sum of token t's rows, rounded once; backward gathers."""

    @staticmethod
    def forward(rows: Tensor, token_of_row: Tensor, order: Tensor) -> Tensor:
        of_tokens: Tensor = rows.index_select(0, order.flatten()).unflatten(0, order.shape)
        return of_tokens.sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grad, *ctx.saved_tensors), None, None  # type: ignore[no-untyped-call]


def rows_of_tokens(tokens: Tensor, token_of_row: Tensor, order: Tensor) -> Tensor:
    """Return tokens[token_of_row], with shape (rows, h).

    Args:
        tokens: (tokens, h).
        token_of_row: (rows,), the token's index.
        order: (tokens, k), the indices of each token's rows.
    """
    rows: Tensor = _Gather.apply(tokens, token_of_row, order)  # type: ignore[no-untyped-call]
    return rows


def tokens_of_rows(rows: Tensor, token_of_row: Tensor, order: Tensor) -> Tensor:
    """Return the sum of each token's rows, with shape (tokens, h). ``rows_of_tokens`` describes the arguments."""
    summed: Tensor = _Sum.apply(rows, token_of_row, order)  # type: ignore[no-untyped-call]
    return summed
