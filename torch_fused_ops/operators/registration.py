"""Declared operators → ``torch.ops.fused.*``: each operator and its backward operator, with everything they need."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import PointwiseOperator, Signature
from torch_fused_ops.formulas import Gradients, room
from torch_fused_ops.kernels import cpu
from torch_fused_ops.operators import eager, fp8_store
from torch_fused_ops.operators.autograd import (
    SavePolicy,
    checked,
    differentiate,
    differentiate_by_reference,
    register,
)
from torch_fused_ops.operators.checks import check, check_gradient
from torch_fused_ops.settings.switches import is_without


class KernelSet(NamedTuple):
    """The kernels and rules of an operator, or of its backward operator."""

    on_cpu: Callable[..., Any]
    on_gpu: Callable[..., Any]
    plain: Callable[..., Any]  # the same in plain torch
    fake: Callable[..., Any]

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
    """``fused::name`` and ``fused::name_backward``."""
    accepts = check(op)

    def fake(*args: Any) -> Tensor:
        accepts(*args)
        first: Tensor = args[0]
        return first.new_empty((*first.shape[:-1], first.shape[-1] // 2) if op.is_packed else first.shape)

    def backward_fake(grad: Tensor, *args: Any) -> Gradients:
        return tuple(room(t, wanted) for t, wanted in zip(args, args[-1], strict=False))

    plain_forward, plain_backward = eager.forward(op), eager.backward(op)
    on_cpu, backward_on_cpu = cpu.kernel(op, op.forward, plain_forward), cpu.kernel(op, op.backward, plain_backward)
    gpu, backward_gpu = _on_gpu(op, op.forward.name, on_cpu), _on_gpu(op, op.backward.name, backward_on_cpu)
    register_pair(
        op.signatures,
        KernelSet(on_cpu, gpu, plain_forward, fake),
        KernelSet(backward_on_cpu, backward_gpu, plain_backward, backward_fake),
        accepts,
        _keep(op),
        cpu.recorded(op),
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
    """The arguments; the result in the data's place, if that is enough; or, as marked, the data in float8."""
    suffices, bias, count = op.keeps_result, op.bias_index, len(op.tensors)
    arguments = SavePolicy(lambda args, _: (args[:count], args[count:]), lambda kept, rest, _: kept + rest)

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

    result, stored = SavePolicy(saved, given_back), fp8_store.policy(op)

    def choose(*args: Any) -> SavePolicy:
        if fp8_store.is_marked(args[0]):
            return stored
        return result if suffices(*args) else arguments

    return choose
