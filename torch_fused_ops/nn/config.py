"""``MLPConfig``, with Megatron's attribute names, and functions that read and check our or Megatron's configs."""

from __future__ import annotations

import functools
import math
import numbers
import operator
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
        bias_activation_fusion: ignored. In Megatron it changes gelu (fused: tanh form, unfused: erf form); here
            ``F.gelu`` is always the erf form.
        activation_func_fp8_input_store: the same as ``memory="fp8"``: save the activation's input in float8.
        use_te_activation_func: use the activation module that ``MLPSubmodules.activation_func`` builds.
        moe_ffn_hidden_size: the default of an expert's ffn_hidden_size.
        moe_latent_size: input and output size of an expert; None means hidden_size.
        moe_apply_probs_on_input: ``GroupedMLP`` multiplies its input, not the activation, by the probabilities.
        moe_router_topk: experts per token; must be 1 with moe_apply_probs_on_input.
        delay_wgrad_compute: backward computes only input gradients; ``backward_dw()`` computes the weight gradients.
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
    bias_activation_fusion: bool = True
    activation_func_fp8_input_store: bool = False
    use_te_activation_func: bool = False
    moe_ffn_hidden_size: int | None = None
    moe_latent_size: int | None = None
    moe_apply_probs_on_input: bool = False
    moe_router_topk: int = 2
    delay_wgrad_compute: bool = False
    sequence_parallel: bool = False
    init_method: Callable[[Tensor], Any] | None = None
    output_layer_init_method: Callable[[Tensor], Any] | None = None
    params_dtype: torch.dtype | None = None
    memory: str = "free"


# Maps functions and module classes to the names of the supported activations.
_CALLABLES: dict[Any, str] = {
    **{fn: name for name in activations.names() for fn in activations.get(name).callables},
    functional.gelu: "gelu",
    functional.silu: "silu",
    functional.quick_gelu: "quick_gelu",
    functional.squared_relu: "relu2",
    megatron.quick_gelu: "quick_gelu",
    megatron.squared_relu: "relu2",
    megatron.fast_gelu: "gelu_tanh",
}
_APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_name(activation: Any, argument: str = "activation") -> str | None:
    """Return a supported activation's name, given its name, function or module; return None for other callables."""
    if isinstance(activation, str):
        activations.get(activation, argument)  # raises ValueError if the name is unknown
        return activation
    if isinstance(activation, nn.GELU):
        return _APPROXIMATE[activation.approximate]
    if isinstance(activation, functools.partial) and activation.func is F.gelu and not activation.args:
        return _APPROXIMATE.get(activation.keywords.get("approximate", "none"))
    try:
        return _CALLABLES.get(type(activation) if isinstance(activation, nn.Module) else activation)
    except TypeError:  # not hashable
        return None


class _Accepted(NamedTuple):
    is_accepted: Callable[[Any], bool]
    description: str


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)  # accepts numpy's integer types
    except TypeError:
        return None


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda value: all(hasattr(value, name) for name in names)


_SIZE = _Accepted(lambda v: not isinstance(v, bool) and _index(v) is not None, "an integer from 1 on")
_FLAG = _Accepted(lambda v: _index(v) in (0, 1), "True or False")
_NUMBER = _Accepted(lambda v: not isinstance(v, bool) and isinstance(v, numbers.Real), "a number")
_FILL = _Accepted(callable, "a function that fills a tensor in place")
_GROUP = _Accepted(_has("size", "rank"), "a torch.distributed.ProcessGroup; mesh.get_group() gives one")

_OF_TYPE = {"int": _SIZE, "bool": _FLAG, "float": _NUMBER}
# Checks of config attributes and module arguments, by name. ``checked`` accepts any value for other names.
_ACCEPTED = {
    **{f.name: _OF_TYPE[kind] for f in fields(MLPConfig) if (kind := str(f.type).removesuffix(" | None")) in _OF_TYPE},
    "config": _Accepted(_has("hidden_size"), "an MLPConfig, or an object with its attributes, hidden_size at least"),
    "submodules": _Accepted(
        _has("linear_fc1", "linear_fc2", "activation_func"), "an object with the attributes of MLPSubmodules"
    ),
    "activation_func": _Accepted(lambda v: isinstance(v, str) or callable(v), "a function, a module or a name"),
    "params_dtype": _Accepted(lambda v: isinstance(v, torch.dtype), "a torch.dtype"),
    **dict.fromkeys(("init_method", "output_layer_init_method"), _FILL),
    **dict.fromkeys(("tp_group", "ep_group"), _GROUP),
    "name": _Accepted(lambda v: isinstance(v, str), "a string"),
    "is_expert": _FLAG,
    **dict.fromkeys(("input_size", "output_size", "num_local_experts", "hidden", "ffn"), _SIZE),
}


