"""``MLPConfig``, with Megatron's attribute names, and functions that read and check our or Megatron's configs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops import activations, functional, megatron
from torch_fused_ops.policy import check_known
from torch_fused_ops.settings import tiles


@dataclass
class MLPConfig:
    """The attributes of Megatron's ``TransformerConfig`` that an MLP reads, with Megatron's defaults.

    Attributes:
        hidden_size: size of input and output.
        ffn_hidden_size: size between the two linears, of gate and up each; by default 4 · hidden_size.
        add_bias_linear: the linears have biases.
        gated_linear_unit: act(gate) · (up + offset) instead of act(h); the first linear computes [gate | up].
        activation_func: F.gelu, F.silu, F.relu, F.sigmoid, torch.tanh, ``megatron.quick_gelu``, ``squared_relu``, a
            torch.nn module for such a function, a supported activation's name, or any other callable on tensors.
        activation_func_clamp_value: the upper bound of gate, and the bound of up on both sides. GLUs only.
        glu_linear_offset: added to up. GLUs only.
        activation_func_fp8_input_store: the same as ``memory="fp8"``: save the activation's input in float8.
        use_te_activation_func: use the activation module that ``MLPSubmodules.activation_func`` builds.
        sequence_parallel: with a tp_group, the MLP's input and output are sharded by tokens, along the first axis.
        init_method, output_layer_init_method: functions that fill the first and the second weight in place; if
            None, the weight is initialized as in ``nn.Linear``.
        params_dtype: dtype of weights and biases; by default torch's default dtype.
        memory: eager autograd's memory level between the two linears: "off", "free", "fp8" or "input"
            (docs/memory.md).
    """

    hidden_size: int
    ffn_hidden_size: int | None = None
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] | str = F.gelu
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    activation_func_fp8_input_store: bool = False
    use_te_activation_func: bool = False
    sequence_parallel: bool = False
    init_method: Callable[[Tensor], Any] | None = None
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    params_dtype: torch.dtype | None = None
    memory: str = "free"


# Maps functions and module classes to the names of the supported activations.
_CALLABLES: dict[Any, str] = {
    **{fn: name for name in activations.names() for fn in activations.get(name).callables},
    megatron.quick_gelu: "quick_gelu",
    megatron.squared_relu: "relu2",
    megatron.fast_gelu: "gelu_tanh",
}


def activation_name(activation: Any, argument: str = "activation") -> str | None:
    """Return a supported activation's name, given its name, function or module; return None for other callables."""
    if isinstance(activation, str):
        activations.get(activation, argument)  # raises ValueError if the name is unknown
        return activation
    if isinstance(activation, nn.GELU):
        return functional.GELU[activation.approximate]
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return functional.GELU.get(activation.keywords.get("approximate", "none"))
    try:
        return _CALLABLES.get(type(activation) if isinstance(activation, nn.Module) else activation)
    except TypeError:  # not hashable
        return None


_DEFAULTS = {f.name: f.default for f in fields(MLPConfig)}


def read(config: Any, name: str) -> Any:
    """Return an attribute of our or Megatron's config, or its default if it is missing or None."""
    value = getattr(config, name, None)
    return _DEFAULTS[name] if value is None else value


def read_group(
    config: Any, is_expert: bool, tp_group: torch.distributed.ProcessGroup | None, pg_collection: Any
) -> torch.distributed.ProcessGroup | None:
    """Return the processes that shard a weight, from the argument or from Megatron's ``ProcessGroupCollection``.

    Raises:
        ValueError: the config sets a parallel size above 1, but the group is missing; or it shards experts.
    """
    group = pg_collection.tp if tp_group is None and pg_collection is not None else tp_group
    for kind in ("tensor_model", "expert_tensor", "expert_model"):
        size = getattr(config, f"{kind}_parallel_size", None) or 1
        if size > 1 and is_expert:
            raise ValueError(f"is_expert=True is not accepted with {kind}_parallel_size={size}: it must be 1")
        if size > 1 and kind == "tensor_model" and group is None:
            raise ValueError(
                f"{kind}_parallel_size={size} is not accepted without tp_group or pg_collection: global state is not "
                "read"
            )
    return group


