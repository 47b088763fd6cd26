"""The activation family: ``fused::bias_act``, ``fused::glu``, ``fused::bias_glu`` and their backward operators.

Read from top to bottom: schemas → what is accepted → CPU → GPU → fake → autograd and transforms → vmap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations, reference
from torch_fused_ops.ops._autograd import differentiate, differentiate_by_reference
from torch_fused_ops.reference import LAYOUTS, Grads3

# ---- schemas -------------------------------------------------------------------------------------------------------

_BIAS_ACT = "Tensor input, Tensor? bias, Tensor? token_scale, str activation"
_GLU = "Tensor gate, Tensor up, Tensor? token_scale, str activation"
_BIAS_GLU = "Tensor input, Tensor? bias, Tensor? token_scale, str activation"
_GRADS3 = "bool[3] output_mask) -> (Tensor?, Tensor?, Tensor?)"
SCHEMAS = {
    "bias_act": f"({_BIAS_ACT}) -> Tensor",
    "glu": f"({_GLU}, float up_offset=0.0, float? clamp=None) -> Tensor",
    "bias_glu": f'({_BIAS_GLU}, str layout="halves", float up_offset=0.0, float? clamp=None) -> Tensor',
    "bias_act_backward": f"(Tensor grad, {_BIAS_ACT}, {_GRADS3}",
    "glu_backward": f"(Tensor grad, {_GLU}, float up_offset, float? clamp, {_GRADS3}",
    "bias_glu_backward": f"(Tensor grad, {_BIAS_GLU}, str layout, float up_offset, float? clamp, {_GRADS3}",
}

# ---- what is accepted ----------------------------------------------------------------------------------------------

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _check_tensor(name: str, t: Tensor | None, device: torch.device) -> None:
    if t is None:
        return
    if t.dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {t.dtype}; accepted: float16, bfloat16, float32, float64")
    if t.device != device:
        raise ValueError(f"{name} is on device {t.device}; accepted: {device}, where the first tensor is")


def _check_shape(name: str, t: Tensor | None, shape: Sequence[int], meaning: str) -> None:
    if t is not None and tuple(t.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: {tuple(shape)}, {meaning}")


def _check_glu_scalars(up_offset: float, clamp: float | None) -> None:
    if not math.isfinite(up_offset):
        raise ValueError(f"up_offset={up_offset!r} is not accepted: it must be finite")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp={clamp!r} is not accepted: it must be above 0, or None for no clamp")


def check_bias_act(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> None:
    """Raise ValueError or TypeError, naming the argument, its value and what is accepted; else nothing."""
    activations.get(activation)
    for name, t in (("input", input), ("bias", bias), ("token_scale", token_scale)):
        _check_tensor(name, t, input.device)
    if input.ndim == 0:
        raise ValueError("input has shape (); accepted: at least one axis")
    _check_shape("bias", bias, input.shape[-1:], "input's last axis")
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
    for name, t in (("gate", gate), ("up", up), ("token_scale", token_scale)):
        _check_tensor(name, t, gate.device)
    if gate.ndim == 0:
        raise ValueError("gate has shape (); accepted: at least one axis")
    _check_shape("up", up, gate.shape, "gate's shape")
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


# ---- CPU: the reference, a cache-sized block at a time ---------------------------------------------------------------

# A formula is some ten elementwise steps. On whole tensors each step is a pass over memory and a temporary of the
# tensor's size; on blocks that stay in the cache the only large tensors are the arguments and the results.
_BLOCK = 1 << 16


def _blocks(shape: torch.Size) -> Iterator[tuple[Any, ...]]:
    """Indices over all axes but the last that cut a tensor of ``shape`` into views of about _BLOCK elements."""
    size, axis = shape[-1], len(shape) - 1
    while axis > 0 and size * shape[axis - 1] <= _BLOCK:
        axis -= 1
        size *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, _BLOCK // max(size, 1))
    for outer in itertools.product(*(range(n) for n in shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))


def _at(t: Tensor | None, index: tuple[Any, ...]) -> Tensor | None:
    return None if t is None else t[index]


def _forward_in_blocks(
    fn: Callable[..., Tensor], data: Sequence[Tensor], bias: Tensor | None, token_scale: Tensor | None, width: int
) -> Tensor:
    out = data[0].new_empty((*data[0].shape[:-1], width))
    for i in _blocks(data[0].shape):
        out[i].copy_(fn([t[i] for t in data], bias, _at(token_scale, i)))
    return out


def _backward_in_blocks(
    fn: Callable[..., Grads3],
    grad: Tensor,
    data: Sequence[Tensor],
    bias: Tensor | None,
    token_scale: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """fn(grad, data, bias, scale) -> (data gradients…, bias gradient, scale gradient), wanted likewise."""
    dtype = reference.compute_dtype(grad, *data, bias, token_scale)
    wide_bias = None if bias is None else bias.to(dtype)  # so that the blocks' bias gradients are not rounded
    outs = [t.new_empty(t.shape) if w else None for t, w in zip(data, wanted, strict=False)]
    d_scale = token_scale.new_empty(token_scale.shape) if token_scale is not None and wanted[-1] else None
    # Hundreds of partial sums: in float64, so that their order costs nothing.
    d_bias = torch.zeros_like(bias, dtype=torch.float64) if bias is not None and wanted[-2] else None
    for i in _blocks(data[0].shape):
        *ds, db, dss = fn(grad[i], [t[i] for t in data], wide_bias, _at(token_scale, i))
        for out, d in zip((*outs, d_scale), (*ds, dss), strict=True):
            if out is not None and d is not None:
                out[i].copy_(d)
        if d_bias is not None and db is not None:
            d_bias += db
    return [*outs, None if d_bias is None or bias is None else d_bias.to(bias.dtype), d_scale]


def _bias_act_cpu(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Tensor:
    check_bias_act(input, bias, token_scale, activation)
    return _forward_in_blocks(
        lambda d, b, s: reference.bias_act(d[0], b, s, activation), (input,), bias, token_scale, input.shape[-1]
    )


def _bias_act_backward_cpu(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    output_mask: list[bool],
) -> Grads3:
    d_input, d_bias, d_scale = _backward_in_blocks(
        lambda g, d, b, s: reference.bias_act_backward(g, d[0], b, s, activation, output_mask),
        grad,
        (input,),
        bias,
        token_scale,
        output_mask,
    )
    return d_input, d_bias, d_scale


def _glu_cpu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    check_glu(gate, up, token_scale, activation, up_offset, clamp)
    return _forward_in_blocks(
        lambda d, _, s: reference.glu(d[0], d[1], s, activation, up_offset, clamp),
        (gate, up),
        None,
        token_scale,
        gate.shape[-1],
    )


def _glu_backward_cpu(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    output_mask: list[bool],
) -> Grads3:
    def block(g: Tensor, d: list[Tensor], _: None, s: Tensor | None) -> tuple[Tensor | None, ...]:
        dg, du, ds = reference.glu_backward(g, d[0], d[1], s, activation, up_offset, clamp, output_mask)
        return dg, du, None, ds

    wanted = (output_mask[0], output_mask[1], False, output_mask[2])
    d_gate, d_up, _, d_scale = _backward_in_blocks(block, grad, (gate, up), None, token_scale, wanted)  # type: ignore[arg-type]
    return d_gate, d_up, d_scale


def _bias_glu_cpu(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    check_bias_glu(input, bias, token_scale, activation, layout, up_offset, clamp)
    return _forward_in_blocks(
        lambda d, b, s: reference.bias_glu(d[0], b, s, activation, layout, up_offset, clamp),
        (input,),
        bias,
        token_scale,
        input.shape[-1] // 2,
    )


def _bias_glu_backward_cpu(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    output_mask: list[bool],
) -> Grads3:
    d_input, d_bias, d_scale = _backward_in_blocks(
        lambda g, d, b, s: reference.bias_glu_backward(
            g, d[0], b, s, activation, layout, up_offset, clamp, output_mask
        ),
        grad,
        (input,),
        bias,
        token_scale,
        output_mask,
    )
    return d_input, d_bias, d_scale


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


# ---- registration: CPU, GPU, fake, autograd, vmap ------------------------------------------------


def _gpu_kernel(name: str, check: Callable[..., None] | None, on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of kernels/activation.py, imported at the first call; plain torch for registered activations."""

    def kernel(*args: Any) -> Any:
        if check is not None:
            check(*args)
        if not activations.get(next(a for a in args if isinstance(a, str))).builtin:
            return on_cpu(*args)
        from torch_fused_ops.kernels import activation

        return getattr(activation, name)(*args)

    return kernel


