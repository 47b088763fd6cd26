"""Activations written as ``torch.autograd.Function``, and order of evaluation, for several test files."""

import math

import torch
import torch.nn.functional as F


def first(value, *_):
    """``value``, after the other arguments were evaluated."""
    return value


def within(context, fn, *args):
    with context():
        return fn(*args)


def autograd_function(value, gradient):
    """A ``torch.autograd.Function``.

    Args:
        value: gives, of the arguments, the result, and behind it what is saved.
        gradient: gives, of the result's gradient and what was saved, the arguments'.
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


# SiLU as memory-saving activations are written: what is saved is computed after the result.
Swish = autograd_function(lambda x: (F.silu(x), x, torch.sigmoid(x)), lambda grad, x, s: grad * (s * (1 + x * (1 - s))))
# Another function's gradient; its own, but clipped; its own, times 1.00001.
StraightThrough = autograd_function(lambda x: (torch.tanh(x),), lambda grad: grad)
Clipped = autograd_function(lambda x: (y := torch.tanh(x), y), lambda grad, y: (grad * (1 - y * y)).clamp(-0.1, 0.1))
Scaled = autograd_function(lambda x: (y := torch.sigmoid(x), y), lambda grad, y: 1.00001 * grad * y * (1 - y))
# silu(gate)·up that gives no gradient to the gate; sigmoid(gate)·up whose two gradients are exchanged.
Forgets = autograd_function(lambda gate, up: ((s := F.silu(gate)) * up, s), lambda grad, s: (None, grad * s))
Swapped = autograd_function(
    lambda gate, up: ((s := torch.sigmoid(gate)) * up, s, up), lambda grad, s, up: (grad * s, grad * up * s * (1 - s))
)
# Swish in bfloat16, on whatever it is given.
Rounding = autograd_function(
    lambda x: (F.silu(x.bfloat16()).to(x.dtype), x),
    lambda grad, x: grad * ((s := torch.sigmoid(x)) + x * s * (1 - s)),
)
# tanh, and after it, for the backward, the value of another activation.
LateState = autograd_function(
    lambda x: (y := torch.tanh(x), y, torch.sigmoid(x)), lambda grad, y, _: grad * (1 - y * y)
)
# gelu(x)·y with the gradients of both.
Gated = autograd_function(
    lambda x, y: (F.gelu(x) * y, x, y),
    lambda grad, x, y: (
        grad * y * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)),
        grad * x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    ),
)
