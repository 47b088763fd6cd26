"""Megatron core's MLP, for one process or as many as hold its weights: ``megatron.core.transformer.mlp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from torch_fused_ops import tiles
from torch_fused_ops.nn._gemms import DENSE, check_gemm, check_shape
from torch_fused_ops.nn._memory import in_tiles, through
from torch_fused_ops.nn.config import (
    Activation,
    check_precision,
    checked,
    read,
    read_activation,
    read_groups,
    read_memory,
    read_offload,
)
from torch_fused_ops.nn.fused_mlp import untouched
from torch_fused_ops.nn.linear import ColumnParallelLinear, Linear, RowParallelLinear, handed_on

if TYPE_CHECKING:
    from torch_fused_ops.distributed.checkpoint import Offsets

__all__ = [
    "MLP",
    "LinearFc1Builder",
    "LinearFc1Interface",
    "LinearFc2Builder",
    "LinearFc2Interface",
    "MLPSubmodules",
    "TEActivationFunctionBuilder",
    "TEActivationFunctionInterface",
]


class LinearFc1Interface(Protocol):
    """What the first linear must be."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """(result without bias, bias or None)"""
        ...

    def backward_dw(self) -> None:
        """Weight gradients that ``backward`` has left."""
        ...


class LinearFc1Builder(Protocol):
    """What makes a first linear; it is given name and pg_collection if the MLP was."""

    def __call__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        tp_group: torch.distributed.ProcessGroup | None,
        stride: int = 1,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> LinearFc1Interface: ...


class TEActivationFunctionInterface(Protocol):
    """What an activation module must be: packed [gate | up] in, half of it out, if the MLP is gated."""

    def forward(self, input_: Tensor, /) -> Tensor:
        """The activation's result."""
        ...


class TEActivationFunctionBuilder(Protocol):
    """What makes an activation module."""

    def __call__(self, *, config: Any) -> TEActivationFunctionInterface: ...


class LinearFc2Interface(Protocol):
    """What the second linear must be."""

    def forward(self, hidden_states: Tensor, /) -> tuple[Tensor, Tensor | None]:
        """(result without bias, bias or None)"""
        ...

    def backward_dw(self) -> None:
        """Weight gradients that ``backward`` has left."""
        ...


class LinearFc2Builder(Protocol):
    """What makes a second linear; it is given name and pg_collection if the MLP was."""

    def __call__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None,
        tp_group: torch.distributed.ProcessGroup | None,
        name: str | None = None,
        pg_collection: Any = None,
    ) -> LinearFc2Interface: ...


@dataclass
class MLPSubmodules:
    """What an MLP builds its parts with.

    Attributes:
        linear_fc1, linear_fc2: builders; a class whose constructor takes these arguments is one.
        activation_func: builder of an activation module, used with ``config.use_te_activation_func`` alone.
    """

    linear_fc1: LinearFc1Builder = ColumnParallelLinear
    linear_fc2: LinearFc2Builder = RowParallelLinear
    activation_func: TEActivationFunctionBuilder | None = None


