"""The definition of every operator of this package, and its kernels for the Autograd dispatch keys.

``torch.library.register_autograd`` alone is not enough: an operator registered so gives *zero* tangents in forward
mode without a word, and raises under ``torch.func.grad`` and ``vmap(grad)``. So each operator has a kernel on the
Autograd keys that evaluates its plain-torch reference wherever a functorch layer or a tangent is present (PyTorch
then differentiates that, to any order), and otherwise does what ``register_autograd`` would do.

Operators are defined by ``torch.library.custom_op``: schema, fake kernel, and plain torch as the kernel of
every device. Calls on small tensors cost what stands around the arithmetic, and custom_op's wrappers of kernels would
double it. So our own kernels, for CPUs and GPUs, and what is on the Autograd keys are registered beside it, and go
first (``register``); and where nothing but our own CPU kernel can come next (no mode, no subclass, no transform), the
Autograd kernel calls it directly rather than through the dispatcher, which saves 2.5 µs a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from torch_fused_ops.declaration import Signature
from torch_fused_ops.operators import batching

# The backends' own keys, not the "Autograd" alias, which an operator's user may want for himself.
_AUTOGRAD_KEYS = (
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradXPU",
    "AutogradMPS",
    "AutogradMeta",
    "AutogradHPU",
    "AutogradXLA",
    "AutogradPrivateUse1",
)
library = torch.library.Library("fused", "FRAGMENT")


COMPOSITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}  # with what compilers see of each


def define(
    name: str, schema: str, kernel: Callable[..., Any], in_aten: Callable[..., Any] | None = None
) -> torch._ops.OpOverload:
    """Define ``fused::name``, which is made of other operators: CompositeImplicitAutograd.

    Args:
        name, schema: of the operator.
        kernel: calls the other operators.
        in_aten: the same for compilers and transforms, if it is another function.
    """
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CompositeImplicitAutograd")
    overload: torch._ops.OpOverload = getattr(torch.ops.fused, name).default
    COMPOSITES[overload] = in_aten or kernel
    return overload


# Layouts that no kernel here reads. Without a kernel torch says that the operator may not exist, and not what is wrong.
_NOT_DENSE = (
    "SparseCPU",
    "SparseCUDA",
    "SparseCsrCPU",
    "SparseCsrCUDA",
    "QuantizedCPU",
    "QuantizedCUDA",
    "MkldnnCPU",
    "AutogradNestedTensor",
    "NestedTensorCPU",
    "NestedTensorCUDA",
)


def _refuses_layout(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        for argument, t in zip(op._schema.arguments, args, strict=False):
            if isinstance(t, Tensor) and (t.layout != torch.strided or t.is_quantized or t.is_nested):
                what = "is a nested tensor" if t.is_nested else f"has layout {t.layout} and dtype {t.dtype}"
                raise TypeError(f"{argument.name} {what}; accepted: dense tensors (torch.strided, not quantized)")
        raise TypeError(f"{op} takes dense tensors (torch.strided, not quantized)")

    return kernel


_GPUS = ("CUDA", "XPU")  # which Triton compiles for; ROCm's key is CUDA
_warned: set[str] = set()  # device types


def checked(kernel: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    """The kernel, behind ``check``, which raises for arguments that are not accepted."""
    if check is None:
        return kernel

    def behind(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return behind


def _elsewhere(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain`` as the kernel for devices that we have no kernels for; the first call says so."""

    def kernel(*args: Any) -> Any:
        device = next(a for a in args if isinstance(a, Tensor)).device.type
        if device not in _warned:
            _warned.add(device)
            warnings.warn(
                f"torch_fused_ops has no kernels for {device!r} devices: in eager mode its operators run there as "
                "plain PyTorch, with the same results and more passes over memory",
                stacklevel=2,
            )
        return plain(*args)

    return kernel


class Registered(NamedTuple):
    """One of our operators: its signature, its plain torch, and what raises for arguments that it does not accept."""

    signature: Signature
    plain: Callable[..., Any]
    check: Callable[..., None] | None


REGISTERED: dict[str, Registered] = {}  # by name


def register(
    signature: Signature,
    on_cpu: Callable[..., Any],
    on_gpu: Callable[..., Any],
    plain: Callable[..., Any],
    fake: Callable[..., Any],
    check: Callable[..., None] | None = None,
) -> torch._ops.OpOverload:
    """``fused::name`` with its kernels and its fake kernel; ``check`` stands in front of them and of ``plain``."""
    name = signature.name
    REGISTERED[name] = Registered(signature, plain, check)
    # custom_op wraps its own kernels in what costs a call 25 µs, and the first one the import of Dynamo (2 s). So plain
    # torch is its kernel, for devices that have none of ours; ours are registered beside it, and go first.
    defined = torch.library.custom_op(
        f"fused::{name}", checked(_elsewhere(plain), check), mutates_args=(), schema=signature.schema
    )
    defined.register_fake(fake)
    op = signature.overload
    batched = batching.kernel(op, signature, plain)  # checks see one example: with a batch axis more would be accepted
    for key, kernel in {"CPU": on_cpu, **dict.fromkeys(_GPUS, on_gpu), "FuncTorchBatched": batched}.items():
        library.impl(op, checked(kernel, check), key)
    for key in _NOT_DENSE:
        library.impl(op, _refuses_layout(op), key)
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
# All that plain CPU tensors and the thread may carry without meaning anything to our operators.
_ELSE = ~_bits(_Key.ADInplaceOrView, _Key.BackendSelect, _Key.AutogradCPU, _Key.AutocastCPU) | _CPU


