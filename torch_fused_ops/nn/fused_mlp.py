"""``FusedMLP``: linear, activation, linear as a plain PyTorch module."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import activations, functional
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.nn._memory import run_at_level
from torch_fused_ops.nn.config import Activation, activation_name, check_memory
from torch_fused_ops.policy import check_known


def untouched(module: nn.Module) -> bool:
    """Return True if calling the module only runs its class's ``forward``: it has no hooks and no replaced method."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__ and module._compiled_call_impl is None


class FusedMLP(nn.Module):
    """``fc2(act(fc1(x)))``, or with ``gated`` ``fc2(act(g) · u)`` where fc1(x) = [g | u]; then dropout.

    Replaces linear, activation, linear, or gate, up and down projections: (..., hidden) → (..., hidden), in x's dtype.
    Gate and up are one GEMM. Forward and backward each run one kernel for bias and activation, and one for dropout with
    the second bias. ``memory`` sets eager mode's memory level; under ``torch.compile`` ``FusionPolicy.memory`` does.

    ``state_dict`` has ``fc1.weight`` (gate rows, then up rows), ``fc1.bias``, ``fc2.weight`` and ``fc2.bias``.

    Args:
        hidden: size of input and output.
        ffn: size between the linears, of gate and up each.
        activation: a supported activation's name, or its function or module in torch.
        gated: True to compute act(gate) · up instead of act(h).
        bias: True if both linears have biases.
        dropout: the probability of dropping an output in training. Backward recomputes the mask.
        memory: "off" saves the activation's input and result, "free" only its input, "fp8" its input in float8_e4m3fn
            with a scale per row. "input" saves neither, and backward recomputes the first GEMM. For an ungated ReLU,
            "off" and "free" save only its result. Results do not depend on the level; only "fp8" changes gradients.
        gemm: precision of both linears, as ``FusionPolicy.gemm``: "bf16" is the parameters' dtype. Float8 recipes need
            sizes that ``functional.linear_fp8`` accepts.
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError, TypeError: an argument is not accepted.

    A hooked, wrapped or parametrized linear is called as a module, and adds its own bias. If the first linear is such a
    module, level "input" acts as "free", because a second call of the module may differ.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        activation: str | Callable[[Tensor], Tensor] = "gelu_tanh",
        gated: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        *,
        memory: str = "free",
        gemm: str = "bf16",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_memory(memory)
        check_known("gemm", gemm)
        multiple = RECIPES[gemm].scaling.multiple if gemm in RECIPES else 1
        if hidden % multiple or ffn % multiple:
            raise ValueError(
                f"hidden={hidden}, ffn={ffn} are not accepted with gemm={gemm!r}: they must be multiples of {multiple}"
            )
        known = activation_name(activation)
        if known is None:
            raise TypeError(
                f"activation={activation!r} is not known; accepted: {', '.join(activations.names())}, and torch's "
                "functions and modules with one of these (torch_fused_ops.register_activation adds others)"
            )
        self.hidden, self.ffn = hidden, ffn
        self._activation = Activation(known, None, gated)  # not in forward: torch 2.11's Dynamo cannot construct it
        self.dropout, self.memory = float(dropout), memory
        self.gemm = gemm
        self.fc1 = nn.Linear(hidden, ffn * 2 if gated else ffn, bias, device, dtype)
        self.fc2 = nn.Linear(ffn, hidden, bias, device, dtype)

    @property
    def activation(self) -> str:
        """Name of the activation."""
        return str(self._activation.name)

    @property
    def gated(self) -> bool:
        """True if the MLP computes act(gate) · up."""
        return self._activation.gated

    def forward(self, x: Tensor) -> Tensor:
        """Run the MLP: (..., hidden) → (..., hidden)."""
        fc1, fc2, memory, bias = self.fc1, self.fc2, self.memory, None
        first: Callable[[Tensor], Tensor] = fc1
        if type(fc1) is nn.Linear and untouched(fc1):
            bias = fc1.bias
            first = lambda x: _linear(self.gemm, x, fc1.weight)  # noqa: E731
        elif memory == "input":
            memory = "free"
        second: Callable[[Tensor], Tensor] = fc2
        p, late = self.dropout if self.training else 0.0, None
        stops_early = type(fc2) is nn.Linear and untouched(fc2)
        if stops_early and (p or self.gemm != "bf16"):
            late = fc2.bias if p else None
            second = lambda a: _linear(self.gemm, a, fc2.weight, None if p else fc2.bias)  # noqa: E731
        act: Callable[[Tensor], Tensor] = lambda h: self._activation(h, bias)  # noqa: E731
        stops_early = stops_early and self.gemm == "bf16"
        result = self._activation.saves_result()
        y = run_at_level(self, x, first, act, second, memory, stops_early=stops_early, saves_result=result)
        return functional.bias_dropout_add(y, late, None, p) if p else y

    def reset_parameters(self) -> None:
        """Reinitialize the parameters as ``nn.Linear`` does."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def extra_repr(self) -> str:
        parts = [f"activation={self.activation}", *["gated"] * self.gated]
        parts += [f"dropout={self.dropout}"] * bool(self.dropout)
        parts += [f"gemm={self.gemm}"] * (self.gemm != "bf16")
        return ", ".join((*parts, f"memory={self.memory}"))


def _linear(gemm: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x · weightᵀ + bias in the precision ``gemm``. Under autocast, x and weight are cast to its dtype."""
    if gemm == "bf16":
        return F.linear(x, weight, bias)
    kind = x.device.type
    available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)  # torch 2.11's Dynamo cannot trace it
    if available and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (x, weight))
    return functional.linear_fp8(x, weight, bias, recipe=gemm)
