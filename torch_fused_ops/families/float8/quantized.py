"""The float8 operands that backward needs of an activation, each in one pass over memory.

A gradient is multiplied twice: by the weight, quantized along its rows, and by the input, along its columns. Its sum
over the rows is a bias's gradient. Where it is an activation's, that activation's result is multiplied as well, along
its columns. Compiled backward graphs call these operators where they find all that (``lowerings/float8.py``).

    quantize_both                      a matrix along its rows and along its columns
    …_backward_quantized               that of an activation's gradients, with sums, and of its result
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import DATA, PointwiseOperator, Signature, arguments_of, refuse
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.operators import register_plain
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.operators import eager
from torch_fused_ops.operators.activation import FAMILY

# By operator: those that ``kernels.py`` has a kernel for.
QUANTIZED: dict[PointwiseOperator, torch._ops.OpOverload] = {}
RESULTS = 5  # of each gradient: values and scales along its rows, values and scales along its columns, sums


def _both(input: Tensor, columns: int = BLOCK) -> tuple[Tensor, ...]:
    return *float8.quantize(input, 1, columns), *float8.quantize(input.t(), 1, columns)


def _check_both(input: Tensor, columns: int = BLOCK) -> None:
    if columns not in (BLOCK, MX_BLOCK):
        refuse("columns", columns, f"{BLOCK} or {MX_BLOCK}, the columns of a block")


def _sums(gradient: Tensor) -> Tensor:
    """The sums over each 128 rows, in float32: (tiles, columns)."""
    rows = gradient.shape[0]
    wide = torch.nn.functional.pad(gradient.to(torch.float32), (0, 0, 0, float8.padded(rows) - rows))
    return wide.reshape(-1, BLOCK, gradient.shape[1]).sum(1)


def _signature(op: PointwiseOperator) -> Signature:
    """``…_backward_quantized`` of a declared operator, for calls without biases and scales."""
    return Signature(
        f"{op.name}_backward_quantized",
        (*op.backward.arguments[: 1 + op.data], *op.required_scalars, *arguments_of(columns=f"int={BLOCK}")),
        (*("data", "scales", "data", "scales", "sums") * op.data, "data", "scales"),
        f"For each of {op.backward.name}'s gradients of data what quantize_both gives of it, and its sums over each "
        f"{BLOCK} rows; and {op.name}'s result along its columns, in blocks of ({BLOCK}, {BLOCK}), or (1, {MX_BLOCK}).",
    )


def _of(op: PointwiseOperator) -> Callable[..., tuple[Tensor, ...]]:
    forward, backward = eager.forward(op), eager.backward(op)
    others = (None,) * (len(op.tensors) - op.data)
    wanted = tuple(kind in DATA for kind in op.kinds)
    end = op.data + len(op.required_scalars)

    def quantized(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        (columns,) = args[end:] or (BLOCK,)  # left out where it is the default
        arguments = *args[: op.data], *others, *args[op.data : end]
        gradients = backward(grad, *arguments, wanted)[: op.data]
        of_each = [part for g in gradients if g is not None for part in (*_both(g, columns), _sums(g))]
        return *of_each, *float8.quantize(forward(*arguments).t(), *float8.block_of_columns(columns))

    return quantized


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel by the function itself, on tensors without data; results are contiguous as a kernel's are."""

    def fake(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device
        # On a device that every build of torch has: what is fake is fake there, too.
        shapes = function(*(a.new_empty(a.shape, device="cpu") if isinstance(a, Tensor) else a for a in args))
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in shapes)

    return fake


register_plain(
    Signature(
        "quantize_both",
        arguments_of(input="Tensor: data", columns=f"int={BLOCK}"),
        ("data", "scales", "data", "scales"),
        "quantize(input, 1, columns) and quantize(inputᵀ, 1, columns), in one pass.",
    ),
    _both,
    _fake(_both),
    _check_both,
)
for _op in FAMILY:
    _function = _of(_op)
    QUANTIZED[_op] = register_plain(_signature(_op), _function, _fake(_function))
