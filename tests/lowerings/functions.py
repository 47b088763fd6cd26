"""Activations written as ``torch.autograd.Function``, and order of evaluation, for several test files."""

import torch
import torch.nn.functional as F


def first(value, *_):
    """``value``, after the other arguments were evaluated."""
    return value


def within(context, fn, *args):
    with context():
        return fn(*args)


class Swish(torch.autograd.Function):
    """SiLU as memory-saving activations are written: what is saved is computed after the result."""

    @staticmethod
    def forward(ctx, x):
        y = F.silu(x)
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, s = ctx.saved_tensors
        return grad * (s * (1 + x * (1 - s)))


class StraightThrough(torch.autograd.Function):
    """Another function's gradient."""

    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Clipped(torch.autograd.Function):
    """Its own gradient, but clipped."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return (grad * (1 - y * y)).clamp(-0.1, 0.1)


class Spread(torch.autograd.Function):
    """x · wᵀ, spelled without a product."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.unsqueeze(-2) * w).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return (grad.unsqueeze(-1) * w).sum(-2), (grad.unsqueeze(-1) * x.unsqueeze(-2)).sum(0)