def _is_cpu_next(keyset: Any) -> bool:
    """True if our CPU kernel follows Autograd: no key of a mode, a subclass, a negative view … is left."""
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


class SavePolicy(NamedTuple):
    """The tensors and values that forward saves for backward.

    Attributes:
        saved: (args, outputs) -> the tensors, and anything else that ``arguments`` wants.
        arguments: (tensors, the rest, output_mask) -> the backward operator's arguments between grad and output_mask.
        apply: the autograd function that saves it, if not ``Differentiable``.
    """

    saved: Callable[[tuple[Any, ...], Any], tuple[tuple[Tensor | None, ...], Any]]
    arguments: Callable[[tuple[Tensor | None, ...], Any, tuple[bool, ...]], tuple[Any, ...]]
    apply: Callable[..., Any] | None = None


_profiler_enabled = torch._C._autograd._profiler_enabled  # a profile is to name the operator


class _Operator(NamedTuple):
    op: torch._ops.OpOverload
    on_cpu: Callable[..., Any]
    tensors: int  # how many arguments are tensors
    arguments: int  # of all
    backward: torch._ops.OpOverload
    backward_on_cpu: Callable[..., Any]


class Differentiable(torch.autograd.Function):
    """An operator forward, its backward *operator* backward. The tensor arguments come first in every schema."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, operator: _Operator, keep: SavePolicy, *args: Any) -> Any:
        out = _below(operator.op, operator.on_cpu, keyset, args)
        tensors, rest = keep.saved(args, out)
        ctx.save_for_backward(*tensors)
        ctx.rest = operator, keep, rest, _is_cpu_next(keyset)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        operator: _Operator
        keep: SavePolicy
        operator, keep, rest, on_cpu = ctx.rest
        grad = grads[0]
        if grad is None:
            return (None,) * (3 + operator.arguments)
        mask = ctx.needs_input_grad[3 : 3 + operator.tensors]
        args = keep.arguments(ctx.saved_tensors, rest, mask)
        plain = on_cpu and not torch.is_grad_enabled() and forward_ad._current_level < 0 and not _profiler_enabled()
        if plain and _is_plain_cpu(grad):
            found = operator.backward_on_cpu(grad, *args, mask)
        else:
            found = operator.backward(grad, *args, mask)
        found_all: tuple[Any, ...] = (None, None, None, *found, *(None,) * (operator.arguments - operator.tensors))
        return found_all


# Function.apply looks for functorch layers first, which costs 1.2 µs; the kernel below has done so.
_apply = super(torch.autograd.Function, Differentiable).apply


def differentiate(
    op: torch._ops.OpOverload,
    check: Callable[..., None],
    reference: Callable[..., Any],
    on_cpu: Callable[..., Any],
    backward: tuple[torch._ops.OpOverload, Callable[..., Any]],
    keep: Callable[..., SavePolicy],
    record: Callable[..., Tensor | None] | None = None,
) -> None:
    """Make ``op`` differentiable: by its backward operator in reverse mode, through ``reference`` under any transform.

    Args:
        op: an operator whose schema is (tensors…, scalars…) -> Tensor.
        check: raises for arguments that op does not accept: the kernel takes them for granted, and the reference
            broadcasts and would accept more.
        reference: the same function in plain torch; differentiable.
        on_cpu: op's CPU kernel.
        backward: the operator (grad, whatever is kept…, bool[] output_mask) -> a gradient or None for each tensor; its
            CPU kernel.
        keep: op's arguments -> what is kept of such a call.
        record: op's arguments, plain tensors on the CPU -> its result in steps that autograd is to record as they are;
            or None.
    """
    arguments = op._schema.arguments
    tensors = sum("Tensor" in str(a.type) for a in arguments)
    defaults = tuple(a.default_value for a in arguments)
    in_torch, on_cpu = checked(reference, check), checked(on_cpu, check)
    operator = _Operator(op, on_cpu, tensors, len(arguments), *backward)

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args):
            return in_torch(*args)
        if _requires_grad(args):
            args += defaults[len(args) :]  # of which the dispatcher has dropped the trailing ones
            kept = keep(*args)
            if record is not None and kept.apply is None and _is_cpu_next(keyset):
                check(*args)
                if (result := record(*args)) is not None:
                    return result
            return (kept.apply or _apply)(keyset, operator, kept, *args)
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel, in_torch)


def differentiate_by_reference(
    op: torch._ops.OpOverload, reference: Callable[..., Any], on_cpu: Callable[..., Any]
) -> None:
    """Make a backward operator differentiable to any order: where a gradient is asked of it, it *is* its reference."""

    def kernel(keyset: Any, *args: Any) -> Any:
        if _transformed(args) or _requires_grad(args):
            return reference(*args)
        return _below(op, on_cpu, keyset, args)

    _install(op, kernel, reference)


def _install(op: torch._ops.OpOverload, kernel: Callable[..., Any], in_torch: Callable[..., Any]) -> None:
    # torch.autograd.grad(is_grads_batched=True) runs on an older vmap, which knows no rules of custom operators.
    library.impl(op, in_torch, "Batched")
    for key in _AUTOGRAD_KEYS:
        library.impl(op, kernel, key, with_keyset=True)