def _batched(
    op: torch._ops.OpOverload, plain: Callable[..., Any], check: Callable[..., None], has_bias: bool, backward: bool
) -> Callable[..., Any]:
    """The vmap rule: the operator where the batch axis is one more leading axis, else its reference by broadcasting."""
    bias_at = (2 if backward else 1) if has_bias else None

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        def lead(i: int) -> Any:
            a, d = args[i], in_dims[i]
            if not isinstance(a, Tensor) or (i == bias_at and d is None):
                return a
            return a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)

        # What one example sees is checked: with a batch axis in front more would be accepted.
        if not backward and info.batch_size:
            check(*(a if d is None else a.select(d, 0) for a, d in zip(args, in_dims, strict=True)))
        leading = [lead(i) for i in range(len(args))]
        # A bias of its own for each example is no (n,) vector, and its gradient must not be summed over the examples.
        if bias_at is not None and (in_dims[bias_at] is not None or (backward and args[-1][1])):
            if in_dims[bias_at] is not None:
                x, bias = leading[bias_at - 1], leading[bias_at]
                leading[bias_at] = bias.reshape(bias.shape[0], *(1,) * (x.ndim - 2), bias.shape[-1])
            outputs = _per_example_backward(plain, *leading) if backward else plain(*leading)
        else:
            outputs = op(*leading)
        return outputs, (tuple(None if o is None else 0 for o in outputs) if backward else 0)

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


