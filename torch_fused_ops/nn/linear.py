"""Megatron's linear layers: they may return their bias to the caller, and defer weight gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.nn._gemms import Gemms, GroupedGemms, under_autocast
from torch_fused_ops.nn.config import checked, read, read_groups

if TYPE_CHECKING:  # importing DTensor takes 0.4 s
    from torch_fused_ops.distributed.checkpoint import Offsets
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel


class Experts(NamedTuple):
    """The experts whose weights a linear holds: ``local`` of ``total`` experts, starting with number ``first``."""

    local: int
    first: int
    total: int


class _Deferred(torch.autograd.Function):
    """Return x · weightᵀ and the bias; backward computes x's gradient and defers the parameters' gradients.

    The bias is returned unchanged. The operator that adds the bias later computes the bias gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, linear: Linear, gemms: Gemms
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # an unused bias has no gradient, as in eager mode
        ctx.dtype = x.dtype
        x, cast_weight = under_autocast(x, weight)
        ctx.save_for_backward(x if weight.requires_grad else None, cast_weight)
        ctx.parameters, ctx.linear, ctx.gemms = (weight, bias), linear, gemms
        return gemms.forward(x, cast_weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, bias_grad: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        if torch.is_grad_enabled():  # ``once_differentiable`` would raise only in a later backward, if at all
            raise RuntimeError(
                "delay_wgrad_compute=True is not accepted with create_graph=True: deferred weight gradients have no "
                "graph"
            )
        (x, cast_weight), (weight, bias), linear, gemms = ctx.saved_tensors, ctx.parameters, ctx.linear, ctx.gemms
        if x is not None and grad is not None:
            linear._defer(weight, lambda: gemms.weight_gradient(grad, x).to(weight.dtype))
        if bias is not None and bias_grad is not None:
            linear._defer(bias, lambda: linear._bias_gradient(bias_grad))
        if grad is None or not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return gemms.input_gradient(grad, cast_weight).to(ctx.dtype), None, None, None, None


class Linear(nn.Module):
    """Return x · weightᵀ + bias, or, with ``skip_bias_add``, x · weightᵀ and the bias separately.

    Attributes:
        weight: (output_size, input_size), or this rank's shard.
        bias: (output_size,), or this rank's shard, or None.
        parallel: the processes that shard the weight, or None.
        gemm: the GEMM's precision, as ``FusionPolicy.gemm``: see ``set_gemm``.
        replica: this process's number among the processes with the same experts, or None if unknown.

    Args:
        skip_bias_add: return the bias to the caller, to be added in a fused kernel.
        delay_wgrad: ``backward`` computes only the input's gradient, and ``backward_dw`` the parameters' gradients
            without calling hooks on parameters (from DistributedDataParallel or FSDP).
        init_method: fills the weight in place; the bias is zeroed, as in Megatron. If None, use ``nn.Linear``'s values.
        experts: stack a weight and a bias per expert along a first axis.
    """

    parallel: TensorParallel | None = None
    replica: int | None = None
    gemm = "bf16"

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        skip_bias_add: bool = False,
        delay_wgrad: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        experts: Experts | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size = checked("input_size", input_size, required=True)
        self.output_size = output_size = checked("output_size", output_size, required=True)
        self.skip_bias_add, self.init_method, self.experts = skip_bias_add, checked("init_method", init_method), experts
        stacked = () if experts is None else (experts.local,)
        self.weight = nn.Parameter(torch.empty(*stacked, output_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*stacked, output_size, device=device, dtype=dtype)) if bias else None
        # For each parameter, functions that compute its deferred gradients, oldest first; None without ``delay_wgrad``.
        self._deferred: dict[nn.Parameter, deque[Callable[[], Tensor]]] | None = {} if delay_wgrad else None
        self.reset_parameters()

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        """The shard spec of each parameter, by name."""
        return {"weight": ShardSpec(None), "bias": ShardSpec(None)}

    def reset_parameters(self) -> None:
        """Reinitialize the parameters; shards get the same numbers as without sharding."""
        if self.parallel is None:
            self._fill()
            return
        unsharded = Linear(
            self.input_size,
            self.output_size,
            bias=self.bias is not None,
            init_method=self.init_method,
            device=self.weight.device,
            dtype=self.weight.dtype,
            experts=self.experts,
        )
        with torch.no_grad():
            for name, parameter in unsharded.named_parameters():
                shard = self.parallel.shard(parameter.detach(), self.shard_specs[name])
                getattr(self, name).copy_(shard)

    def _fill(self) -> None:
        weight, bias, experts = self.weight, self.bias, self.experts
        if experts is None:
            self._fill_matrix(weight, bias)
            return
        # Draw the numbers of all experts: with the same seed, an expert's initial weights do not depend on sharding.
        unused = torch.empty_like(weight[0]), None if bias is None else torch.empty_like(bias[0])
        for index in range(-experts.first, experts.total - experts.first):
            local = 0 <= index < experts.local
            with torch.no_grad():
                self._fill_matrix(*((weight[index], None if bias is None else bias[index]) if local else unused))

    def _fill_matrix(self, weight: Tensor, bias: Tensor | None) -> None:
        if self.init_method is None:
            nn.Linear.reset_parameters(SimpleNamespace(weight=weight, bias=bias))  # type: ignore[arg-type]
            return
        with torch.no_grad():
            self.init_method(weight)
            if bias is not None:
                bias.zero_()

    def shard(self, parallel: TensorParallel | None) -> None:
        """Replace the parameters by this rank's shards.

        Raises:
            ValueError: features do not divide evenly.
        """
        if parallel is None:
            return
        self._check_gemm(self.gemm, parallel)
        for name, parameter in list(self.named_parameters(recurse=False)):
            shard = parallel.shard(parameter.detach(), self.shard_specs[name])
            setattr(self, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
        self.parallel = parallel

    def _mark(self, config: Any, is_expert: bool) -> None:
        """Set the attributes that Megatron reads from parameters, if the config comes from Megatron.

        Megatron's gradient clipping counts a parameter without ``tensor_model_parallel`` only on the first rank. If
        ``allreduce`` is False, Megatron's DDP sums the gradient over the ranks that have the same experts.
        """
        if not hasattr(config, "tensor_model_parallel_size"):
            return
        tensor, expert, experts = (
            getattr(config, f"{kind}_parallel_size", None) or 1
            for kind in ("tensor_model", "expert_tensor", "expert_model")
        )
        reduced_separately = is_expert and (experts > 1 or expert != tensor)
        for name, parameter in self.named_parameters(recurse=False):
            axis, groups = self.shard_specs[name]
            marks: dict[str, Any] = {"allreduce": not reduced_separately}
            if axis is not None:
                marks |= {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": groups}
            for mark, value in marks.items():
                setattr(parameter, mark, value)

    def forward(self, x: Tensor, /, entered: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the result, and the bias if the caller must add it, else None. ``entered``: x is from ``_enter``."""
        plain = (
            self.parallel is None and not self.skip_bias_add and (self._deferred is None or not torch.is_grad_enabled())
        )
        if plain and self.gemm == "bf16":
            return F.linear(x, self.weight, self.bias), None
        return self._forward(x, entered, Gemms(self.gemm))

    def set_gemm(self, gemm: str) -> None:
        """Set the GEMM's precision to a value of ``FusionPolicy.gemm``; the caller checks sizes.

        Raises:
            ValueError: this linear does not support float8; the message gives the reason.
        """
        self._check_gemm(gemm, self.parallel)
        self.gemm = gemm

    def _check_gemm(self, gemm: str, parallel: TensorParallel | None) -> None:
        if gemm != "bf16" and parallel is not None:
            raise ValueError(
                f"gemm={gemm!r} is not accepted with a weight that {parallel.size} processes shard: they communicate "
                "through DTensors, which float8 GEMMs do not take"
            )
        if gemm != "bf16" and self._deferred is not None:
            raise ValueError(
                f"gemm={gemm!r} is not accepted with delay_wgrad_compute=True: float8 operators compute the "
                "weight's gradient during backward"
            )

    def _forward(self, x: Tensor, entered: bool, gemms: Gemms) -> tuple[Tensor, Tensor | None]:
        bias, added = self.bias, None
        x = x if entered else self._enter(x)
        if self._deferred is not None and torch.is_grad_enabled():
            call: Callable[..., tuple[Tensor, Tensor | None]] = _Deferred.apply
            y, added = call(x, self.weight, bias if bias is not None and bias.requires_grad else None, self, gemms)
        else:
            y = gemms.forward(x, self.weight)
        y = self._leave(y)
        if bias is None:
            return y, None
        added = self._used_bias(bias) if added is None else added
        return (y, bias_for_caller(self, added)) if self.skip_bias_add else (gemms.add(y, added), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's shards of the parameters, for ``torch.distributed.checkpoint``: see ``MLP.sharded_state_dict``.

        A packed parameter's shard is one piece, which ``apply_swiglu_sharded_factory`` splits into gate and up. With
        metadata["dp_cp_group"], the tensors are Megatron's, and Megatron's function of that name splits them.
        """
        from torch_fused_ops.distributed import megatron_checkpoint
        from torch_fused_ops.distributed.checkpoint import ShardedTensor

        if megatron_checkpoint.is_megatron_call(metadata):
            return megatron_checkpoint.linear_state(self, prefix, sharded_offsets, metadata)
        return {
            f"{prefix}{name}": ShardedTensor.of_parameter(
                f"{prefix}{name}",
                parameter,
                self.shard_specs[name],
                self.parallel,
                sharded_offsets,
                None if self.experts is None else self.experts[1:],
            )
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Also load Megatron's checkpoints: ignore ``_extra_state``, and stack grouped weight0, weight1, …."""
        for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
            del state_dict[key]
        num_experts = 0 if self.experts is None else self.experts.local
        for name in ("weight", "bias") if num_experts else ():
            keys = [f"{prefix}{name}{i}" for i in range(num_experts)]
            if f"{prefix}{name}" not in state_dict and all(key in state_dict for key in keys):
                state_dict[f"{prefix}{name}"] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    # Sharded linears override these; for one process they are identities.

    def _enter(self, x: Tensor) -> Tensor:
        return x

    def _leave(self, y: Tensor) -> Tensor:
        return y

    def _used_bias(self, bias: Tensor) -> Tensor:
        return bias

    def _bias_gradient(self, grad: Tensor) -> Tensor:
        return grad

    def _defer(self, parameter: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        assert self._deferred is not None
        self._deferred.setdefault(parameter, deque()).append(gradient)

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest ``backward`` deferred; does nothing without ``delay_wgrad``."""
        with torch.no_grad():
            for parameter, queue in (self._deferred or {}).items():
                if queue:
                    gradient = queue.popleft()()
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def extra_repr(self) -> str:
        ranks = "" if self.parallel is None else f", over {self.parallel.size} ranks"
        experts = "" if self.experts is None else f", experts={self.experts.local} of {self.experts.total}"
        gemm = "" if self.gemm == "bf16" else f", gemm={self.gemm}"
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{experts}{ranks}{gemm}"


class _ParallelLinear(Linear):
    """A linear that Megatron's builders can construct: it reads the config, and shards and marks its parameters."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        is_expert: bool = False,
        bias: bool = True,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        **arguments: Any,
    ) -> None:
        deferred, dtype = read(config, "delay_wgrad_compute"), read(config, "params_dtype")
        super().__init__(input_size, output_size, bias=bias, delay_wgrad=deferred, dtype=dtype, **arguments)
        group = read_groups(config, is_expert, tp_group, pg_collection=pg_collection).tp
        self.shard(_parallel(config, group, is_expert, bias))
        self._mark(config, is_expert)


class ColumnParallelLinear(_ParallelLinear):
    """The first linear, a ``LinearFc1Builder``: each rank of ``tp_group`` computes a shard of the output features.

    Args:
        gather_output: not accepted if the weight is sharded: the second linear takes shards.
        stride: the number of tensors packed in the output, 2 for [gate | up]; a rank has a shard of each.
        is_expert: under Megatron's config, the linears do not communicate. Megatron's token dispatchers give each rank
            all rows, and sum the second linear's results over the ranks.
        pg_collection: Megatron's ``ProcessGroupCollection``: its ``tp``, or an expert's ``expt_tp``, is the default
            tp_group.
        name, tp_comm_buffer_name: accepted, as Megatron's layers pass them, and not used.
        (others): see ``Linear``; the config has ``delay_wgrad_compute``, ``params_dtype``, ``sequence_parallel``.

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
        spec = ShardSpec(0 if self.experts is None else 1, self.stride)
        return {"weight": spec, "bias": spec}

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.parallel is None else self.parallel.enter(x)


class RowParallelLinear(_ParallelLinear):
    """The second linear, a ``LinearFc2Builder``: each rank multiplies its input features; the results are summed.

    Args:
        input_is_parallel: must be True if the weight is sharded.
        (others): see ``ColumnParallelLinear``.

    Raises:
        ValueError: for input_is_parallel=False, and for features that do not divide evenly.

    Source: ``megatron.core.tensor_parallel.RowParallelLinear``.
    """

    def __init__(
        self, input_size: int, output_size: int, /, *, input_is_parallel: bool = True, **arguments: Any
    ) -> None:
        super().__init__(input_size, output_size, **arguments)
        if not input_is_parallel and self.parallel is not None:
            raise ValueError("input_is_parallel=False is not accepted: the first linear gives each rank's own features")

    @property
    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(1 if self.experts is None else 2), "bias": ShardSpec(None)}

    def _leave(self, y: Tensor) -> Tensor:
        return y if self.parallel is None else self.parallel.leave(y)

    def _used_bias(self, bias: Tensor) -> Tensor:
        return bias if self.parallel is None else self.parallel.replicated(bias)

    def _bias_gradient(self, grad: Tensor) -> Tensor:
        return grad if self.parallel is None else self.parallel.replicated_gradient(grad)


class GroupedLinear(Linear):
    """A linear with a weight and a bias per expert, for rows of x that are sorted by expert.

    Attributes:
        weight: (num_local_experts, output_size, input_size), or this rank's shard.
        bias: (num_local_experts, output_size), or this rank's shard, or None.
    """

    experts: Experts

    def shard(self, parallel: TensorParallel | None) -> None:
        """Do the same as ``Linear.shard``.

        Raises:
            ValueError: also with sequence parallelism: rows that each rank has sorted are not sorted after the gather.
        """
        if parallel is not None and parallel.sequence_parallel:
            raise ValueError(
                "sequence_parallel=True is not accepted for experts over several ranks: their rows are sorted by "
                "expert. Gather the tokens before sorting them, and set sequence_parallel=False in the experts' config"
            )
        super().shard(parallel)

    def forward(  # type: ignore[override]
        self, x: Tensor, tokens_per_expert: Tensor | Sequence[int] | GroupedGemms, /, entered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result, and the bias if the caller must add it, else None.

        Args:
            x: (T, input_size), sorted by expert.
            tokens_per_expert: (num_local_experts,), each expert's number of rows.
        """
        gemms = tokens_per_expert
        if not isinstance(gemms, GroupedGemms):
            gemms = GroupedGemms.from_counts(x, gemms, self.experts.local)
        return self._forward(x, entered, GroupedGemms(gemms.ends, self.gemm))


class _GroupedParallelLinear(GroupedLinear):
    """The experts' linears as Megatron's builders call them.

    Args:
        num_local_experts: this rank's number of experts.
        ep_group: the processes that share the experts, ``num_local_experts`` each.
        pg_collection: Megatron's ``ProcessGroupCollection``: its ``expt_tp`` and ``ep`` are the groups' defaults, and
            Megatron's checkpoints need its ``expt_dp``.
        (others): see ``ColumnParallelLinear`` and ``RowParallelLinear``.
    """

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        is_expert: bool = True,
        tp_group: torch.distributed.ProcessGroup | None = None,
        ep_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        **arguments: Any,
    ) -> None:
        groups = read_groups(config, True, tp_group, ep_group, pg_collection, grouped=True)
        count: int = checked("num_local_experts", num_local_experts, required=True)
        ranks, rank = (1, 0) if groups.ep is None else (groups.ep.size(), groups.ep.rank())
        arguments |= {"config": config, "is_expert": True, "tp_group": groups.tp}
        super().__init__(input_size, output_size, experts=Experts(count, rank * count, ranks * count), **arguments)
        self.replica = None if groups.expt_dp is None else groups.expt_dp.rank()


class GroupedColumnParallelLinear(_GroupedParallelLinear, ColumnParallelLinear):
    """The experts' first linear, a ``GroupedLinearBuilder``: a ``ColumnParallelLinear`` per expert."""


class GroupedRowParallelLinear(_GroupedParallelLinear, RowParallelLinear):
    """The experts' second linear, a ``GroupedLinearBuilder``: a ``RowParallelLinear`` per expert."""


def bias_for_caller(module: nn.Module, bias: Tensor) -> Tensor:
    """Return the bias, or a copy if FSDP2 wraps the module, since FSDP2 frees parameters after forward."""
    return bias.clone() if hasattr(module, "set_requires_gradient_sync") else bias


def _parallel(
    config: Any, group: torch.distributed.ProcessGroup | None, is_expert: bool, bias: bool
) -> TensorParallel | None:
    if group is None or group.size() == 1:
        return None
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

    # Megatron's token dispatchers gather an expert's rows from the ranks that shard it, and sum its outputs.
    if not (is_expert and hasattr(config, "expert_tensor_parallel_size")):
        return TensorParallel(group, sequence_parallel=read(config, "sequence_parallel"))
    if bias:
        raise ValueError(
            f"add_bias_linear=True is not accepted with expert_tensor_parallel_size={group.size()}: Megatron's token "
            "dispatcher sums the ranks' outputs, and would add the bias on every rank"
        )
    return TensorParallel(group, summed_outside=True)
