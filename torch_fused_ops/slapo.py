"""Slapo's names for these operators: only the import changes.

    from torch_fused_ops.slapo import BiasGeLUFunction, bias_dropout, bias_new_gelu, new_gelu

Names and signatures come from ``slapo.op.fused_bias`` at commit b80534a; "upstream" below. Slapo is not needed.
Instead of its linear layers and MLP (``slapo.op.linear``, ``slapo.op.mlp``), use plain ``torch.nn.Linear`` and
activations under ``torch.compile(backend="fused")``.

All of them, unlike upstream, have float32 arithmetic rounded once, GELU's negative tail, bias gradients of the bias's
shape, no work for frozen arguments, ``torch.compile(fullgraph=True)``, double backward and ``torch.func``.
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
        """``gelu_tanh(inp + bias)``. Upstream's requires the bias and returns its gradient input-sized."""
        return bias_gelu(bias, inp)


def new_gelu(inp: Tensor) -> Tensor:
    """``gelu_tanh(inp)``. Upstream's ``new_gelu``, with the negative tail, in one pass."""
    return functional.gelu(inp, "tanh")


def bias_new_gelu(inp: Tensor, bias: Tensor) -> Tensor:
    """``gelu_tanh(inp + bias)``. Upstream's ``bias_new_gelu``."""
    return bias_gelu(bias, inp)


def bias_dropout(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``dropout(x + bias)``, in x's dtype.

    Upstream's ``bias_dropout``. Backward recomputes the mask, which torch's generator determines, though not as for
    ``torch.nn.functional.dropout``. ``inplace`` is accepted and has no effect: no intermediate tensor needs memory, and
    x is never written.
    """
    return _bias_dropout_add_func((x, bias), None, p, training)
