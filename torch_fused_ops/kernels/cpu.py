"""Pointwise operators on the CPU, in eager mode: the operators in plain torch, a block of rows at a time.

A formula is some ten elementwise steps. On large tensors each step is a pass over memory and a temporary of the
tensor's size; on blocks that stay in the cache the only large tensors are the arguments and the results.

PyTorch's CPU kernels have costs of their own: ``where`` takes ten times as long as ``mul``, ``exp2`` three times,
``sigmoid``, which is as exact, five times, ``erfc`` ten times. So activations have other steps here than in the table
(``ON_CPU``), and those that PyTorch computes as accurately in one call are that call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import activations
from torch_fused_ops.activations import Activation
from torch_fused_ops.declaration import DATA, PointwiseOperator, Signature
from torch_fused_ops.formulas import act_element, act_input_grads, compute_dtype, glu_input_grads

aten = torch.ops.aten

# ---- the activations in the CPU's fastest calls --------------------------------------------------------------------


def _relu_grad(grad: Tensor, x: Tensor) -> Tensor:
    d: Tensor = aten.threshold_backward.default(grad, x, 0)
    return d


def _gelu(x: Tensor) -> Tensor:
    y = (x * -activations.SQRT1_2).erfc_().mul_(0.5).mul_(x)
    return y.add_(x, alpha=0)  # NaN at ∞, as the table's formula and oneDNN's gelu have


def _gelu_grads(grad: Tensor, x: Tensor, of_up: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    density = (x * x).mul_(-0.5 * activations.LOG2E).exp2_()
    half = (x * -activations.SQRT1_2).erfc_().mul_(0.5)
    up = None if of_up is None else (x * half).add_(x, alpha=0).mul_(of_up)
    return half.add_(density.mul_(x), alpha=activations.INV_SQRT_2PI).mul_(grad), up


def _gelu_tanh_sigmoid(x: Tensor, square: Tensor) -> Tensor:
    inner = torch.addcmul(x, square, x, value=activations.GELU_TANH_CUBIC)
    return inner.mul_(activations.GELU_TANH_SLOPE).sigmoid_()


def _gelu_tanh_grads(grad: Tensor, x: Tensor, of_up: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    square = x * x
    s = _gelu_tanh_sigmoid(x, square)
    up = None if of_up is None else (x * s).mul_(of_up)
    # Past 30 s·(1 - s) is 0, and 0·∞ would be NaN.
    slope = square.clamp_max_(900.0).mul_(3 * activations.GELU_TANH_CUBIC * activations.GELU_TANH_SLOPE)
    d: Tensor = aten.sigmoid_backward.default(x, s)
    return s.addcmul_(d, slope.add_(activations.GELU_TANH_SLOPE)).mul_(grad), up


def _quick_gelu_grad(grad: Tensor, x: Tensor) -> Tensor:
    s = (x * activations.QUICK_GELU_SLOPE).sigmoid_()
    d: Tensor = aten.sigmoid_backward.default(x, s)  # x·s·(1 - s) first: slope·x may overflow
    return s.add_(d, alpha=activations.QUICK_GELU_SLOPE).mul_(grad)


def _sigmoid_grad(grad: Tensor, x: Tensor, slope: float = 1.0) -> Tensor:
    # s·(1 - s) loses the right tail. The derivative is even: both tails as the left one.
    d: Tensor = aten.sigmoid_backward.default(grad, torch.abs(x).mul_(-slope).sigmoid_())
    return d


# The gradients of gate and, if its gradient is given, of up, which is that times the activation.
_GATED: dict[str, Callable[..., Any]] = {"gelu": _gelu_grads, "gelu_tanh": _gelu_tanh_grads}
_VARIANTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu, _relu_grad),
    "relu2": (lambda x: torch.relu(x).square_(), lambda grad, x: _relu_grad(torch.relu(x).mul_(2.0).mul_(grad), x)),
    "silu": (torch.nn.functional.silu, aten.silu_backward.default),
    "gelu": (_gelu, lambda grad, x: _gelu_grads(grad, x)[0]),
    "gelu_tanh": (lambda x: _gelu_tanh_sigmoid(x, x * x).mul_(x), lambda grad, x: _gelu_tanh_grads(grad, x)[0]),
    "quick_gelu": (lambda x: (x * activations.QUICK_GELU_SLOPE).sigmoid_().mul_(x), _quick_gelu_grad),
    "sigmoid": (torch.sigmoid, _sigmoid_grad),
    "tanh": (torch.tanh, lambda grad, x: _sigmoid_grad(grad, x, 2.0).mul_(4.0)),
}
ON_CPU: dict[str, Activation] = {
    name: dataclasses.replace(activations.get(name), value=value, gradient=gradient, gated=_GATED.get(name))
    for name, (value, gradient) in _VARIANTS.items()
}
# PyTorch's own: of any dtype with one rounding, and accurate everywhere; the first two in their derivatives, too.
_RECORDED = ("relu", "silu")
_NATIVE = (*_RECORDED, "sigmoid", "tanh")
_HALVES = (torch.float16, torch.bfloat16)


# ---- blocks --------------------------------------------------------------------------------------------------------

_GRAIN = 32768  # elements of a thread's, below which PyTorch does not share an elementwise call
# With fewer, and for few steps of PyTorch's own in the data's dtype, whole temporaries cost less than a pass that
# writes blocks' results into whole tensors (SwiGLU, 1024×1024, float32: 0.3 and 0.6 ns an element).
_FEWEST_BLOCKS = 4


def block() -> int:
    """Elements of a block: a grain for each thread, and at least four: a step costs 2 µs, as 10,000 elements do."""
    return _GRAIN * max(4, torch.get_num_threads())


def in_blocks(
    compute: Callable[..., Sequence[Tensor | None]],
    args: Sequence[Any],
    kinds: Sequence[str],
    results: Sequence[str],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """``compute(*args)``, a block of rows at a time.

    Args:
        compute: computes any number of rows, and is called with them in order.
        args: of which the first is data.
        kinds: of the arguments, as in a declaration. Data and what is per row is cut; the rest all blocks share.
        results: the kinds of the results. What is per column is summed over the blocks.
        dtypes: of the results, to which they are rounded; None for their own.
    """
    *lead, width = args[0].shape
    rows, step = math.prod(lead), max(1, block() // max(width, 1))
    cut = [t is not None and kind in (*DATA, "per_row") for t, kind in zip(args, kinds, strict=False)]
    flat = [t.reshape(rows, *t.shape[len(lead) :]) if c else t for t, c in zip(args, cut, strict=True)]

    def room(part: Tensor | None, kind: str, dtype: torch.dtype | None) -> Tensor | None:
        if part is None:
            return None
        if kind == "per_column":  # hundreds of partial sums: in float64, so that their order costs nothing
            return torch.zeros_like(part, dtype=torch.float64)
        # In the result's shape: autograd does not let a view that a custom function returns be written in place.
        return part.new_empty((*lead, *part.shape[1:]), dtype=dtype)

    outs: list[Any] = []
    for start in range(0, max(rows, 1), step):
        here = slice(start, start + step)
        parts = compute(*(t[here] if c else t for t, c in zip(flat, cut, strict=True)))
        outs = outs or list(map(room, parts, results, dtypes))
        for out, part, kind in zip(outs, parts, results, strict=True):
            if part is not None:
                out.add_(part) if kind == "per_column" else out.view(rows, *part.shape[1:])[here].copy_(part)
    return tuple(
        None if out is None else out.to(dtype) if kind == "per_column" else out
        for out, kind, dtype in zip(outs, results, dtypes, strict=True)
    )


# ---- the kernels of an operator --------------------------------------------------------------------------------------


def _is_activation_alone(op: PointwiseOperator) -> bool:
    """Test for an operator that is its activation alone where it has no bias and no scale; with other scalars none."""
    return op.value is act_element and (op.kinds, *op.scalars) == (("data", "per_column", "per_row"), "activation")


def _rounds_twice(op: PointwiseOperator, args: tuple[Any, ...]) -> bool:
    """Test for gradients of bfloat16 that PyTorch's own calls round twice: within 2 ulp, and in float32's range."""
    tensors, _, scalars = op.split(args[1:-1])
    data = [args[0], *(t for t in tensors if t is not None)]
    calls: dict[Any, tuple[str, ...]] = {act_input_grads: _NATIVE, glu_input_grads: _RECORDED}
    is_quick = len(data) == 1 + op.num_data and scalars[0] in calls.get(op.grads, ()) and not any(scalars[1:])
    return is_quick and all(t.dtype == torch.bfloat16 for t in data)


def kernel(op: PointwiseOperator, signature: Signature, plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, which is the operator or its backward operator in plain torch, in blocks."""
    kinds, names = [a.kind for a in signature.arguments], [a.name for a in signature.arguments]
    is_native = signature is op.forward and _is_activation_alone(op)
    # For each result the argument whose dtype it has.
    likes = [names.index(name) for name in op.tensors] if signature.is_backward else [0]

    def blocked(*args: Any) -> Any:
        if is_native and args[1] is None and args[2] is None and args[3] in _NATIVE:
            return ON_CPU[args[3]].value(args[0]).contiguous()
        variants = list(args)
        if args[0].dtype != torch.float64:  # whose results are the table's, to the last bit
            variants = [ON_CPU.get(a, a) if isinstance(a, str) else a for a in args]
        wide = compute_dtype(*(a for a in args if isinstance(a, Tensor)))
        is_short = args[0].dtype != torch.float64 and any(a in _NATIVE for a in args if isinstance(a, str))
        if is_short and signature is op.backward and _rounds_twice(op, args):
            wide = torch.bfloat16
        if (is_short and args[0].dtype == wide) or args[0].numel() <= _FEWEST_BLOCKS * block():
            whole = plain(*variants, dtype=wide)
            if isinstance(whole, Tensor):  # a registered activation may return its argument
                aliased = torch._C._is_alias_of(whole, args[0])  # type: ignore[attr-defined]
                return whole.clone() if aliased else whole.contiguous()
            return tuple(r if r is None else r.contiguous() for r in whole)

        def compute(*parts: Any) -> Any:
            # Widened here, results are rounded as they are written, and sums once all of them are added.
            widened = (p.to(wide) if isinstance(p, Tensor) and p.dtype in _HALVES else p for p in parts)
            computed = plain(*widened)
            return computed if isinstance(computed, tuple) else (computed,)

        dtypes = [None if args[i] is None else args[i].dtype for i in likes]
        outs = in_blocks(compute, variants, kinds, signature.results, dtypes)
        return outs if signature.is_backward else outs[0]

    return blocked


def recorded(op: PointwiseOperator) -> Callable[..., Tensor | None] | None:
    """The operator as PyTorch's own differentiable function where that is all there is to it, or None.

    It keeps for backward just what the operator keeps. So a recomputation that takes the other way, because some mode
    is active then, is the same to ``torch.utils.checkpoint``: with GLUs, recorded step by step, it would not be.
    """
    if not _is_activation_alone(op):
        return None

    def record(input: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Tensor | None:
        alone = bias is None and scale is None and activation in _RECORDED and input.is_contiguous()
        return ON_CPU[activation].value(input) if alone else None

    return record
