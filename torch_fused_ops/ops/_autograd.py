"""What every operator of this package puts on the Autograd dispatch keys.

``torch.library.register_autograd`` alone is not enough: an operator registered so gives *zero* tangents in forward
mode without a word, and raises under ``torch.func.grad`` and ``vmap(grad)``. So each operator has a kernel on the
Autograd keys that evaluates its plain-torch reference wherever a functorch layer or a tangent is present (PyTorch
then differentiates that, to any order), and otherwise does what ``register_autograd`` would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

# The backends' own keys, not the "Autograd" alias: torch.library.custom_op has put its own kernel there.
_AUTOGRAD_KEYS = (
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradXPU",
    "AutogradMPS",
    "AutogradMeta",
    "AutogradHPU",
    "AutogradPrivateUse1",
)
_library = torch.library.Library("fused", "FRAGMENT")


def _transformed(args: tuple[Any, ...]) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    level: int = forward_ad._current_level
    return level >= 0 and any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _with_defaults(op: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    # The dispatcher drops trailing arguments that equal their defaults.
    return args + tuple(a.default_value for a in op._schema.arguments[len(args) :])


def _below(op: torch._ops.OpOverload, keyset: Any, args: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


class _Differentiable(torch.autograd.Function):
    """op forward, its backward *operator* backward. The tensor arguments come first in every schema."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, op: torch._ops.OpOverload, backwards: Any, count: int, *args: Any) -> Any:
        ctx.save_for_backward(*args[:count])
        ctx.rest = (backwards, args[count:])
        return _below(op, keyset, args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (backward_op, backward_reference), scalars = ctx.rest
        tensors = ctx.saved_tensors
        mask = ctx.needs_input_grad[4 : 4 + len(tensors)]
        # torch.autograd.grad(is_grads_batched=True) runs on an older vmap that knows no rules of custom operators.
        batched = torch._C._functorch.is_legacy_batchedtensor(grad)
        grads = (backward_reference if batched else backward_op)(grad, *tensors, *scalars, mask)
        return (None, None, None, None, *grads, *(None for _ in scalars))


def differentiate(
    op: torch._ops.OpOverload,
    check: Callable[..., None],
    reference: Callable[..., Any],
    backward_op: torch._ops.OpOverload,
    backward_reference: Callable[..., Any],
) -> None:
    """Make ``op`` differentiable: by ``backward_op`` in reverse mode, through ``reference`` under any transform.

    Args:
        op: an operator whose schema is (tensors…, scalars…) -> Tensor.
        check: raises for arguments that op does not accept; the reference broadcasts and would accept more.
        reference: the same function in plain torch; differentiable.
        backward_op: (grad, tensors…, scalars…, bool[] output_mask) -> a gradient or None for each tensor.
        backward_reference: the same function as backward_op in plain torch; differentiable.
    """
    count = sum("Tensor" in str(a.type) for a in op._schema.arguments)
    backwards = (backward_op, backward_reference)

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args):
            check(*args)
            return reference(*args)
        if _requires_grad(args):
            return _Differentiable.apply(keyset, op, backwards, count, *_with_defaults(op, args))  # type: ignore[no-untyped-call]
        return _below(op, keyset, args)

    _install(op, kernel)


def differentiate_by_reference(op: torch._ops.OpOverload, reference: Callable[..., Any]) -> None:
    """Make a backward operator differentiable to any order: where a gradient is asked of it, it *is* its reference."""

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args) or _requires_grad(args):
            return reference(*args)
        return _below(op, keyset, args)

    _install(op, kernel)


def _install(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    for key in _AUTOGRAD_KEYS:
        _library.impl(op, kernel, key, with_keyset=True)
