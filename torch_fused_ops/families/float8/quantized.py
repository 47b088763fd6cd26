"""Operators that compute backward's float8 operands in one pass over memory.

Backward multiplies a gradient twice: quantized along its rows, by the weight; and quantized along its columns, by the
input. The gradient's sum over the rows is the bias gradient. If an activation computes the gradient, another GEMM reads
the activation's result, quantized along its columns. Compiled backward graphs call these operators if they contain all
of these steps (``lowerings/float8.py``).

    quantize_both              quantizes a matrix along its rows and along its columns
    …_backward_quantized       computes an activation's gradients, quantized both ways, their sums, and its result
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.declaration import DATA, PointwiseOperator, arguments_of
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.operators import register_plain
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK
from torch_fused_ops.operators import eager
from torch_fused_ops.operators.activation import FAMILY

# Maps each operator for which ``kernels.py`` has a kernel to its …_backward_quantized.
QUANTIZED: dict[PointwiseOperator, torch._ops.OpOverload] = {}
# The activations for which ``kernels.py`` quantizes gradients in the kernel that computes them (``activations.py``).
ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "tanh")
RESULTS = 5  # per gradient: values and scales along its rows, values and scales along its columns, sums


def _quantize_both(input: Tensor, columns: int = BLOCK) -> tuple[Tensor, ...]:
    return *float8.quantize(input, 1, columns), *float8.quantize(input.t(), 1, columns)


def _sums(gradient: Tensor) -> Tensor:
    """Sum every 128 rows in float32. Return a tensor (tiles, columns)."""
    rows = gradient.shape[0]
    wide = torch.nn.functional.pad(gradient.to(torch.float32), (0, 0, 0, float8.padded(rows) - rows))
    return wide.reshape(-1, BLOCK, gradient.shape[1]).sum(1)


def _quantized_backward(op: PointwiseOperator) -> Callable[..., tuple[Tensor, ...]]:
    forward, backward = eager.forward(op), eager.backward(op)
    no_bias_or_scale = (None,) * (len(op.tensors) - op.num_data)
    requested = tuple(kind in DATA for kind in op.kinds)
    end = op.num_data + len(op.required_scalars)

    def quantized(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        (columns,) = args[end:] or (BLOCK,)  # omitted if it is the default
        arguments = *args[: op.num_data], *no_bias_or_scale, *args[op.num_data : end]
        gradients: Any = backward(grad, *arguments, requested)[: op.num_data]  # all of them are requested
        stored = [part for g in gradients for part in (*_quantize_both(g, columns), _sums(g))]
        return *stored, *float8.quantize(forward(*arguments).t(), *float8.block_of_columns(columns))

    return quantized


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a fake kernel that calls the function on tensors without data, and returns contiguous results."""

    def fake(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device
        # Every build of torch has the device "cpu", on which fake tensors remain fake, but tensors on "meta" do not.
        without_data = "meta" if device.type == "meta" else "cpu"
        empty_args = [a.new_empty(a.shape, device=without_data) if isinstance(a, Tensor) else a for a in args]
        shapes = function(*empty_args)
        return tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in shapes)

    return fake


register_plain(
    "quantize_both",
    "quantize(input, 1, columns) and quantize(inputᵀ, 1, columns), in one pass.",
    arguments_of(input="Tensor: data", columns=f"int={BLOCK}"),
    ("data", "scales", "data", "scales"),
    _quantize_both,
    _fake(_quantize_both),
)
for _op in FAMILY:
    _function = _quantized_backward(_op)
    QUANTIZED[_op] = register_plain(  # for calls without biases and scales
        f"{_op.name}_backward_quantized",
        f"The results of quantize_both for each data gradient of {_op.backward.name}, and its sums over each {BLOCK} "
        f"rows; and {_op.name}'s result along its columns, in blocks of ({BLOCK}, {BLOCK}), or (1, {MX_BLOCK}).",
        (*_op.backward.arguments[: 1 + _op.num_data], *_op.required_scalars, *arguments_of(columns=f"int={BLOCK}")),
        (*("data", "scales", "data", "scales", "sums") * _op.num_data, "data", "scales"),
        _function,
        _fake(_function),
    )
