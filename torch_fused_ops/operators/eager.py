"""Compute declared operators in plain torch on whole tensors: for tests, transforms, exports, calls without a kernel.

To a formula, an operator adds widening, unpacking, the sums in the gradients of biases and scales, and one rounding
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import DATA, PointwiseOperator
from torch_fused_ops.formulas import Gradients, compute_dtype, over_rows, pack, unpack, widened


def _elements(
    op: PointwiseOperator, tensors: Sequence[Tensor | None], layout: str | None, dtype: torch.dtype
) -> list[Any]:
    """Return ``op.value``'s tensor arguments: data plus bias, packed data as gate and up, the scale as a column."""
    wide = [widened(dtype, t) for t in tensors]
    if op.bias_index is not None and wide[op.bias_index] is not None:
        wide[0] = wide[0] + wide[op.bias_index]  # type: ignore[operator]
    data: list[Any] = wide[: op.num_data] if layout is None else list(unpack(wide[0], layout))  # type: ignore[arg-type]
    if op.scale_index is not None:
        scale = wide[op.scale_index]
        data.append(None if scale is None else scale.unsqueeze(-1))
    return data


def forward(op: PointwiseOperator) -> Callable[..., Tensor]:
    """Return a function that computes the operator in plain torch, in float32 or float64."""

    def plain(*args: Any) -> Tensor:
        tensors, layout, scalars = op.split(args)
        out = op.value(*_elements(op, tensors, layout, compute_dtype(*tensors)), *scalars)
        return widened(tensors[0].dtype, out)

    return plain


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """Return the backward operator as a plain-torch function. Gradients that output_mask does not request are None."""
    derived_from_data = [kind in DATA or kind == "per_column" for kind in op.kinds]

    def plain(grad: Tensor, *args: Any) -> Gradients:
        *args, output_mask = args  # type: ignore[assignment]
        tensors, layout, scalars = op.split(tuple(args))
        dtype = compute_dtype(grad, *tensors)
        wide, elements = widened(dtype, grad), _elements(op, tensors, layout, dtype)
        grads: Sequence[Tensor] = ()
        pairs = zip(output_mask, derived_from_data, strict=True)
        if any(requested and from_data for requested, from_data in pairs):
            grads = op.grads(wide, *elements, *scalars)
            grads = grads if layout is None else [pack(grads[0], grads[1], layout)]

        def gradient(i: int, t: Tensor, kind: str) -> Tensor:
            if kind == "per_row":
                unscaled = op.value(*elements[:-1], None, *scalars)
                return (wide * unscaled).sum(-1).to(t.dtype)
            wide_gradient = over_rows(grads[0]) if kind == "per_column" else grads[i]
            return widened(t.dtype, wide_gradient)

        arguments = enumerate(zip(tensors, op.kinds, output_mask, strict=True))
        return tuple(gradient(i, t, kind) if requested else None for i, (t, kind, requested) in arguments)

    return plain
