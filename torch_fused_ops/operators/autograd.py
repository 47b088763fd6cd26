"""Define this package's operators, and register their kernels for the Autograd dispatch keys.

``torch.library.register_autograd`` alone is not enough: it silently gives *zero* tangents in forward mode, and raises
under ``torch.func.grad`` and ``vmap(grad)``. So each operator has a kernel on the Autograd keys. If a functorch layer
or a tangent is present, this kernel evaluates the operator's plain-torch reference, which PyTorch differentiates to any
order. Otherwise it saves tensors and calls the backward operator, as ``register_autograd`` would.

``torch.library.custom_op`` defines each operator: schema, fake kernel, and plain torch as the kernel of every device.
On small tensors call overhead dominates, and custom_op's kernel wrappers would double it. So our CPU and GPU kernels
and the Autograd kernels are registered separately, and take precedence (``register``). If only our CPU kernel can run
next (no mode, subclass or transform is active), the Autograd kernel calls it directly. Skipping the dispatcher
saves 2.5 µs a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_fused_ops.declaration import Signature
from torch_fused_ops.operators import batching

# Autograd keys of single backends. The alias key "Autograd" remains free for kernels that users register.
_BACKENDS = "CPU", "CUDA", "XPU", "MPS", "Meta", "HPU", "XLA", "PrivateUse1"
_AUTOGRAD_KEYS = [f"Autograd{backend}" for backend in _BACKENDS]
library = torch.library.Library("fused", "FRAGMENT")


COMPOSITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}  # operators that ``define`` has defined


def define(name: str, schema: str, kernel: Callable[..., Any]) -> None:
    """Define ``fused::name`` as CompositeImplicitAutograd. ``kernel`` calls other operators."""
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeImplicitAutograd")
    COMPOSITES[getattr(torch.ops.fused, name).default] = kernel


# Without a kernel for nested tensors, torch's error suggests that the operator is missing. The check says it better.
_NESTED = ("AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA")
_GPUS = ("CUDA", "XPU")  # dispatch keys of the GPUs that Triton compiles for; ROCm uses the key CUDA


def checked(kernel: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    """Return a kernel that first calls ``check``, which raises for unaccepted arguments."""
    if check is None:
        return kernel

    def check_first(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return check_first


@dataclass(frozen=True)
class Implementation:
    """The functions that compute one registered operator.

    Attributes:
        signature: the operator's name and arguments.
        plain: the reference in plain torch, for other devices, transforms and exports. It does not check arguments.
        fake: the fake kernel. It checks arguments itself.
        on_cpu, on_gpu: kernels. They do not check arguments.
        check: called with the operator's arguments; raises for unaccepted arguments. None accepts all.
    """

    signature: Signature
    plain: Callable[..., Any]
    fake: Callable[..., Any]
    on_cpu: Callable[..., Any]
    on_gpu: Callable[..., Any]
    check: Callable[..., None] | None = None


REGISTERED: dict[str, Implementation] = {}  # by the operator's name, without "fused::"


def register(implementation: Implementation) -> torch._ops.OpOverload:
    """Register an operator with its kernels and fake kernel. Kernels and ``plain`` call ``check`` first."""
    signature, plain, check = implementation.signature, implementation.plain, implementation.check
    REGISTERED[signature.name] = implementation
    # custom_op's wrappers add 25 µs to every call, and the import of Dynamo (2 s) to the first call. So custom_op only
    # gets plain torch, for devices without our own kernels. Our kernels are registered separately and take precedence.
    defined = torch.library.custom_op(
        f"fused::{signature.name}", checked(plain, check), mutates_args=(), schema=signature.schema
    )
    defined.register_fake(implementation.fake)
    op = signature.overload
    batched = batching.kernel(op, signature, plain)  # checks see one example: a batch axis would make them lenient
    kernels = {"CPU": implementation.on_cpu, **dict.fromkeys(_GPUS, implementation.on_gpu), "FuncTorchBatched": batched}
    for key, kernel in {**kernels, **dict.fromkeys(_NESTED, plain)}.items():
        library.impl(op, checked(kernel, check), key)
    return op


# ---- what comes after Autograd ---------------------------------------------------------------------------------------

_Key = torch._C.DispatchKey


def _bits(*keys: Any) -> int:
    bits = 0
    for key in keys:
        bits |= torch._C.DispatchKeySet(key).raw_repr()
    return bits


_CPU = _bits(_Key.CPU)
_BELOW: int = torch._C._after_autograd_keyset.raw_repr()
# Mask without the keys that do not affect our operators, although plain CPU tensors or the thread may carry them.
_RELEVANT = ~_bits(_Key.ADInplaceOrView, _Key.BackendSelect, _Key.AutogradCPU, _Key.AutocastCPU) | _CPU


def _is_cpu_next(keyset: Any) -> bool:
    """Return True if our CPU kernel follows Autograd: no key of a mode, a subclass or a negative view remains."""
    return bool(keyset.raw_repr() & _BELOW == _CPU)


def _is_plain_cpu(t: Tensor) -> bool:
    """Return ``_is_cpu_next`` for a tensor outside the dispatcher, which would add the thread's keys to its keys."""
    keys: int = torch._C._dispatch_tls_local_include_set().raw_repr() | torch._C._dispatch_keys(t).raw_repr()
    return keys & _RELEVANT == _CPU


