"""Slapo's names for these operators: only the import changes.

    from torch_fused_ops.slapo import BiasGeLUFunction, bias_dropout, bias_new_gelu, new_gelu

Names and signatures come from ``slapo.op.fused_bias`` at commit b80534a ("upstream" below). Slapo is not required.
Instead of its linear layers and MLP (``slapo.op.linear``, ``slapo.op.mlp``), use plain ``torch.nn.Linear`` and
activations under ``torch.compile(backend="fused")``.

These functions compute in float32, round once, have GELU's negative tail, return bias gradients of the bias's
shape, skip frozen arguments, and support ``torch.compile(fullgraph=True)``, double backward and ``torch.func``.
"""

from __future__ import annotations

from torch import Tensor

from torch_fused_ops import functional
from torch_fused_ops.megatron import GeLUFunction as BiasGeLUFunction
from torch_fused_ops.megatron import _bias_dropout_add_func, bias_gelu

__all__ = ["BiasGeLUFunction", "bias_dropout", "bias_new_gelu", "new_gelu"]


def new_gelu(inp: Tensor) -> Tensor:
    """``gelu_tanh(inp)`` in one pass."""
    return functional.bias_gelu(inp, None, "tanh")


def bias_new_gelu(inp: Tensor, bias: Tensor) -> Tensor:
    """``gelu_tanh(inp + bias)``."""
    return bias_gelu(bias, inp)


def bias_dropout(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``dropout(x + bias)``, in x's dtype.

    torch's generator determines the mask, but ``torch.nn.functional.dropout`` drops other elements. ``inplace`` has no
    effect: the operator has no intermediate tensors, and never writes to x.
    """
    return _bias_dropout_add_func((x, bias), None, p, training)
