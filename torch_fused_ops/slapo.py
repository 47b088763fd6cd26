"""Slapo's names for these operators: change the import, keep the calls.

    from torch_fused_ops.slapo import FusedMLP, LinearWithAct, LinearWithDropout, bias_dropout

Names, signatures and parameters' names (so checkpoints load) are those of ``slapo.op.fused_bias``, ``slapo.op.linear``
and ``slapo.op.mlp``, read at commit b80534a; "upstream" below. None of them needs Slapo. Left out are ``FusedQKV`` and
``LinearWithSeparateBias``, which have none of these operators, and attention and cross entropy, other libraries'
kernels.

All of them, unlike upstream, have float32 arithmetic rounded once, GELU's negative tail, bias gradients of the bias's
shape, no work for frozen arguments, ``torch.compile(fullgraph=True)``, double backward and ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import activations, functional
from torch_fused_ops.megatron import _bias_dropout_add_func, bias_gelu, bias_gelu_back

__all__ = [
    "BiasGeLUFunction",
    "FusedMLP",
    "LinearWithAct",
    "LinearWithDropout",
    "LinearWithSyncFunc",
    "bias_dropout",
    "bias_new_gelu",
    "new_gelu",
]

# ---- fused_bias ------------------------------------------------------------------------------------------------------


class BiasGeLUFunction:
    """``BiasGeLUFunction.apply(inp, bias)``: ``gelu_tanh(inp + bias)`` with its gradients. Saves inp and bias."""

    bias_gelu = staticmethod(bias_gelu)
    bias_gelu_back = staticmethod(bias_gelu_back)

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
    ``torch.nn.functional.dropout``. ``inplace`` is accepted and has no effect: there is no intermediate tensor to save,
    and x is never written.
    """
    return _bias_dropout_add_func((x, bias), None, p, training)


# ---- linear ----------------------------------------------------------------------------------------------------------


class LinearWithSyncFunc(nn.Linear):
    """``sync_fn(x @ weight.T) + bias``: a linear layer with a function (an all-reduce) in front of the bias.

    Args:
        in_features, out_features, bias, device, dtype: as ``torch.nn.Linear``.
        sync_fn: a function of the GEMM's result, or None.
    """

    traceable = False  # Slapo's tracer does not trace into such a module

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sync_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.sync_fn = sync_fn

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        x = self._gemm(input)
        return x if self.bias is None else x + self.bias

    def _gemm(self, input: Tensor) -> Tensor:
        x = F.linear(input, self.weight)
        return x if self.sync_fn is None else self.sync_fn(x)

    def extra_repr(self) -> str:
        """``torch.nn.Linear``'s, with sync_fn."""
        return f"{super().extra_repr()}, sync_fn={getattr(self.sync_fn, '__name__', self.sync_fn)}"


def _needs_bias(module: nn.Module, bias: bool) -> None:
    if not bias:
        raise ValueError(f"bias={bias!r} is not accepted by {type(module).__name__}: it must be True")


# Upstream's "gelu" is the tanh form, so that a model's numbers stay the same.
_ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_erf": "gelu"}


class LinearWithAct(LinearWithSyncFunc):
    """``act(sync_fn(x @ weight.T) + bias)``, bias and activation in one pass.

    Args:
        act_fn: "gelu" and "gelu_new" are the tanh form, as upstream; "gelu_erf" the exact one; or any other name of the
            activation table, where upstream knows the first two.
        others: as ``LinearWithSyncFunc``; bias must be True.

    Raises:
        ValueError: bias is False.
        NotImplementedError: act_fn is not an activation.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act_fn: str = "gelu",
        device: Any = None,
        dtype: torch.dtype | None = None,
        sync_fn: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, sync_fn)
        _needs_bias(self, bias)
        self.act_fn = act_fn
        self.activation = _ACTIVATIONS.get(act_fn, act_fn)
        if self.activation not in activations.names():
            accepted = ", ".join(sorted({*_ACTIVATIONS, *activations.names()}))
            raise NotImplementedError(f"act_fn={act_fn!r} is not known; accepted: {accepted}")

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        return functional.bias_act(self._gemm(input), self.bias, activation=self.activation)

    def extra_repr(self) -> str:
        """``LinearWithSyncFunc``'s, with the additions."""
        return f"{super().extra_repr()}, act_fn={self.act_fn}"


class LinearWithDropout(LinearWithSyncFunc):
    """``dropout(sync_fn(x @ weight.T) + bias)``, bias and dropout in one pass, dropping while training.

    Args:
        p: the probability of an element to become 0.
        inplace, use_torchscript: accepted, without effect: the one implementation does not write its input.
        others: as ``LinearWithSyncFunc``; bias must be True.

    Raises:
        ValueError: bias is False.

    Upstream's, by default, reads ``training`` once, in the constructor: it goes on dropping after ``eval()``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        p: float = 0.5,
        inplace: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sync_fn: Callable[[Tensor], Tensor] | None = None,
        use_torchscript: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, sync_fn)
        _needs_bias(self, bias)
        self.p = p
        self.inplace = inplace
        self.use_torchscript = use_torchscript

    def forward(self, input: Tensor) -> Tensor:
        """(…, in_features) → (…, out_features)."""
        return bias_dropout(self._gemm(input), self.bias, self.p, self.training)

    def extra_repr(self) -> str:
        """``LinearWithSyncFunc``'s, with the additions."""
        return f"{super().extra_repr()}, p={self.p}"


# ---- mlp -------------------------------------------------------------------------------------------------------------


class FusedMLP(nn.Module):
    """``dropout(act(x @ W_in.T + b_in) @ W_out.T + b_out)``: ``fc_in`` a LinearWithAct, ``fc_out`` a LinearWithDropout.

    Args:
        hidden_size: the input's and output's.
        intermediate_size: between the two.
        orig_act: an ``act_fn`` of LinearWithAct.
        resid_pdrop: the probability of an element of the result to become 0 while training.
        use_torchscript: accepted, without effect.

    Upstream's passes orig_act as the linear layer's ``bias``: its activation is always tanh GELU.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        orig_act: str,
        resid_pdrop: float,
        use_torchscript: bool = False,
    ) -> None:
        super().__init__()
        self.fc_in = LinearWithAct(hidden_size, intermediate_size, act_fn=orig_act)
        self.fc_out = LinearWithDropout(intermediate_size, hidden_size, p=resid_pdrop, use_torchscript=use_torchscript)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(…, hidden_size) → (…, hidden_size)."""
        out: Tensor = self.fc_out(self.fc_in(hidden_states))
        return out
