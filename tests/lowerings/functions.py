"""Activations written as ``torch.autograd.Function``, and helpers for the order of evaluation."""

import math

import torch
import torch.nn.functional as F


def first(value, *_):
    """Return the first argument, after Python has evaluated the others."""
    return value


def within(context, fn, *args):
    with context():
        return fn(*args)


def autograd_function(value, gradient):
    """Return a ``torch.autograd.Function``.

    Args:
        value: maps the arguments to the result, followed by the saved tensors.
        gradient: maps the result's gradient and the saved tensors to the arguments' gradients.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            result, *saved = value(*args)
            ctx.save_for_backward(*saved)
            return result

        @staticmethod
        def backward(ctx, grad):
            return gradient(grad, *ctx.saved_tensors)

    return Function


# SiLU in the style of memory-saving activations: a saved tensor is computed after the result.
Swish = autograd_function(lambda x: (F.silu(x), x, torch.sigmoid(x)), lambda grad, x, s: grad * (s * (1 + x * (1 - s))))
# Functions with the identity's gradient, a clipped gradient, and the right gradient times 1.00001.
StraightThrough = autograd_function(lambda x: (torch.tanh(x),), lambda grad: grad)
Clipped = autograd_function(lambda x: (y := torch.tanh(x), y), lambda grad, y: (grad * (1 - y * y)).clamp(-0.1, 0.1))
Scaled = autograd_function(lambda x: (y := torch.sigmoid(x), y), lambda grad, y: 1.00001 * grad * y * (1 - y))
# silu(gate)·up without a gradient for the gate, and sigmoid(gate)·up with exchanged gradients.
Forgets = autograd_function(lambda gate, up: ((s := F.silu(gate)) * up, s), lambda grad, s: (None, grad * s))
Swapped = autograd_function(
    lambda gate, up: ((s := torch.sigmoid(gate)) * up, s, up), lambda grad, s, up: (grad * s, grad * up * s * (1 - s))
)
# Swish in bfloat16, for inputs of any dtype.
Rounding = autograd_function(
    lambda x: (F.silu(x.bfloat16()).to(x.dtype), x),
    lambda grad, x: grad * ((s := torch.sigmoid(x)) + x * s * (1 - s)),
)
# tanh, which then computes and saves the value of another activation.
LateState = autograd_function(
    lambda x: (y := torch.tanh(x), y, torch.sigmoid(x)), lambda grad, y, _: grad * (1 - y * y)
)
# gelu(x)·y with both gradients.
Gated = autograd_function(
    lambda x, y: (F.gelu(x) * y, x, y),
    lambda grad, x, y: (
        grad * y * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)),
        grad * x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    ),
)
