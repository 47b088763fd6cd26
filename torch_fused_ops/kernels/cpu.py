"""The operators of the activation family on the CPU, in eager mode: ``reference``'s formulas, a block at a time.

Three things make them quick, and none of them is another formula for an operator:

* A formula is some ten elementwise steps. On whole tensors each step is a pass over memory and a temporary of the
  tensor's size; on blocks that stay in the cache the only large tensors are the arguments and the results.
* Each activation has a row here in the CPU's fastest calls (``_FORMS``), handed to ``reference``'s element functions in
  place of the table's. PyTorch's CPU kernels have costs of their own: ``where`` takes nine times as long as ``mul``
  (84 and 9 µs for 65536 float32 numbers on one core), ``exp2`` twice, ``erfc`` twelve times, while ``silu`` and
  ``sigmoid`` are one pass of 29 µs and exact to the last digits.
* Where PyTorch has the very function in one call, and as accurate, that call is all there is.

Float64, and registered activations, take the table's own functions. Tests hold all of it to the precision contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops import activations, reference
from torch_fused_ops.activations import Activation
from torch_fused_ops.reference import Grads3, unpack

__all__ = [
    "bias_act",
    "bias_act_backward",
    "bias_act_fp8",
    "bias_act_fp8_backward",
    "bias_glu",
    "bias_glu_backward",
    "bias_glu_fp8",
    "bias_glu_fp8_backward",
    "glu",
    "glu_backward",
    "glu_fp8",
    "glu_fp8_backward",
]

aten = torch.ops.aten

# ---- the activations in the CPU's fastest calls --------------------------------------------------------------------


class _Form(NamedTuple):
    """An activation on float32: f(x) and grad·f'(x) from ``parts``, what they have in common.

    ``native`` and ``native_backward`` are PyTorch's own x → f(x) and grad, x → grad·f'(x) for any dtype, with one
    rounding, where they are accurate over the whole range. With both, autograd may as well record ``native`` itself.
    """

    parts: Callable[[Tensor], Any]
    value: Callable[[Tensor, Any], Tensor]
    gradient: Callable[[Tensor, Tensor, Any], Tensor]
    native: Callable[[Tensor], Tensor] | None = None
    native_backward: Callable[[Tensor, Tensor], Tensor] | None = None


with _disable_current_modes():  # whatever this module is imported under

    def _number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(value, dtype=dtype, device="cpu")

    # As tensors: a Python number costs a call 1.8 µs. addcmul and its like take some as the addend, at full speed.
    _ONE = _number(1.0)
    _SLOPE = _number(activations.GELU_TANH_SLOPE)
    _QUICK_SLOPE = _number(activations.QUICK_GELU_SLOPE)
    _TAIL = tuple(map(_number, activations.NORMAL_TAIL))
    _HALF_WIDE, _MINUS_HALF_WIDE, _MINUS_SQRT1_2_WIDE, _INV_SQRT_2PI_WIDE = (
        _number(v, torch.float64) for v in (0.5, -0.5, -activations.SQRT1_2, activations.INV_SQRT_2PI)
    )

_GRAIN = 32768  # elements of a thread's, below which PyTorch does not share an elementwise call
_FEW = 2048  # elements that are quicker in a few calls in float64 than in many in float32


def _swish_derivative(slope: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, s: torch.addcmul(s, _ONE - s, x * s, value=slope)  # in this order: slope·x may overflow


def _gelu_tanh_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    x2 = x * x
    return x2, torch.sigmoid(torch.addcmul(x, x2, x, value=activations.GELU_TANH_CUBIC) * _SLOPE)


def _gelu_tanh_derivative(x: Tensor, parts: tuple[Tensor, Tensor]) -> Tensor:
    x2, s = parts
    slope = 3 * activations.GELU_TANH_SLOPE * activations.GELU_TANH_CUBIC
    # Past 30 s·(1 - s) is 0, and 0·∞ would be NaN.
    return torch.addcmul(s, (x * s).mul_(_ONE - s), torch.add(_SLOPE, torch.clamp_max(x2, 900.0), alpha=slope))


def _gelu_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Few: (Φ(x), x) in float64. Many: (a, q, e), as the table's."""
    if x.numel() <= _FEW:
        wide = x.double()
        return (wide * _MINUS_SQRT1_2_WIDE).erfc_().mul_(_HALF_WIDE), wide
    a = torch.abs(x).clamp_max_(38.0)
    t = torch.add(_ONE, a, alpha=activations.NORMAL_TAIL_P).reciprocal_()
    q = torch.addcmul(_TAIL[-2], t, _TAIL[-1]) if t.numel() <= _FEW else (t * _TAIL[-1]).add_(_TAIL[-2])
    for c in reversed(_TAIL[:-2]):
        q = torch.addcmul(c, q, t, out=q)
    return a, q.mul_(t), torch.mul(x, x).mul_(-0.5 * activations.LOG2E).exp2_()


