"""``fused::scaled_masked_softmax`` and its backward operator.

Read from top to bottom: the declaration → what is accepted → fake → what is kept for backward → registration,
autocast among it. The kernels are in ``kernels.py`` for GPUs and ``cpu.py`` for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.autocast_mode import _cast

from torch_fused_ops.declaration import OpaqueOperator, Signature, arguments_of
from torch_fused_ops.families.softmax import cpu, formulas, sharding  # noqa: F401
from torch_fused_ops.operators.autograd import SavePolicy, library
from torch_fused_ops.operators.checks import DTYPES
from torch_fused_ops.operators.registration import KernelSet, imported, register_pair

Grads2: TypeAlias = tuple[Tensor | None, Tensor | None]

scaled_masked_softmax = OpaqueOperator(
    "scaled_masked_softmax",
    "softmax(scale·input) over the last axis, with a sink beside the row's scores, where nothing masks a score.",
    tensors={"input": "scores", "mask": "mask?", "sink": "per_head?"},
    scalars={
        "scale": "float=1.0",
        "causal": "bool=False",
        "window_left": "int=-1",
        "window_right": "int=-1",
    },
    gradients=Signature(
        "scaled_masked_softmax_backward",
        # Only the output is kept. Of input and sink, what is left to know is sink's dtype; of the masks, what a kernel
        # may leave unread.
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

# ---- what is accepted ----------------------------------------------------------------------------------------------

_ACCEPTED = "float16, bfloat16, float32, float64"


def _check_mask(input: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        if mask.is_floating_point():
            what = "convert a mask that is added to the scores with `mask < 0` or `mask.isneginf()`"
        else:
            what = "convert a mask of numbers with `mask != 0`"
        raise TypeError(f"mask has dtype {mask.dtype}; accepted: bool, True where a score is masked out ({what})")
    shape, size = mask.shape, input.shape
    if len(shape) > len(size) or any(m != 1 and m != n for m, n in zip(reversed(shape), reversed(size), strict=False)):
        raise ValueError(f"mask has shape {tuple(shape)}; accepted: a shape that broadcasts to input's, {tuple(size)}")


def check(input: Tensor, mask: Tensor | None, sink: Tensor | None, scale: float = 1.0, *window: int) -> None:
    """Raise ValueError or TypeError, naming the argument, its value and what is accepted; else nothing."""
    if input is None:  # torch.ops takes it for an undefined tensor
        raise TypeError("input=None is not accepted: it must be a tensor, not NoneType")
    for name, t in (("input", input), ("sink", sink)):
        if t is not None and t.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {t.dtype}; accepted: {_ACCEPTED}")
    if input.ndim < 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; accepted: at least two axes, queries and keys")
    if mask is not None:
        _check_mask(input, mask)
    if sink is not None:
        if input.ndim < 3:
            raise ValueError(
                f"sink is not accepted with input of shape {tuple(input.shape)}: heads are input's last axis but two"
            )
        if sink.shape != input.shape[-3:-2]:
            raise ValueError(
                f"sink has shape {tuple(sink.shape)}; accepted: {tuple(input.shape[-3:-2])}, input's last axis but two"
            )
    for name, t in (("mask", mask), ("sink", sink)):
        if t is not None and t.device != input.device:
            raise ValueError(f"{name} is on device {t.device}; accepted: {input.device}, where input is")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale!r} is not accepted: it must be finite")
    for name, width in zip(("window_left", "window_right"), window[1:], strict=False):
        if width < -1:
            raise ValueError(f"{name}={width!r} is not accepted: it must be at least 0, or -1 for no bound")


# ---- fake ------------------------------------------------------------------------------------------------------------


def _fake(input: Tensor, *rest: Any) -> Tensor:
    check(input, *rest)
    return input.new_empty(input.shape)


def _backward_fake(grad: Tensor, output: Tensor, *scalars: Any) -> Grads2:
    sink_dtype, mask = scalars[-2:]
    d_input = output.new_empty(output.shape) if mask[0] else None
    return d_input, output.new_empty(output.shape[-3:-2], dtype=sink_dtype) if mask[1] else None


# ---- what is kept for backward ---------------------------------------------------------------------------------------

# The output alone, which what reads it keeps anyway: attention's product with the values.
_OUTPUT = SavePolicy(
    lambda args, out: ((out,), (*args[3:], None if args[2] is None else args[2].dtype)),
    lambda kept, rest, _: (*kept, *rest),
)


def _for_three(backward: Callable[..., Grads2]) -> Callable[..., Any]:
    """A backward of (input, sink) as autograd calls it, for (input, mask, sink)."""

    def called(*args: Any) -> tuple[Tensor | None, ...]:
        *rest, mask = args
        d_input, d_sink = backward(*rest, (mask[0], mask[2]))
        return d_input, None, d_sink

    return called


# ---- registration ----------------------------------------------------------------------------------------------------

_KERNELS = "torch_fused_ops.families.softmax.kernels"

_FORWARD = register_pair(
    scaled_masked_softmax.signatures,
    KernelSet(
        cpu.scaled_masked_softmax,
        imported(_KERNELS, lambda kernels: kernels.scaled_masked_softmax),
        formulas.scaled_masked_softmax,
        _fake,
    ),
    KernelSet(
        cpu.scaled_masked_softmax_backward,
        imported(_KERNELS, lambda kernels: kernels.scaled_masked_softmax_backward),
        formulas.scaled_masked_softmax_backward,
        _backward_fake,
    ),
    check,
    lambda *_: _OUTPUT,
    adapt=_for_three,
)


def _register_autocast(key_name: str) -> None:
    """PyTorch's rule for softmax on GPUs: input and sink, unless float64, become float32, and so does the result.

    Not ``torch.library.register_autocast``, which torch 2.11's compiler does not see: the Python kernel is for it.
    """
    key = getattr(torch._C.DispatchKey, key_name)

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return _FORWARD(*_cast(args, args[0].device.type, torch.float32))

    library.impl(_FORWARD, kernel, key_name)
    _FORWARD.py_impl(key)(kernel)


for _key in ("AutocastCUDA", "AutocastXPU"):  # on CPUs softmax keeps its dtype
    _register_autocast(_key)
