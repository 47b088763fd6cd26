"""How every operator of this package is defined, and what it puts on the Autograd dispatch keys.

``torch.library.register_autograd`` alone is not enough: an operator registered so gives *zero* tangents in forward
mode without a word, and raises under ``torch.func.grad`` and ``vmap(grad)``. So each operator has a kernel on the
Autograd keys that evaluates its plain-torch reference wherever a functorch layer or a tangent is present (PyTorch
then differentiates that, to any order), and otherwise does what ``register_autograd`` would do.

Calls on small tensors cost what stands around the arithmetic. Hence ``Library.define`` rather than ``custom_op``, whose
wrappers cost about as much again as all of this; and where nothing but our own CPU kernel can come next (no mode, no
subclass, no transform), the Autograd kernel calls it directly rather than through the dispatcher, which saves 2.5 µs a
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Keep", "define", "differentiate", "differentiate_by_reference", "lead", "library", "register"]

# The backends' own keys, not the "Autograd" alias, which an operator's user may want for himself.
_AUTOGRAD_KEYS = (
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradXPU",
    "AutogradMPS",
    "AutogradMeta",
    "AutogradHPU",
    "AutogradPrivateUse1",
)
library = torch.library.Library("fused", "FRAGMENT")


def define(name: str, schema: str, kernels: Mapping[str, Callable[..., Any]]) -> torch._ops.OpOverload:
    """``fused::name`` with these kernels, by dispatch key."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, kernel in kernels.items():
        library.impl(name, kernel, key)
    overload: torch._ops.OpOverload = getattr(torch.ops.fused, name).default
    return overload


_GPUS = ("CUDA", "XPU")


def register(
    name: str,
    schema: str,
    on_cpu: Callable[..., Any],
    on_gpu: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[[torch._ops.OpOverload], Callable[..., Any]],
) -> torch._ops.OpOverload:
    """``fused::name`` with its kernels, its fake kernel and its vmap rule, which ``vmap`` makes of the operator."""
    op = define(name, schema, {"CPU": on_cpu, **dict.fromkeys(_GPUS, on_gpu)})
    torch.library.register_fake(f"fused::{name}", fake, lib=library)
    torch.library.register_vmap(f"fused::{name}", vmap(op), lib=library)
    return op


def lead(info: Any, t: Tensor, axis: int | None) -> Tensor:
    """In a vmap rule: t with the batch axis in front."""
    return t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)


# ---- what comes after Autograd ---------------------------------------------------------------------------------------

_Key = torch._C.DispatchKey


def _bits(*keys: Any) -> int:
    bits = 0
    for key in keys:
        bits |= torch._C.DispatchKeySet(key).raw_repr()
    return bits


_CPU = _bits(_Key.CPU)
_BELOW: int = torch._C._after_autograd_keyset.raw_repr()
# All that plain CPU tensors and the thread may carry without meaning anything to our operators.
_ELSE = ~_bits(_Key.ADInplaceOrView, _Key.BackendSelect, _Key.AutogradCPU, _Key.AutocastCPU) | _CPU


def _is_cpu_next(keyset: Any) -> bool:
    """Whether what follows Autograd is our CPU kernel: no key of a mode, a subclass, a negative view … is left."""
    return bool(keyset.raw_repr() & _BELOW == _CPU)


def _is_plain_cpu(t: Tensor) -> bool:
    """The same where no dispatcher has put the thread's keys (modes) and the tensor's together."""
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr() | torch._C._dispatch_keys(t).raw_repr()
    return keys & _ELSE == _CPU