def _register(
    name: str,
    cpu: tuple[Callable[..., Any], Callable[..., Any]],
    fake: Callable[..., Any],
    check: Callable[..., None],
    has_bias: bool,
) -> None:
    backward_name = f"{name}_backward"
    plain: tuple[Callable[..., Any], Callable[..., Any]] = getattr(reference, name), getattr(reference, backward_name)
    for backward, op_name, fake_kernel, check_args in (
        (True, backward_name, _backward_fake, None),
        (False, name, fake, check),
    ):
        definition = torch.library.custom_op(
            f"fused::{op_name}", cpu[backward], mutates_args=(), schema=SCHEMAS[op_name]
        )
        definition.register_kernel(("cuda", "xpu"), _gpu_kernel(op_name, check_args, cpu[backward]))
        definition.register_fake(fake_kernel)
        definition.register_vmap(_batched(definition._opoverload, plain[backward], check, has_bias, backward))
    ops = torch.ops.fused
    differentiate_by_reference(getattr(ops, backward_name).default, plain[True])
    differentiate(getattr(ops, name).default, check, plain[False], getattr(ops, backward_name).default, plain[True])


_register("bias_act", (_bias_act_cpu, _bias_act_backward_cpu), _bias_act_fake, check_bias_act, has_bias=True)
_register("glu", (_glu_cpu, _glu_backward_cpu), _glu_fake, check_glu, has_bias=False)
_register("bias_glu", (_bias_glu_cpu, _bias_glu_backward_cpu), _bias_glu_fake, check_bias_glu, has_bias=True)
