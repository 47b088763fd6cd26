"""Declared operators → ``torch.ops.fused.*``: each of the four that an operator comes in, with everything it needs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import PointwiseOperator, Signature
from torch_fused_ops.kernels import cpu
from torch_fused_ops.operators import batching, eager, fakes
from torch_fused_ops.operators.autograd import (
    SavePolicy,
    checked,
    differentiate,
    differentiate_by_reference,
    keep_arguments,
    register,
)
from torch_fused_ops.operators.checks import check, check_gradient
from torch_fused_ops.settings.switches import is_without

__all__ = ["KernelSet", "imported", "register_pair", "register_pointwise"]


class KernelSet(NamedTuple):
    """What an operator, or its backward operator, is registered with."""

    on_cpu: Callable[..., Any]
    on_gpu: Callable[..., Any]
    plain: Callable[..., Any]  # the same in plain torch
    fake: Callable[..., Any]
    vmap: Callable[[torch._ops.OpOverload], Callable[..., Any]]

    def chosen(self) -> KernelSet:
        """These, without kernels of ours where the environment says so."""
        return self._replace(on_cpu=self.plain, on_gpu=self.plain) if is_without("kernels") else self


def register_pair(
    signatures: tuple[Signature, Signature],
    forward: KernelSet,
    backward: KernelSet,
    check: Callable[..., None],
    keep: Callable[..., SavePolicy],
    record: Callable[..., Tensor | None] | None = None,
    adapt: Callable[[Any], Any] = lambda backward: backward,
) -> torch._ops.OpOverload:
    """An operator and its backward operator, by which it is differentiable.

    Args:
        signatures: of the two.
        forward, backward: their parts, whose arguments are unchecked.
        check: raises for what the operator does not accept.
        keep, record: see ``differentiate``.
        adapt: makes of the backward operator what gives a gradient, or None, for each of the operator's tensors.
    """
    forward, backward = forward.chosen(), backward.chosen()
    if is_without("kernels"):
        record = None  # which is a kernel of ours on CPUs, if one made of PyTorch's
    operator = register(signatures[0], *forward, check)
    backward_operator = register(signatures[1], *backward, check_gradient)
    of_backward = (checked(kernel, check_gradient) for kernel in (backward.plain, backward.on_cpu))
    differentiate_by_reference(backward_operator, *of_backward)
    of_all = adapt(backward_operator), adapt(backward.on_cpu)
    differentiate(operator, check, forward.plain, forward.on_cpu, of_all, keep, record)
    return operator


def register_pointwise(op: PointwiseOperator) -> None:
    """``fused::name``, ``…_backward``, ``…_fp8`` and ``…_fp8_backward``."""
    accepts = check(op)
    for factories, forward, backward in ((_PLAIN, op.forward, op.backward), (_STORING, op.fp8, op.fp8_backward)):
        plain_forward, plain_backward = (make(op) for make in factories.plain)
        on_cpu, backward_on_cpu = cpu.kernel(op, forward, plain_forward), cpu.kernel(op, backward, plain_backward)
        batched = functools.partial(batching.forward, op, plain=plain_forward, check=accepts)
        batched_backward = functools.partial(factories.batched_backward, op)
        fake, backward_fake = factories.fakes[0](op, accepts), factories.fakes[1](op)
        gpu, backward_gpu = (_on_gpu(op, s.name, k) for s, k in ((forward, on_cpu), (backward, backward_on_cpu)))
        register_pair(
            (forward, backward),
            KernelSet(on_cpu, gpu, plain_forward, fake, batched),
            KernelSet(backward_on_cpu, backward_gpu, plain_backward, backward_fake, batched_backward),
            accepts,
            factories.keep(op),
            cpu.recorded(op) if factories is _PLAIN else None,
        )


def imported(module: str, find: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """``find(module)``, the module imported at the first call: GPUs' kernels need Triton."""
    load = functools.cache(lambda: find(importlib.import_module(module)))
    return lambda *args: load()(*args)


def _on_gpu(op: PointwiseOperator, name: str, in_torch: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of ``op.kernels``; blocks of plain torch where there is none, and for registered activations."""
    if op.kernels is None:
        return in_torch
    launch = imported(op.kernels, lambda module: module.launch_of(name))
    if "activation" not in op.scalars:
        return launch

    def kernel(*args: Any) -> Any:
        activation = next(a for a in args if isinstance(a, str))  # the first of the strings
        return (launch if activations.get(activation).builtin else in_torch)(*args)

    return kernel


# ---- what is kept for backward ---------------------------------------------------------------------------------------


def _keep(op: PointwiseOperator) -> Callable[..., SavePolicy]:
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

    result = SavePolicy(saved, given_back)
    return lambda *args: result if suffices(*args) else arguments


def _keep_fp8(op: PointwiseOperator) -> Callable[..., SavePolicy]:
    """Of the data what the operator stored; the other arguments as they are."""
    data, count = op.data, len(op.tensors)
    keep = SavePolicy(
        lambda args, outputs: ((*outputs[1:], *args[data:count]), (*args[count:], *(t.dtype for t in args[:data]))),
        lambda kept, rest, _: kept + rest,
        once=True,
    )
    return lambda *_: keep


# ---- an operator, and the same with its data stored ------------------------------------------------------------------


class _KernelFactories(NamedTuple):
    """What makes the parts of an operator and of its backward operator."""

    plain: tuple[Callable[..., Any], Callable[..., Any]]
    fakes: tuple[Callable[..., Any], Callable[..., Any]]
    batched_backward: Callable[..., Any]
    keep: Callable[[PointwiseOperator], Callable[..., SavePolicy]]


_PLAIN = _KernelFactories(
    plain=(eager.forward, eager.backward),
    fakes=(fakes.forward, fakes.backward),
    batched_backward=batching.backward,
    keep=_keep,
)
_STORING = _KernelFactories(
    plain=(eager.fp8, eager.fp8_backward),
    fakes=(fakes.fp8, fakes.fp8_backward),
    batched_backward=batching.fp8_backward,
    keep=_keep_fp8,
)