class Activation(NamedTuple):
    """The function between the linears: ``act(h + bias) · scale[..., None]``; if gated, a GLU of packed [gate | up]."""

    name: str | None  # name of a supported activation; if None, ``function`` runs in plain torch
    function: Callable[[Tensor], Tensor] | None
    gated: bool
    up_offset: float = 0.0
    clamp: float | None = None

    def __call__(self, h: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
        if self.name is not None and self.gated:
            return functional.bias_glu(h, bias, scale, activation=self.name, up_offset=self.up_offset, clamp=self.clamp)
        if self.name is not None:
            return functional.bias_act(h, bias, scale, activation=self.name)
        return self._in_plain_torch(h if bias is None else h + bias, scale)

    def saves_result(self, scale: Tensor | None = None) -> bool:
        """Return True if backward needs only the result, which the second linear saves anyway, as for ReLU."""
        gated = self.gated or scale is not None
        return self.name is not None and not gated and activations.get(self.name).gradient_from_output

    def _in_plain_torch(self, h: Tensor, scale: Tensor | None) -> Tensor:
        """Compute the activation with PyTorch's own functions. The fusion pass may still match it."""
        act, y = self.function, h
        assert act is not None
        if self.gated:
            gate, up = h.chunk(2, -1)
            if self.clamp is not None:
                gate, up = gate.clamp(max=self.clamp), up.clamp(-self.clamp, self.clamp)
            y = act(gate) * (up + self.up_offset)
        else:
            y = act(y)
        return y if scale is None else (y * scale.unsqueeze(-1)).to(y.dtype)


def read_activation(config: Any) -> Activation:
    """Read the config's activation.

    Raises:
        ValueError, TypeError: the config's flags are incompatible.
    """
    function, gated = read(config, "activation_func"), read(config, "gated_linear_unit")
    clamp, offset = read(config, "activation_func_clamp_value"), read(config, "glu_linear_offset")
    in_module = read(config, "use_te_activation_func")
    for flag, value, neutral in (("activation_func_clamp_value", clamp, None), ("glu_linear_offset", offset, 0.0)):
        if value != neutral and not gated:
            raise ValueError(f"{flag}={value!r} is not accepted without gated_linear_unit: only a GLU has it")
        if value != neutral and in_module:
            raise ValueError(
                f"{flag}={value!r} is not accepted with use_te_activation_func: the module does not take it"
            )
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{flag}={value!r} is not accepted: it must be finite")
    if clamp is not None and clamp <= 0:
        raise ValueError(f"activation_func_clamp_value={clamp!r} is not accepted: it must be above 0, or None")
    name = activation_name(function, "activation_func")
    return Activation(name, function if name is None else None, gated, float(offset), clamp)


def check_memory(memory: str) -> None:
    """Raise a ValueError if eager modules do not support this memory level: it is unknown, or needs tiles."""
    check_known("memory", memory)
    if tiles.requested_tiles(memory) is not None:
        raise ValueError(
            f"memory={memory!r} is not accepted: these modules are not tiled. Use memory='input', or an MLP of "
            f'torch.nn.Linear in torch.compile(model, backend="fused", options={{"memory": {memory!r}}})'
        )


def read_memory(config: Any, is_supported: bool) -> str:
    """Read the config's memory level. Levels are for supported activations; for others "free" means "off".

    Raises:
        ValueError: the level is unknown, two flags set different levels, or the level needs a supported activation.
    """
    memory, fp8 = read(config, "memory"), read(config, "activation_func_fp8_input_store")
    check_memory(memory)
    if fp8 and memory not in ("free", "fp8"):
        raise ValueError(f"activation_func_fp8_input_store=True is not accepted with memory={memory!r}: two levels")
    memory = "fp8" if fp8 else memory
    if is_supported or memory == "off":
        return str(memory)
    if memory == "free":
        return "off"
    raise ValueError(
        f"memory={memory!r} (activation_func_fp8_input_store={fp8!r}) is not accepted with an unsupported activation. "
        "torch_fused_ops.register_activation adds it"
    )


def check_precision(config: Any) -> None:
    """Raise ValueError if the config sets one of Megatron's precision flags."""
    for flag in ("fp8", "fp4", "quant_recipe"):
        if value := getattr(config, flag, None):
            raise ValueError(
                f"{flag}={value!r} is not accepted: GEMMs run in the tensors' dtypes, or in autocast's dtype. "
                "memory='fp8' saves activations in float8"
            )