def _gelu(x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    if len(parts) == 2:
        normal, wide = parts
        return (normal * wide).float()
    a, q, e = parts
    return torch.addcmul(torch.relu(x), a * q, e, value=-1)


def _gelu_derivative(x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    if len(parts) == 2:
        normal, wide = parts
        return normal.addcmul(wide, (wide * wide).mul_(_MINUS_HALF_WIDE).exp_().mul_(_INV_SQRT_2PI_WIDE)).float()
    a, q, e = parts
    below = torch.sub(q, a, alpha=activations.INV_SQRT_2PI).mul_(e)
    sign = torch.copysign(_ONE, x)
    return torch.addcmul(torch.relu(sign), below, sign, value=-1)  # below 0: below, else 1 - below


def _relu_backward(grad: Tensor, x: Tensor) -> Tensor:
    d: Tensor = aten.threshold_backward.default(grad, x, 0)
    return d


def _relu2(x: Tensor, r: Tensor) -> Tensor:
    return r * r


def _sigmoid_backward(x: Tensor) -> Tensor:
    # e/(1 + e)² with e = exp(-|x|): both tails as the left one
    e = torch.abs(x).mul_(-activations.LOG2E).exp2_()
    d = e + _ONE
    return e.div_(d.mul_(d))


def _nothing(x: Tensor) -> None:
    return None


def _times(derivative: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Tensor, Any], Tensor]:
    return lambda grad, x, parts: grad * derivative(x, parts)


_FORMS = {
    "relu": _Form(
        _nothing,
        lambda x, _: torch.relu(x),
        lambda grad, x, _: _relu_backward(grad, x),
        torch.relu,
        _relu_backward,
    ),
    "relu2": _Form(torch.relu, _relu2, lambda grad, x, r: _relu_backward(grad * (r + r), x)),
    "silu": _Form(
        torch.sigmoid,
        lambda x, s: x * s,
        _times(_swish_derivative(1.0)),
        torch.nn.functional.silu,
        aten.silu_backward.default,
    ),
    "gelu": _Form(_gelu_parts, _gelu, _times(_gelu_derivative)),
    "gelu_tanh": _Form(_gelu_tanh_parts, lambda x, parts: x * parts[1], _times(_gelu_tanh_derivative)),
    "quick_gelu": _Form(
        lambda x: torch.sigmoid(x * _QUICK_SLOPE),
        lambda x, s: x * s,
        _times(_swish_derivative(activations.QUICK_GELU_SLOPE)),
    ),
    "sigmoid": _Form(_nothing, lambda x, _: torch.sigmoid(x), _times(lambda x, _: _sigmoid_backward(x)), torch.sigmoid),
    "tanh": _Form(
        _nothing,
        lambda x, _: torch.tanh(x),
        _times(lambda x, _: _sigmoid_backward(x + x).mul_(4.0)),
        torch.tanh,
    ),
}


def _value(form: _Form, x: Tensor) -> Tensor:
    return form.value(x, form.parts(x)) if form.native is None else form.native(x)


class _OnCpu(Activation):
    """A row for ``reference``: what value and gradient have in common is computed once."""

    def __init__(self, form: _Form) -> None:
        self.__dict__.update(form=form, x=None, parts=None)

    def _of(self, x: Tensor) -> Any:
        mine = self.__dict__
        if mine["x"] is not x:
            mine["x"], mine["parts"] = x, mine["form"].parts(x)
        return mine["parts"]

    def value(self, x: Tensor) -> Tensor:
        form = self.__dict__["form"]
        if form.native is not None and self.__dict__["x"] is not x:  # nothing to share: forward alone
            return form.native(x)  # type: ignore[no-any-return]
        return form.value(x, self._of(x))  # type: ignore[no-any-return]

    def input_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        return self.__dict__["form"].gradient(grad, x, self._of(x))  # type: ignore[no-any-return]


def _row(activation: str, dtype: torch.dtype) -> Any:
    """What ``reference`` is handed as the activation."""
    form = _FORMS.get(activation) if dtype == torch.float32 else None
    return activation if form is None else _OnCpu(form)


def _is_simple(*tensors: Tensor | None) -> bool:
    """Whether nothing need be widened, cut or laid out anew: float32, contiguous, no more numbers than a grain."""
    for t in tensors:
        if t is not None and (t.dtype != torch.float32 or t.numel() > _GRAIN or not t.is_contiguous()):
            return False
    return True


def record_bias_act(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Tensor | None:
    """bias_act as PyTorch's own differentiable function where that is all there is to it, or None.

    It keeps for backward just what the operator keeps. So a recomputation that takes the other way, because some mode
    is active then, is the same to ``torch.utils.checkpoint``: with GLUs, recorded step by step, it would not be.
    """
    form = _FORMS.get(activation)
    if form is None or form.native is None or form.native_backward is None:
        return None
    alone = bias is None and token_scale is None and input.is_contiguous()
    return form.native(input) if alone else None


# ---- blocks --------------------------------------------------------------------------------------------------------


def block() -> int:
    """How many elements a block has: enough for every thread; one thread's share where there are only two.

    Threads meet after each step of each block, and two that meet so often lose more than they gain as soon as anything
    else runs: the median of 12 passes of GELU's backward over 4 Mi bfloat16 numbers, on two busy cores, was 1285 ms
    on two threads (34 at best) and 25 ms on one (20 at best).
    """
    threads = torch.get_num_threads()
    return _GRAIN * threads if threads > 2 else _GRAIN


def _blocks(shape: Sequence[int], block: int) -> Iterator[tuple[Any, ...]]:
    """Indices over all axes but the last that cut a tensor of ``shape`` into views of about ``block`` elements."""
    size, axis = shape[-1], len(shape) - 1
    while axis > 0 and size * shape[axis - 1] <= block:
        axis -= 1
        size *= shape[axis]
    if axis == 0:
        yield ()
        return
    step = max(1, block // max(size, 1))
    for outer in itertools.product(*(range(n) for n in shape[: axis - 1])):
        for start in range(0, shape[axis - 1], step):
            yield (*outer, slice(start, start + step))


def _wide(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)


def _input_grads(
    grad: Tensor,
    data: Sequence[Tensor],
    scale: Tensor | None,
    row: Any,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> tuple[Tensor, ...]:
    """reference's; or PyTorch's own derivative where it is the whole of it, bit for bit what record_bias_act's is."""
    form: _Form | None = row.__dict__["form"] if isinstance(row, _OnCpu) else None
    plain = not up_offset and clamp is None
    if form is not None and form.native is not None and form.native_backward is not None and plain:
        if len(data) == 1:
            dx = form.native_backward(grad, data[0])
            return (dx if scale is None else dx * scale,)
        grad = grad if scale is None else grad * scale
        gate, up = data
        return form.native_backward(grad * up, gate), grad * form.native(gate)
    if len(data) == 1:
        return (reference.bias_act_input_grad(grad, data[0], None, scale, row),)
    gate, up = data
    return reference.glu_input_grads(grad, gate, up, scale, row, up_offset, clamp)


class _Call(NamedTuple):
    """An operator's arguments: ``data`` is (x,) for bias_act, else (gate, up); ``biases`` likewise, or empty."""

    data: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    scale: Tensor | None
    activation: str
    up_offset: float = 0.0
    clamp: float | None = None
    row_scales: tuple[Tensor, ...] = ()  # of data in float8: see reference.store_fp8

    @staticmethod
    def packed(
        input: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        activation: str,
        layout: str,
        up_offset: float,
        clamp: float | None,
        row_scale: Tensor | None = None,
    ) -> _Call:
        biases = () if bias is None else unpack(bias, layout)
        row_scales = () if row_scale is None else (row_scale, row_scale)
        return _Call(unpack(input, layout), biases, scale, activation, up_offset, clamp, row_scales)

    def dtype(self, *more: Tensor) -> torch.dtype:
        for t in (*self.data, *self.biases, *more):
            if t.dtype == torch.float64:
                return torch.float64
        return torch.float64 if self.scale is not None and self.scale.dtype == torch.float64 else torch.float32

    def wide(self, dtype: torch.dtype) -> _Call:
        """With the small arguments in ``dtype``, scale as a column, and the activation as ``reference`` takes it."""
        scale = None if self.scale is None else _wide(self.scale, dtype).unsqueeze(-1)
        biases = tuple([_wide(b, dtype) for b in self.biases])
        return self._replace(biases=biases, scale=scale, activation=_row(self.activation, dtype))

    def block(self, index: tuple[Any, ...], dtype: torch.dtype) -> _Call:
        """A block's part of a wide call, with the biases added."""
        data = [t[index] if index else t for t in self.data]
        if self.row_scales:
            scales = [s[index] for s in self.row_scales]
            data = [reference.load_fp8(t, s, dtype) for t, s in zip(data, scales, strict=True)]
        else:
            data = [_wide(t, dtype) for t in data]
        if self.biases:
            data = [t + b for t, b in zip(data, self.biases, strict=True)]
        scale = self.scale[index] if index and self.scale is not None else self.scale
        return self._replace(data=tuple(data), scale=scale)

    def value(self) -> Tensor:
        if len(self.data) == 1:
            return reference.bias_act_element(self.data[0], None, self.scale, self.activation)
        gate, up = self.data
        return reference.glu_element(gate, up, self.scale, self.activation, self.up_offset, self.clamp)

    def input_grads(self, grad: Tensor) -> tuple[Tensor, ...]:
        return _input_grads(grad, self.data, self.scale, self.activation, self.up_offset, self.clamp)

    def scale_grad(self, grad: Tensor) -> Tensor:
        if len(self.data) == 1:
            terms = reference.bias_act_scale_grad(grad, self.data[0], None, self.activation)
        else:
            gate, up = self.data
            terms = reference.glu_scale_grad(grad, gate, up, self.activation, self.up_offset, self.clamp)
        return terms.sum(-1)


def _forward(call: _Call) -> Tensor:
    first, dtype = call.data[0], call.dtype()
    shape = first.shape
    if call.activation in _FORMS and first.numel() <= _GRAIN:
        y = call.wide(dtype).block((), dtype).value()
        y = y if y.dtype == first.dtype else y.to(first.dtype)
        return y if y.is_contiguous() else y.contiguous()
    out = first.new_empty(shape)
    wide = call.wide(dtype)
    for i in _blocks(shape, block()):
        out[i].copy_(wide.block(i, dtype).value())
    return out


def _backward(
    grad: Tensor,
    call: _Call,
    outs: Sequence[Tensor | None],
    bias_outs: Sequence[Tensor],
    scale_out: Tensor | None,
    dtypes: Sequence[torch.dtype] = (),
) -> None:
    """Fill what is given: the gradients of the data, of the biases and of the scale. ``dtypes``: of data in float8."""
    dtype = torch.float64 if torch.float64 in dtypes else call.dtype(grad)
    wide = call.wide(dtype)
    inputs = bool(bias_outs) or any(o is not None for o in outs)
    # Hundreds of partial sums: in float64, so that their order costs nothing.
    totals = [torch.zeros_like(b, dtype=torch.float64) for b in bias_outs]
    for i in _blocks(grad.shape, block()):
        g, part = _wide(grad[i] if i else grad, dtype), wide.block(i, dtype)
        if inputs:
            ds = part.input_grads(g)
            for out, d in zip(outs, ds, strict=True):
                if out is not None:
                    (out[i] if i else out).copy_(d)
            for total, d in zip(totals, ds, strict=False):
                total += reference._over_rows(d)
        if scale_out is not None:
            (scale_out[i] if i else scale_out).copy_(part.scale_grad(g))
    for out, total in zip(bias_outs, totals, strict=True):
        out.copy_(total)


# ---- the operators -------------------------------------------------------------------------------------------------


def _given(t: Tensor | None) -> tuple[Tensor, ...]:
    return () if t is None else (t,)


def _room(t: Tensor | None, wanted: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    """For the gradient of t."""
    return t.new_empty(t.shape, dtype=dtype or t.dtype) if wanted and t is not None else None


def _store(t: Tensor) -> tuple[Tensor, Tensor]:
    """reference.store_fp8, a block at a time."""
    if t.numel() <= _GRAIN:
        return reference.store_fp8(t)
    stored = t.new_empty(t.shape, dtype=reference.FP8)
    scale = t.new_empty(t.shape[:-1], dtype=torch.float32)
    for i in _blocks(t.shape, block()):
        for out, part in zip((stored, scale), reference.store_fp8(t[i]), strict=True):
            out[i].copy_(part)
    return stored, scale


def bias_act(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> Tensor:
    """act(input + bias) · token_scale[..., None]; see ``reference.bias_act``."""
    form = _FORMS.get(activation)
    if bias is None and token_scale is None and form is not None and form.native is not None:
        y = form.native(input)
        return y if y.is_contiguous() else y.contiguous()
    if form is not None and token_scale is None and _is_simple(input, bias):
        return _value(form, input if bias is None else input + bias)
    return _forward(_Call((input,), _given(bias), token_scale, activation))


def bias_act_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of bias_act for (input, bias, token_scale); None where output_mask says no."""
    form = _FORMS.get(activation)
    native = form.native_backward if form is not None and bias is None and token_scale is None else None
    if native is not None and grad.dtype == input.dtype and output_mask[0]:
        d = native(grad, input)
        return d if d.is_contiguous() else d.contiguous(), None, None
    if form is not None and token_scale is None and _is_simple(grad, input, bias):
        x = input if bias is None else input + bias
        (d,) = _input_grads(grad, (x,), None, _OnCpu(form))
        return d if output_mask[0] else None, reference._over_rows(d) if output_mask[1] else None, None
    d_input, d_bias, d_scale = map(_room, (input, bias, token_scale), output_mask)
    call = _Call((input,), _given(bias), token_scale, activation)
    _backward(grad, call, (d_input,), _given(d_bias), d_scale)
    return d_input, d_bias, d_scale


def bias_act_fp8(input: Tensor, bias: Tensor | None, token_scale: Tensor | None, activation: str) -> tuple[Tensor, ...]:
    """bias_act, and what its backward needs of input in float8; see ``reference.bias_act_fp8``."""
    return bias_act(input, bias, token_scale, activation), *_store(input)


def bias_act_fp8_backward(
    grad: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """bias_act_backward at what bias_act_fp8 stored."""
    d_input = _room(stored, output_mask[0], dtype)
    d_bias, d_scale = map(_room, (bias, token_scale), output_mask[1:])
    call = _Call((stored,), _given(bias), token_scale, activation, row_scales=(scale,))
    _backward(grad, call, (d_input,), _given(d_bias), d_scale, (dtype,))
    return d_input, d_bias, d_scale


def glu(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """act(min(gate, clamp)) · (clamp(up, ±clamp) + up_offset) · token_scale[..., None]; see ``reference.glu``."""
    if activation in _FORMS and token_scale is None and _is_simple(gate, up):
        return reference.glu_element(gate, up, None, _row(activation, torch.float32), up_offset, clamp)
    return _forward(_Call((gate, up), (), token_scale, activation, up_offset, clamp))


def glu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of glu for (gate, up, token_scale); None where output_mask says no."""
    if activation in _FORMS and token_scale is None and _is_simple(grad, gate, up):
        row = _row(activation, torch.float32)
        found = _input_grads(grad, (gate, up), None, row, up_offset, clamp)
        return found[0] if output_mask[0] else None, found[1] if output_mask[1] else None, None
    d_gate, d_up, d_scale = map(_room, (gate, up, token_scale), output_mask)
    _backward(grad, _Call((gate, up), (), token_scale, activation, up_offset, clamp), (d_gate, d_up), (), d_scale)
    return d_gate, d_up, d_scale


def glu_fp8(
    gate: Tensor,
    up: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> tuple[Tensor, ...]:
    """glu, and what its backward needs of gate and up in float8; see ``reference.glu_fp8``."""
    return glu(gate, up, token_scale, activation, up_offset, clamp), *_store(gate), *_store(up)


def glu_fp8_backward(
    grad: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    token_scale: Tensor | None,
    activation: str,
    up_offset: float,
    clamp: float | None,
    gate_dtype: torch.dtype,
    up_dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """glu_backward at what glu_fp8 stored."""
    d_gate, d_up = _room(gate, output_mask[0], gate_dtype), _room(up, output_mask[1], up_dtype)
    d_scale = _room(token_scale, output_mask[2])
    call = _Call((gate, up), (), token_scale, activation, up_offset, clamp, (gate_scale, up_scale))
    _backward(grad, call, (d_gate, d_up), (), d_scale, (gate_dtype, up_dtype))
    return d_gate, d_up, d_scale


def bias_glu(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> Tensor:
    """glu of the packed input (..., 2n) + bias (2n,); see ``reference.bias_glu``."""
    if activation in _FORMS and token_scale is None and _is_simple(input, bias):
        gate, up = unpack(input if bias is None else input + bias, layout)
        y = reference.glu_element(gate, up, None, _row(activation, torch.float32), up_offset, clamp)
        return y if y.is_contiguous() else y.contiguous()
    return _forward(_Call.packed(input, bias, token_scale, activation, layout, up_offset, clamp))


def _packed_backward(
    grad: Tensor, call: _Call, layout: str, outs: Grads3, dtypes: tuple[torch.dtype, ...] = ()
) -> Grads3:
    d_input, d_bias, d_scale = outs
    halves = (None, None) if d_input is None else unpack(d_input, layout)
    _backward(grad, call, halves, () if d_bias is None else unpack(d_bias, layout), d_scale, dtypes)
    return outs


def bias_glu_backward(
    grad: Tensor,
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    output_mask: Sequence[bool],
) -> Grads3:
    """The gradients of bias_glu for (input, bias, token_scale); None where output_mask says no."""
    if activation in _FORMS and token_scale is None and _is_simple(grad, input, bias):
        gate, up = unpack(input if bias is None else input + bias, layout)
        row = _row(activation, torch.float32)
        d_gate, d_up = _input_grads(grad, (gate, up), None, row, up_offset, clamp)
        d = reference.pack(d_gate, d_up, layout)
        return d if output_mask[0] else None, reference._over_rows(d) if output_mask[1] else None, None
    d_input, d_bias, d_scale = map(_room, (input, bias, token_scale), output_mask)
    call = _Call.packed(input, bias, token_scale, activation, layout, up_offset, clamp)
    return _packed_backward(grad, call, layout, (d_input, d_bias, d_scale))


def bias_glu_fp8(
    input: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str = "halves",
    up_offset: float = 0.0,
    clamp: float | None = None,
) -> tuple[Tensor, ...]:
    """bias_glu, and what its backward needs of input in float8; see ``reference.bias_glu_fp8``."""
    return bias_glu(input, bias, token_scale, activation, layout, up_offset, clamp), *_store(input)


def bias_glu_fp8_backward(
    grad: Tensor,
    stored: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    token_scale: Tensor | None,
    activation: str,
    layout: str,
    up_offset: float,
    clamp: float | None,
    dtype: torch.dtype,
    output_mask: Sequence[bool],
) -> Grads3:
    """bias_glu_backward at what bias_glu_fp8 stored."""
    d_input = _room(stored, output_mask[0], dtype)
    d_bias, d_scale = map(_room, (bias, token_scale), output_mask[1:])
    call = _Call.packed(stored, bias, token_scale, activation, layout, up_offset, clamp, scale)
    return _packed_backward(grad, call, layout, (d_input, d_bias, d_scale), (dtype,))
