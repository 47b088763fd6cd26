"""``fused::scaled_masked_softmax`` and its backward operator.

Read from top to bottom: the declaration → what is accepted → fake → vmap → what is kept for backward → registration,
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
from torch_fused_ops.operators.batching import lead
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


def check(
    input: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
    scale: float = 1.0,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> None:
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
    for name, width in (("window_left", window_left), ("window_right", window_right)):
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


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _as_heads(t: Tensor) -> Tensor:
    """(batch, …, heads, sq, sk) → (…, batch · heads, sq, sk): each example's heads are heads of their own."""
    return t.movedim(0, -4).flatten(-4, -3)


def _from_heads(t: Tensor, batch: int) -> Tensor:
    out: Tensor = t.unflatten(-3, (batch, t.shape[-3] // batch if batch else t.shape[-3])).movedim(-4, 0)
    return out


def _mask_as_heads(mask: Tensor, batch: int, heads: int) -> Tensor:
    """``_as_heads`` of a mask (batch or 1, …, heads or 1, …): a copy only if it differs between heads or examples."""
    if mask.shape[0] != 1 or mask.shape[-3] != 1:
        mask = mask.expand(batch, *mask.shape[1:-3], heads, *mask.shape[-2:])
    return _as_heads(mask)


def _rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """The operator with the batch axis as one more leading axis; next to the heads, where sinks are batched."""
    batch, scalars = info.batch_size, args[3:]
    if batch:  # what one example sees is checked: with a batch axis in front more would be accepted
        check(*(a if d is None else a.select(d, 0) for a, d in zip(args, in_dims, strict=True)))
    input, mask, sink = (
        t if t is None or (d is None and i) else lead(info, t, d)
        for i, (t, d) in enumerate(zip(args[:3], in_dims[:3], strict=True))
    )
    ndim = input.ndim - 1  # of an example
    if mask is not None:
        own = mask.shape[1:] if in_dims[1] is not None else mask.shape
        front = mask.shape[:1] if in_dims[1] is not None else (1,)
        mask = mask.reshape(*front, *(1,) * (ndim - len(own)), *own)
    if in_dims[2] is None:
        return torch.ops.fused.scaled_masked_softmax(input, mask, sink, *scalars), 0
    if mask is not None:
        mask = _mask_as_heads(mask, batch, input.shape[-3])
    out = torch.ops.fused.scaled_masked_softmax(_as_heads(input), mask, sink.flatten(), *scalars)
    return _from_heads(out, batch), 0


def _backward_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    grad, output = (lead(info, t, d) for t, d in zip(args[:2], in_dims[:2], strict=True))
    scalars, wanted = args[2:], args[-1]
    backward = torch.ops.fused.scaled_masked_softmax_backward
    if not wanted[1]:  # a sink's gradient must not be summed over the examples
        return backward(grad, output, *scalars), (0 if wanted[0] else None, None)
    d_input, d_sink = backward(_as_heads(grad), _as_heads(output), *scalars)
    d_input = None if d_input is None else _from_heads(d_input, info.batch_size)
    return (d_input, d_sink.view(info.batch_size, output.shape[-3])), (0 if wanted[0] else None, 0)


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
        lambda _: _rule,
    ),
    KernelSet(
        cpu.scaled_masked_softmax_backward,
        imported(_KERNELS, lambda kernels: kernels.scaled_masked_softmax_backward),
        formulas.scaled_masked_softmax_backward,
        _backward_fake,
        lambda _: _backward_rule,
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
