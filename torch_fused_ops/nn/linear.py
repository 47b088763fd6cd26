"""Megatron's linear layers, which may return their bias to the caller."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.nn.config import read, read_group

if TYPE_CHECKING:  # importing DTensor takes 0.4 s
    from torch_fused_ops.distributed.checkpoint import Offsets
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel


class ParallelLinear(nn.Module):
    """Return x · weightᵀ + bias, or, with ``skip_bias_add``, x · weightᵀ and the bias separately.

    Attributes:
        weight: (output_size, input_size), or this rank's shard.
        bias: (output_size,), or this rank's shard, or None.
        parallel: the processes that shard the weight, or None.

    Args:
        config: its ``params_dtype`` and ``sequence_parallel`` are read.
        init_method: fills the weight in place; the bias is zeroed, as in Megatron. If None, use ``nn.Linear``'s values.
        skip_bias_add: return the bias to the caller, to be added in a fused kernel.
        tp_group: the processes that shard the weight; by default ``pg_collection.tp``.
        pg_collection: Megatron's ``ProcessGroupCollection``.
        is_expert: not accepted if Megatron's config shards experts.
        name, tp_comm_buffer_name: accepted, as Megatron's layers pass them, and not used.
    """

    weight: nn.Parameter
    parallel: TensorParallel | None = None
    _splits_input = False  # True if each process multiplies its own input features

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.init_method = skip_bias_add, init_method
        group = read_group(config, is_expert, tp_group, pg_collection)
        if group is not None and group.size() > 1:
            from torch_fused_ops.distributed.tensor_parallel import TensorParallel

            self.parallel = TensorParallel(group, sequence_parallel=read(config, "sequence_parallel"))
        self.bias: nn.Parameter | None = None
        for name, t in self._initial_values(bias, None, read(config, "params_dtype")).items():
            setattr(self, name, nn.Parameter(t))
        if hasattr(config, "tensor_model_parallel_size"):
            self._mark()

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        """The shard spec of each parameter, by name."""
        raise NotImplementedError

    def _initial_values(
        self, has_bias: bool, device: torch.device | None, dtype: torch.dtype | None
    ) -> dict[str, Tensor]:
        """Return initial values of the parameters, or of this rank's shards, which do not depend on the sharding."""
        weight = torch.empty(self.output_size, self.input_size, device=device, dtype=dtype)
        bias = torch.empty(self.output_size, device=device, dtype=dtype) if has_bias else None
        self._fill(weight, bias)
        values = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        if self.parallel is None:
            return values
        return {name: self.parallel.shard(t, self.shard_specs[name]) for name, t in values.items()}

    def _fill(self, weight: Tensor, bias: Tensor | None) -> None:
        if self.init_method is None:
            nn.Linear.reset_parameters(SimpleNamespace(weight=weight, bias=bias))  # type: ignore[arg-type]
            return
        with torch.no_grad():
            self.init_method(weight)
            if bias is not None:
                bias.zero_()

    def reset_parameters(self) -> None:
        """Reinitialize the parameters."""
        if self.parallel is None:
            self._fill(self.weight, self.bias)
            return
        values = self._initial_values(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, t in values.items():
                getattr(self, name).copy_(t)

    def _mark(self) -> None:
        """Set the attributes that Megatron reads from parameters.

        Megatron's gradient clipping counts a parameter without ``tensor_model_parallel`` only on the first rank. If
        ``allreduce`` is True, Megatron's DDP sums the gradient over all replicas of dense layers.
        """
        for name, parameter in self.named_parameters(recurse=False):
            axis, groups = self.shard_specs[name]
            marks: dict[str, Any] = {"allreduce": True}
            if axis is not None:
                marks |= {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": groups}
            for mark, value in marks.items():
                setattr(parameter, mark, value)

    def forward(self, x: Tensor, /, entered: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the result, and the bias if the caller must add it, else None.

        ``entered``: x is from ``parallel.enter``.
        """
        bias: Tensor | None = self.bias
        summed = self.parallel if self._splits_input else None  # the processes that sum their results
        if self.parallel is not None and summed is None and not entered:
            x = self.parallel.enter(x)
        if self.parallel is None and not self.skip_bias_add:
            return F.linear(x, self.weight, bias), None
        y = F.linear(x, self.weight)
        if summed is not None:
            y, bias = summed.leave(y), None if bias is None else summed.replicated(bias)
        if bias is None:
            return y, None
        return (y, bias_for_caller(self, bias)) if self.skip_bias_add else (y + bias, None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's shards of the parameters, for ``torch.distributed.checkpoint``: see ``MLP.sharded_state_dict``.

        A packed parameter's shard is one piece, which ``apply_swiglu_sharded_factory`` splits into gate and up. With
        metadata["dp_cp_group"], the result is for Megatron's ``dist_checkpointing``.
        """
        if metadata is not None and "dp_cp_group" in metadata:
            return self._megatron_state(prefix, sharded_offsets, metadata["dp_cp_group"])
        from torch_fused_ops.distributed.checkpoint import ShardedTensor

        return {
            f"{prefix}{name}": ShardedTensor.of_parameter(
                f"{prefix}{name}", parameter, self.shard_specs[name], self.parallel, sharded_offsets
            )
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _megatron_state(self, prefix: str, offsets: Offsets, dp_cp_group: Any) -> dict[str, Any]:
        """Return the state as Megatron's ``ColumnParallelLinear`` does (0.16, and its main branch of August 2026).

        Megatron's optimizers find a parameter's state by the parameter object, so an entry's ``data`` is the parameter.
        ``_extra_state`` is the place of TransformerEngine's fp8 state; ours is None.
        """
        from torch.distributed.tensor import DTensor

        state: dict[str, Any] = dict(self.named_parameters(recurse=False))
        for name, parameter in state.items():
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"{prefix}{name} is a DTensor, which Megatron's checkpoints do not support: use distributed.save"
                )
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        axes = {name: self.shard_specs[name].axis for name in state if self.shard_specs[name].axis is not None}
        group = None if self.parallel is None else self.parallel.group
        state["_extra_state"] = None
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, axes, offsets, tp_group=group, dp_cp_group=dp_cp_group
        )
        return sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Ignore the ``_extra_state`` of Megatron's checkpoints."""
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def backward_dw(self) -> None:
        """Do nothing, as Megatron's method: ``backward`` has computed the weight gradient."""

    def extra_repr(self) -> str:
        ranks = "" if self.parallel is None else f", over {self.parallel.size} ranks"
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{ranks}"


class ColumnParallelLinear(ParallelLinear):
    """The first linear, a ``LinearFc1Builder``: each rank of ``tp_group`` computes a shard of the output features.

    Args:
        gather_output: not accepted if the weight is sharded: the second linear takes shards.
        stride: the number of tensors packed in the output, 2 for [gate | up]; a rank has a shard of each.
        (others): see ``ParallelLinear``.

    Raises:
        ValueError: for gather_output, and for features that do not divide evenly.

    Source: ``megatron.core.tensor_parallel.ColumnParallelLinear``.
    """

    def __init__(
        self, input_size: int, output_size: int, /, *, gather_output: bool = False, stride: int = 1, **arguments: Any
    ) -> None:
        self.stride = stride
        super().__init__(input_size, output_size, **arguments)
        if gather_output and self.parallel is not None:
            raise ValueError("gather_output=True is not accepted: the second linear takes each rank's own features")

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        return dict.fromkeys(("weight", "bias"), ShardSpec(0, self.stride))


class RowParallelLinear(ParallelLinear):
    """The second linear, a ``LinearFc2Builder``: each rank multiplies its input features; the results are summed.

    Args:
        input_is_parallel: must be True if the weight is sharded.
        (others): see ``ParallelLinear``.

    Raises:
        ValueError: for input_is_parallel=False, and for features that do not divide evenly.

    Source: ``megatron.core.tensor_parallel.RowParallelLinear``.
    """

    _splits_input = True

    def __init__(
        self, input_size: int, output_size: int, /, *, input_is_parallel: bool = True, **arguments: Any
    ) -> None:
        super().__init__(input_size, output_size, **arguments)
        if not input_is_parallel and self.parallel is not None:
            raise ValueError("input_is_parallel=False is not accepted: the first linear gives each rank's own features")

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(1), "bias": ShardSpec(None)}


def bias_for_caller(module: nn.Module, bias: Tensor) -> Tensor:
    """Return the bias, or a copy if FSDP2 wraps the module, since FSDP2 frees parameters after forward."""
    return bias.clone() if hasattr(module, "set_requires_gradient_sync") else bias
