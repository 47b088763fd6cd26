"""Register declared operators and their backward operators as ``torch.ops.fused.*``, with all kernels and rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_fused_ops.declaration import PointwiseOperator, Signature
from torch_fused_ops.formulas import Gradients, empty_gradient
from torch_fused_ops.kernels import compiled, cpu
from torch_fused_ops.operators import eager, fp8_store
from torch_fused_ops.operators.autograd import Implementation, SavePolicy, register_pair
from torch_fused_ops.operators.checks import check_gradient, make_check
from torch_fused_ops.settings.switches import is_without


def with_kernels(
    signature: Signature,
    plain: Callable[..., Any],
    fake: Callable[..., Any],
    check: Callable[..., None],
    formula: Callable[..., Any] | None = None,
) -> Implementation:
    """Return an operator's implementation with compiled eager kernels. If kernels are turned off, ``plain`` runs.

    Args:
        signature, plain, fake, check: see ``Implementation``.
        formula: runs if no kernel is compiled for a call; None if that is ``plain``.
    """
    on_cpu = on_gpu = plain
    if not is_without("kernels"):
        on_cpu = compiled.kernel(signature, formula or plain, on_gpu=False)
        on_gpu = compiled.kernel(signature, formula or plain, on_gpu=True)
    return Implementation(signature, plain, fake, on_cpu, on_gpu, check)


def register_pointwise(op: PointwiseOperator) -> None:
    """Register ``fused::name`` and ``fused::name_backward`` of a pointwise operator."""
    check = make_check(op)

    def fake(*args: Any) -> Tensor:
        check(*args)
        first: Tensor = args[0]
        shape = (*first.shape[:-1], first.shape[-1] // 2) if op.is_packed else first.shape
        return first.new_empty(shape)

    def backward_fake(grad: Tensor, *args: Any) -> Gradients:
        return tuple(empty_gradient(t, requested) for t, requested in zip(args, args[-1], strict=False))

    plain, plain_backward = eager.forward(op), eager.backward(op)
    value, grads = cpu.kernel(op, op.forward, plain), cpu.kernel(op, op.backward, plain_backward)
    forward = with_kernels(op.forward, plain, fake, check, value)
    backward = with_kernels(op.backward, plain_backward, backward_fake, check_gradient, grads)
    register_pair(forward, backward, _keep(op))


# ---- tensors saved for backward ------------------------------------------------------------------------------------


def _keep(op: PointwiseOperator) -> Callable[..., SavePolicy]:
    """Return a function that chooses a call's policy: save its arguments, its result, or marked data in float8."""
    suffices, bias, count = op.keeps_result, op.bias_index, len(op.tensors)
    arguments = SavePolicy(lambda args, out: (args[:count], args[count:]))

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
