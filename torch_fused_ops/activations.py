"""Define the activation table: each activation's value and derivative, written once, in plain torch.

These functions are the float64 oracle of the tests, the functions that double backward and ``torch.func`` transforms
differentiate, and (traced) the Inductor lowering, from which eager kernels are compiled. Only the float8 kernel of
gradients (``families/float8/activations.py``) repeats eight of them; tests compare both.

The formulas have two properties that PyTorch's formulas lack:

* **An accurate negative tail.** ``1 + tanh(u)`` and ``1 + erf(x)`` cancel for negative ``x``: for bf16 inputs in
  [-10, -3] more than half of PyTorch's GELU results are off by more than one ulp, and below x = -6 all are 0.
  The sigmoid form ``x / (1 + exp(-2u))`` and the complementary error function do not cancel.
* **Lower cost.** Exponentials are base two (one instruction on a GPU), without branches and ``tanh``.

The formulas are evaluated in float32 (float64 for float64 input). The caller widens arguments and rounds results.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]

LOG2E = 1 / math.log(2)
GELU_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)  # gelu_tanh(x) = x·sigmoid(SLOPE·(x + CUBIC·x³))
GELU_TANH_CUBIC = 0.044715
QUICK_GELU_SLOPE = 1.702
LEAKY_RELU_SLOPE = 0.01  # PyTorch's default; register_activation adds other slopes
SQRT1_2 = math.sqrt(0.5)
INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)

# -½·erfc(a/√2)·exp(a²/2) = t·P(t) with t = 1/(1 + NORMAL_TAIL_P·a), a in [0, 13.5]: a minimax fit with relative error
# 9.4e-8, below float32's rounding. It has the form of Abramowitz & Stegun 7.1.26 with more terms. Minimizing the
# relative error preserves the tail. Coefficients start at the lowest power.
NORMAL_TAIL_P = 0.305
NORMAL_TAIL = (
    -0.12163973187139278,
    -0.12246683118857601,
    -0.10342076847957368,
    -0.12102202023542959,
    0.03797749533101353,
    -0.1857176397437275,
    0.15298874309279162,
    -0.03669929389992738,
)

# tanh(x) = x·N(x²)/D(x²) for |x| below TANH_BOUND, where tanh rounds to 1 - 4e-7: a minimax fit with relative error
# 1.2e-7. In float32 the error is at most 3.6e-7, and no result exceeds 1.
TANH_BOUND = 7.8
TANH_NUMERATOR = (0.9999998843864523, 0.12943194477988185, 0.0029699696257593612, 1.1636503104136918e-05)
TANH_DENOMINATOR = (1.0, 0.4627643199651776, 0.023892737388278743, 0.0002413655003447225, 2.526468945116366e-07)


@dataclass(frozen=True)
class Activation:
    """An elementwise function without parameters.

    Attributes:
        name: the value of the operators' ``activation`` argument.
        value: f(x), in x's dtype (float32 or float64), accurate relative to the result.
        derivative: f'(x), in x's dtype, accurate relative to the result; differentiable, for double backward.
        definition: the textbook formula for f, which the recognizer reads symbolically; it may lose accuracy.
        builtin: False for registered activations.
        gradient_from_output: whether f'(f(x)) = f'(x), even if f(x) is rounded. Backward then reads f(x), which the
            next linear layer saves anyway, instead of x.
        gradient: (g, x) → PyTorch's gradient, if it is not the product g·f'(x): ReLU's also stops infinity and NaN.
        callables: PyTorch's functions and module classes that compute f for all their arguments.
    """

    name: str
    value: Function
    derivative: Function
    definition: Function
    builtin: bool = True
    gradient_from_output: bool = False
    gradient: Callable[[Tensor, Tensor], Tensor] | None = None
    callables: tuple[Function | type[nn.Module], ...] = ()

    def input_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return grad · f'(x)."""
        return grad * self.derivative(x) if self.gradient is None else self.gradient(grad, x)


_for_derivatives: ContextVar[bool] = ContextVar("torch_fused_ops_for_derivatives", default=False)


@contextmanager
def spelled_for_derivatives(yes: bool) -> Iterator[None]:
    """Use differentiable formulas inside the block, although no tensor shows that derivatives will be taken."""
    token = _for_derivatives.set(yes)
    try:
        yield
    finally:
        _for_derivatives.reset(token)


