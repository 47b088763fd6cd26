"""Tensor parallelism of two linears with an activation between them (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank holds rows of the first weight (gate rows and up rows of a packed [gate | up] weight) and the matching columns
of the second. The activation needs no communication. DTensor does the rest: tensors become DTensors where they enter
the first linear and leave the second, are redistributed, and become plain tensors again.

    forward    nothing on entering            all-reduce on leaving
    backward   all-reduce                     nothing

or, with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198), where tokens are sharded outside,

    forward    all-gather                     reduce-scatter
    backward   reduce-scatter                 all-gather

Backward also sums a per-token scale's gradient over ranks and, with sequence parallelism, the second bias's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from torch_fused_ops.distributed.shard_spec import Shardable, ShardSpec


class TensorParallel:
    """The processes that shard a linear's weight, and the collectives on its inputs, outputs and parameters.

    Args:
        meshes: one-dimensional, of the same processes, for each kind of device where tensors may be.
        sequence_parallel: outside, each rank holds its shard of the tokens, along the first axis.
        summed_outside: communicate nothing: the caller sums the ranks' outputs and the input's gradients.
    """

    def __init__(self, *meshes: DeviceMesh, sequence_parallel: bool = False, summed_outside: bool = False) -> None:
        for mesh in meshes:
            if mesh.ndim != 1:
                raise ValueError(f"mesh has {mesh.ndim} dimensions; accepted: one, for instance mesh['tp']")
        self.meshes, self.sequence_parallel = {mesh.device_type: mesh for mesh in meshes}, sequence_parallel
        self.size, self.rank = meshes[0].size(), meshes[0].get_local_rank()
        self._outside: Any = Shard(0) if sequence_parallel else Replicate()
        self.summed_outside = summed_outside

    @classmethod
    def of(cls, group: dist.ProcessGroup, **arguments: bool) -> TensorParallel:
        """Make the meshes of a process group."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        here = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        kinds = [device.type for device in group._device_types if device.type in here]
        return cls(*(DeviceMesh.from_group(group, kind) for kind in kinds), **arguments)

    def _any_mesh(self, t: Tensor) -> DeviceMesh:
        """Support parameters that are created on one device and moved later."""
        return self.meshes.get(t.device.type) or next(iter(self.meshes.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # the same processes shard a copied module

    # ---- activations

    def enter(self, x: Tensor) -> Tensor:
        """Gather x from each rank's tokens; backward sums the ranks' gradients."""
        return x if self.summed_outside else self._redistribute(x, self._outside, Replicate(), [Partial()])

    def leave(self, y: Tensor) -> Tensor:
        """Sum the ranks' y; each rank gets its shard of the tokens."""
        return y if self.summed_outside else self._redistribute(y, Partial(), self._outside)

    def _redistribute(self, local: Tensor, before: Any, after: Any, grad_placements: Any = None) -> Tensor:
        t = DTensor.from_local(local, self.meshes[local.device.type], [before], run_check=False)
        result: Tensor = t.redistribute(placements=[after]).to_local(grad_placements=grad_placements)
        return result

    # ---- parameters

    def shard(self, whole: Tensor, spec: ShardSpec) -> Tensor:
        """This rank's shard of a whole parameter; all ranks get it from the first rank, so seeds may differ."""
        if spec.axis is not None:
            _check_divides(whole.shape[spec.axis], spec.groups, self.size)
        shape = self.shape(whole.shape, spec)
        if whole.is_meta:
            return whole.new_empty(shape)
        mesh = self._any_mesh(whole)
        if spec.axis is None:
            shards = distribute_tensor(whole, mesh, [Replicate()])
        else:
            shards = distribute_tensor(whole.unflatten(spec.axis, (spec.groups, -1)), mesh, [Shard(spec.axis + 1)])
        return shards.to_local().reshape(shape).to(whole.device)

    def shape(self, whole: torch.Size, spec: ShardSpec) -> torch.Size:
        """The shape of a rank's shard."""
        return torch.Size(n // self.size if axis == spec.axis else n for axis, n in enumerate(whole))

    @staticmethod
    def local(parameter: Tensor) -> Tensor:
        """This rank's shard as a plain tensor; the parameter may be a DTensor."""
        if not isinstance(parameter, DTensor):
            return parameter
        local: Tensor = parameter.to_local()
        return local

    def as_dtensor(self, local: Tensor, whole: Tensor, spec: ShardSpec) -> DTensor:
        """A DTensor of the whole parameter from this rank's shard."""
        placement: Any = Replicate()
        if spec.axis is not None:
            placement = Shard(spec.axis) if spec.groups == 1 else _StridedShard(spec.axis, split_factor=spec.groups)
        return DTensor.from_local(
            local, self._any_mesh(local), [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def gradient_of(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """The parameter's gradient from that of its local tensor."""
        if not isinstance(parameter, DTensor):
            return grad
        mesh, places, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
        return DTensor.from_local(grad, mesh, places, run_check=False, shape=shape, stride=stride)

    def replicated(self, bias: Tensor) -> Tensor:
        """A bias that all ranks hold and add to their own tokens; backward sums the ranks' gradients."""
        return self._redistribute(bias, Replicate(), Replicate(), [Partial()]) if self.sequence_parallel else bias

    def replicated_gradient(self, grad: Tensor) -> Tensor:
        """The sum of the ranks' gradients of a ``replicated`` bias."""
        return self._redistribute(grad, Partial(), Replicate()) if self.sequence_parallel else grad


def _check_divides(features: int, groups: int, ranks: int) -> None:
    if features % (groups * ranks):
        raise ValueError(
            f"{features // groups} features are not accepted with tensor parallelism over {ranks} ranks: they do not "
            "divide evenly"
        )


# ---- parallelize_module ----------------------------------------------------------------------------------------------


class ShardedLinear(ParallelStyle):
    """Shards ``nn.ColumnParallelLinear`` or ``nn.RowParallelLinear`` as DTensors."""

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Shardable):
            raise TypeError(f"{type(module).__name__} is not accepted: this is for the linears of torch_fused_ops.nn")
        module.shard(TensorParallel(device_mesh, sequence_parallel=self.sequence_parallel), as_dtensors=True)
        return module


class PackedColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for an ``nn.Linear`` with packed [gate | up] output: each rank computes columns of both."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        packed = [_StridedShard(0, split_factor=2)]
        for key, parameter in list(module.named_parameters(recurse=False)):
            _check_divides(parameter.shape[0], 2, device_mesh.size())
            try:
                sharded = distribute_tensor(parameter.detach(), device_mesh, packed)
                if parameter.ndim == 2:  # torch 2.11 makes such a tensor and cannot compute with it
                    row = DTensor.from_local(parameter.new_zeros(1, parameter.shape[1]), device_mesh, run_check=False)
                    nn.functional.linear(row, sharded)
            except ValueError as error:
                raise NotImplementedError(
                    f"{type(module).__name__} with packed gate and up is not accepted: this torch's DTensor cannot "
                    "shard each half of a tensor. Use torch 2.13 or later, or torch_fused_ops.nn.MLP"
                ) from error
            setattr(module, key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return outputs.to_local() if use_local_output else outputs


def tensor_parallel_plan(mlp: nn.Module, sequence_parallel: bool | None = None) -> dict[str, ParallelStyle]:
    """The plan for an MLP's linears that ``torch.distributed.tensor.parallel.parallelize_module`` takes.

        parallelize_module(mlp, mesh["tp"], tensor_parallel_plan(mlp))

    Parameters become DTensors. Each half of a packed [gate | up] weight is sharded, so that each rank computes gate and
    up of the same columns.

    Args:
        mlp: ``nn.MLP``, or a module whose children ``fc1`` and ``fc2`` are ``nn.Linear``, such as ``nn.FusedMLP``, and
            whose forward passes plain tensors between them.
        sequence_parallel: tokens are sharded along the first axis outside; the default is ``mlp.config``'s.

    Raises:
        ValueError: the module has no such children.
    """
    children: dict[str, Any] = dict(mlp.named_children())
    names = ("linear_fc1", "linear_fc2") if "linear_fc1" in children else ("fc1", "fc2")
    if not all(name in children for name in names):
        listed = ", ".join(f"{name} ({type(child).__name__})" for name, child in children.items())
        raise ValueError(
            f"{type(mlp).__name__} is not accepted: it must have children fc1 and fc2, and has {listed or 'none'}"
        )
    if sequence_parallel is None:
        sequence_parallel = getattr(getattr(mlp, "config", None), "sequence_parallel", None) or False
        if sequence_parallel not in (False, True):
            raise TypeError(f"sequence_parallel={sequence_parallel!r} is not accepted: it must be True or False")
    first, second = (children[name] for name in names)
    if isinstance(second, Shardable):
        return {name: ShardedLinear(sequence_parallel) for name in names}
    outside: Any = Shard(0) if sequence_parallel else Replicate()
    packed = first.out_features == 2 * second.in_features
    columns = PackedColwiseParallel if packed else ColwiseParallel
    return {names[0]: columns(input_layouts=outside), names[1]: RowwiseParallel(output_layouts=outside)}
