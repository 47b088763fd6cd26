"""The activation family: ``fused::bias_act``, ``fused::glu``, ``fused::bias_glu``, the same with what backward needs
stored in float8 (``…_fp8``), and their backward operators.

Read from top to bottom: schemas → what is accepted → fake → vmap → what is kept for backward → registration. The
kernels are in ``kernels/``, a file for CPUs and one for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations, reference
from torch_fused_ops.kernels import cpu
from torch_fused_ops.ops._autograd import (
    Keep,
    differentiate,
    differentiate_by_reference,
    keep_arguments,
    lead,
    register,
)
from torch_fused_ops.reference import FP8, LAYOUTS, Grads3

# ---- schemas -------------------------------------------------------------------------------------------------------

_BIAS_ACT = "Tensor input, Tensor? bias, Tensor? token_scale, str activation"
_GLU = "Tensor gate, Tensor up, Tensor? token_scale, str activation"
_PACKED = f'{_BIAS_ACT}, str layout="halves", float up_offset=0.0, float? clamp=None'
_GRADS3 = "bool[3] output_mask) -> (Tensor?, Tensor?, Tensor?)"
_STORED = "Tensor grad, Tensor stored, Tensor scale, Tensor? bias, Tensor? token_scale, str activation"
SCHEMAS = {
    "bias_act": f"({_BIAS_ACT}) -> Tensor",
    "glu": f"({_GLU}, float up_offset=0.0, float? clamp=None) -> Tensor",
    "bias_glu": f"({_PACKED}) -> Tensor",
    "bias_act_backward": f"(Tensor grad, {_BIAS_ACT}, {_GRADS3}",
    "glu_backward": f"(Tensor grad, {_GLU}, float up_offset, float? clamp, {_GRADS3}",
    "bias_glu_backward": f"(Tensor grad, {_BIAS_ACT}, str layout, float up_offset, float? clamp, {_GRADS3}",
    # The result, and each data tensor as ``reference.store_fp8`` stores it: what backward needs of it.
    "bias_act_fp8": f"({_BIAS_ACT}) -> (Tensor, Tensor, Tensor)",
    "glu_fp8": f"({_GLU}, float up_offset=0.0, float? clamp=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "bias_glu_fp8": f"({_PACKED}) -> (Tensor, Tensor, Tensor)",
    # dtype: the data tensor's own, which is its gradient's.
    "bias_act_fp8_backward": f"({_STORED}, ScalarType dtype, {_GRADS3}",
    "glu_fp8_backward": (
        "(Tensor grad, Tensor gate, Tensor gate_scale, Tensor up, Tensor up_scale, Tensor? token_scale, "
        f"str activation, float up_offset, float? clamp, ScalarType gate_dtype, ScalarType up_dtype, {_GRADS3}"
    ),
    "bias_glu_fp8_backward": f"({_STORED}, str layout, float up_offset, float? clamp, ScalarType dtype, {_GRADS3}",
}

# ---- what is accepted ----------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_tensors(first: Tensor, *named: tuple[str, Tensor | None]) -> None:
    if first is None:  # torch.ops takes it for an undefined tensor
        raise TypeError(f"{named[0][0]}=None is not accepted: it must be a tensor, not NoneType")
    device = first.device
    for name, t in named:
        if t is None:
            continue
        if t.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {t.dtype}; accepted: float16, bfloat16, float32, float64")
        if t.device != device:
            raise ValueError(f"{name} is on device {t.device}; accepted: {device}, where the first tensor is")


def _check_shape(name: str, t: Tensor, shape: Sequence[int], meaning: str) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: {tuple(shape)}, {meaning}")


def _check_glu_scalars(up_offset: float, clamp: float | None) -> None:
    if not math.isfinite(up_offset):
        raise ValueError(f"up_offset={up_offset!r} is not accepted: it must be finite")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp={clamp!r} is not accepted: it must be above 0, or None for no clamp")


def check_bias_act(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> None:
    """Raise ValueError or TypeError, naming the argument, its value and what is accepted; else nothing."""
    activations.get(activation)
    _check_tensors(input, ("input", input), ("bias", bias), ("token_scale", token_scale))
    if input.ndim == 0:
        raise ValueError("input has shape (); accepted: at least one axis")
    if bias is not None:
        _check_shape("bias", bias, input.shape[-1:], "input's last axis")
    if token_scale is not None:
        _check_shape("token_scale", token_scale, input.shape[:-1], "input's shape without its last axis")


def check_glu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, its value and what is accepted; else nothing."""
    activations.get(activation)
    _check_tensors(gate, ("gate", gate), ("up", up), ("token_scale", token_scale))
    if gate.ndim == 0:
        raise ValueError("gate has shape (); accepted: at least one axis")
    if up is None:
        raise TypeError("up=None is not accepted: it must be a tensor, not NoneType")
    _check_shape("up", up, gate.shape, "gate's shape")
    if token_scale is not None:
        _check_shape("token_scale", token_scale, gate.shape[:-1], "gate's shape without its last axis")
    _check_glu_scalars(up_offset, clamp)