def checked(name: str, value: Any, required: bool = False) -> Any:
    """Check the value of an attribute or argument; return sizes as int, flags as bool. Unless required, it may be None.

    Raises:
        TypeError, ValueError: the value is not accepted, or is a size below 1.
    """
    accepted = _ACCEPTED.get(name)
    if accepted is None or (value is None and not required):
        return value
    if not accepted.is_accepted(value):
        raise TypeError(f"{name}={value!r} is not accepted: it must be {accepted.description}")
    if accepted is _FLAG:
        return bool(value)
    if accepted is not _SIZE:
        return value
    if (size := operator.index(value)) < 1:
        raise ValueError(f"{name}={value!r} is not accepted: it must be {accepted.description}")
    return size


_DEFAULTS = {f.name: f.default for f in fields(MLPConfig)}


def read(config: Any, name: str) -> Any:
    """Return an attribute of our or Megatron's config, or its default if it is missing or None.

    Raises:
        TypeError, ValueError: ``checked`` does not accept the value.
    """
    value = checked(name, getattr(config, name, None))
    return _DEFAULTS[name] if value is None else value


class ParallelGroups(NamedTuple):
    """The process groups of a module.

    Attributes:
        tp: tensor parallelism: the processes that shard a weight, or an expert's weight.
        ep: expert parallelism: the processes among which experts are distributed.
        expt_dp: data parallelism of experts: the processes with replicas of the same experts.
    """

    tp: torch.distributed.ProcessGroup | None = None
    ep: torch.distributed.ProcessGroup | None = None
    expt_dp: torch.distributed.ProcessGroup | None = None


def read_groups(
    config: Any,
    is_expert: bool,
    tp_group: torch.distributed.ProcessGroup | None = None,
    ep_group: torch.distributed.ProcessGroup | None = None,
    pg_collection: Any = None,
    grouped: bool = False,
) -> ParallelGroups:
    """Read a module's groups from its arguments, or from Megatron's ``ProcessGroupCollection``.

    Args:
        grouped: True if the module has several experts, and so may have an ep group.

    Raises:
        TypeError: an argument is not a group, or pg_collection lacks a group.
        ValueError: the config sets a parallel size above 1, but the group is missing.
    """
    groups = {"tp": checked("tp_group", tp_group), "ep": checked("ep_group", ep_group)}
    names = {"tp": ("expt_tp", "expert_tensor_parallel_size") if is_expert else ("tp", "tensor_model_parallel_size")}
    if grouped:
        names["ep"] = "ep", "expert_model_parallel_size"
    for kind, (name, flag) in names.items():
        if pg_collection is not None:
            if groups[kind] is None and not hasattr(pg_collection, name):
                raise TypeError(
                    f"pg_collection={pg_collection!r} is not accepted: it must have the process group {name}, as "
                    "Megatron's ProcessGroupCollection has it"
                )
            groups[kind] = groups[kind] or checked(f"{kind}_group", getattr(pg_collection, name, None))
        size = getattr(config, flag, None) or 1
        if size > 1 and groups[kind] is None:
            raise ValueError(
                f"{flag}={size} is not accepted without {kind}_group or pg_collection: global state is not read"
            )
    return ParallelGroups(**groups, expt_dp=getattr(pg_collection, "expt_dp", None))


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


def read_memory(config: Any, fused: bool) -> str:
    """Read the config's memory level.

    Raises:
        ValueError: the level is unknown, two flags set different levels, or the level is "fp8" and ``fused`` is False.
    """
    memory, fp8 = read(config, "memory"), read(config, "activation_func_fp8_input_store")
    check_memory(memory)
    if fp8 and memory not in ("free", "fp8"):
        raise ValueError(f"activation_func_fp8_input_store=True is not accepted with memory={memory!r}: two levels")
    memory = "fp8" if fp8 else memory
    if memory == "fp8" and not fused:
        raise ValueError(
            "activation_func_fp8_input_store=True or memory='fp8' is not accepted with an unsupported activation. "
            "torch_fused_ops.register_activation adds it"
        )
    return str(memory)


# Megatron's flags that set precisions, with the value of each that is accepted; unset flags always are.
_PRECISION = {"fp8": None, "fp4": None, "quant_recipe": None}
_PRECISION_OF_EXPERTS = {**_PRECISION, "moe_dispatch_fwd_dtype": "bf16", "moe_combine_bwd_dtype": "bf16"}


def check_precision(config: Any, experts: bool) -> None:
    """Raise ValueError if the config sets one of Megatron's precision flags to a value that is not accepted."""
    for flag, accepted in (_PRECISION_OF_EXPERTS if experts else _PRECISION).items():
        value = getattr(config, flag, None)
        if value and value != accepted:
            raise ValueError(
                f"{flag}={value!r} is not accepted: GEMMs run in the tensors' dtypes, or in autocast's dtype. "
                "memory='fp8' saves activations in float8"
            )
