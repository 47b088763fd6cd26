"""Megatron core's MLP (``megatron.core.transformer.mlp``), in one process or sharded over several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from torch_fused_ops.nn._memory import run_at_level
from torch_fused_ops.nn.config import check_precision, read, read_activation, read_group, read_memory
from torch_fused_ops.nn.fused_mlp import untouched
from torch_fused_ops.nn.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear, bias_for_caller

if TYPE_CHECKING:
    from torch_fused_ops.distributed.checkpoint import Offsets


class LinearFc1Interface(Protocol):
    """The interface of a linear."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """Return (result without bias, bias or None)."""
        ...

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``backward`` deferred, if the linear defers them."""
        ...


class LinearFc1Builder(Protocol):
    """A builder of a linear. It gets arguments of ``ColumnParallelLinear`` or ``RowParallelLinear``.

    The sizes are positional. It gets name and pg_collection only if the MLP has them.
    """

    def __call__(self, input_size: int, output_size: int, /, *args: Any, **arguments: Any) -> LinearFc1Interface: ...


LinearFc2Interface = LinearFc1Interface
LinearFc2Builder = LinearFc1Builder


class TEActivationFunctionInterface(Protocol):
    """The interface of an activation module. The input is packed [gate | up] if the MLP is gated."""

    def forward(self, input_: Tensor, /) -> Tensor:
        """Compute the activation."""
        ...


class TEActivationFunctionBuilder(Protocol):
    """A builder of an activation module."""

    def __call__(self, *, config: Any) -> TEActivationFunctionInterface: ...


@dataclass
class MLPSubmodules:
    """The builders of an MLP's children.

    Attributes:
        linear_fc1, linear_fc2: builders of the linears, such as a class whose constructor takes a builder's arguments.
        activation_func: builder of the activation module, used only if ``config.use_te_activation_func`` is True.
    """

    linear_fc1: LinearFc1Builder = ColumnParallelLinear
    linear_fc2: LinearFc2Builder = RowParallelLinear
    activation_func: TEActivationFunctionBuilder | None = None


