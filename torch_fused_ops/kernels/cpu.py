"""Declared operators on the CPU, in eager mode: their formulas, a block at a time.

Three things make them quick, and none of them is another formula for an operator:

* A formula is some ten elementwise steps. On whole tensors each step is a pass over memory and a temporary of the
  tensor's size; on blocks that stay in the cache the only large tensors are the arguments and the results.
* Each activation has a spelling here in the CPU's fastest calls (``_SPELLINGS``), which takes the place of its name in
  the operators' formulas. PyTorch's CPU kernels have costs of their own: ``where`` takes nine times as long as ``mul``
  (84 and 9 µs for 65536 float32 numbers on one core), ``exp2`` twice, ``erfc`` twelve times, while ``silu`` and
  ``sigmoid`` are one pass of 29 µs and exact to the last digits. With the table's own formulas backward takes 1.4 to
  3.2 times as long (float32 and bfloat16, 256×4096, one core), calls on small tensors 1.4 to 6.5 times.
* Where PyTorch has the very function in one call, and as accurate, that call is all there is.

Float64, and registered activations, take the table's own functions. Tests hold all of it to the precision contract.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from torch_fused_ops import activations
from torch_fused_ops.declaration import DATA, PointwiseOperator
from torch_fused_ops.formulas import (
    Gradients,
    Spelling,
    act_element,
    compute_dtype,
    over_rows,
    pack,
    room,
    unpack,
)

__all__ = ["backward", "forward", "recorded"]

aten = torch.ops.aten

# ---- the activations in the CPU's fastest calls --------------------------------------------------------------------


class _Calls(NamedTuple):
    """A ``Spelling`` of two calls."""

    value: Callable[[Tensor], Tensor]
    input_grad: Callable[[Tensor, Tensor], Tensor]


class _Shared:
    """A ``Spelling`` in which f(x) and grad·f'(x) have something in common: ``parts``, computed once."""

    __slots__ = ("_gradient", "_parts", "_value", "known", "of")

    def __init__(
        self,
        parts: Callable[[Tensor], Any],
        value: Callable[[Tensor, Any], Tensor],
        gradient: Callable[[Tensor, Tensor, Any], Tensor],
    ) -> None:
        self._parts, self._value, self._gradient = parts, value, gradient
        self.of: Tensor | None = None
        self.known: Any = None

    def _parts_of(self, x: Tensor) -> Any:
        if self.of is not x:
            self.of, self.known = x, self._parts(x)
        return self.known

    def value(self, x: Tensor) -> Tensor:
        return self._value(x, self._parts_of(x))

    def input_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        return self._gradient(grad, x, self._parts_of(x))


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


def _sigmoid_derivative(x: Tensor) -> Tensor:
    # e/(1 + e)² with e = exp(-|x|): both tails as the left one
    e = torch.abs(x).mul_(-activations.LOG2E).exp2_()
    d = e + _ONE
    return e.div_(d.mul_(d))


def _times(derivative: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Tensor, Any], Tensor]:
    return lambda grad, x, parts: grad * derivative(x, parts)


# PyTorch's own functions and derivatives, of any dtype, with one rounding, where they are accurate everywhere.
_NATIVE = {
    "relu": _Calls(torch.relu, _relu_backward),
    "silu": _Calls(torch.nn.functional.silu, aten.silu_backward.default),
}
_NATIVE_VALUE = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, **{name: calls.value for name, calls in _NATIVE.items()}}


class _Spellings(NamedTuple):
    """An activation in float32: where its value alone is wanted, and what makes a spelling for a gradient."""

    value: Spelling
    shared: Callable[[], Spelling]


def _both(calls: _Calls) -> _Spellings:
    return _Spellings(calls, lambda: calls)


def _sharing(
    parts: Callable[[Tensor], Any],
    value: Callable[[Tensor, Any], Tensor],
    gradient: Callable[[Tensor, Tensor, Any], Tensor],
) -> _Spellings:
    alone = _Calls(lambda x: value(x, parts(x)), lambda grad, x: gradient(grad, x, parts(x)))
    return _Spellings(alone, lambda: _Shared(parts, value, gradient))


_SPELLINGS: dict[str, _Spellings] = {
    **{name: _both(calls) for name, calls in _NATIVE.items()},
    "relu2": _sharing(torch.relu, _relu2, lambda grad, x, r: _relu_backward(grad * (r + r), x)),
    "gelu": _sharing(_gelu_parts, _gelu, _times(_gelu_derivative)),
    "gelu_tanh": _sharing(_gelu_tanh_parts, lambda x, parts: x * parts[1], _times(_gelu_tanh_derivative)),
    "quick_gelu": _sharing(
        lambda x: torch.sigmoid(x * _QUICK_SLOPE),
        lambda x, s: x * s,
        _times(_swish_derivative(activations.QUICK_GELU_SLOPE)),
    ),
    "sigmoid": _both(_Calls(torch.sigmoid, lambda grad, x: grad * _sigmoid_derivative(x))),
    "tanh": _both(_Calls(torch.tanh, lambda grad, x: grad * _sigmoid_derivative(x + x).mul_(4.0))),
}


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


