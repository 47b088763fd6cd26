# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton formulas of activations, for the kernel that quantizes an activation's gradients (``kernels.py``).

The formulas repeat ``torch_fused_ops.activations`` and ``formulas.clamped``; tests compare both. All other kernels come
from these by Inductor. ``quantized.ACTIVATIONS`` names the activations; the others have separate kernels for gradients
and for quantizing.
"""

from __future__ import annotations

from torch_fused_ops import activations, formulas

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as error:
    raise ImportError(
        "torch_fused_ops needs Triton to run its float8 operators on a GPU, and it cannot be imported. "
        "Install it with: pip install triton numpy (GPU builds of PyTorch bring the Triton that fits "
        "them). With TORCH_FUSED_OPS_WITHOUT=float8_kernels in the environment they run as plain PyTorch"
    ) from error

__all__ = ["activate", "clamp", "clamp_above", "input_grad", "tl", "triton", "within"]  # ``kernels`` imports these

LOG2E = tl.constexpr(activations.LOG2E)
GELU_TANH_SLOPE = tl.constexpr(activations.GELU_TANH_SLOPE)
GELU_TANH_CUBIC = tl.constexpr(activations.GELU_TANH_CUBIC)
QUICK_GELU_SLOPE = tl.constexpr(activations.QUICK_GELU_SLOPE)
INV_SQRT_2PI = tl.constexpr(activations.INV_SQRT_2PI)
NORMAL_TAIL_P = tl.constexpr(activations.NORMAL_TAIL_P)
NORMAL_TAIL = tl.constexpr(activations.NORMAL_TAIL)
NORMAL_TERMS = tl.constexpr(len(activations.NORMAL_TAIL))
CLAMP_KEEPS_BOUNDS = tl.constexpr(formulas.CLAMP_KEEPS_BOUNDS)
PROPAGATE_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _swish(x, slope: tl.constexpr):
    d = 1.0 + tl.exp2(x * (-slope * LOG2E))
    s = 1.0 / d
    slope_x = x * (s * (1.0 - s))
    return x / d, s + (slope_x if slope == 1.0 else slope_x * slope)


@triton.jit
def _gelu_tanh(x):
    scale: tl.constexpr = -GELU_TANH_SLOPE * LOG2E
    x2 = x * x
    d = 1.0 + tl.exp2(x * (x2 * (scale * GELU_TANH_CUBIC) + scale))
    s = 1.0 / d
    slope = tl.minimum(x2, 900.0) * (3 * GELU_TANH_SLOPE * GELU_TANH_CUBIC) + GELU_TANH_SLOPE
    return x / d, s + ((x * s) * (1.0 - s)) * slope


@triton.jit
def _gelu(x):
    a = tl.abs(x)
    t = libdevice.fast_dividef(1.0, 1.0 + a * NORMAL_TAIL_P)  # near 1 as exact as a division, and cheaper
    q = t * NORMAL_TAIL[NORMAL_TERMS - 1] + NORMAL_TAIL[NORMAL_TERMS - 2]
    for i in tl.static_range(NORMAL_TERMS - 3, -1, -1):
        q = t * q + NORMAL_TAIL[i]
    q = t * q
    e = tl.exp2(x * x * (-0.5 * LOG2E))
    below = (q + a * INV_SQRT_2PI) * -e
    return tl.maximum(x, 0.0) + (a * q) * e, tl.where(x < 0, below, 1.0 - below)


@triton.jit
def _sigmoid_derivative(x):
    e = tl.exp2(tl.abs(x) * -LOG2E)
    d = 1.0 + e
    return e / (d * d)


@triton.jit
def activate(x, activation: tl.constexpr):
    """Return (act(x), act'(x)). The compiler removes an unused result."""
    if activation == "silu":
        return _swish(x, 1.0)
    elif activation == "quick_gelu":
        return _swish(x, QUICK_GELU_SLOPE)
    elif activation == "gelu":
        return _gelu(x)
    elif activation == "gelu_tanh":
        return _gelu_tanh(x)
    elif activation == "sigmoid":
        return 1.0 / (1.0 + tl.exp2(x * -LOG2E)), _sigmoid_derivative(x)
    elif activation == "tanh":
        return libdevice.tanh(x), 4.0 * _sigmoid_derivative(2.0 * x)
    else:
        positive = tl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN)
        if activation == "relu":
            return positive, tl.where(x <= 0, 0.0, 1.0).to(x.dtype)
        else:
            tl.static_assert(activation == "relu2")
            return positive * positive, 2.0 * positive


@triton.jit
def input_grad(grad, x, derivative, activation: tl.constexpr):
    """Return grad · act'(x); see ``Activation.gradient``."""
    if activation == "relu":
        return tl.where(x <= 0, 0.0, grad)
    elif activation == "relu2":
        return tl.where(x <= 0, 0.0, grad * derivative)
    else:
        return grad * derivative


@triton.jit
def clamp_above(x, bound: tl.constexpr):
    """Return min(x, bound). NaN stays NaN."""
    return tl.minimum(x, tl.full((1, 1), bound, x.dtype), propagate_nan=PROPAGATE_NAN)  # a plain scalar is float32


@triton.jit
def clamp(x, bound: tl.constexpr):
    """Clamp x to ±bound. NaN stays NaN."""
    return tl.clamp(x, -bound, bound, propagate_nan=PROPAGATE_NAN)


@triton.jit
def within(x, bound: tl.constexpr):
    """Return True where a clamp passes the gradient, as in ``formulas``."""
    return x <= bound if CLAMP_KEEPS_BOUNDS else x < bound