class MLP(nn.Module):
    """fc2(act(fc1(x) + bias1) · scale): Megatron core's MLP block.

    Hidden states (..., h) → (output (..., h), bias for the caller to add, or None). With ``gated_linear_unit`` fc1 is
    twice as wide, and its output is [gate | up]. If the activation is supported, forward and backward each run
    one kernel for bias, activation and scale.

    Args:
        config: an ``MLPConfig``, or any object with ``hidden_size`` and possibly other attributes of ``MLPConfig``.
        submodules: builders of the MLP's children; by default the linears of ``torch_fused_ops.nn``.
        is_expert: True for a mixture's expert. It needs ``ffn_hidden_size``, and a config that does not shard experts.
        input_size: size of the input; by default ``config.hidden_size``.
        ffn_hidden_size: size between the linears; by default ``config.ffn_hidden_size``.
        tp_group: the processes that shard the weights (``distributed.tensor_parallel``). Each has rows of fc1's weight
            (gate rows and up rows if gated) and columns of fc2's weight, as plain parameters, sliced from one process's
            initial weights. Every rank returns the complete output; with ``config.sequence_parallel``, only its tokens.
        name, is_mtp_layer: accepted because Megatron's ``TransformerLayer`` passes them. The linears get the name.
        pg_collection: Megatron's ``ProcessGroupCollection``. Its ``tp`` is the default tp_group. The linears also get
            the collection.

    Raises:
        ValueError, TypeError: the flags are incompatible; the message says why. ``forward`` does not check flags.

    Source: ``megatron.core.transformer.mlp.MLP``. In Megatron fc2 ignores ``ffn_hidden_size``, fused GELU is the tanh
    form, unfused GELU is the erf form, and some configurations raise only in ``forward``.
    """

    def __init__(
        self,
        config: Any,
        submodules: MLPSubmodules | None = None,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: Any = None,
        is_mtp_layer: bool = False,
    ) -> None:
        super().__init__()
        check_precision(config)
        if is_expert:
            _check_expert(config, ffn_hidden_size)
        submodules = submodules or MLPSubmodules()
        self.config, self.is_expert = config, is_expert
        self._activation = read_activation(config)
        hidden = config.hidden_size
        self.input_size = input_size or hidden
        self.ffn_hidden_size = ffn = ffn_hidden_size or read(config, "ffn_hidden_size") or 4 * hidden
        group = read_group(config, is_expert, tp_group, pg_collection)
        if group is not None and ffn % group.size():
            raise ValueError(
                f"ffn_hidden_size={ffn} is not accepted with a tp_group of {group.size()}: it does not divide evenly"
            )
        common: dict[str, Any] = {"config": config, "bias": read(config, "add_bias_linear"), "skip_bias_add": True}
        common |= {"is_expert": is_expert, "tp_group": group}
        packed = 2 if self._activation.gated else 1
        self.linear_fc1: Any = submodules.linear_fc1(
            self.input_size,
            ffn * packed,
            init_method=read(config, "init_method"),
            tp_comm_buffer_name="fc1",
            gather_output=False,
            stride=packed,
            **common,
            **_from_megatron(name, "linear_fc1", pg_collection),
        )
        self.activation_func: Any = None
        if read(config, "use_te_activation_func"):
            if submodules.activation_func is None:
                raise ValueError(
                    "use_te_activation_func=True is not accepted without MLPSubmodules.activation_func, its builder"
                )
            self.activation_func = submodules.activation_func(config=config)
        self._memory = read_memory(config, self._activation.name is not None and self.activation_func is None)
        self.linear_fc2: Any = submodules.linear_fc2(
            ffn,
            hidden,
            init_method=read(config, "output_layer_init_method"),
            tp_comm_buffer_name="fc2",
            input_is_parallel=True,
            **common,
            **_from_megatron(name, "linear_fc2", pg_collection),
        )

    @classmethod
    def as_mlp_submodule(cls, submodules: MLPSubmodules | None = None, **arguments: Any) -> MLP:
        """Construct an MLP. Megatron's layer specs contain this method, in a ``functools.partial``.

        Source: the method of this name in ``megatron.core.transformer.mlp.MLP``.
        """
        return cls(submodules=submodules, **arguments)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, bias for the caller to add, or None).

        Args:
            hidden_states: (..., input_size).
            per_token_scale: (...), a factor of the activation's result (a router's weight of this expert). ``forward``
                then scales and adds the output bias itself, and returns None as the bias.
            **kwargs: ignored; Megatron's layers pass further arguments.

        Raises:
            ValueError: per_token_scale has another shape.
        """
        if per_token_scale is not None and per_token_scale.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"per_token_scale of shape {tuple(per_token_scale.shape)} is not accepted: it must be "
                f"{tuple(hidden_states.shape[:-1])}"
            )
        output, bias = self._run(hidden_states, per_token_scale)
        if per_token_scale is not None and bias is not None:
            return output + (bias * per_token_scale.unsqueeze(-1)).to(output.dtype), None
        return output, bias if bias is None else bias_for_caller(self, bias)

    def _run(self, x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return fc2's result, and the bias that the caller must add."""
        biases: dict[str, Tensor | None] = {}
        fc1 = self.linear_fc1
        parallel = fc1.parallel if isinstance(fc1, ParallelLinear) else None
        entered: dict[str, Any] = {}
        if parallel is not None:  # if ``first`` did this, backward might gather again
            x, entered = parallel.enter(x), {"entered": True}
            scale = None if scale is None else parallel.enter(scale)

        level = self._memory
        by_fsdp = hasattr(fc1, "set_requires_gradient_sync")
        if level == "input" and not (untouched(fc1) or by_fsdp):
            level = "free"  # when backward calls fc1 again, a hook may act differently

        def first(x: Tensor) -> Tensor:
            h: Tensor
            h, biases["fc1"] = fc1(x, **entered)
            return h

        def activate(h: Tensor) -> Tensor:
            if self.activation_func is None:
                return self._activation(h, biases["fc1"], scale)
            y: Tensor = self.activation_func(h if biases["fc1"] is None else h + biases["fc1"])
            return y if scale is None else (y * scale.unsqueeze(-1)).to(y.dtype)

        def second(a: Tensor) -> Tensor:
            y: Tensor
            y, biases["fc2"] = self.linear_fc2(a)
            return y

        fc2 = self.linear_fc2
        y = run_at_level(
            self,
            x,
            first,
            activate,
            second,
            level,
            stops_early=isinstance(fc2, ParallelLinear) and untouched(fc2),
            reads=(("per_token_scale", scale),),
            saves_result=self._activation.saves_result(scale),
        )
        return y, biases["fc2"]

    def backward_dw(self) -> None:
        """Call ``backward_dw`` of both linears, fc2 first. Only linears of other libraries defer weight gradients."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return this rank's shards of the parameters, which ``torch.distributed.checkpoint`` saves or loads in place.

        The checkpoint does not depend on the number of ranks: fc1's weight is [gate; up], (2n, h), as in one process's
        ``state_dict``.

        Args:
            prefix: prefix of all keys.
            sharded_offsets: (axis, index, size) for each axis that the checkpoint has in front of the parameters' axes.
                For example, ((0, layer, layers),) stacks the parameters of all layers.
            metadata: {"singleton_local_shards": True} saves gate and up under two keys, ``…_w`` and ``…_v``. Megatron's
                layers pass {"dp_cp_group": group}. The result is then for Megatron's ``dist_checkpointing``.

        Raises:
            ValueError: a linear comes from Megatron, and metadata has no dp_cp_group.
        """
        if metadata is not None and "dp_cp_group" in metadata:  # one of Megatron's layers made the call
            from megatron.core.transformer.mlp import apply_swiglu_sharded_factory as split
            from megatron.core.transformer.utils import sharded_state_dict_default as state_of
        else:
            from torch_fused_ops.distributed.checkpoint import apply_swiglu_sharded_factory as split
            from torch_fused_ops.distributed.checkpoint import sharded_state_dict as state_of

            _check_linears(self)
        separate_keys = bool((metadata or {}).get("singleton_local_shards", False))
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            entries = state_of(module, f"{prefix}{name}.", sharded_offsets, metadata)
            is_packed = name == "linear_fc1" and self._activation.gated
            for key, entry in entries.items():
                if not is_packed or not key.endswith((".weight", ".bias")):
                    state[key] = entry
                    continue
                parts = split(entry, sharded_offsets, separate_keys)
                state |= parts if isinstance(parts, dict) else {key: parts}
        return state


