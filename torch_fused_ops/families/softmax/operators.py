"""Declare and register ``fused::scaled_masked_softmax`` and its backward operator.

Read from top to bottom: declaration → checks → fake → saved for backward → registration with autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.autocast_mode import _cast

from torch_fused_ops.declaration import Operator, Signature, arguments_of, bound, finite
from torch_fused_ops.families.softmax import formulas, sharding  # noqa: F401
from torch_fused_ops.operators.autograd import SavePolicy, library, register_pair
from torch_fused_ops.operators.checks import check_gradient, make_check
from torch_fused_ops.operators.registration import with_kernels

Grads2: TypeAlias = tuple[Tensor | None, Tensor | None]

scaled_masked_softmax = Operator(
    "scaled_masked_softmax",
    "softmax(scale·input) over the last axis, with a sink beside the row's scores, where nothing masks a score.",
    tensors={"input": "scores", "mask": "mask?", "sink": "per_head?"},
    scalars={
        "scale": "float=1.0",
        "causal": "bool=False",
        "window_left": "int=-1",
        "window_right": "int=-1",
    },
    rules=(finite("scale"), bound("window_left"), bound("window_right")),
    backward=Signature(
        "scaled_masked_softmax_backward",
        # Only the output is saved. The gradients also depend on sink's dtype. Kernels skip keys outside the window.
        arguments_of(
            grad="Tensor: scores",
            output="Tensor: scores",
            scale="float",
            causal="bool",
            window_left="int",
            window_right="int",
            sink_dtype="ScalarType?",
            output_mask="bool[2]",
        ),
        ("scores", "per_head"),
        "The gradients of scaled_masked_softmax for (input, sink), from its output; None where output_mask says no.",
    ),
)

# ---- checks --------------------------------------------------------------------------------------------------------

_check_kinds = make_check(scaled_masked_softmax)


def check(input: Tensor, mask: Tensor | None, sink: Tensor | None, *scalars: Any) -> None:
    """Raise ValueError or TypeError for unaccepted arguments, with the argument, its value and the accepted ones."""
    if mask is not None and mask.dtype != torch.bool:
        if mask.is_floating_point():
            hint = "convert a mask that is added to the scores with `mask < 0` or `mask.isneginf()`"
        else:
            hint = "convert a mask of numbers with `mask != 0`"
        raise TypeError(f"mask has dtype {mask.dtype}; accepted: bool, True where a score is masked out ({hint})")
    _check_kinds(input, mask, sink, *scalars)
    size = tuple(input.shape)
    if len(size) < 2:
        raise ValueError(f"input has shape {size}; accepted: at least two axes, queries and keys")
    if mask is not None:
        pairs = zip(reversed(mask.shape), reversed(size), strict=False)
        if mask.ndim > len(size) or any(m != 1 and m != n for m, n in pairs):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}; accepted: a shape that broadcasts to input's, {size}"
            )
    if sink is not None and len(size) < 3:
        raise ValueError(f"sink is not accepted with input of shape {size}: heads are input's last axis but two")
    if sink is not None and sink.shape != size[-3:-2]:
        accepted = f"{size[-3:-2]}, input's last axis but two"
        raise ValueError(f"sink has shape {tuple(sink.shape)}; accepted: {accepted}")


# ---- fake ------------------------------------------------------------------------------------------------------------


def _fake(input: Tensor, *args: Any) -> Tensor:
    check(input, *args)
    return input.new_empty(input.shape)


def _backward_fake(grad: Tensor, output: Tensor, *scalars: Any) -> Grads2:
    sink_dtype, mask = scalars[-2:]
    d_input = output.new_empty(output.shape) if mask[0] else None
    return d_input, output.new_empty(output.shape[-3:-2], dtype=sink_dtype) if mask[1] else None


# ---- saved for backward ----------------------------------------------------------------------------------------------


def _save_output(args: tuple[Any, ...], out: Tensor) -> tuple[tuple[Tensor], tuple[Any, ...]]:
    """Save only the output, which attention's second GEMM saves anyway."""
    _, _, sink, *scalars = args
    return (out,), (*scalars, None if sink is None else sink.dtype)


def _for_three(backward: Callable[..., Grads2]) -> Callable[..., Any]:
    """Extend a backward function for (input, sink) to autograd's (input, mask, sink)."""

    def backward_of_all(*args: Any) -> tuple[Tensor | None, ...]:
        *values, mask = args
        d_input, d_sink = backward(*values, (mask[0], mask[2]))
        return d_input, None, d_sink

    return backward_of_all


# ---- registration ----------------------------------------------------------------------------------------------------

_FORWARD = register_pair(
    with_kernels(scaled_masked_softmax.forward, formulas.scaled_masked_softmax, _fake, check),
    with_kernels(
        scaled_masked_softmax.backward, formulas.scaled_masked_softmax_backward, _backward_fake, check_gradient
    ),
    lambda *args: SavePolicy(_save_output),
    adapt=_for_three,
)


def _register_autocast(key_name: str) -> None:
    """Apply PyTorch's autocast rule for softmax: input and sink are cast to float32 unless they are float64.

    torch 2.11's compiler ignores ``torch.library.register_autocast``, so it gets a Python kernel.
    """
    key = getattr(torch._C.DispatchKey, key_name)

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return _FORWARD(*_cast(args, args[0].device.type, torch.float32))

    library.impl(_FORWARD, kernel, key_name)
    _FORWARD.py_impl(key)(kernel)


for _key in ("AutocastCUDA", "AutocastXPU"):  # on CPUs autocast does not change softmax's dtype
    _register_autocast(_key)