def check_bias_glu(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> None:
    """Raise ValueError or TypeError, naming the argument, its value and what is accepted; else nothing."""
    check_bias_act(input, bias, token_scale, activation)
    if input.shape[-1] % 2:
        raise ValueError(f"input has last axis {input.shape[-1]}; accepted: an even size, gate and up packed")
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; accepted: {', '.join(LAYOUTS)}")
    _check_glu_scalars(up_offset, clamp)


# ---- fake ------------------------------------------------------------------------------------------------------------


def _like(t: Tensor | None, wanted: bool) -> Tensor | None:
    return t.new_empty(t.shape) if wanted and t is not None else None


def _bias_act_fake(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Tensor:
    check_bias_act(input, bias, token_scale, activation)
    return input.new_empty(input.shape)


def _glu_fake(gate: Tensor, up: Tensor, token_scale: Tensor | None, activation: str, *scalars: Any) -> Tensor:
    check_glu(gate, up, token_scale, activation, *scalars)
    return gate.new_empty(gate.shape)


def _bias_glu_fake(
    input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str, *scalars: Any
) -> Tensor:
    check_bias_glu(input, bias, token_scale, activation, *scalars)
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


def _backward_fake(grad: Tensor, a: Tensor, b: Tensor | None, c: Tensor | None, *scalars: Any) -> Grads3:
    mask = scalars[-1]
    return _like(a, mask[0]), _like(b, mask[1]), _like(c, mask[2])


def _stored_fake(t: Tensor) -> tuple[Tensor, Tensor]:
    return t.new_empty(t.shape, dtype=FP8), t.new_empty(t.shape[:-1], dtype=torch.float32)


def _bias_act_fp8_fake(input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _bias_act_fake(input, *rest), *_stored_fake(input)


def _glu_fp8_fake(gate: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _glu_fake(gate, up, *rest), *_stored_fake(gate), *_stored_fake(up)


def _bias_glu_fp8_fake(input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _bias_glu_fake(input, *rest), *_stored_fake(input)


def _fp8_backward_fake(
    grad: Tensor, stored: Tensor, scale: Tensor, bias: Tensor | None, token_scale: Tensor | None, *scalars: Any
) -> Grads3:
    dtype, mask = scalars[-2:]
    d_input = stored.new_empty(stored.shape, dtype=dtype) if mask[0] else None
    return d_input, _like(bias, mask[1]), _like(token_scale, mask[2])


def _glu_fp8_backward_fake(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    token_scale: Tensor | None,
    *scalars: Any,
) -> Grads3:
    gate_dtype, up_dtype, mask = scalars[-3:]
    d_gate = gate.new_empty(gate.shape, dtype=gate_dtype) if mask[0] else None
    d_up = up.new_empty(up.shape, dtype=up_dtype) if mask[1] else None
    return d_gate, d_up, _like(token_scale, mask[2])


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _batched(
    op: torch._ops.OpOverload, plain: Callable[..., Any], check: Callable[..., None], has_bias: bool, backward: bool
) -> Callable[..., Any]:
    """The vmap rule: the operator where the batch axis is one more leading axis, else its reference by broadcasting."""
    bias_at = (2 if backward else 1) if has_bias else None

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        # What one example sees is checked: with a batch axis in front more would be accepted.
        if not backward and info.batch_size:
            check(*(a if d is None else a.select(d, 0) for a, d in zip(args, in_dims, strict=True)))
        leading = [
            a if not isinstance(a, Tensor) or (i == bias_at and d is None) else lead(info, a, d)
            for i, (a, d) in enumerate(zip(args, in_dims, strict=True))
        ]
        # A bias of its own for each example is no (n,) vector, and its gradient must not be summed over the examples.
        if bias_at is not None and (in_dims[bias_at] is not None or (backward and args[-1][1])):
            if in_dims[bias_at] is not None:
                x, bias = leading[bias_at - 1], leading[bias_at]
                leading[bias_at] = bias.reshape(bias.shape[0], *(1,) * (x.ndim - 2), bias.shape[-1])
            outputs = _per_example_backward(plain, *leading) if backward else plain(*leading)
        else:
            outputs = op(*leading)
        return outputs, tuple(None if o is None else 0 for o in outputs) if isinstance(outputs, tuple) else 0

    return rule


def _per_example_backward(
    plain: Callable[..., Grads3], grad: Tensor, x: Tensor, bias: Tensor, scale: Tensor | None, *scalars: Any
) -> Grads3:
    """A backward reference on a leading batch axis, with a bias gradient for each example."""
    *rest, mask = scalars
    wide = x.to(reference.compute_dtype(grad, x, bias, scale))  # so that the summands are not rounded
    dx, _, d_scale = plain(grad, wide, bias, scale, *rest, (mask[0] or mask[1], False, mask[2]))
    d_bias = None
    if mask[1]:
        assert dx is not None
        d_bias = (dx.sum(tuple(range(1, dx.ndim - 1))) if dx.ndim > 2 else dx).to(bias.dtype)
    return dx.to(x.dtype) if dx is not None and mask[0] else None, d_bias, d_scale


def _batched_fp8_backward(backward_rule: Callable[..., Any], data: int) -> Callable[..., Any]:
    """The vmap rule of a backward operator that loads float8: the plain backward operator's, on what was loaded."""

    def rule(info: Any, in_dims: tuple[Any, ...], grad: Tensor, *args: Any) -> Any:
        stored, rest, dtypes, mask = args[: 2 * data], args[2 * data : -1 - data], args[-1 - data : -1], args[-1]
        wide = reference.compute_dtype(grad, *(a for a in rest if isinstance(a, Tensor)))
        wide = torch.float64 if torch.float64 in dtypes else wide
        pairs = zip(stored[::2], in_dims[1::2], stored[1::2], in_dims[2::2], strict=False)
        loaded = [reference.load_fp8(lead(info, t, d), lead(info, s, ds), wide) for t, d, s, ds in pairs]
        dims = (in_dims[0], *(0,) * data, *in_dims[1 + 2 * data : -1 - data], in_dims[-1])
        outputs, out_dims = backward_rule(info, dims, grad, *loaded, *rest, mask)
        rounded = [None if o is None else o.to(d) for o, d in zip(outputs, dtypes, strict=False)]
        return (*rounded, *outputs[data:]), out_dims

    return rule


# ---- what is kept for backward ---------------------------------------------------------------------------------------

_ARGUMENTS = keep_arguments(3)


def _zero_bias(tensors: tuple[Tensor | None, ...], rest: Any, mask: tuple[bool, ...]) -> tuple[Any, ...]:
    (out,), (activation, bias_dtype) = tensors, rest
    assert out is not None
    bias = out.new_zeros(out.shape[-1:], dtype=bias_dtype) if mask[1] else None
    return out, bias, None, activation


# The derivative there is the derivative at input + bias: see Activation.gradient_from_output.
_OUTPUT = Keep(lambda args, out: ((out,), (args[3], args[1] is not None and args[1].dtype)), _zero_bias)


def keeps_output(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> bool:
    """Whether bias_act's backward needs no more than its result: nothing is kept that the next linear does not keep.

    The result must not be 0 where the sum that it rounds is not: a sum of two numbers of a dtype never is.
    """
    return (
        token_scale is None
        and activations.get(activation).gradient_from_output
        and (bias is None or bias.dtype == input.dtype)
    )


def _bias_act_keep(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Keep:
    return _OUTPUT if keeps_output(input, bias, token_scale, activation) else _ARGUMENTS


def _keep_fp8(data: int) -> Callable[..., Keep]:
    """Of the data tensors, the first ``data`` arguments, what the operator stored; the other arguments as they are."""
    keep = Keep(
        lambda args, outputs: ((*outputs[1:], *args[data:3]), (*args[3:], *(t.dtype for t in args[:data]))),
        lambda kept, rest, _: kept + rest,
        once=True,
    )
    return lambda *_: keep


# ---- registration ----------------------------------------------------------------------------------------------------


def _cpu_kernel(name: str, check: Callable[..., None] | None) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(cpu, name)
    if check is None:
        return kernel

    def checked(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return checked


def _gpu_kernel(name: str, check: Callable[..., None] | None) -> Callable[..., Any]:
    """The kernel of kernels/activation.py, imported at the first call; plain torch for registered activations."""
    in_torch: Callable[..., Any] = getattr(cpu, name)

    def kernel(*args: Any) -> Any:
        if check is not None:
            check(*args)
        if not activations.get(next(a for a in args if isinstance(a, str))).builtin:
            return in_torch(*args)
        from torch_fused_ops.kernels import activation

        return getattr(activation, name)(*args)

    return kernel


def _register(
    name: str,
    check: Callable[..., None],
    fakes: tuple[Callable[..., Any], Callable[..., Any]],
    keep: Callable[..., Keep],
    rules: tuple[Callable[..., Any], ...],
) -> None:
    """fused::name and its backward operator; ``fakes`` and ``rules`` (of vmap) are of the two."""
    both = name, f"{name}_backward"
    ops, kernels = [], []
    for op_name, checked, fake, rule in zip(both, (check, None), fakes, rules, strict=True):
        on_cpu = _cpu_kernel(op_name, checked)
        ops.append(register(op_name, SCHEMAS[op_name], on_cpu, _gpu_kernel(op_name, checked), fake, rule, checked))
        kernels.append(on_cpu)
    plain, plain_backward = (getattr(reference, n) for n in both)
    differentiate_by_reference(ops[1], plain_backward, kernels[1])
    record = getattr(cpu, f"record_{name}", None)
    differentiate(ops[0], check, plain, kernels[0], (ops[1], kernels[1]), keep, record)


def _register_family(
    name: str,
    check: Callable[..., None],
    fakes: tuple[Callable[..., Any], ...],
    keep: Callable[..., Keep],
    data: int = 1,
) -> None:
    """An operator and its variant that stores its first ``data`` tensors in float8; ``fakes`` are of the four."""
    has_bias = data == 1

    def forward_rule(fp8: str) -> Callable[..., Any]:
        return lambda op: _batched(op, getattr(reference, name + fp8), check, has_bias, backward=False)

    def backward_rule(op: torch._ops.OpOverload) -> Callable[..., Any]:
        return _batched(op, getattr(reference, f"{name}_backward"), check, has_bias, backward=True)

    def fp8_backward_rule(_: torch._ops.OpOverload) -> Callable[..., Any]:
        return _batched_fp8_backward(backward_rule(getattr(torch.ops.fused, f"{name}_backward").default), data)

    _register(name, check, (fakes[0], _backward_fake), keep, (forward_rule(""), backward_rule))
    _register(f"{name}_fp8", check, (fakes[1], fakes[2]), _keep_fp8(data), (forward_rule("_fp8"), fp8_backward_rule))


_register_family("bias_act", check_bias_act, (_bias_act_fake, _bias_act_fp8_fake, _fp8_backward_fake), _bias_act_keep)
_register_family("glu", check_glu, (_glu_fake, _glu_fp8_fake, _glu_fp8_backward_fake), lambda *_: _ARGUMENTS, data=2)
_register_family(
    "bias_glu", check_bias_glu, (_bias_glu_fake, _bias_glu_fp8_fake, _fp8_backward_fake), lambda *_: _ARGUMENTS
)
