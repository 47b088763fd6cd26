"""What a declared operator accepts: its tensors' dtypes, devices and shapes, by their kinds; its scalars, by its rules.

Every check raises TypeError or ValueError that names the argument, its value and what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.operators.declare import Operator

__all__ = ["DTYPES", "check"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _first(name: str, t: Tensor) -> None:
    if t.ndim == 0:
        raise ValueError(f"{name} has shape (); accepted: at least one axis")


def _packed(name: str, t: Tensor) -> None:
    _first(name, t)
    if t.shape[-1] % 2:
        raise ValueError(f"{name} has last axis {t.shape[-1]}; accepted: an even size, gate and up packed")


# By a tensor's kind: its shape, from the first tensor's, and what that is called.
_SHAPES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data": (lambda shape: shape, "shape"),
    "per_column": (lambda shape: shape[-1:], "last axis"),
    "per_row": (lambda shape: shape[:-1], "shape without its last axis"),
}


def _is_seed(name: str, t: Tensor) -> None:
    if t.dtype != torch.int64:
        raise TypeError(f"{name} has dtype {t.dtype}; accepted: int64")
    if t.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: one element")


_OTHERS: dict[str, Callable[[str, Tensor], None]] = {"seed": _is_seed}


def check(op: Operator) -> Callable[..., None]:
    """A function of the operator's arguments that raises for what is not accepted, and returns nothing."""
    count = len(op.tensors)
    first_name, *_ = op.tensors
    first_is = _packed if op.kinds[0] == "packed" else _first
    tensors = [(a.name, a.type == "Tensor?", _SHAPES.get(a.kind), _OTHERS.get(a.kind)) for a in op.tensor_arguments]
    rules = [(count + list(op.scalars).index(rule.name), rule.check) for rule in op.rules]

    def checked(*args: Any) -> None:
        first = args[0]
        if first is None:  # torch.ops takes it for an undefined tensor
            raise TypeError(f"{first_name}=None is not accepted: it must be a tensor, not NoneType")
        device = first.device
        for (name, optional, _, special), t in zip(tensors, args, strict=False):
            if t is None:
                if not optional:
                    raise TypeError(f"{name}=None is not accepted: it must be a tensor, not NoneType")
                continue
            if special is not None:
                special(name, t)
            elif t.dtype not in DTYPES:
                raise TypeError(f"{name} has dtype {t.dtype}; accepted: float16, bfloat16, float32, float64")
            if t.device != device:
                raise ValueError(f"{name} is on device {t.device}; accepted: {device}, where the first tensor is")
        first_is(first_name, first)
        for i in range(1, count):
            t, shape_of = args[i], tensors[i][2]
            if t is not None and shape_of is not None:
                expected, meaning = shape_of[0](first.shape), shape_of[1]
                if t.shape != expected:
                    raise ValueError(
                        f"{tensors[i][0]} has shape {tuple(t.shape)}; accepted: {tuple(expected)}, "
                        f"{first_name}'s {meaning}"
                    )
        for i, rule in rules:
            if i < len(args):
                rule(args[i])

    return checked
