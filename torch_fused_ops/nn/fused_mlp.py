"""``FusedMLP``: linear, activation, linear as a plain PyTorch module; and what it runs between its linears."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import activations, functional, tiles
from torch_fused_ops.nn import layouts
from torch_fused_ops.nn._gemms import check_gemm, check_shape, linear
from torch_fused_ops.nn._memory import in_tiles, through
from torch_fused_ops.nn.config import activation_name, checked
from torch_fused_ops.policy import check_known

__all__ = ["FusedMLP", "Middle", "untouched"]


def untouched(module: nn.Module) -> bool:
    """Whether calling the module is calling its class's ``forward``: nobody has hooked into it or replaced it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__ and module._compiled_call_impl is None


@dataclass(frozen=True)
class Middle:
    """What stands between two linears: ``act(h)``, or a GLU of packed h.

    Attributes:
        activation: its name in the table.
        layout: how gate and up lie in h; None if it is not gated.
    """

    activation: str
    layout: str | None = None

    def __call__(self, h: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.layout is None:
            return functional.bias_act(h, bias, activation=self.activation)
        return functional.bias_glu(h, bias, activation=self.activation, layout=self.layout)

    def run(
        self,
        x: Tensor,
        first: Callable[[Tensor], Tensor],
        bias: Tensor | None,
        second: Callable[[Tensor], Tensor],
        memory: str,
        reads: Callable[[], Iterable[Tensor | None]] = tuple,
    ) -> Tensor:
        """``second(act(first(x) + bias))``, keeping for backward what ``memory`` says; ``reads``: what
        ``first`` reads besides its argument."""

        def of_rows(rows: Tensor, level: str) -> Tensor:
            """Of all rows, or of a tile's."""
            produce: Callable[[Tensor], Tensor] = first
            act: Callable[[Tensor], Tensor] = lambda h: self(h, bias)  # noqa: E731
            # ReLU keeps its result. Where that is made again it must not: threshold is ReLU, bit for bit, and keeps
            # what it reads.
            if self.layout is None and self.activation == "relu" and level in ("fp8", "input"):
                produce = first if bias is None else lambda x: first(x) + bias
                act = lambda h: F.threshold(h, 0.0, 0.0)  # noqa: E731
            return through(rows, produce, act, second, level, reads=lambda: (bias, *reads()))

        return in_tiles(x, memory, of_rows)


class FusedMLP(nn.Module):
    """``fc2(act(fc1(x)))``, or with ``gated`` ``fc2(act(g) · u)`` where fc1(x) = [g | u]; then dropout.

    Drop-in for linear, activation, linear and for gate, up and down projections: (..., hidden) → (..., hidden), in x's
    dtype. Gate and up are one product; bias and activation are one kernel each way, dropout and the second bias another
    one. Eager autograd keeps between the linears what ``memory`` says; under ``torch.compile`` the policy decides
    (``FusionPolicy.memory``).

    ``load_state_dict``, of this module or of a model around it, takes the layouts of ``nn.layouts.LAYOUTS``: it knows
    them by their keys, and converts once. ``state_dict`` gives ``fc1.weight`` (gate's rows over up's), ``fc1.bias``,
    ``fc2.weight`` and ``fc2.bias``; ``state_dict_as`` any layout.

    Args:
        hidden: size of input and output.
        ffn: size between the linears; of gate and of up alone.
        activation: a name in our table, or a function or module of torch with one of those.
        gated: act(gate) · up instead of act(h).
        bias: whether both linears have biases.
        dropout: the chance of being dropped behind the second linear, in training. Its mask is made again in backward.
        memory: "off" keeps what the activation reads and what it gives, "free" what it reads, "fp8" that in
            float8_e4m3fn with a scale for each row, "input" neither: the first product is computed again. "tiled" does
            both products in tiles of rows, forward and backward; "tiled:16" says how many. (Of ReLU
            "free" keeps what it gives.) Results are the same; so are gradients but with "fp8".
        gemm: what both linears multiply in, as ``FusionPolicy.gemm``: "bf16", the parameters' dtype; or in float8,
            "fp8", "fp8-wgrad-bf16", "fp8-rowwise", "mxfp8" or "mxfp8-wgrad-bf16" (``functional.linear_fp8``), for sizes
            that are multiples of 128, in rows of 16, by "mxfp8" of 32.
        device, dtype: of the parameters.
        checkpoint_layout: the layout of the state dicts that are loaded, for those whose keys and shapes do not tell:
            "gate_up_proj/down_proj interleaved" has the keys and shapes of "gate_up_proj/down_proj".

    Raises:
        ValueError, TypeError: for arguments that are not accepted.

    A linear that is hooked, wrapped or parametrized is called as it is: then its bias is added there, and "input" is
    "free", since what a wrapper does need not be the same twice. So is "tiled"; where it is the second one, "input".
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
        checkpoint_layout: str | None = None,
    ) -> None:
        super().__init__()
        hidden, ffn = checked("hidden", hidden, required=True), checked("ffn", ffn, required=True)
        for name, flag in (("gated", gated), ("bias", bias)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name}={flag!r} is not accepted: it must be True or False")
        if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
            raise TypeError(f"dropout={dropout!r} is not accepted: it must be a number from 0 to 1")
        if not (math.isfinite(dropout) and 0 <= dropout <= 1):
            raise ValueError(f"dropout={dropout!r} is not accepted: it must be from 0 to 1")
        check_known("memory", memory)
        check_gemm(gemm, hidden=hidden, ffn=ffn)
        known = activation_name(activation)
        if known is None:
            raise TypeError(
                f"activation={activation!r} is not known; accepted: {', '.join(activations.names())}, and torch's "
                "functions and modules with one of these (torch_fused_ops.register_activation adds others)"
            )
        if checkpoint_layout is not None:
            layouts.layout_of(checkpoint_layout, gated, "checkpoint_layout")
        self.hidden, self.ffn = hidden, ffn
        self._middle = Middle(known, "halves" if gated else None)  # here: torch 2.11's Dynamo cannot make one
        self.dropout, self.memory, self.checkpoint_layout = float(dropout), memory, checkpoint_layout
        self.gemm = gemm
        self.fc1 = nn.Linear(hidden, ffn * 2 if gated else ffn, bias, device, dtype)
        self.fc2 = nn.Linear(ffn, hidden, bias, device, dtype)

    @property
    def activation(self) -> str:
        """Its name in our table."""
        return self._middle.activation

    @property
    def gated(self) -> bool:
        """Whether it is act(gate) · up."""
        return self._middle.layout is not None

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) → (..., hidden)"""
        middle = self._middle
        fc1, fc2, memory, bias = self.fc1, self.fc2, self.memory, None
        first: Callable[[Tensor], Tensor] = fc1
        if type(fc1) is nn.Linear and untouched(fc1):
            weight, bias = fc1.weight, fc1.bias  # those of now: functional_call's are gone when "input" runs it again
            check_shape("x", x, weight.shape[1:], "...")
            first = lambda x: linear(self.gemm, x, weight)  # noqa: E731
        elif memory == "input" or tiles.asked(memory) is not None:
            memory = "free"
        own = type(fc2) is nn.Linear and untouched(fc2)
        if not own and tiles.asked(memory) is not None:  # what stands around it must run once
            memory = "input"
        p = self.dropout if self.training else 0.0
        if own and (p or self.gemm != "bf16"):
            late = fc2.bias if p else None
            second = lambda a: linear(self.gemm, a, fc2.weight, None if p else fc2.bias)  # noqa: E731
            y = middle.run(x, first, bias, second, memory, reads=fc1.parameters)
            return functional.bias_dropout_add(y, late, None, p) if p else y
        y = middle.run(x, first, bias, fc2, memory, reads=fc1.parameters)
        return functional.bias_dropout_add(y, None, None, p) if p else y

    def reset_parameters(self) -> None:
        """Fill the parameters anew, as ``nn.Linear`` does."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def extra_repr(self) -> str:
        parts = [f"activation={self.activation}", *["gated"] * self.gated]
        parts += [f"dropout={self.dropout}"] * bool(self.dropout)
        parts += [f"gemm={self.gemm}"] * (self.gemm != "bf16")
        return ", ".join((*parts, f"memory={self.memory}"))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict_as(self, layout: str, prefix: str = "") -> dict[str, Tensor]:
        """The parameters as another layout names and packs them: new tensors, bit for bit the same numbers.

        Args:
            layout: one of ``nn.layouts.LAYOUTS``, e.g. "gate_proj/up_proj/down_proj".
            prefix: put in front of every key.

        Raises:
            ValueError: there is no such layout of a gated MLP, or of one that is not.
        """
        chosen, own = layouts.layout_of(layout, self.gated, "layout"), self._own()
        return {
            prefix + part: tensor
            for key, parts in chosen.keys("fc1.bias" in own).items()
            for part, tensor in zip(parts, chosen.save(key, own[key].detach()), strict=True)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``, from every layout of the table.

        Raises:
            RuntimeError: tensors do not fit, or with ``strict`` keys are missing or unknown; the message names them.
                Nothing is changed then.
        """
        if self._is_plain():
            found = self._convert(state_dict, "")
            wrong = list(found.errors)
            if strict:
                wrong += [f"missing: {key}" for key in found.missing]
                wrong += [f"unexpected: {key}" for key in found.unexpected]
            if wrong:
                lines = "".join(f"\n\t{text}" for text in wrong)
                raise RuntimeError(f"Error(s) in loading state_dict for {type(self).__name__}:{lines}")
        return super().load_state_dict(state_dict, strict, assign)

    def _own(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def _is_plain(self) -> bool:
        """Whether the linears are as they were made, and a state dict's keys say which layout it has."""
        wanted = {f"{fc}.{kind}" for fc in ("fc1", "fc2") for kind in ("weight", "bias")}
        return set(self.state_dict(keep_vars=True)) <= wanted and {"fc1.weight", "fc2.weight"} <= set(self._own())

    def _convert(self, state_dict: Mapping[str, Any], prefix: str) -> layouts.Conversion:
        stored = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
        shapes = {key: tensor.shape for key, tensor in self._own().items()}
        return layouts.convert(stored, shapes, self.gated, self.checkpoint_layout)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._is_plain():
            found = self._convert(state_dict, prefix)
            missing_keys += [prefix + key for key in found.missing]
            unexpected_keys += [prefix + key for key in found.unexpected] if strict else []
            error_msgs += [prefix + text for text in found.errors]
            for key in [key for key in state_dict if key.startswith(prefix)]:
                del state_dict[key]
            # The linears load from this dict after us. What it does not have stays as it is, and is told above.
            state_dict.update((prefix + key, found.tensors.get(key, own)) for key, own in self._own().items())
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