def _below(op: torch._ops.OpOverload, on_cpu: Callable[..., Any], keyset: Any, args: tuple[Any, ...]) -> Any:
    if _is_cpu_next(keyset):
        return on_cpu(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _transformed(args: tuple[Any, ...]) -> bool:
    """Return True under a torch.func transform, or if an argument has a tangent."""
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


class SavePolicy(NamedTuple):
    """Functions that choose the tensors and values to save for backward.

    Attributes:
        saved: (args, outputs) -> the (tensors, values) to save, which backward passes to ``arguments``.
        arguments: (tensors, values, output_mask) -> the backward operator's arguments between grad and output_mask, by
            default the saved tensors and then the saved values.
        result: (output, saved tensors) -> the operator's result; None if that is the output.
    """

    saved: Callable[[tuple[Any, ...], Any], tuple[tuple[Tensor | None, ...], Any]]
    arguments: Callable[[tuple[Tensor | None, ...], Any, tuple[bool, ...]], tuple[Any, ...]] = (
        lambda tensors, values, output_mask: (*tensors, *values)
    )
    result: Callable[[Tensor, tuple[Tensor | None, ...]], Tensor] | None = None


_profiler_enabled = torch._C._autograd._profiler_enabled  # a profile names only dispatched operators


class _Operator(NamedTuple):
    op: torch._ops.OpOverload
    on_cpu: Callable[..., Any]
    tensors: int  # number of tensor arguments
    arguments: int  # number of all arguments
    backward: torch._ops.OpOverload
    backward_on_cpu: Callable[..., Any]


class Differentiable(torch.autograd.Function):
    """Call an operator in forward and its backward *operator* in backward. Every schema has tensors first."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, operator: _Operator, policy: SavePolicy, *args: Any) -> Any:
        out = _below(operator.op, operator.on_cpu, keyset, args)
        tensors, values = policy.saved(args, out)
        ctx.save_for_backward(*tensors)
        ctx.call = operator, policy, values, _is_cpu_next(keyset)
        return out if policy.result is None else policy.result(out, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator: _Operator
        policy: SavePolicy
        operator, policy, values, on_cpu = ctx.call
        grad = grads[0]
        if grad is None:
            return (None,) * (3 + operator.arguments)
        mask = ctx.needs_input_grad[3 : 3 + operator.tensors]
        args = policy.arguments(ctx.saved_tensors, values, mask)
        plain = on_cpu and not torch.is_grad_enabled() and forward_ad._current_level < 0 and not _profiler_enabled()
        if plain and _is_plain_cpu(grad):
            gradients = operator.backward_on_cpu(grad, *args, mask)
        else:
            gradients = operator.backward(grad, *args, mask)
        return (None, None, None, *gradients, *(None,) * (operator.arguments - operator.tensors))


# Function.apply first looks for functorch layers, which takes 1.2 µs. The kernel below has already looked for them.
_apply = super(torch.autograd.Function, Differentiable).apply


def register_pair(
    forward: Implementation,
    backward: Implementation,
    save_policy: Callable[..., SavePolicy],
    adapt: Callable[[Any], Any] = lambda backward: backward,
) -> torch._ops.OpOverload:
    """Register an operator and its backward operator. Return the operator.

    The operator is differentiable: by its backward operator in reverse mode, through ``plain`` under any transform. The
    backward operator is differentiable to any order: if it needs a gradient itself, its ``plain`` runs.

    Args:
        forward: the operator. Its schema is (tensors…, scalars…) -> Tensor.
        backward: the backward operator: (grad, saved values…, bool[] output_mask) -> gradients.
        save_policy: the operator's arguments -> the call's ``SavePolicy``.
        adapt: wraps the backward operator or its kernel, to return a gradient or None for each tensor of the operator.
    """
    op, backward_op = register(forward), register(backward)
    _differentiate_by_reference(backward_op, backward)
    arguments, check = forward.signature.arguments, forward.check
    tensors = sum(argument.type.startswith("Tensor") for argument in arguments)
    defaults = tuple(argument.value for argument in arguments)
    # The kernel does not check arguments, and plain torch would broadcast them.
    in_torch, on_cpu = checked(forward.plain, check), checked(forward.on_cpu, check)
    operator = _Operator(op, on_cpu, tensors, len(arguments), adapt(backward_op), adapt(backward.on_cpu))

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args):
            return in_torch(*args)
        if _requires_grad(args):
            args += defaults[len(args) :]  # the dispatcher drops trailing defaults
            return _apply(keyset, operator, save_policy(*args), *args)  # type: ignore[no-untyped-call]
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel, in_torch)
    return op


def _differentiate_by_reference(op: torch._ops.OpOverload, implementation: Implementation) -> None:
    reference = checked(implementation.plain, implementation.check)
    on_cpu = checked(implementation.on_cpu, implementation.check)

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args) or _requires_grad(args):
            return reference(*args)
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel, reference)


def _install(op: torch._ops.OpOverload, kernel: Callable[..., Any], in_torch: Callable[..., Any]) -> None:
    # torch.autograd.grad(is_grads_batched=True) uses an older vmap, which ignores custom operators' rules.
    library.impl(op, in_torch, "Batched")
    for key in _AUTOGRAD_KEYS:
        library.impl(op, kernel, key, with_keyset=True)
