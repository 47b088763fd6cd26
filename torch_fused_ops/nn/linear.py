"""Linear layers as Megatron's MLP builds them: they may hand their bias on, and leave weight gradients for later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops.distributed.shard_spec import Shardable, ShardSpec
from torch_fused_ops.nn._gemms import Groups, Products, under_autocast
from torch_fused_ops.nn.config import ParallelGroups, checked, read, read_groups

if TYPE_CHECKING:  # importing DTensor takes 0.4 s
    from torch_fused_ops.distributed.checkpoint import Offsets
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

__all__ = [
    "ColumnParallelLinear",
    "DeferredWeightGradient",
    "Experts",
    "GroupedColumnParallelLinear",
    "GroupedLinear",
    "GroupedRowParallelLinear",
    "Linear",
    "RowParallelLinear",
]


class Experts(NamedTuple):
    """Of which experts a linear has the weights: so many here, from the first on, of a total."""

    here: int
    first: int
    total: int


class DeferredWeightGradient:
    """Gradients of parameters that ``backward`` leaves for ``backward_dw``: a queue for each, first in, first out."""

    def __init__(self) -> None:
        self.queues: dict[nn.Parameter, deque[Callable[[], Tensor]]] = {}

    def put(self, parameter: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        """One forward pass's gradient, to be computed later."""
        self.queues.setdefault(parameter, deque()).append(gradient)

    def compute(self) -> None:
        """Add the oldest gradient of each parameter to its ``grad``, as ``backward`` would have done."""
        with torch.no_grad():
            for parameter, queue in self.queues.items():
                if not queue:
                    continue
                gradient = queue.popleft()()
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient


