"""Slapo's names for these operators: only the import changes.

    from torch_fused_ops.slapo import BiasGeLUFunction, bias_dropout, bias_new_gelu, new_gelu

Names and signatures come from ``slapo.op.fused_bias`` at commit b80534a ("upstream" below). Slapo is not required.
Instead of its linear layers and MLP (``slapo.op.linear``, ``slapo.op.mlp``), use plain ``torch.nn.Linear`` and
activations under ``torch.compile(backend="fused")``.

Unlike upstream, these compute in float32, round once, have GELU's negative tail, return bias gradients of the bias's
shape, skip frozen arguments, and support ``torch.compile(fullgraph=True)``, double backward and ``torch.func``.
"""

from __future__ import annotations

from torch import Tensor

from torch_fused_ops import functional
from torch_fused_ops.megatron import _bias_dropout_add_func, bias_gelu

__all__ = [
    "BiasGeLUFunction",
    "bias_dropout",
    "bias_new_gelu",
    "new_gelu",
]


class BiasGeLUFunction:
    """``BiasGeLUFunction.apply(inp, bias)``: ``gelu_tanh(inp + bias)`` with its gradients. Saves inp and bias."""

    @staticmethod
    def apply(inp: Tensor, bias: Tensor | None) -> Tensor:
        """``gelu_tanh(inp + bias)``. Upstream requires a bias and returns a bias gradient of the input's shape."""
        return bias_gelu(bias, inp)


def new_gelu(inp: Tensor) -> Tensor:
    """``gelu_tanh(inp)`` in one pass: upstream's ``new_gelu``, with an accurate negative tail."""
    return functional.bias_gelu(inp, None, "tanh")


def bias_new_gelu(inp: Tensor, bias: Tensor) -> Tensor:
    """``gelu_tanh(inp + bias)``: upstream's ``bias_new_gelu``."""
    return bias_gelu(bias, inp)


def bias_dropout(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``dropout(x + bias)``, in x's dtype.

    Upstream's ``bias_dropout``. torch's generator determines the mask, but ``torch.nn.functional.dropout`` drops other
    elements. Backward recomputes the mask. ``inplace`` has no effect: the operator has no intermediate tensors,
    and never writes to x.
    """
    return _bias_dropout_add_func((x, bias), None, p, training)