class _Block(nn.Module):
    """Two linears and what stands between them, as a config says: what ``MLP`` and ``GroupedMLP`` share."""

    linear_fc1: Any
    linear_fc2: Any
    _grouped = False

    def __init__(self, config: Any, experts: bool) -> None:
        super().__init__()
        checked("config", config, required=True)
        check_precision(config, experts)
        self.config = config
        self._activation = read_activation(config)

    def _build(self, builder: TEActivationFunctionBuilder | None, where: str) -> None:
        """What the activation is, and what is kept of it."""
        self.activation_func = _activation_module(self.config, builder, where, self._activation)
        fused = self._activation.name is not None and self.activation_func is None
        self._memory = read_memory(self.config, fused)
        self._offload = read_offload(self.config, self._memory)
        self._delayed: bool = read(self.config, "delay_wgrad_compute")

    def _multiply_in(self, gemm: str) -> None:
        """Have both linears multiply in this, which ``check_gemm`` has seen."""
        self.gemm = gemm
        for child, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            if isinstance(linear, Linear):
                linear.multiply_in(gemm)
            elif gemm != "bf16":
                raise ValueError(
                    f"gemm={gemm!r} is not accepted with a {child} of type {type(linear).__name__}, which multiplies "
                    "as it does"
                )

    def _run(self, x: Tensor, scale: Tensor | None, *groups: Any) -> tuple[Tensor, Tensor | None]:
        """(fc2's result, its bias to be added); ``groups``: what the linears take besides."""
        biases: dict[str, Tensor | None] = {}
        fc1 = self.linear_fc1
        parallel = fc1.parallel if isinstance(fc1, Linear) else None
        entered: dict[str, Any] = {}
        if parallel is not None:  # here, so that nothing is gathered again where fc1 runs again
            x, scale, entered = parallel.enter(x), scale if scale is None else parallel.enter(scale), {"entered": True}

        level = self._memory
        tiled = tiles.asked(level) is not None
        if tiled and not (scale is None and not groups and parallel is None and self._calls_may_repeat()):
            level = "input"  # probabilities, experts, collectives and delayed gradients go with all tokens at once
        if level == "input" and not (untouched(fc1) or hasattr(fc1, "set_requires_gradient_sync")):
            level = "free"  # a hook need not do the same twice; FSDP2's own do
        then = dict(fc1.named_parameters()) if tiled or level == "input" else {}

        def first(x: Tensor) -> Tensor:
            h: Tensor
            if then and _are_others(fc1, then):  # functional_call's, which are gone when backward comes here again
                h, biases["fc1"] = torch.func.functional_call(fc1, then, (x, *groups), entered)
            else:
                h, biases["fc1"] = fc1(x, *groups, **entered)
            return h

        def activate(h: Tensor) -> Tensor:
            if self.activation_func is None:
                return self._activation(h, biases["fc1"], scale)
            h = self._activation.halves(h)
            y: Tensor = self.activation_func(h if biases["fc1"] is None else h + biases["fc1"])
            return y if scale is None else (y * scale.unsqueeze(-1)).to(y.dtype)

        def second(a: Tensor) -> Tensor:
            y: Tensor
            y, biases["fc2"] = self.linear_fc2(a, *groups)
            return y

        def reads() -> Iterator[Tensor | None]:
            yield scale
            yield from fc1.parameters()
            yield from () if self.activation_func is None else self.activation_func.parameters()

        def run(x: Tensor, level: str) -> Tensor:
            unknown = self.activation_func is not None or self._activation.name is None
            return through(x, first, activate, second, level, self._offload, reads, unknown)

        return in_tiles(x, level, run), biases["fc2"]

    def _calls_may_repeat(self) -> bool:
        """Whether the linears may run once a tile: nobody notices, and nothing is counted by calls."""
        linears = self.linear_fc1, self.linear_fc2
        return all(isinstance(one, Linear) and untouched(one) for one in linears) and not self._delayed

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``: the gradients that the oldest ``backward`` has left, fc2's, then fc1's."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's parts of the parameters, for ``torch.distributed.checkpoint``: to be saved, and loaded in place.

        What is saved does not depend on how many ranks saved it: fc1's weight is [gate; up], (2n, h), as one process's
        ``state_dict`` has it, and loads at any other number of ranks. A ``GroupedMLP``'s parameters are those of all
        experts, on all of ``ep_group``'s ranks, along one axis more: what as many ``MLP``s save with
        sharded_offsets=((0, expert, experts),), and they load each other's.

        Args:
            prefix: of the keys.
            sharded_offsets: (axis, place, size) for each axis in front of the parameters' own, if modules' parameters
                are stacked in the checkpoint: ((0, layer, layers),).
            metadata: {"singleton_local_shards": True} saves gate and up under two keys, ``…_w`` and ``…_v``. With
                {"dp_cp_group": group}, as Megatron's layers call it, or with linears of Megatron's, the tensors are
                those of its ``dist_checkpointing``, and so are a ``GroupedMLP``'s keys:
                ``{prefix}experts.linear_fc1…``.

        Raises:
            ValueError: for singleton_local_shards where gate and up are in blocks (moe_mlp_glu_interleave_size).
        """
        from torch_fused_ops.distributed import megatron_checkpoint
        from torch_fused_ops.distributed.checkpoint import apply_swiglu_sharded_factory, sharded_state_dict

        apart = bool((metadata or {}).get("singleton_local_shards", False))
        blocks = self._activation.interleave
        if apart and blocks is not None:
            raise ValueError(
                f"singleton_local_shards=True is not accepted with moe_mlp_glu_interleave_size={blocks}: gate and up "
                "are not two pieces of the weight"
            )
        packed = ("linear_fc1",) if self._activation.gated and blocks is None else ()
        theirs = megatron_checkpoint.with_group(self, metadata)
        if theirs is not None:
            return megatron_checkpoint.of_block(self, prefix, sharded_offsets, theirs, packed, self._grouped)
        state: dict[str, Any] = {}
        for name, module in self.named_children():
            found = sharded_state_dict(module, f"{prefix}{name}.", sharded_offsets, metadata)
            if name in packed:
                for one in found.values():
                    state |= apply_swiglu_sharded_factory(one, sharded_offsets, apart)
            else:
                state |= found
        return state


class MLP(_Block):
    """fc2(act(fc1(x) + bias1) · scale): Megatron core's MLP block.

    Hidden states (..., h) → (output (..., h), bias to be added to it or None). With ``gated_linear_unit`` fc1 is twice
    as wide and gives [gate | up]. Bias, activation and scale are one kernel each way wherever the activation is in our
    table, whatever ``config.bias_activation_fusion`` says; no flag changes the formula.

    Args:
        config: an ``MLPConfig``, or any object with some of its attributes.
        submodules: builders of the linears; by default ours.
        is_expert: whether this is an expert of a mixture: its sizes are ``moe_ffn_hidden_size``, ``moe_latent_size``.
            With a tp_group and a config of Megatron's see ``ColumnParallelLinear``.
        input_size: by default ``config.hidden_size``.
        ffn_hidden_size: by default ``config.ffn_hidden_size``, for both linears.
        tp_group: the processes that hold the weights together (``distributed.tensor_parallel``): of fc1's weight each
            has its rows, gate rows and up rows if gated, of fc2's its columns, as plain parameters, cut from those that
            one process would have started with. Every rank gets the whole output, or with
            ``config.sequence_parallel`` its tokens'.
        name, is_mtp_layer: taken, as Megatron's ``TransformerLayer`` passes them; the name is handed on to the linears.
        pg_collection: Megatron's ``ProcessGroupCollection``, whose ``tp`` (of an expert ``expt_tp``) is the tp_group
            where none is given; handed on to the linears.
        gemm: what both linears multiply in, as ``FusionPolicy.gemm``: "bf16", the parameters' dtype; or in float8,
            "fp8", "fp8-wgrad-bf16", "fp8-rowwise", "mxfp8" or "mxfp8-wgrad-bf16" (``functional.linear_fp8``), for sizes
            that are multiples of 128, in rows of 16, by "mxfp8" of 32, in one process.

    Raises:
        ValueError, TypeError: for flags that do not go together, each with its reason. Nothing is left for ``forward``.

    Source: ``megatron.core.transformer.mlp.MLP``. There fc2 ignores ``ffn_hidden_size``, fused GELU is the tanh form,
    the unfused one erf's, and some configurations raise in ``forward``.
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
        gemm: str = "bf16",
    ) -> None:
        is_expert = checked("is_expert", is_expert, required=True)
        super().__init__(config, is_expert)
        submodules = checked("submodules", submodules) or MLPSubmodules()
        self.is_expert = is_expert
        self.input_size, ffn, output_size = _sizes(config, is_expert, input_size, ffn_hidden_size)
        self.ffn_hidden_size = ffn
        tp_group = read_groups(config, is_expert, tp_group, pg_collection=pg_collection).tp
        _check_divides(ffn, tp_group)
        check_gemm(gemm, input_size=self.input_size, ffn_hidden_size=ffn, hidden_size=output_size)
        if is_expert and (blocks := read(config, "moe_mlp_glu_interleave_size")) is not None:
            raise ValueError(
                f"moe_mlp_glu_interleave_size={blocks!r} is not accepted with is_expert: GroupedMLP reads it, and "
                "Megatron's MLP does not, so that it would compute something else with the same weights"
            )
        common: dict[str, Any] = {"config": config, "bias": read(config, "add_bias_linear"), "skip_bias_add": True}
        common |= {"is_expert": is_expert, "tp_group": tp_group}
        gated = self._activation.gated
        self.linear_fc1: Any = submodules.linear_fc1(
            self.input_size,
            ffn * 2 if gated else ffn,
            init_method=read(config, "init_method"),
            gather_output=False,
            tp_comm_buffer_name="fc1",
            stride=2 if gated else 1,
            **common,
            **_from_megatron(name, "linear_fc1", pg_collection),
        )
        self._build(submodules.activation_func, "MLPSubmodules.activation_func")
        self.linear_fc2: Any = submodules.linear_fc2(
            ffn,
            output_size,
            init_method=read(config, "output_layer_init_method"),
            input_is_parallel=True,
            tp_comm_buffer_name="fc2",
            **common,
            **_from_megatron(name, "linear_fc2", pg_collection),
        )
        self._multiply_in(gemm)

    @classmethod
    def as_mlp_submodule(cls, submodules: MLPSubmodules | None = None, **arguments: Any) -> MLP:
        """As the constructor: what Megatron's layer specs are given, with ``functools.partial``, to build an MLP.

        Source: the method of this name in ``megatron.core.transformer.mlp.MLP``.
        """
        return cls(submodules=submodules, **arguments)

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(output, bias to be added or None).

        Args:
            hidden_states: (..., input_size).
            per_token_scale: (...), multiplied to what the activation gives (a router's weight of this expert). The
                output bias is then scaled and added here, and the bias returned is None.
            **kwargs: taken and left, as Megatron's layers pass some on.

        Raises:
            TypeError, ValueError: for what is no tensor, or of another shape.
        """
        check_shape("hidden_states", hidden_states, (self.input_size,), "...")
        if per_token_scale is not None:
            check_shape("per_token_scale", per_token_scale, hidden_states.shape[:-1])
        output, bias = self._run(hidden_states, per_token_scale)
        if per_token_scale is not None and bias is not None:
            return DENSE.add(output, bias, per_token_scale), None
        return output, bias if bias is None else handed_on(self, bias)


def _from_megatron(name: str | None, child: str, pg_collection: Any) -> dict[str, Any]:
    """What Megatron's layers give a linear besides, of which its older releases know nothing."""
    given = {"name": checked("name", name) and f"{name}.{child}", "pg_collection": pg_collection}
    return {argument: value for argument, value in given.items() if value is not None}


def _are_others(module: nn.Module, then: dict[str, Tensor]) -> bool:
    """Whether its parameters were others then. FSDP2's own come and go by hooks."""
    if hasattr(module, "set_requires_gradient_sync"):
        return False
    return any(p is not then[name] for name, p in module.named_parameters())


def _sizes(config: Any, is_expert: bool, input_size: int | None, ffn_hidden_size: int | None) -> tuple[int, int, int]:
    """(input size, ffn_hidden_size, output size)"""
    hidden = checked("hidden_size", config.hidden_size, required=True)
    latent = read(config, "moe_latent_size") if is_expert else None
    ffn = checked("ffn_hidden_size", ffn_hidden_size)
    ffn = ffn or read(config, "moe_ffn_hidden_size" if is_expert else "ffn_hidden_size")
    if ffn is None and is_expert:
        raise ValueError(
            "moe_ffn_hidden_size=None is not accepted of an expert: config.ffn_hidden_size is for dense MLPs. Give "
            "config.moe_ffn_hidden_size, or MLP's ffn_hidden_size"
        )
    return latent or checked("input_size", input_size) or hidden, ffn or 4 * hidden, latent or hidden


def _check_divides(ffn: int, tp_group: torch.distributed.ProcessGroup | None) -> None:
    if tp_group is not None and ffn % checked("tp_group", tp_group).size():
        raise ValueError(
            f"ffn_hidden_size={ffn} is not accepted with a tp_group of {tp_group.size()}: it does not divide evenly"
        )


def _activation_module(
    config: Any, builder: TEActivationFunctionBuilder | None, where: str, activation: Activation
) -> nn.Module | None:
    if not read(config, "use_te_activation_func"):
        return None
    if builder is None:
        raise ValueError(f"use_te_activation_func=True is not accepted without {where}, its builder")
    for flag, value, neutral in (
        ("activation_func_clamp_value", activation.clamp, None),
        ("glu_linear_offset", activation.up_offset, 0.0),
    ):
        if value != neutral:
            raise ValueError(f"{flag}={value!r} is not accepted with use_te_activation_func: the module knows none")
    return builder(config=config)  # type: ignore[return-value]
