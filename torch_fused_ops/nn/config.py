"""What an MLP is made of: ``MLPConfig``, with Megatron's attribute names, and what it means."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import activations, functional, megatron

__all__ = ["Activation", "MLPConfig", "activation_name", "read", "read_activation", "read_memory"]


@dataclass
class MLPConfig:
    """The attributes of Megatron's ``TransformerConfig`` that an MLP reads, with its defaults where it has any.

    Attributes:
        hidden_size: of the block's input and output.
        ffn_hidden_size: between the two linears, of gate and of up alone if gated; by default 4 · hidden_size.
        add_bias_linear: whether the linears have biases.
        gated_linear_unit: act(gate) · (up + offset) instead of act(h); the first linear then gives [gate | up].
        activation_func: F.gelu, F.silu, F.relu, F.sigmoid, torch.tanh, ``megatron.quick_gelu``, ``squared_relu``, a
            module of torch.nn with one of these, the name of an activation of ours, or any other callable on tensors.
        activation_func_clamp_value: gate is cut above it, up on both sides. GLUs only.
        glu_linear_offset: added to up. GLUs only.
        bias_activation_fusion: whether bias, activation and scale may be one kernel. Never another formula: Megatron's
            fused gelu is the tanh form and its unfused one erf's, here ``F.gelu`` is erf's, either way.
        activation_func_fp8_input_store: keep the activation's input in float8 for backward, as ``memory="fp8"``.
        use_te_activation_func: take the activation module that ``MLPSubmodules.activation_func`` builds.
        moe_ffn_hidden_size: ffn_hidden_size of an expert that is given none.
        moe_latent_size: input and output size of an expert, if not hidden_size.
        delay_wgrad_compute: backward computes input gradients alone; ``backward_dw()`` the weights' later.
        sequence_parallel: with a tp_group, tokens are shared out along the first axis outside the MLP: each rank gives
            and gets its own.
        init_method, output_layer_init_method: fill the first and the second weight, in place; by default
            ``nn.Linear``'s.
        params_dtype: of weights and biases; by default torch's default dtype.
        memory: what eager autograd keeps between the two linears: "off", "free", "fp8" or "input".
    """

    hidden_size: int
    ffn_hidden_size: int | None = None
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] | str = F.gelu
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    bias_activation_fusion: bool = True
    activation_func_fp8_input_store: bool = False
    use_te_activation_func: bool = False
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    delay_wgrad_compute: bool = False
    sequence_parallel: bool = False
    init_method: Callable[[Tensor], Any] | None = None
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    params_dtype: torch.dtype | None = None
    memory: str = "free"


# Functions and modules → names of ours. What else a user means by them is decided by the name alone.
_FUNCTIONS: dict[Any, str] = {
    F.gelu: "gelu",
    F.silu: "silu",
    F.relu: "relu",
    torch.relu: "relu",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    functional.gelu: "gelu",
    functional.silu: "silu",
    functional.quick_gelu: "quick_gelu",
    functional.squared_relu: "relu2",
    megatron.quick_gelu: "quick_gelu",
    megatron.squared_relu: "relu2",
    megatron.fast_gelu: "gelu_tanh",
    megatron.openai_gelu: "gelu_tanh",
    megatron.erf_gelu: "gelu",
}
_MODULES: dict[type[nn.Module], str] = {
    nn.SiLU: "silu",
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
_APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_name(activation: Any) -> str | None:
    """The name in our table of a name, a function or a module; None for any other callable."""
    if isinstance(activation, str):
        activations.get(activation)
        return activation
    if isinstance(activation, nn.GELU):
        return _APPROXIMATE[activation.approximate]
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return _APPROXIMATE.get(activation.keywords.get("approximate", "none"))
    if isinstance(activation, nn.Module):
        return _MODULES.get(type(activation))
    try:
        return _FUNCTIONS.get(activation)
    except TypeError:  # not hashable
        return None


_DEFAULTS = {f.name: f.default for f in fields(MLPConfig)}


def read(config: Any, name: str) -> Any:
    """An attribute of the config, ours or Megatron's; what it does not have, or has as None, is at its default."""
    value = getattr(config, name, None)
    return _DEFAULTS[name] if value is None else value


class Activation(NamedTuple):
    """What stands between the two linears: ``y = act(h + bias) · scale[..., None]``, or a GLU of packed [gate | up]."""

    name: str | None  # in the table; None: ``function``, spelled out
    function: Callable[[Tensor], Tensor] | None
    gated: bool
    up_offset: float
    clamp: float | None

    def __call__(self, h: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        if self.name is not None and self.gated:
            return functional.bias_glu(h, bias, scale, activation=self.name, up_offset=self.up_offset, clamp=self.clamp)
        if self.name is not None:
            return functional.bias_act(h, bias, scale, activation=self.name)
        return self.spelled(h, bias, scale)

    def spelled(self, h: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        """The same in PyTorch's own functions; under ``torch.compile`` the recogniser may well find it."""
        act = self.function
        assert act is not None
        y = h if bias is None else h + bias
        if self.gated:
            gate, up = y.chunk(2, -1)
            if self.clamp is not None:
                gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
            y = act(gate) * (up + self.up_offset)
        else:
            y = act(y)
        return y if scale is None else (y * scale.unsqueeze(-1)).to(y.dtype)


def read_activation(config: Any) -> Activation:
    """What the config says of the activation.

    Raises:
        ValueError, TypeError: for flags that do not go together.
    """
    given, gated = read(config, "activation_func"), read(config, "gated_linear_unit")
    clamp, offset = read(config, "activation_func_clamp_value"), read(config, "glu_linear_offset")
    if not isinstance(given, str) and not callable(given):
        raise TypeError(f"activation_func={given!r} is not accepted: it must be a function, a module or a name")
    for flag, value, neutral in (("activation_func_clamp_value", clamp, None), ("glu_linear_offset", offset, 0.0)):
        if value != neutral and not gated:
            raise ValueError(f"{flag}={value!r} is not accepted without gated_linear_unit: only a GLU has it")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{flag}={value!r} is not accepted: it must be finite")
    if clamp is not None and clamp <= 0:
        raise ValueError(f"activation_func_clamp_value={clamp!r} is not accepted: it must be above 0, or None")
    name = activation_name(given)
    return Activation(name, given if name is None else None, bool(gated), float(offset), clamp)


def read_memory(config: Any, fused: bool, levels: Collection[str]) -> str:
    """The memory level that the config asks for.

    Raises:
        ValueError: it is not known, or two flags ask for two levels, or float8 is asked for where nothing is fused.
    """
    memory, fp8 = read(config, "memory"), read(config, "activation_func_fp8_input_store")
    if memory not in levels:
        raise ValueError(f"memory={memory!r} is not known; accepted: {', '.join(levels)}")
    if fp8 and memory not in ("free", "fp8"):
        raise ValueError(f"activation_func_fp8_input_store=True is not accepted with memory={memory!r}: two levels")
    memory = "fp8" if fp8 else memory
    if memory == "fp8" and not fused:
        raise ValueError(
            "activation_func_fp8_input_store=True or memory='fp8' is not accepted with an activation that is not in "
            "our table: it keeps what it likes. torch_fused_ops.register_activation adds it"
        )
    return str(memory)
