"""Declared operators → ``torch.ops.fused.*``: each of the four that an operator comes in, with everything it needs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import Elementwise
from torch_fused_ops.kernels import cpu
from torch_fused_ops.operators import batching, fakes, plain
from torch_fused_ops.operators.autograd import (
    Keep,
    differentiate,
    differentiate_by_reference,
    keep_arguments,
    register,
)
from torch_fused_ops.operators.checks import check

__all__ = ["register_elementwise"]


def register_elementwise(op: Elementwise) -> None:
    """``fused::name``, ``…_backward``, ``…_fp8`` and ``…_fp8_backward``."""
    accepts = check(op)
    for fp8 in (False, True):
        forward, backward = (op.fp8, op.fp8_backward) if fp8 else (op.forward, op.backward)
        family = _STORING if fp8 else _PLAIN
        plain_forward, plain_backward = family.plain[0](op), family.plain[1](op)
        on_cpu, backward_on_cpu = _checked(family.on_cpu[0](op), accepts), family.on_cpu[1](op)
        operator = register(
            forward,
            on_cpu,
            _on_gpu(op, forward.name, on_cpu, accepts),
            plain_forward,
            family.fakes[0](op, accepts),
            functools.partial(batching.forward, op, plain=plain_forward, check=accepts),
            accepts,
        )
        backward_operator = register(
            backward,
            backward_on_cpu,
            _on_gpu(op, backward.name, backward_on_cpu, None),
            plain_backward,
            family.fakes[1](op),
            functools.partial(family.batched_backward, op),
        )
        differentiate_by_reference(backward_operator, plain_backward, backward_on_cpu)
        differentiate(
            operator,
            accepts,
            plain_forward,
            on_cpu,
            (backward_operator, backward_on_cpu),
            family.keep(op),
            None if fp8 else cpu.recorded(op),
        )


def _checked(kernel: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return checked


def _on_gpu(
    op: Elementwise, name: str, in_torch: Callable[..., Any], check: Callable[..., None] | None
) -> Callable[..., Any]:
    """The kernel of ``op.kernels``, imported at the first call; blocks of plain torch for registered activations."""
    if op.kernels is None:
        return in_torch
    module, found, has_activation = op.kernels, list[Callable[..., Any]](), "activation" in op.scalars

    def kernel(*args: Any) -> Any:
        if has_activation and not activations.get(next(a for a in args if isinstance(a, str))).builtin:
            return in_torch(*args)
        if check is not None:
            check(*args)
        if not found:
            found.append(importlib.import_module(module).launch_of(name))
        return found[0](*args)

    return kernel


# ---- what is kept for backward ---------------------------------------------------------------------------------------


def _keep(op: Elementwise) -> Callable[..., Keep]:
    """The arguments; or the result in the data's place, if that is enough."""
    arguments, suffices, bias = keep_arguments(len(op.tensors)), op.keeps_result, op.bias
    count = len(op.tensors)

    def saved(args: tuple[Any, ...], out: Tensor) -> tuple[tuple[Tensor], Any]:
        given = None if bias is None else args[bias]
        return (out,), (None if given is None else given.dtype, args[count:])

    def given_back(kept: tuple[Tensor | None, ...], rest: Any, mask: tuple[bool, ...]) -> tuple[Any, ...]:
        (out,), (bias_dtype, scalars) = kept, rest
        assert out is not None
        tensors: list[Tensor | None] = [out, *[None] * (count - 1)]
        if bias is not None and mask[bias]:  # the derivative at input + bias is the derivative at the result
            tensors[bias] = out.new_zeros(out.shape[-1:], dtype=bias_dtype)
        return *tensors, *scalars

    result = Keep(saved, given_back)
    return lambda *args: result if suffices(*args) else arguments


def _keep_fp8(op: Elementwise) -> Callable[..., Keep]:
    """Of the data what the operator stored; the other arguments as they are."""
    data, count = op.data, len(op.tensors)
    keep = Keep(
        lambda args, outputs: ((*outputs[1:], *args[data:count]), (*args[count:], *(t.dtype for t in args[:data]))),
        lambda kept, rest, _: kept + rest,
        once=True,
    )
    return lambda *_: keep


# ---- an operator, and the same with its data stored ------------------------------------------------------------------


class _Family(NamedTuple):
    """What makes the parts of an operator and of its backward operator."""

    plain: tuple[Callable[..., Any], Callable[..., Any]]
    on_cpu: tuple[Callable[..., Any], Callable[..., Any]]
    fakes: tuple[Callable[..., Any], Callable[..., Any]]
    batched_backward: Callable[..., Any]
    keep: Callable[[Elementwise], Callable[..., Keep]]


_PLAIN = _Family(
    plain=(plain.forward, plain.backward),
    on_cpu=(cpu.forward, cpu.backward),
    fakes=(fakes.forward, fakes.backward),
    batched_backward=batching.backward,
    keep=_keep,
)
_STORING = _Family(
    plain=(plain.fp8, plain.fp8_backward),
    on_cpu=(cpu.fp8, cpu.fp8_backward),
    fakes=(fakes.fp8, fakes.fp8_backward),
    batched_backward=batching.fp8_backward,
    keep=_keep_fp8,
)