def _below(op: torch._ops.OpOverload, on_cpu: Callable[..., Any], keyset: Any, args: tuple[Any, ...]) -> Any:
    if _is_cpu_next(keyset):
        return on_cpu(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _transformed(args: tuple[Any, ...]) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    level: int = forward_ad._current_level
    return level >= 0 and any(isinstance(a, Tensor) and forward_ad.unpack_dual(a).tangent is not None for a in args)


def _requires_grad(args: tuple[Any, ...]) -> bool:
    if torch.is_grad_enabled():
        for a in args:  # a loop: any() and a generator cost 0.7 µs
            if isinstance(a, Tensor) and a.requires_grad:
                return True
    return False


# ---- backward --------------------------------------------------------------------------------------------------------


class Keep(NamedTuple):
    """What forward keeps for backward.

    Attributes:
        saved: (args, outputs) -> the tensors, and anything else that ``arguments`` wants.
        arguments: (tensors, the rest, output_mask) -> the backward operator's arguments between grad and output_mask.
        once: whether backward cannot be differentiated, because what is kept is no differentiable function of the
            arguments; asking for it raises.
    """

    saved: Callable[[tuple[Any, ...], Any], tuple[tuple[Tensor | None, ...], Any]]
    arguments: Callable[[tuple[Tensor | None, ...], Any, tuple[bool, ...]], tuple[Any, ...]]
    once: bool = False


def keep_arguments(tensors: int) -> Keep:
    """Keep the arguments, of which the first ``tensors`` are tensors."""
    return Keep(lambda args, _: (args[:tensors], args[tensors:]), lambda kept, rest, _: kept + rest)


_profiler_enabled = torch._C._autograd._profiler_enabled  # a profile is to name the operator


class _Operator(NamedTuple):
    op: torch._ops.OpOverload
    on_cpu: Callable[..., Any]
    tensors: int  # how many arguments are tensors
    arguments: int  # of all
    backward: torch._ops.OpOverload
    backward_on_cpu: Callable[..., Any]
    backward_reference: Callable[..., Any]


class _Differentiable(torch.autograd.Function):
    """An operator forward, its backward *operator* backward. The tensor arguments come first in every schema."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, operator: _Operator, keep: Keep, *args: Any) -> Any:
        outputs = _below(operator.op, operator.on_cpu, keyset, args)
        if isinstance(outputs, tuple):
            ctx.mark_non_differentiable(*outputs[1:])
            ctx.set_materialize_grads(False)
        tensors, rest = keep.saved(args, outputs)
        ctx.save_for_backward(*tensors)
        ctx.rest = operator, keep, rest, _is_cpu_next(keyset)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator: _Operator
        keep: Keep
        operator, keep, rest, on_cpu = ctx.rest
        grad, tensors = grads[0], ctx.saved_tensors
        if grad is None:
            return (None,) * (3 + operator.arguments)
        mask = ctx.needs_input_grad[3 : 3 + operator.tensors]
        args = keep.arguments(tensors, rest, mask)
        if on_cpu and not torch.is_grad_enabled() and _is_plain_cpu(grad) and not _profiler_enabled():
            found = operator.backward_on_cpu(grad, *args, mask)
        # torch.autograd.grad(is_grads_batched=True) runs on an older vmap that knows no rules of custom operators.
        elif torch._C._functorch.is_legacy_batchedtensor(grad):
            found = operator.backward_reference(grad, *args, mask)
        else:
            found = operator.backward(grad, *args, mask)
        found_all: tuple[Any, ...] = (None, None, None, *found, *(None,) * (operator.arguments - operator.tensors))
        return found_all


class _DifferentiableOnce(_Differentiable):
    backward = staticmethod(once_differentiable(_Differentiable.backward))  # type: ignore[assignment]


# Function.apply looks for functorch layers first, which costs 1.2 µs; the kernel below has done so.
_apply = super(torch.autograd.Function, _Differentiable).apply
_apply_once = super(torch.autograd.Function, _DifferentiableOnce).apply


def differentiate(
    op: torch._ops.OpOverload,
    check: Callable[..., None],
    reference: Callable[..., Any],
    on_cpu: Callable[..., Any],
    backward: tuple[torch._ops.OpOverload, Callable[..., Any], Callable[..., Any]],
    keep: Callable[..., Keep],
    record: Callable[..., Tensor | None] | None = None,
) -> None:
    """Make ``op`` differentiable: by its backward operator in reverse mode, through ``reference`` under any transform.

    Args:
        op: an operator whose schema is (tensors…, scalars…) -> Tensor, or a tuple whose first alone has derivatives.
        check: raises for arguments that op does not accept; the reference broadcasts and would accept more.
        reference: the same function in plain torch; differentiable.
        on_cpu: op's CPU kernel.
        backward: the operator (grad, whatever is kept…, bool[] output_mask) -> a gradient or None for each tensor; the
            same in plain torch, differentiable; its CPU kernel.
        keep: op's arguments -> what is kept of such a call.
        record: op's arguments, plain tensors on the CPU -> its result in steps that autograd is to record as they are;
            or None.
    """
    arguments = op._schema.arguments
    tensors = sum("Tensor" in str(a.type) for a in arguments)
    defaults = tuple(a.default_value for a in arguments)
    operator = _Operator(op, on_cpu, tensors, len(arguments), backward[0], backward[2], backward[1])

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args):
            check(*args)
            return reference(*args)
        if _requires_grad(args):
            args += defaults[len(args) :]  # of which the dispatcher has dropped the trailing ones
            if record is not None and _is_cpu_next(keyset):
                check(*args)
                if (result := record(*args)) is not None:
                    return result
            kept = keep(*args)
            return (_apply_once if kept.once else _apply)(keyset, operator, kept, *args)  # type: ignore[no-untyped-call]
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel)


def differentiate_by_reference(
    op: torch._ops.OpOverload, reference: Callable[..., Any], on_cpu: Callable[..., Any]
) -> None:
    """Make a backward operator differentiable to any order: where a gradient is asked of it, it *is* its reference."""

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args) or _requires_grad(args):
            return reference(*args)
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel)


def _install(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> None:
    for key in _AUTOGRAD_KEYS:
        library.impl(op, kernel, key, with_keyset=True)