def _check_once() -> None:
    """Not ``once_differentiable``, whose error stands where ``torch.autograd.grad`` may never come by."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "delay_wgrad_compute=True is not accepted with create_graph=True: weight gradients that are computed later "
            "are in no graph"
        )


class _LinearDeferred(torch.autograd.Function):
    """x · weightᵀ; backward gives x's gradient and leaves weight's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, linear: Linear, products: Products) -> Tensor:
        ctx.dtype = x.dtype
        x, own = under_autocast(x, linear._own(weight))
        ctx.save_for_backward(x if weight.requires_grad else None, own)
        ctx.parameter, ctx.linear, ctx.products = weight, linear, products
        return products.forward(x, own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        _check_once()
        (x, weight), parameter, products = ctx.saved_tensors, ctx.parameter, ctx.products
        if x is not None:
            ctx.linear._put(parameter, lambda: products.of_weight(grad, x).to(parameter.dtype))
        dx = products.of_input(grad, weight).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None


class _BiasDeferred(torch.autograd.Function):
    """A bias as it is; backward leaves its gradient, which comes out of the kernel that computes its neighbor's."""

    @staticmethod
    def forward(ctx: Any, bias: nn.Parameter, linear: Linear) -> Tensor:
        ctx.parameter, ctx.linear = bias, linear
        own = linear._own(bias)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        _check_once()
        ctx.linear._put(ctx.parameter, lambda: ctx.linear._bias_gradient(grad))
        return None, None


class Linear(Shardable):
    """x · weightᵀ + bias, or, with ``skip_bias_add``, x · weightᵀ and the bias beside it.

    Attributes:
        weight: (output_size, input_size), or this rank's part of it.
        bias: (output_size,), or this rank's part of it, or None.
        parallel: the processes that hold the weight together, or None.
        gemm: what its product is in, as ``FusionPolicy.gemm``: see ``multiply_in``.
        replica: which of the processes that have the same experts this one is, or None where that is not known.

    Args:
        skip_bias_add: hand the bias on, to be added where that costs nothing.
        delay_wgrad: ``backward`` computes the input's gradient alone, ``backward_dw`` the weight's and the bias's.
            Hooks on the parameters' gradients (DistributedDataParallel's, FSDP's) do not see those.
        init_method: fills the weight, in place; by default as ``nn.Linear``. The bias is 0 then, as in Megatron.
        experts: have a weight and a bias for each of these experts, stacked along a first axis.
    """

    parallel: TensorParallel | None = None
    replica: int | None = None
    _as_dtensors = False
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
        stacked = () if experts is None else (experts.here,)
        self.weight = nn.Parameter(torch.empty(*stacked, output_size, input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(*stacked, output_size, device=device, dtype=dtype)) if bias else None
        self._deferred = DeferredWeightGradient() if delay_wgrad else None
        self.reset_parameters()

    @property
    def parts(self) -> dict[str, ShardSpec]:
        """Of each parameter, the part that a rank holds where the linear is shared out."""
        return {"weight": ShardSpec(None), "bias": ShardSpec(None)}

    def reset_parameters(self) -> None:
        """Fill the parameters anew; shared out, with the same numbers as in one process."""
        if self.parallel is None:
            self._fill()
            return
        whole = Linear(
            self.input_size,
            self.output_size,
            bias=self.bias is not None,
            init_method=self.init_method,
            device=self.weight.device,
            dtype=self.weight.dtype,
            experts=self.experts,
        )
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                own = self.parallel.own(getattr(self, name))
                own.copy_(self.parallel.share(parameter.detach(), self.parts[name]))

    def _fill(self) -> None:
        weight, bias, experts = self.weight, self.bias, self.experts
        if experts is None:
            self._fill_one(weight, bias)
            return
        # All experts draw their numbers, so that with the same seed each starts as in one process.
        others = torch.empty_like(weight[0]), None if bias is None else torch.empty_like(bias[0])
        for place in range(-experts.first, experts.total - experts.first):
            own = 0 <= place < experts.here
            with torch.no_grad():
                self._fill_one(*((weight[place], None if bias is None else bias[place]) if own else others))

    def _fill_one(self, weight: Tensor, bias: Tensor | None) -> None:
        if self.init_method is None:
            nn.Linear.reset_parameters(SimpleNamespace(weight=weight, bias=bias))  # type: ignore[arg-type]
            return
        with torch.no_grad():
            self.init_method(weight)
            if bias is not None:
                bias.zero_()

    def share(self, parallel: TensorParallel | None, as_dtensors: bool = False) -> None:
        """As ``Shardable``."""
        if parallel is None:
            return
        self._check_gemm(self.gemm, parallel)
        for name, whole in list(self.named_parameters(recurse=False)):
            part = self.parts[name]
            local: Tensor = parallel.share(whole.detach(), part)
            if as_dtensors:
                local = parallel.as_dtensor(local, whole, part)
            setattr(self, name, nn.Parameter(local, requires_grad=whole.requires_grad))
        self.parallel, self._as_dtensors = parallel, as_dtensors

    def _mark(self, config: Any, is_expert: bool) -> None:
        """Say on the parameters what Megatron reads there, where the config is its.

        Its gradient clipping counts a parameter without ``tensor_model_parallel`` on the first rank alone, and its DDP
        sums a gradient over the ranks that have the same experts where ``allreduce`` is False.
        """
        if not hasattr(config, "tensor_model_parallel_size"):
            return
        tensor, expert, experts = (
            getattr(config, f"{which}_parallel_size", None) or 1
            for which in ("tensor_model", "expert_tensor", "expert_model")
        )
        apart = is_expert and (experts > 1 or expert != tensor)
        for name, parameter in self.named_parameters(recurse=False):
            part = self.parts[name]
            marks: dict[str, Any] = {"allreduce": not apart}
            if part.axis is not None:
                marks |= {"tensor_model_parallel": True, "partition_dim": part.axis, "partition_stride": part.groups}
            for mark, value in marks.items():
                setattr(parameter, mark, value)

    def forward(self, x: Tensor, /, entered: bool = False) -> tuple[Tensor, Tensor | None]:
        """(result, bias to be added, or None); ``entered``: x is what ``_enter`` gives."""
        alone = self.parallel is None and not self.skip_bias_add and not (self._deferred and torch.is_grad_enabled())
        if alone and self.gemm == "bf16":
            return F.linear(x, self.weight, self.bias), None
        return self._forward(x, entered, Products(self.gemm))

    def multiply_in(self, gemm: str) -> None:
        """Multiply in what ``FusionPolicy.gemm`` calls so; sizes are the caller's to check.

        Raises:
            ValueError: float8 is not for this linear, and why.
        """
        self._check_gemm(gemm, self.parallel)
        self.gemm = gemm

    def _check_gemm(self, gemm: str, parallel: TensorParallel | None) -> None:
        if gemm == "bf16":
            return
        if parallel is not None:
            raise ValueError(
                f"gemm={gemm!r} is not accepted where {parallel.size} processes hold a weight together: they "
                "communicate through DTensors, which products in float8 do not take"
            )
        if self._deferred is not None:
            raise ValueError(
                f"gemm={gemm!r} is not accepted with delay_wgrad_compute=True: a weight's gradient in float8 "
                "is computed in backward"
            )

    def _forward(self, x: Tensor, entered: bool, products: Products) -> tuple[Tensor, Tensor | None]:
        later, bias = self._deferred if torch.is_grad_enabled() else None, self.bias
        x = x if entered else self._enter(x)
        product: Callable[..., Tensor] = _LinearDeferred.apply
        y = product(x, self.weight, self, products) if later else products.forward(x, self._own(self.weight))
        y = self._leave(y)
        if bias is None:
            return y, None
        added: Tensor
        if later is not None and bias.requires_grad:
            added = _BiasDeferred.apply(bias, self)  # type: ignore[no-untyped-call]
        else:
            added = self._used_bias(self._own(bias))
        return (y, handed_on(self, added)) if self.skip_bias_add else (products.add(y, added), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """This rank's parts of the parameters, for ``torch.distributed.checkpoint``: see ``MLP.sharded_state_dict``.

        A packed parameter's part is placed as if it were one: ``apply_swiglu_sharded_factory`` then places its halves,
        or Megatron's function of that name, whose tensors these are with metadata["dp_cp_group"].
        """
        from torch_fused_ops.distributed import megatron_checkpoint
        from torch_fused_ops.distributed.checkpoint import ShardedTensor

        if megatron_checkpoint.asked_for(metadata):
            return megatron_checkpoint.of_linear(self, prefix, sharded_offsets, metadata)
        return {
            f"{prefix}{name}": ShardedTensor.of_parameter(
                f"{prefix}{name}",
                parameter,
                self.parts[name],
                self.parallel,
                self._as_dtensors,
                sharded_offsets,
                None if self.experts is None else self.experts[1:],
            )
            for name, parameter in self.named_parameters(recurse=False)
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """As ``nn.Module``, of what Megatron's linears save, too.

        Those have an ``_extra_state``, of which nothing is read here, and grouped ones a weight0, weight1, … each.
        """
        for key in [key for key in state_dict if key.startswith(f"{prefix}_extra_state")]:
            del state_dict[key]
        here = 0 if self.experts is None else self.experts.here
        for name in ("weight", "bias") if here else ():
            keys = [f"{prefix}{name}{i}" for i in range(here)]
            if f"{prefix}{name}" not in state_dict and all(key in state_dict for key in keys):
                state_dict[f"{prefix}{name}"] = torch.stack([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    # What the processes that share a linear do besides; one alone does nothing.

    def _own(self, parameter: Tensor) -> Tensor:
        return parameter if self.parallel is None else self.parallel.own(parameter)

    def _enter(self, x: Tensor) -> Tensor:
        return x

    def _leave(self, y: Tensor) -> Tensor:
        return y

    def _used_bias(self, bias: Tensor) -> Tensor:
        return bias

    def _bias_gradient(self, grad: Tensor) -> Tensor:
        return grad

    def _put(self, parameter: nn.Parameter, gradient: Callable[[], Tensor]) -> None:
        assert self._deferred is not None
        if (parallel := self.parallel) is None:
            self._deferred.put(parameter, gradient)
        else:
            self._deferred.put(parameter, lambda: parallel.gradient_of(parameter, gradient()))

    def backward_dw(self) -> None:
        """Compute the gradients that the oldest ``backward`` has left; nothing without ``delay_wgrad``."""
        if self._deferred is not None:
            self._deferred.compute()

    def extra_repr(self) -> str:
        shared = "" if self.parallel is None else f", over {self.parallel.size} ranks"
        if self.experts is not None:
            shared = f", experts={self.experts.here} of {self.experts.total}{shared}"
        gemm = "" if self.gemm == "bf16" else f", gemm={self.gemm}"
        return f"{self.input_size}, {self.output_size}, bias={self.bias is not None}{shared}{gemm}"


class ColumnParallelLinear(Linear):
    """The first linear, a ``LinearFc1Builder``: each of ``tp_group``'s ranks computes a share of the output features.

    Args:
        gather_output: not accepted where the weight is shared out: the second linear takes shares.
        stride: how many tensors are packed in the output, 2 for [gate | up]; a rank has its share of each.
        is_expert: with a config of Megatron's, whose token dispatchers gather and add up for experts, the linears send
            nothing: each rank gets all rows, and the second linear gives its summand.
        pg_collection: Megatron's ``ProcessGroupCollection``: its ``tp``, or ``expt_tp`` of an expert, where there is no
            tp_group.
        name: taken, as Megatron's layers pass it on, and not used.
        (the rest): as ``Linear``; what the config says of ``delay_wgrad_compute``, ``params_dtype`` and
            ``sequence_parallel``.

    Raises:
        ValueError: for gather_output, and for features that do not divide evenly.

    Source: ``megatron.core.tensor_parallel.ColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None = None,
        gather_output: bool = False,
        bias: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        stride: int = 1,
        name: str | None = None,
        experts: Experts | None = None,
    ) -> None:
        arguments = _linear_arguments(config, bias, skip_bias_add, init_method, experts)
        super().__init__(input_size, output_size, **arguments)
        self.stride = stride
        groups = read_groups(config, is_expert, tp_group, pg_collection=pg_collection)
        parallel = _parallel(config, groups, is_expert, bias)
        if gather_output and parallel is not None:
            raise ValueError("gather_output=True is not accepted: the second linear takes each rank's own features")
        self.share(parallel)
        self._mark(config, is_expert)

    @property
    def parts(self) -> dict[str, ShardSpec]:
        axis = 0 if self.experts is None else 1
        return {"weight": ShardSpec(axis, self.stride), "bias": ShardSpec(axis, self.stride)}

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.parallel is None else self.parallel.enter(x)


class RowParallelLinear(Linear):
    """The second linear, a ``LinearFc2Builder``: each rank computes what its input features give, and these are added.

    Args:
        input_is_parallel: must be True where the weight is shared out.
        (the rest): as ``ColumnParallelLinear``.

    Raises:
        ValueError: for input_is_parallel=False, and for features that do not divide evenly.

    Source: ``megatron.core.tensor_parallel.RowParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        experts: Experts | None = None,
    ) -> None:
        arguments = _linear_arguments(config, bias, skip_bias_add, init_method, experts)
        super().__init__(input_size, output_size, **arguments)
        groups = read_groups(config, is_expert, tp_group, pg_collection=pg_collection)
        parallel = _parallel(config, groups, is_expert, bias)
        if not input_is_parallel and parallel is not None:
            raise ValueError("input_is_parallel=False is not accepted: the first linear gives each rank's own features")
        self.share(parallel)
        self._mark(config, is_expert)

    @property
    def parts(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(1 if self.experts is None else 2), "bias": ShardSpec(None)}

    def _leave(self, y: Tensor) -> Tensor:
        return y if self.parallel is None else self.parallel.leave(y)

    def _used_bias(self, bias: Tensor) -> Tensor:
        return bias if self.parallel is None else self.parallel.replicated(bias)

    def _bias_gradient(self, grad: Tensor) -> Tensor:
        return grad if self.parallel is None else self.parallel.replicated_gradient(grad)


class GroupedLinear(Linear):
    """A linear of several experts: rows of x, sorted by expert, each with the expert's own weight and bias.

    Attributes:
        weight: (num_local_experts, output_size, input_size), or this rank's part of it.
        bias: (num_local_experts, output_size), or this rank's part of it, or None.
    """

    experts: Experts

    def share(self, parallel: TensorParallel | None, as_dtensors: bool = False) -> None:
        """As ``Linear``.

        Raises:
            ValueError: with sequence parallelism, too: rows are sorted by expert, and shares of them would not be.
        """
        if parallel is not None and parallel.sequence_parallel:
            raise ValueError(
                "sequence_parallel=True is not accepted for experts over several ranks: their rows are sorted by "
                "expert. Gather the tokens before they are sorted, and give the experts a config without it"
            )
        super().share(parallel, as_dtensors)

    def forward(  # type: ignore[override]
        self, x: Tensor, tokens_per_expert: Tensor | Sequence[int] | Groups, /, entered: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(result, bias to be added, or None).

        Args:
            x: (T, input_size), sorted by expert.
            tokens_per_expert: (num_local_experts,), how many rows each has.
        """
        groups = tokens_per_expert
        if not isinstance(groups, Groups):
            groups = Groups.of(x, groups, self.experts.here)
        return self._forward(x, entered, Groups(groups.ends, self.gemm))


class GroupedColumnParallelLinear(GroupedLinear, ColumnParallelLinear):
    """The experts' first linear, a ``GroupedLinearBuilder``: ``ColumnParallelLinear`` for each of them.

    Args:
        num_local_experts: how many experts this rank has.
        ep_group: the processes that have the others, as many each.
        pg_collection: Megatron's ``ProcessGroupCollection``: its ``expt_tp`` and ``ep``, where those groups are not
            given, and its ``expt_dp``, which Megatron's checkpoints need.
        (the rest): as ``ColumnParallelLinear``.
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
        arguments |= {"config": config, "is_expert": True, "tp_group": groups.tp}
        experts = _experts(num_local_experts, groups.ep)
        ColumnParallelLinear.__init__(self, input_size, output_size, experts=experts, **arguments)
        self.replica = None if groups.expt_dp is None else groups.expt_dp.rank()


class GroupedRowParallelLinear(GroupedLinear, RowParallelLinear):
    """The experts' second linear, a ``GroupedLinearBuilder``: ``RowParallelLinear`` for each of them.

    Args: as ``GroupedColumnParallelLinear``.
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
        arguments |= {"config": config, "is_expert": True, "tp_group": groups.tp}
        experts = _experts(num_local_experts, groups.ep)
        RowParallelLinear.__init__(self, input_size, output_size, experts=experts, **arguments)
        self.replica = None if groups.expt_dp is None else groups.expt_dp.rank()


def _experts(count: int, ep_group: torch.distributed.ProcessGroup | None) -> Experts:
    count = checked("num_local_experts", count, required=True)
    ranks, rank = (1, 0) if ep_group is None else (checked("ep_group", ep_group).size(), ep_group.rank())
    return Experts(count, rank * count, ranks * count)


def handed_on(module: nn.Module, bias: Tensor) -> Tensor:
    """A bias for a module's caller: a copy where FSDP2 wraps the module, as it frees parameters after forward."""
    return bias.clone() if hasattr(module, "set_requires_gradient_sync") else bias


def _linear_arguments(
    config: Any,
    bias: bool,
    skip_bias_add: bool,
    init_method: Callable[[Tensor], Any] | None,
    experts: Experts | None,
) -> dict[str, Any]:
    return {
        "experts": experts,
        "bias": bias,
        "skip_bias_add": skip_bias_add,
        "init_method": init_method,
        "delay_wgrad": read(config, "delay_wgrad_compute"),
        "dtype": read(config, "params_dtype"),
    }


def _parallel(config: Any, groups: ParallelGroups, is_expert: bool, bias: bool) -> TensorParallel | None:
    if groups.tp is None or groups.tp.size() == 1:
        return None
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

    # Megatron's token dispatchers gather an expert's rows from the ranks that share it out, and add up its outputs.
    if not (is_expert and hasattr(config, "expert_tensor_parallel_size")):
        return TensorParallel.of(groups.tp, sequence_parallel=read(config, "sequence_parallel"))
    if bias:
        raise ValueError(
            f"add_bias_linear=True is not accepted with expert_tensor_parallel_size={groups.tp.size()}: Megatron's "
            "token dispatcher adds up the ranks' outputs, and would add the bias that often"
        )
    return TensorParallel.of(groups.tp, summed_outside=True)
