"""Declared operators' rules for ``torch.vmap``: the operator where the batch axis is one more leading axis, else its
plain-torch spelling by broadcasting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_fused_ops.declaration import PointwiseOperator
from torch_fused_ops.formulas import Gradients, compute_dtype, widened
from torch_fused_ops.operators.eager import backward as plain_backward

Rule = Callable[..., Any]  # (info, in_dims, *args) -> (outputs, out_dims)


def lead(info: Any, t: Tensor, axis: int | None) -> Tensor:
    """t with the batch axis in front."""
    return t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)


def over_rows_of_each(t: Tensor) -> Tensor:
    """``over_rows`` of each example: the sum over all axes but the batch's, in front, and the last."""
    return t.sum(tuple(range(1, t.ndim - 1))) if t.ndim > 2 else t


def _led(info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...], bias: int | None, ndim: int) -> list[Any]:
    """The arguments with the batch axis in front; a bias that all examples share as it is.

    A bias of each example's own is no (n,) vector: it is made to broadcast to ``ndim`` axes.
    """
    found = [
        a if not isinstance(a, Tensor) or (i == bias and d is None) else lead(info, a, d)
        for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
    ]
    if bias is not None and in_dims[bias] is not None:
        own = found[bias]
        found[bias] = own.reshape(own.shape[0], *(1,) * (ndim - 1), own.shape[-1])
    return found


def forward(
    op: PointwiseOperator, operator: Callable[..., Any], plain: Callable[..., Any], check: Callable[..., None]
) -> Rule:
    """The vmap rule of the operator."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        if info.batch_size:  # what one example sees is checked: with a batch axis in front more would be accepted
            check(*(a if d is None else a.select(d, 0) for a, d in zip(args, in_dims, strict=True)))
        ndim = args[0].ndim - (in_dims[0] is not None)
        batched_bias = op.bias is not None and in_dims[op.bias] is not None
        return (plain if batched_bias else operator)(*_led(info, in_dims, args, op.bias, ndim)), 0

    return rule


def backward(op: PointwiseOperator, operator: Callable[..., Any]) -> Rule:
    """The vmap rule of its backward operator. A bias's gradient must not be summed over the examples."""
    bias = None if op.bias is None else op.bias + 1
    plain = plain_backward(op)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        wanted = args[-1]
        led = _led(info, in_dims, args, bias, args[1].ndim - (in_dims[1] is not None))
        if bias is None or not (in_dims[bias] is not None or wanted[op.bias]):
            outputs = operator(*led)
        else:
            outputs = _per_example(op, plain, op.bias or 0, *led)
        return outputs, tuple(None if o is None else 0 for o in outputs)

    return rule


def _per_example(
    op: PointwiseOperator, plain: Callable[..., Gradients], bias: int, grad: Tensor, *args: Any
) -> Gradients:
    """``plain`` on a leading batch axis, with a bias gradient for each example."""
    *given, wanted = args
    first, own = given[0], given[bias]
    # Wide, so that the summands are not rounded.
    given[0] = first.to(compute_dtype(grad, *given[: len(op.tensors)]))
    mask = [w or (i == 0 and wanted[bias]) for i, w in enumerate(wanted)]
    mask[bias] = False
    found = list(plain(grad, *given, mask))
    dx = found[0]
    if wanted[bias]:
        assert dx is not None
        found[bias] = over_rows_of_each(dx).to(own.dtype)
    found[0] = widened(first.dtype, dx) if wanted[0] else None
    return tuple(found)
