"""A proved forward, as data: which linear layers, which activation, which dropouts; and how it is run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fused_ops import functional
from torch_fused_ops.nn._products import linear
from torch_fused_ops.nn.fused_mlp import Middle
from torch_fused_ops.reasons import Kind, Reason, Refusal
from torch_fused_ops.recipes import RECIPES

__all__ = ["Linear", "Recipe", "Refused"]


class Refused(Refusal):
    """A module is left alone, or runs its own forward. ``has_mlp``: an activation between linear layers is in it."""

    def __init__(self, kind: Kind, text: str, excluded_by: str = "", *, has_mlp: bool = False) -> None:
        super().__init__(kind, text, excluded_by)
        self.has_mlp = has_mlp


class Linear(NamedTuple):
    """A linear layer by its parameters' names: x · weightᵀ + bias, or x · weight + bias where it is ``transposed``."""

    weight: str
    bias: str | None
    transposed: bool

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """(weight (out, in), bias)"""
        weight = _parameter(module, self.weight)
        bias = None if self.bias is None else _parameter(module, self.bias)
        return weight.t() if self.transposed else weight, bias


class Recipe(NamedTuple):
    """A proved forward: ``dropout(second(dropout(middle(first(x)))))``, first being one linear, or gate and up."""

    first: tuple[Linear, ...]
    middle: Middle
    second: Linear
    inner: float = 0.0  # chances of being dropped, behind the activation and at the end
    outer: float = 0.0
    cast: bool = False  # what the second linear reads is brought to its weight's dtype
    proved_from: str = ""
    # By each recipe of float8: of each linear layer, the last one last, why it cannot be; None where it can.
    not_in_float8: Mapping[str, tuple[Reason | None, ...]] = {}

    def examined(self, module: nn.Module) -> Recipe:
        """The recipe with ``not_in_float8``: what shapes, dtypes and devices of the module's weights say."""
        from torch_fused_ops.lowerings.recognise.gemms import check_float8

        found: dict[str, tuple[Reason | None, ...]] = {}
        for gemm in RECIPES:
            reasons: list[Reason | None] = []
            for layer in (*self.first, self.second):
                weight, _ = layer.of(module)
                try:
                    check_float8(weight, weight.dtype, gemm)
                    reasons.append(None)
                except Refusal as refusal:
                    reasons.append(refusal.reason)
            found[gemm] = tuple(reasons)
        return self._replace(not_in_float8=found)

    def run(self, module: nn.Module, x: Tensor, memory: str, gemm: str = "bf16") -> Tensor:
        """The module's result; ``gemm``: what the linear layers multiply in that can."""
        linears = [layer.of(module) for layer in self.first]
        weight, bias = self.second.of(module)
        last = None if self.outer else bias
        refused = self.not_in_float8.get(gemm, (None,) * (len(self.first) + 1))
        *of_first, of_second = (gemm if reason is None else "bf16" for reason in refused)

        def second(a: Tensor) -> Tensor:
            return linear(of_second, a.to(weight.dtype) if self.cast else a, weight, last)

        if len(linears) == 1:
            ((own, added),) = linears

            def first(x: Tensor) -> Tensor:
                return linear(of_first[0], x, own)
        else:
            added = None

            def first(x: Tensor) -> Tensor:
                if of_first == ["bf16", "bf16"]:
                    return _gate_up(x, linears)
                return torch.cat([linear(g, x, *pair) for g, pair in zip(of_first, linears, strict=True)], -1)

        reads = lambda: (t for pair in linears for t in pair)  # noqa: E731
        y = self.middle.run(x, first, added, second, memory, self.inner, reads)
        return functional.bias_dropout_add(y, bias, None, self.outer) if self.outer else y


def _gate_up(x: Tensor, linears: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
    tensors, kind = [x, *(t for pair in linears for t in pair)], x.device.type
    on = torch.is_autocast_enabled(kind)
    if on:  # it knows no out=
        tensors = [None if t is None else t.to(torch.get_autocast_dtype(kind)) for t in tensors]
    with torch.autocast(kind, enabled=False) if on else contextlib.nullcontext():
        packed: Tensor = _GateUp.apply(*tensors)  # type: ignore[no-untyped-call]
    return packed


class _GateUp(torch.autograd.Function):
    """[x · gateᵀ + bias | x · upᵀ + bias] in one tensor, without a copy of either: (..., h) → (..., 2f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, gate_bias: Any, up: Tensor, up_bias: Any) -> Tensor:
        rows, n = x.reshape(-1, x.shape[-1]), gate.shape[0]
        packed = x.new_empty(rows.shape[0], n + up.shape[0])
        for out, weight, bias in ((packed[:, :n], gate, gate_bias), (packed[:, n:], up, up_bias)):
            if bias is None:
                torch.mm(rows, weight.t(), out=out)
            else:
                torch.addmm(bias, rows, weight.t(), out=out)
        ctx.save_for_backward(x, gate, up)
        return packed.view(*x.shape[:-1], packed.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up = ctx.saved_tensors
        needs = ctx.needs_input_grad
        rows, both = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        parts = both.split((gate.shape[0], up.shape[0]), -1)
        to_x = torch.addmm(parts[1].mm(up), parts[0], gate).view_as(x) if needs[0] else None
        to_weights = [part.t().mm(rows) if needs[i] else None for part, i in zip(parts, (1, 3), strict=True)]
        to_biases = [part.sum(0) if needs[i] else None for part, i in zip(parts, (2, 4), strict=True)]
        return to_x, to_weights[0], to_biases[0], to_weights[1], to_biases[1]


def _parameter(module: nn.Module, path: str) -> Tensor:
    *owners, name = path.split(".")
    for owner in owners:
        module = module._modules[owner]  # type: ignore[assignment]
    tensor = module._parameters[name]
    assert tensor is not None
    return tensor
