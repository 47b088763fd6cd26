"""Checks of a declared operator's arguments: dtypes, devices and shapes by kind, scalars by rule.

A failed check raises a TypeError or ValueError that names the argument, its value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_fused_ops.declaration import Operator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_has_axis(name: str, shape: Any) -> None:
    if len(shape) == 0:
        raise ValueError(f"{name} has shape (); accepted: at least one axis")


def check_gradient(grad: Tensor, *args: Any) -> None:
    """Raise if a backward operator's gradient has no axis: the forward operator also rejects such data."""
    _check_has_axis("grad", grad.shape)


def _check_packed(name: str, shape: Any) -> None:
    _check_has_axis(name, shape)
    if shape[-1] % 2:
        raise ValueError(f"{name} has last axis {shape[-1]}; accepted: an even size, gate and up packed")


# By kind: a function from the first tensor's shape to this tensor's shape, and the name of that shape in messages.
_SHAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data": (lambda shape: shape, "shape"),
    "per_column": (lambda shape: shape[-1:], "last axis"),
    "per_row": (lambda shape: shape[:-1], "shape without its last axis"),
}


_DTYPES = {"seed": (torch.int64,), "mask": (torch.bool,)}  # by kind; other kinds have DTYPES


def refuse_dtype(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...]) -> NoReturn:
    """Raise a TypeError that lists the accepted dtypes."""
    accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise TypeError(f"{name} has dtype {t.dtype}; accepted: {accepted}")


def make_check(op: Operator) -> Callable[..., None]:
    """Return a function of the operator's arguments that raises for unaccepted ones and returns None."""
    count = len(op.tensors)
    first_name, *_ = op.tensors
    check_first = _check_packed if op.kinds[0] == "packed" else _check_has_axis
    # On small tensors these loops dominate a call's time, so each visits only the arguments it checks.
    typed = [(i, a.name, _DTYPES.get(a.kind, DTYPES)) for i, a in enumerate(op.tensor_arguments)]
    required = [(i, a.name) for i, a in enumerate(op.tensor_arguments) if a.type == "Tensor"]
    shaped = [(i, a.name, *_SHAPES[a.kind]) for i, a in enumerate(op.tensor_arguments) if i and a.kind in _SHAPES]
    single = [(i, a.name) for i, a in enumerate(op.tensor_arguments) if a.kind == "seed"]
    rules = [(count + list(op.scalars).index(rule.name), rule.check) for rule in op.rules]

    def check_arguments(*args: Any) -> None:
        for i, name in required:
            if args[i] is None:  # torch.ops accepts None as an undefined tensor
                raise TypeError(f"{name}=None is not accepted: it must be a tensor, not NoneType")
        first = args[0]
        device = first.device
        for i, name, dtypes in typed:
            t = args[i]
            if t is None:
                continue
            if t.dtype not in dtypes:
                refuse_dtype(name, t, dtypes)
            if t.layout is not torch.strided or t.is_nested:
                raise TypeError(f"{name} has layout {t.layout}; accepted: dense tensors (torch.strided, not nested)")
            if t.device != device:
                raise ValueError(f"{name} is on device {t.device}; accepted: {device}, where {first_name} is")
        shape = first.shape
        check_first(first_name, shape)
        for i, name, of_first, meaning in shaped:
            t = args[i]
            if t is not None and t.shape != of_first(shape):
                accepted = f"{tuple(of_first(shape))}, {first_name}'s {meaning}"
                raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: {accepted}")
        for i, name in single:
            if args[i].numel() != 1:
                raise ValueError(f"{name} has shape {tuple(args[i].shape)}; accepted: one element")
        for i, rule in rules:
            if i < len(args):
                rule(args[i])

    return check_arguments