def _differentiated(x: Tensor) -> bool:
    """Return True if PyTorch differentiates *through* this evaluation (torch.func, forward mode, double backward)."""
    if (torch.is_grad_enabled() and x.requires_grad) or _for_derivatives.get():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    level: int = forward_ad._current_level
    return level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _exact_normal(x: Tensor) -> bool:
    # The fit's derivative is not a fit of the derivative, and |x| is not differentiable at 0. The fit is too coarse for
    # float64.
    return x.dtype == torch.float64 or _differentiated(x)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial whose coefficients start at the lowest power."""
    result = x * coefficients[-1] + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        result = x * result + c
    return result


def _normal_tail(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (a, q, e) with a = |x|, e = exp(-a²/2) and -Φ(-a) = q·e, accurate relative to Φ; a·q is NaN at ±∞."""
    a = torch.abs(x)
    d = 1.0 + NORMAL_TAIL_P * a
    # On a GPU a division takes seven instructions, to handle operands near the ends of the range. A reciprocal square
    # root takes one and is as exact (2⁻²²): GELU takes 22.8 instructions an element instead of 28.9 (sm_90).
    t = torch.reciprocal(d) if d.device.type == "cpu" else torch.square(torch.rsqrt(d))
    return a, t * _polynomial(t, NORMAL_TAIL), torch.exp2(x * x * (-0.5 * LOG2E))


def _gelu(x: Tensor) -> Tensor:
    if _exact_normal(x):
        y = x * (0.5 * torch.erfc(-SQRT1_2 * x))
        return y if x.dtype == torch.float64 else y + 0.0 * x  # NaN at ±∞, like the fit and oneDNN's gelu
    a, q, e = _normal_tail(x)
    return torch.relu(x) + (a * q) * e  # x·Φ(x) for either sign: x - x·Φ(-x) above 0, -a·Φ(-a) below


def _gelu_derivative(x: Tensor) -> Tensor:
    if _exact_normal(x):
        return 0.5 * torch.erfc(-SQRT1_2 * x) + x * (INV_SQRT_2PI * torch.exp(-0.5 * x * x))
    a, q, e = _normal_tail(x)
    below = (q + INV_SQRT_2PI * a) * -e
    return torch.where(x < 0, below, 1.0 - below)


def _sigmoid_of(slope: float, x: Tensor) -> Tensor:
    if _differentiated(x):  # fewer steps
        return torch.sigmoid(x if slope == 1.0 else slope * x)
    return torch.reciprocal(1.0 + torch.exp2(x * (-slope * LOG2E)))


def _over(x: Tensor, d: Tensor) -> Tensor:
    # On CPUs multiply by the reciprocal, which the derivative also computes: a GLU's backward then divides once.
    return x * torch.reciprocal(d) if d.device.type == "cpu" else x / d


def _swish(slope: float) -> Function:
    def value(x: Tensor) -> Tensor:
        if _differentiated(x):
            return x * _sigmoid_of(slope, x)
        return _over(x, 1.0 + torch.exp2(x * (-slope * LOG2E)))

    return value


def _swish_derivative(slope: float) -> Function:
    def derivative(x: Tensor) -> Tensor:
        s = _sigmoid_of(slope, x)
        slope_x = x * (s * (1.0 - s))  # in this order no factor overflows before s makes the product 0
        return s + (slope_x if slope == 1.0 else slope * slope_x)

    return derivative


