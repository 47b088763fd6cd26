"""Declare and register ``fused::dropout_add`` and its backward operator.

The mask is a function of the seed and an element's index, so backward recomputes it and only the seed is saved.

Read from top to bottom: declaration → fake → saved for backward → registration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from torch_fused_ops.declaration import Operator, Signature, arguments_of, between
from torch_fused_ops.families.dropout import formulas
from torch_fused_ops.operators import checks
from torch_fused_ops.operators.autograd import SavePolicy, register_pair
from torch_fused_ops.operators.registration import with_kernels

Grads2: TypeAlias = tuple[Tensor | None, Tensor | None]

dropout_add = Operator(
    "dropout_add",
    "residual + dropout(input + bias); input (..., n), bias (n,), residual as input, seed int64 with one element.",
    tensors={"input": "data", "bias": "per_column?", "residual": "data?", "seed": "seed"},
    scalars={"p": "float"},
    rules=(between("p", 0.0, 1.0),),
    pointwise=True,
    backward=Signature(
        "dropout_add_backward",
        # dtype, bias_dtype: dtypes of input and bias, and of their gradients. The residual's gradient is grad itself.
        arguments_of(
            grad="Tensor: data",
            seed="Tensor: seed",
            p="float",
            dtype="ScalarType",
            bias_dtype="ScalarType?",
            output_mask="bool[2]",
        ),
        ("data", "per_column"),
        "The gradients of dropout_add for (input, bias), in their dtypes; None where output_mask says no.",
    ),
)
check = checks.make_check(dropout_add)

# ---- fake ------------------------------------------------------------------------------------------------------------


def _fake(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    check(input, bias, residual, seed, p)
    return (input if residual is None else residual).new_empty(input.shape)


def _backward_fake(grad: Tensor, seed: Tensor, p: float, *values: Any) -> Grads2:
    dtype, bias_dtype, mask = values
    d_input = grad.new_empty(grad.shape, dtype=dtype) if mask[0] else None
    return d_input, grad.new_empty(grad.shape[-1:], dtype=bias_dtype) if mask[1] else None


# ---- saved for backward ----------------------------------------------------------------------------------------------


def _save_seed(args: tuple[Any, ...], out: Tensor) -> tuple[tuple[Tensor], tuple[Any, ...]]:
    input, bias, _, seed, p = args
    return (seed,), (p, input.dtype, None if bias is None else bias.dtype)


def _for_all(backward: Callable[..., Grads2]) -> Callable[..., Any]:
    """Extend a backward function for (input, bias) to autograd's (input, bias, residual, seed)."""

    def backward_of_all(grad: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        *values, mask = args
        d_input, d_bias = backward(grad, *values, mask[:2]) if any(mask[:2]) else (None, None)
        return d_input, d_bias, grad if mask[2] else None, None

    return backward_of_all


# ---- registration ----------------------------------------------------------------------------------------------------

register_pair(
    with_kernels(
        dropout_add.forward,
        formulas.dropout_add,
        _fake,
        check,
        functools.partial(formulas.dropout_add, draw=formulas.mask_in_fours),
    ),
    with_kernels(
        dropout_add.backward,
        formulas.dropout_add_backward,
        _backward_fake,
        checks.check_gradient,
        functools.partial(formulas.dropout_add_backward, draw=formulas.mask_in_fours),
    ),
    lambda *args: SavePolicy(_save_seed),
    adapt=_for_all,
)