def _contiguous(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else t.contiguous()


def _is_simple(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing need be widened, cut or laid out anew: float32, contiguous, no more numbers than a grain."""
    for t in tensors:
        if t is not None and (t.dtype != torch.float32 or t.numel() > _GRAIN or not t.is_contiguous()):
            return False
    return True


class _Operands(NamedTuple):
    """An operator's tensors: packed data in two, and its bias likewise."""

    data: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]  # none, or one for each of the first data
    scale: tuple[Tensor | None, ...]  # as a column; none where the operator has no such argument

    @staticmethod
    def of(op: PointwiseOperator, tensors: Sequence[Any], layout: str | None, dtype: torch.dtype) -> _Operands:
        """With the small ones in ``dtype``."""
        bias = None if op.bias is None else tensors[op.bias]
        scale: tuple[Tensor | None, ...] = ()
        if op.scale is not None:
            rows = tensors[op.scale]
            scale = (None if rows is None else _wide(rows, dtype).unsqueeze(-1),)
        wide = None if bias is None else _wide(bias, dtype)
        if layout is None:
            return _Operands(tuple(tensors[: op.data]), () if wide is None else (wide,), scale)
        biases = () if wide is None else unpack(wide, layout)
        return _Operands(unpack(tensors[0], layout), biases, scale)

    def block(self, index: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        """What the formula is called with, of one block: the data, with the biases added, and the scale."""
        data = [_wide(t[index] if index else t, dtype) for t in self.data]
        for i, bias in enumerate(self.biases):
            data[i] = data[i] + bias
        if not index:
            return (*data, *self.scale)
        return (*data, *(None if s is None else s[index] for s in self.scale))


# ---- the kernels of an operator --------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """How a kernel reads its arguments, in plain numbers: a call on few elements costs what this costs."""

    complete: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    tensors: int
    total: int  # arguments
    layout: int | None
    activation: int | None
    scalars: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # the formula's, but for the activation, which is its first

    @staticmethod
    def of(op: PointwiseOperator) -> _Call:
        count = len(op.tensors)
        names = list(op.scalars)
        activation = count + names.index("activation") if "activation" in names else None
        at = [count + i for i, name in enumerate(names) if name not in ("layout", "activation")]
        if len(at) > 1:
            scalars: Callable[[tuple[Any, ...]], tuple[Any, ...]] = operator.itemgetter(*at)
        else:
            scalars = (lambda args: (args[at[0]],)) if at else (lambda args: ())
        return _Call(op.complete, count, count + len(names), op.layout, activation, scalars)


def _is_activation_alone(op: PointwiseOperator) -> bool:
    """Whether without bias and scale the operator is nothing but its activation: with any scalar more it is not."""
    return op.value is act_element and (op.kinds, *op.scalars) == (("data", "per_column", "per_row"), "activation")


def _simple_elements(op: PointwiseOperator) -> Callable[[tuple[Any, ...], str | None], tuple[Any, ...]]:
    """What the formula is called with where no row is scaled and nothing need be widened or cut."""
    bias_at, data, scale = op.bias, op.data, () if op.scale is None else (None,)

    def elements(args: tuple[Any, ...], layout: str | None) -> tuple[Any, ...]:
        first = args[0]
        if bias_at is not None and args[bias_at] is not None:
            first = first + args[bias_at]
        if layout is not None:
            return (*unpack(first, layout), *scale)
        return (first, *args[1:data], *scale)

    return elements


def forward(op: PointwiseOperator) -> Callable[..., Tensor]:
    """The operator."""
    complete, count, total, layout_at, activation_at, rest = _Call.of(op)
    alone, scale_at, simple, value = _is_activation_alone(op), op.scale, _simple_elements(op), op.value

    def kernel(*args: Any) -> Tensor:
        if alone and args[1] is None and args[2] is None and (native := _NATIVE_VALUE.get(args[3])) is not None:
            return _contiguous(native(args[0]))
        if len(args) != total:
            args = complete(args)
        tensors = args[:count]
        layout = None if layout_at is None else args[layout_at]
        named = () if activation_at is None else (args[activation_at],)
        spellings = _SPELLINGS.get(named[0]) if named else None
        if spellings is not None and (scale_at is None or args[scale_at] is None) and _is_simple(tensors):
            if alone:
                return spellings.value.value(args[0] if args[1] is None else args[0] + args[1])
            return _contiguous(value(*simple(args, layout), spellings.value, *rest(args)))
        dtype = compute_dtype(*tensors)
        operands = _Operands.of(op, tensors, layout, dtype)
        scalars = (*((spellings.value,) if spellings and dtype == torch.float32 else named), *rest(args))
        shape, first = operands.data[0].shape, args[0]
        if spellings is not None and operands.data[0].numel() <= _GRAIN:
            return _contiguous(_wide(value(*operands.block((), dtype), *scalars), first.dtype))
        out: Tensor = first.new_empty(shape)
        for i in _blocks(shape, block()):
            out[i].copy_(value(*operands.block(i, dtype), *scalars))
        return out

    return kernel


def backward(op: PointwiseOperator) -> Callable[..., Gradients]:
    """Its backward operator."""
    _, count, _, layout_at, activation_at, rest = _Call.of(op)
    alone, bias, scale_at, simple = _is_activation_alone(op), op.bias, op.scale, _simple_elements(op)
    data = op.data

    def kernel(grad: Tensor, *args: Any) -> Gradients:
        mask = args[-1]
        if alone and mask[0] and args[1] is None and args[2] is None and grad.dtype == args[0].dtype:
            native = _NATIVE.get(args[3])
            if native is not None:
                return _contiguous(native.input_grad(grad, args[0])), None, None
        tensors = args[:count]
        layout = None if layout_at is None else args[layout_at]
        spellings = None if activation_at is None else _SPELLINGS.get(args[activation_at])
        unscaled = scale_at is None or args[scale_at] is None
        if spellings is not None and unscaled and _is_simple((grad, *tensors)):
            found: Any = op.grads(grad, *simple(args, layout), spellings.shared(), *rest(args))
            if layout is not None:
                found = (pack(found[0], found[1], layout),)
            of_tensors = [found[i] if i < data and w else None for i, w in enumerate(mask)]
            if bias is not None and mask[bias]:
                of_tensors[bias] = over_rows(found[0])
            return tuple(of_tensors)
        gradients = tuple(map(room, tensors, mask))
        dtype = compute_dtype(grad, *tensors)
        named = () if activation_at is None else (args[activation_at],)
        _fill_gradients(
            op, grad, _Operands.of(op, tensors, layout, dtype), layout, (named, rest(args)), gradients, dtype
        )
        return gradients

    return kernel


def recorded(op: PointwiseOperator) -> Callable[..., Tensor | None] | None:
    """The operator as PyTorch's own differentiable function where that is all there is to it, or None.

    It keeps for backward just what the operator keeps. So a recomputation that takes the other way, because some mode
    is active then, is the same to ``torch.utils.checkpoint``: with GLUs, recorded step by step, it would not be.
    """
    if not _is_activation_alone(op):
        return None

    def record(input: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Tensor | None:
        alone = bias is None and scale is None and activation in _NATIVE and input.is_contiguous()
        return _NATIVE[activation].value(input) if alone else None

    return record


def _fill_gradients(
    op: PointwiseOperator,
    grad: Tensor,
    operands: _Operands,
    layout: str | None,
    scalars: tuple[tuple[str, ...], tuple[Any, ...]],
    found: Sequence[Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Fill ``found``, room for each gradient that is wanted. ``scalars``: the activation, and the rest."""

    def parts(t: Tensor | None) -> Sequence[Tensor | None]:
        return (t,) if layout is None else (None, None) if t is None else unpack(t, layout)

    outs = [part for t, kind in zip(found, op.kinds, strict=True) if kind in DATA for part in parts(t)]
    bias_out = None if op.bias is None else found[op.bias]
    bias_outs = [] if bias_out is None else [t for t in parts(bias_out) if t is not None]
    scale_out = None if op.scale is None else found[op.scale]
    inputs = bool(bias_outs) or any(o is not None for o in outs)
    # Hundreds of partial sums: in float64, so that their order costs nothing.
    totals = [torch.zeros_like(b, dtype=torch.float64) for b in bias_outs]
    named, rest = scalars
    spellings = _SPELLINGS.get(named[0]) if named and dtype == torch.float32 else None
    for i in _blocks(grad.shape, block()):
        g, part = _wide(grad[i] if i else grad, dtype), operands.block(i, dtype)
        spelled = (*named, *rest) if spellings is None else (spellings.shared(), *rest)
        if inputs:
            ds = op.grads(g, *part, *spelled)
            for out, d in zip(outs, ds, strict=True):
                if out is not None:
                    (out[i] if i else out).copy_(d)
            for total, d in zip(totals, ds, strict=False):
                total += over_rows(d)
        if scale_out is not None:
            (scale_out[i] if i else scale_out).copy_((g * op.value(*part[:-1], None, *spelled)).sum(-1))
    for out, total in zip(bias_outs, totals, strict=True):
        out.copy_(total)