def _check_linears(mlp: MLP) -> None:
    """Raise ValueError for a linear of Megatron: ``torch.distributed.checkpoint`` does not support its tensors."""
    for name, child in mlp.named_children():
        if not hasattr(child, "shard_specs") and hasattr(child, "sharded_state_dict"):
            raise ValueError(
                f"metadata without dp_cp_group is not accepted with {name} of type {type(child).__name__}, a linear of "
                "Megatron: dp_cp_group must be the process group that holds the same parameters"
            )


def _from_megatron(name: str | None, child: str, pg_collection: Any) -> dict[str, Any]:
    """Return a linear's arguments name and pg_collection. Older releases of Megatron lack them, so omit None."""
    arguments = {"name": name and f"{name}.{child}", "pg_collection": pg_collection}
    return {argument: value for argument, value in arguments.items() if value is not None}


def _check_expert(config: Any, ffn_hidden_size: int | None) -> None:
    if ffn_hidden_size is None:
        raise ValueError("ffn_hidden_size=None is not accepted for an expert: the config's value is for dense MLPs")
    if (blocks := getattr(config, "moe_mlp_glu_interleave_size", None)) is not None:
        raise ValueError(f"moe_mlp_glu_interleave_size={blocks!r} is not accepted: reorder fc1's rows to [gate; up]")
