"""Declared operators in plain torch, on whole tensors: the oracle, what transforms differentiate, what exports hold.

What an operator adds to its formula: widening, layout, the sums behind the gradients of biases and scales, and one
rounding at the end.
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
    """The arguments of ``op.value``: data with biases added, packed data in two; and the scale as a column."""
    wide = [widened(dtype, t) for t in tensors]
    if op.bias_index is not None and wide[op.bias_index] is not None:
        wide[0] = wide[0] + wide[op.bias_index]  # type: ignore[operator]
    data: list[Any] = wide[: op.num_data] if layout is None else list(unpack(wide[0], layout))  # type: ignore[arg-type]
    if op.scale_index is not None:
        scale = wide[op.scale_index]
        data.append(None if scale is None else scale.unsqueeze(-1))
    return data


def forward(op: PointwiseOperator) -> Callable[..., Tensor]:
    """The operator; computed in float32, or float64, if ``dtype`` does not say otherwise."""

    def plain(*args: Any, dtype: torch.dtype | None = None) -> Tensor:
        tensors, layout, scalars = op.split(args)
        out = op.value(*_elements(op, tensors, layout, dtype or compute_dtype(*tensors)), *scalars)
        return widened(tensors[0].dtype, out)

    return plain


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """The gradients of its tensors, likewise; None where output_mask says no."""
    summed = [kind in DATA or kind == "per_column" for kind in op.kinds]

    def plain(grad: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Gradients:
        *args, wanted = args  # type: ignore[assignment]
        tensors, layout, scalars = op.split(tuple(args))
        dtype = dtype or compute_dtype(grad, *tensors)
        wide, elements = widened(dtype, grad), _elements(op, tensors, layout, dtype)
        found: Sequence[Tensor] = ()
        if any(w and s for w, s in zip(wanted, summed, strict=True)):
            found = op.grads(wide, *elements, *scalars)
            found = found if layout is None else [pack(found[0], found[1], layout)]

        def gradient(i: int, t: Tensor, kind: str) -> Tensor:
            if kind == "per_row":
                without = [*elements[:-1], None]
                return (wide * op.value(*without, *scalars)).sum(-1).to(t.dtype)
            return widened(t.dtype, over_rows(found[0]) if kind == "per_column" else found[i])

        every = enumerate(zip(tensors, op.kinds, wanted, strict=True))
        return tuple(gradient(i, t, kind) if w else None for i, (t, kind, w) in every)

    return plain