def _gelu_tanh_exp(x: Tensor) -> Tensor:
    scale = -GELU_TANH_SLOPE * LOG2E
    return torch.exp2(x * (scale + (scale * GELU_TANH_CUBIC) * (x * x)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return _over(x, 1.0 + _gelu_tanh_exp(x))


def _gelu_tanh_derivative(x: Tensor) -> Tensor:
    s = torch.reciprocal(1.0 + _gelu_tanh_exp(x))
    x2 = x * x
    x2 = torch.where(x2 < 900.0, x2, 900.0)  # past 30, s·(1 - s) is 0 even in float64, and 0·∞ would be NaN
    return s + ((x * s) * (1.0 - s)) * (GELU_TANH_SLOPE + (3 * GELU_TANH_SLOPE * GELU_TANH_CUBIC) * x2)


def _tanh(x: Tensor) -> Tensor:
    if x.device.type != "cpu" or x.dtype == torch.float64 or _differentiated(x):
        return torch.tanh(x)
    bounded = torch.clamp(x, -TANH_BOUND, TANH_BOUND)
    square = bounded * bounded
    return bounded * _polynomial(square, TANH_NUMERATOR) / _polynomial(square, TANH_DENOMINATOR)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    # s·(1 - s) loses the right tail, and exp(-x)/(1 + exp(-x))² overflows on the left. The derivative is even, so |x|
    # serves both tails.
    if _differentiated(x):
        return torch.sigmoid(x) * torch.sigmoid(-x)  # |x| has no derivative at 0
    e = torch.exp2(torch.abs(x) * -LOG2E)
    d = 1.0 + e
    return e / (d * d)


def _tanh_derivative(x: Tensor) -> Tensor:
    # 1 - tanh² loses both tails: sech² = 4·sigmoid'(2x)
    return 4.0 * _sigmoid_derivative(2.0 * x)


def _relu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.0, grad)  # for NaN x the gradient passes, as in PyTorch's threshold_backward


def _relu2(x: Tensor) -> Tensor:
    r = torch.relu(x)
    return r * r


def _relu2_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _relu_gradient(grad * (2.0 * torch.relu(x)), x)


def _relu6(x: Tensor) -> Tensor:
    return torch.where(x >= 6, 6.0, torch.relu(x))  # torch.clamp has other gradients at the bounds


def _relu6_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where((x <= 0) | (x >= 6), 0.0, grad)


def _leaky_relu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.where(x > 0, grad, LEAKY_RELU_SLOPE * grad)


def _hardswish(x: Tensor) -> Tensor:
    return x * (_relu6(x + 3.0) * (1 / 6))  # in this order no product overflows


def _hardswish_gradient(grad: Tensor, x: Tensor) -> Tensor:
    inner = torch.where(x < 3, grad * ((2.0 * x + 3.0) * (1 / 6)), grad)
    return torch.where(x <= -3, 0.0, inner)


def _elu(x: Tensor) -> Tensor:
    return torch.where(x < 0, torch.expm1(torch.where(x < 0, x, 0.0)), x)  # expm1(x) overflows above 88


def _elu_derivative(x: Tensor) -> Tensor:
    return torch.exp2(torch.where(x < 0, x, 0.0) * LOG2E)  # 1 for NaN, as in PyTorch's elu_backward


def _softplus(x: Tensor) -> Tensor:
    if _differentiated(x):  # |x| has no derivative at 0
        return F.softplus(x)
    return torch.relu(x) + torch.log1p(torch.exp2(torch.abs(x) * -LOG2E))


def _mish_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (e, a, d) with e = exp(-|x|) and tanh(softplus(x)) = a / d."""
    e = torch.exp2(torch.abs(x) * -LOG2E)
    above = 1.0 + 2.0 * e
    a = torch.where(x < 0, e * (e + 2.0), above)
    return e, a, a + torch.where(x < 0, 2.0, 2.0 * e * e)


def _mish(x: Tensor) -> Tensor:
    if _differentiated(x):
        return x * torch.tanh(F.softplus(x))
    _, a, d = _mish_parts(x)
    return x * (a / d)


def _mish_derivative(x: Tensor) -> Tensor:
    if _differentiated(x):
        t = torch.tanh(F.softplus(x))
        return t + x * (torch.sigmoid(x) * (1.0 - t * t))
    # 1 - tanh² cancels on the right; with n = exp(x) it is 4·(n + 1)²/(n² + 2n + 2)².
    e, a, d = _mish_parts(x)
    slope = torch.where(x < 0, e, e * e) * (1.0 + e) / (d * d)
    return a / d + 4.0 * (x * slope)


def _of_one(gradient: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda x: gradient(torch.ones_like(x), x)


_TABLE: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation(
            "relu",
            torch.relu,
            _of_one(_relu_gradient),
            torch.relu,
            gradient_from_output=True,
            gradient=_relu_gradient,
            callables=(F.relu, torch.relu, nn.ReLU),
        ),
        # relu2's backward reads x: 2·sqrt(y) is within 0.94 ulp in bf16 and 1.78 in float32 for x from 1e-10 to
        # 1e10, but x² underflows below 3.9e-20 (float32: 5.6e-21) and overflows above 1.84e19, where 2x is normal.
        Activation(
            "relu2",
            _relu2,
            _of_one(_relu2_gradient),
            lambda x: torch.square(torch.relu(x)),
            gradient=_relu2_gradient,
        ),
        Activation("silu", _swish(1.0), _swish_derivative(1.0), F.silu, callables=(F.silu, nn.SiLU)),
        Activation("gelu", _gelu, _gelu_derivative, F.gelu, callables=(F.gelu,)),  # nn.GELU may be the tanh form
        Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, lambda x: F.gelu(x, approximate="tanh")),
        Activation(
            "quick_gelu",
            _swish(QUICK_GELU_SLOPE),
            _swish_derivative(QUICK_GELU_SLOPE),
            lambda x: x * torch.sigmoid(QUICK_GELU_SLOPE * x),
        ),
        Activation(
            "sigmoid",
            lambda x: _sigmoid_of(1.0, x),
            _sigmoid_derivative,
            torch.sigmoid,
            callables=(F.sigmoid, torch.sigmoid, nn.Sigmoid),
        ),
        Activation("tanh", _tanh, _tanh_derivative, torch.tanh, callables=(F.tanh, torch.tanh, nn.Tanh)),
        Activation(
            "leaky_relu",
            lambda x: torch.where(x > 0, x, LEAKY_RELU_SLOPE * x),
            _of_one(_leaky_relu_gradient),
            F.leaky_relu,
            gradient_from_output=True,
        ),
        Activation(
            "relu6",
            _relu6,
            _of_one(_relu6_gradient),
            F.relu6,
            gradient=_relu6_gradient,
            callables=(F.relu6, nn.ReLU6),
        ),
        Activation(
            "hardswish",
            _hardswish,
            _of_one(_hardswish_gradient),
            F.hardswish,
            gradient=_hardswish_gradient,
            callables=(F.hardswish, nn.Hardswish),
        ),
        Activation("elu", _elu, _elu_derivative, F.elu),
        Activation("softplus", _softplus, lambda x: _sigmoid_of(1.0, x), F.softplus),
        Activation("mish", _mish, _mish_derivative, F.mish, callables=(F.mish, nn.Mish)),
        # The gate of a bilinear GLU (arXiv:2002.05202). A product, because an operator may not return its argument.
        Activation("identity", lambda x: x * 1.0, torch.ones_like, lambda x: x, gradient_from_output=True),
    )
}

_on_change: list[Callable[[], None]] = []  # called after a change: caches depend on the table
# Lock for changes of the table, and for tracing: make_fx patches process-wide state.
_changing = threading.RLock()


def names() -> tuple[str, ...]:
    """Return the names of all activations, built in or registered."""
    return tuple(_TABLE)


def get(name: str, argument: str = "activation") -> Activation:
    """Return the table's row for ``name``. Raise ValueError with the accepted names if there is no such row."""
    try:
        return _TABLE[name]
    except (KeyError, TypeError):
        raise ValueError(
            f"{argument}={name!r} is not known; accepted: {', '.join(_TABLE)}; register_activation adds others"
        ) from None


def register_activation(name: str, fn: Function, derivative: Function | None = None, *, replace: bool = False) -> None:
    """Add an activation to the table, for every operator, for the lowerings and for the recognizer.

    Args:
        name: a new name (an identifier). Registering the same functions under the same name again does nothing.
        fn: f(x), elementwise, without parameters, in plain torch: same shape and dtype out as in, for float32 and
            float64, no randomness, no data-dependent control flow. Compiled code and eager kernels inline it.
        derivative: f'(x), with the same requirements. None derives it from ``fn`` by autograd.
        replace: whether to replace functions that were registered under this name. Compiled graphs do not change until
            ``torch.compiler.reset()``.

    Raises:
        ValueError: name is not an identifier, is built in, or is registered with other functions and replace is False;
            fn changes shape or dtype, or is not elementwise; derivative is not the derivative of fn.
        TypeError: fn or derivative is not callable, or replace is not a bool.
    """
    if not isinstance(replace, bool):
        raise TypeError(f"replace={replace!r} is not accepted: it must be True or False")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name={name!r} is not accepted: an activation's name is a Python identifier")
    for argument, value in (("fn", fn), ("derivative", derivative)):
        if not callable(value) and not (argument == "derivative" and value is None):
            raise TypeError(f"{argument}={value!r} is not callable: it must be a function of one tensor")
    _check_elementwise("fn", fn)
    derived = _Derived(fn)
    if derivative is None:
        derivative = derived
    _check_elementwise("derivative", derivative)
    x = torch.linspace(-2.9, 3.0, 12, dtype=torch.float64)
    actual, expected = derivative(x), derived(x)
    differs = ~torch.isclose(actual, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
    if differs.sum() > 3:  # a few points may be kinks
        raise ValueError(
            f"derivative is not accepted: at x = {x[differs][0].item():.4g} it gives {actual[differs][0].item():.6g}, "
            f"where autograd derives {expected[differs][0].item():.6g} from fn"
        )
    with _changing:
        if name in _TABLE:
            old = _TABLE[name]
            if old.builtin:
                raise ValueError(f"name={name!r} is taken by a built-in activation; choose another name")
            if (_traced(old.value), _traced(old.derivative)) == (_traced(fn), _traced(derivative)):
                return
            if not replace:
                raise ValueError(
                    f"name={name!r} is taken by another activation, which was registered before; replace=True replaces "
                    "it, or choose another name"
                )
        _TABLE[name] = Activation(name, fn, derivative, fn, builtin=False)
        for notify in _on_change:
            notify()


def table_hash() -> str:
    """Return a hash of the registered activations' functions; this package's sources identify the built-in ones."""
    parts = [f"{a.name}:{_traced(a.value)}:{_traced(a.derivative)}" for a in tuple(_TABLE.values()) if not a.builtin]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


def _check_elementwise(argument: str, fn: Function) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.linspace(-3.0, 3.0, 12, dtype=dtype)
        version = x._version
        try:
            y = fn(x)
        except Exception as error:
            raise ValueError(
                f"{argument} is not accepted: for {dtype} (12,) it raised {type(error).__name__}: {error}"
            ) from error
        if x._version != version:
            raise ValueError(f"{argument} is not accepted: it writes to its argument, which may be a saved tensor")
        if isinstance(y, Tensor) and y.requires_grad:
            raise ValueError(f"{argument} is not accepted: it has parameters, which would get no gradient")
        if not isinstance(y, Tensor) or y.dtype != dtype or y.shape != x.shape:
            got = f"{y.dtype} {tuple(y.shape)}" if isinstance(y, Tensor) else repr(y)
            raise ValueError(
                f"{argument} is not accepted: for {dtype} (12,) it gave {got}; it must keep shape and dtype"
            )
        reordered = fn(x.flip(0).reshape(3, 4)).reshape(12).flip(0)
        if not torch.allclose(y, reordered, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise ValueError(
                f"{argument} is not accepted: it is not elementwise (the same values in another shape gave another "
                "result: it mixes elements, is random, or branches on the data)"
            )


def _trace(fn: Function, dtype: torch.dtype) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    with _changing:
        return make_fx(lambda x: fn(x))(torch.linspace(-1.0, 1.0, 3, dtype=dtype))


@lru_cache(maxsize=256)  # bounded: its keys are users' functions
def _traced(fn: Function) -> str:
    gm = _trace(fn, torch.float32)
    constants = {k: v.tolist() for k, v in vars(gm).items() if isinstance(v, Tensor)}
    return f"{gm.code}{constants}"


class _Derived:
    """The derivative of an elementwise function by autograd, traced to plain torch once for each dtype."""

    def __init__(self, fn: Function) -> None:
        self.fn = fn
        self.graphs = {dtype: _trace(self._vjp, dtype) for dtype in (torch.float32, torch.float64)}

    def _vjp(self, x: Tensor) -> Tensor:
        pull = torch.func.vjp(self.fn, x)[1]
        gradient: Tensor = pull(torch.ones_like(x))[0]
        return gradient

    def __call__(self, x: Tensor) -> Tensor:
        return self.graphs[x.dtype](x)  # type: ignore[no-any-return]
