"""Register declared operators and their backward operators as ``torch.ops.fused.*``, with all kernels and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.declaration import PointwiseOperator, Signature
from torch_fused_ops.formulas import Gradients, act_element, empty_gradient
from torch_fused_ops.kernels import compiled, cpu
from torch_fused_ops.operators import eager, fp8_store
from torch_fused_ops.operators.autograd import (
    SavePolicy,
    checked,
    differentiate,
    differentiate_by_reference,
    register,
)
from torch_fused_ops.operators.checks import check_gradient, make_check
from torch_fused_ops.settings.switches import is_without


class KernelSet(NamedTuple):
    """The functions that compute an operator or a backward operator."""

    formula: Callable[..., Any]  # runs if no kernel is compiled
    plain: Callable[..., Any]  # the reference in plain torch
    fake: Callable[..., Any]

    def kernels(self, signature: Signature) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the kernels for CPUs and GPUs. If kernels are turned off, both are ``plain``."""
        if is_without("kernels"):
            return self.plain, self.plain
        return compiled.kernel(signature, self.formula), compiled.kernel(signature, self.formula, on_gpu=True)


def register_pair(
    signatures: tuple[Signature, Signature],
    forward: KernelSet,
    backward: KernelSet,
    check: Callable[..., None],
    keep: Callable[..., SavePolicy],
    native: Callable[..., Any] | None = None,
    adapt: Callable[[Any], Any] = lambda backward: backward,
) -> torch._ops.OpOverload:
    """Register an operator and its backward operator, and make the operator differentiable.

    Args:
        signatures: signatures of the operator and of its backward operator.
        forward, backward: their kernels; only ``fake`` checks arguments.
        check: raises for arguments that the operator does not accept.
        keep, native: see ``differentiate``.
        adapt: wraps the backward operator or its kernel, to return a gradient or None for each tensor of the operator.
    """
    on_cpu, on_gpu = forward.kernels(signatures[0])
    backward_on_cpu, backward_on_gpu = backward.kernels(signatures[1])
    if is_without("kernels"):
        native = None
    if native is not None:
        on_cpu = _prefer(native, on_cpu)
    operator = register(signatures[0], on_cpu, on_gpu, forward.plain, forward.fake, check)
    backward_operator = register(
        signatures[1], backward_on_cpu, backward_on_gpu, backward.plain, backward.fake, check_gradient
    )
    reference, on_cpu_checked = (checked(kernel, check_gradient) for kernel in (backward.plain, backward_on_cpu))
    differentiate_by_reference(backward_operator, reference, on_cpu_checked)
    adapted = adapt(backward_operator), adapt(backward_on_cpu)
    differentiate(operator, check, forward.plain, on_cpu, adapted, keep, native)
    return operator


def register_pointwise(op: PointwiseOperator) -> None:
    """Register ``fused::name`` and ``fused::name_backward`` of a pointwise operator."""
    accepts = make_check(op)

    def fake(*args: Any) -> Tensor:
        accepts(*args)
        first: Tensor = args[0]
        return first.new_empty((*first.shape[:-1], first.shape[-1] // 2) if op.is_packed else first.shape)

    def backward_fake(grad: Tensor, *args: Any) -> Gradients:
        return tuple(empty_gradient(t, requested) for t, requested in zip(args, args[-1], strict=False))

    plain_forward, plain_backward = eager.forward(op), eager.backward(op)
    value, grads = cpu.kernel(op, op.forward, plain_forward), cpu.kernel(op, op.backward, plain_backward)
    register_pair(
        op.signatures,
        KernelSet(value, plain_forward, fake),
        KernelSet(grads, plain_backward, backward_fake),
        accepts,
        _keep(op),
        _native if op.value is act_element else None,
    )


def _native(input: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Any:
    """Return ``Activation.native`` if the call has neither bias nor scale, else None.

    PyTorch's function and the operator save equal tensors for backward. So ``torch.utils.checkpoint`` works
    even if only one pass calls the operator, because a mode is active in it.
    """
    return activations.get(activation).native if bias is None and scale is None else None


def _prefer(native: Callable[..., Any], on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls ``native``'s function if there is one, else ``on_cpu``."""

    def kernel(*args: Any) -> Any:
        function = native(*args)
        return on_cpu(*args) if function is None else function(args[0]).contiguous()

    return kernel


# ---- tensors saved for backward ------------------------------------------------------------------------------------


def _keep(op: PointwiseOperator) -> Callable[..., SavePolicy]:
    """Return a function that chooses a call's policy: save its arguments, its result, or marked data in float8."""
    suffices, bias, count = op.keeps_result, op.bias_index, len(op.tensors)
    arguments = SavePolicy(lambda args, _: (args[:count], args[count:]), lambda tensors, scalars, _: tensors + scalars)

    def save_result(args: tuple[Any, ...], out: Tensor) -> tuple[tuple[Tensor], Any]:
        bias_tensor = None if bias is None else args[bias]
        return (out,), (None if bias_tensor is None else bias_tensor.dtype, args[count:])

    def from_result(saved: tuple[Tensor | None, ...], values: Any, mask: tuple[bool, ...]) -> tuple[Any, ...]:
        (out,), (bias_dtype, scalars) = saved, values
        assert out is not None
        tensors: list[Tensor | None] = [out, *[None] * (count - 1)]
        if bias is not None and mask[bias]:  # backward reads the result as input + bias, so the bias is 0
            tensors[bias] = out.new_zeros(out.shape[-1:], dtype=bias_dtype)
        return *tensors, *scalars

    result, stored = SavePolicy(save_result, from_result), fp8_store.policy(op)

    def choose(*args: Any) -> SavePolicy:
        if fp8_store.is_marked(args[0]):
            return stored
        return result if suffices(*args) else arguments

    return choose
