"""Tensor parallelism of two linears with an activation between them (Shoeybi et al. 2019, arXiv:1909.08053).

Of the first linear's weight each rank holds rows, of a packed [gate | up] weight its gate rows and its up rows; of the
second linear's, the columns that meet them. The activation is then each rank's own affair. What ranks tell each other
is left to DTensor: tensors become DTensors where they enter the first linear and leave the second, are redistributed,
and are plain tensors again.

    forward    nothing on entering            all-reduce on leaving
    backward   all-reduce                     nothing

or, with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198), where tokens are shared out outside,

    forward    all-gather                     reduce-scatter
    backward   reduce-scatter                 all-gather

Besides, a few numbers in backward: a per-token scale's gradient is summed over ranks, and, with sequence parallelism,
the second bias's. A ``TensorParallel`` is what a linear knows of all this.
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

__all__ = ["PackedColwiseParallel", "SharedLinear", "TensorParallel", "tensor_parallel_plan"]


class TensorParallel:
    """The processes that hold a linear's weight together, and how tensors come to them and go.

    Args:
        meshes: one-dimensional, of the same processes, for each kind of device where tensors may be.
        sequence_parallel: outside, each rank holds a share of the tokens, that of its place along the first axis.
        summed_outside: each rank gives its summand of the output, which somebody else adds up, and sums gradients of
            the input likewise: nothing is sent here.
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
        """The processes of a group."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        here = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        kinds = [device.type for device in group._device_types if device.type in here]
        return cls(*(DeviceMesh.from_group(group, kind) for kind in kinds), **arguments)

    def _mesh(self, t: Tensor) -> DeviceMesh:
        return self.meshes[t.device.type]

    def _any_mesh(self, t: Tensor) -> DeviceMesh:
        """For parameters, which may be made elsewhere and moved later."""
        return self.meshes.get(t.device.type) or next(iter(self.meshes.values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a copied module is shared by the same processes

    # ---- activations

    def enter(self, x: Tensor) -> Tensor:
        """What each rank has of x → all of x; what each rank has of its gradient is added up."""
        if self.summed_outside:
            return x
        given = DTensor.from_local(x, self._mesh(x), [self._outside], run_check=False)
        whole: Tensor = given.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole

    def leave(self, y: Tensor) -> Tensor:
        """Each rank's summand of y → its share of the sum."""
        if self.summed_outside:
            return y
        given = DTensor.from_local(y, self._mesh(y), [Partial()], run_check=False)
        summed: Tensor = given.redistribute(placements=[self._outside]).to_local()
        return summed

    # ---- parameters

    def share(self, whole: Tensor, part: ShardSpec) -> Tensor:
        """This rank's part of a whole parameter. All ranks get theirs from the first one's, so seeds may differ."""
        if part.axis is not None:
            _check_divides(whole.shape[part.axis], part.groups, self.size)
        shape = self.shape(whole.shape, part)
        if whole.is_meta:
            return whole.new_empty(shape)
        mesh = self._any_mesh(whole)
        if part.axis is None:
            shares = distribute_tensor(whole, mesh, [Replicate()])
        else:
            shares = distribute_tensor(whole.unflatten(part.axis, (part.groups, -1)), mesh, [Shard(part.axis + 1)])
        return shares.to_local().reshape(shape).to(whole.device)

    def shape(self, whole: torch.Size, part: ShardSpec) -> torch.Size:
        """A rank's part of a shape."""
        return torch.Size(n // self.size if axis == part.axis else n for axis, n in enumerate(whole))

    def own(self, parameter: Tensor) -> Tensor:
        """This rank's part as a plain tensor, of a parameter that may be a DTensor."""
        if not isinstance(parameter, DTensor):
            return parameter
        local: Tensor = parameter.to_local()
        return local

    def as_dtensor(self, local: Tensor, whole: Tensor, part: ShardSpec) -> DTensor:
        """A rank's part of a parameter as a DTensor of the whole."""
        placement: Any = Replicate()
        if part.axis is not None:
            placement = Shard(part.axis) if part.groups == 1 else _StridedShard(part.axis, split_factor=part.groups)
        return DTensor.from_local(
            local, self._any_mesh(local), [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def gradient_of(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """A gradient of what ``own`` gives, as the parameter's."""
        if not isinstance(parameter, DTensor):
            return grad
        return DTensor.from_local(
            grad,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def replicated(self, bias: Tensor) -> Tensor:
        """A parameter that all ranks hold and add to their own tokens."""
        if not self.sequence_parallel:
            return bias
        same = DTensor.from_local(bias, self._mesh(bias), [Replicate()], run_check=False)
        used: Tensor = same.to_local(grad_placements=[Partial()])
        return used

    def replicated_gradient(self, grad: Tensor) -> Tensor:
        """The gradient that ``replicated`` gives a bias whose uses have this one."""
        if not self.sequence_parallel:
            return grad
        parts = DTensor.from_local(grad, self._mesh(grad), [Partial()], run_check=False)
        summed: Tensor = parts.redistribute(placements=[Replicate()]).to_local()
        return summed


def _check_divides(features: int, groups: int, ranks: int) -> None:
    if features % (groups * ranks):
        raise ValueError(
            f"{features // groups} features are not accepted with tensor parallelism over {ranks} ranks: they do not "
            "divide evenly"
        )


# ---- parallelize_module ----------------------------------------------------------------------------------------------


class SharedLinear(ParallelStyle):
    """Shares out one of our linears (``nn.ColumnParallelLinear``, ``nn.RowParallelLinear``), as DTensors."""

    def __init__(self, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Shardable):
            raise TypeError(f"{type(module).__name__} is not accepted: this is for the linears of torch_fused_ops.nn")
        module.share(TensorParallel(device_mesh, sequence_parallel=self.sequence_parallel), as_dtensors=True)
        return module


class PackedColwiseParallel(ColwiseParallel):
    """``ColwiseParallel`` for an ``nn.Linear`` that gives [gate | up]: each rank gives its columns of both."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        packed = [_StridedShard(0, split_factor=2)]
        for key, parameter in list(module.named_parameters(recurse=False)):
            _check_divides(parameter.shape[0], 2, device_mesh.size())
            try:
                shared = distribute_tensor(parameter.detach(), device_mesh, packed)
                if parameter.ndim == 2:  # torch 2.11 makes such a tensor, and can do nothing with it
                    one = DTensor.from_local(parameter.new_zeros(1, parameter.shape[1]), device_mesh, run_check=False)
                    nn.functional.linear(one, shared)
            except ValueError as error:
                raise NotImplementedError(
                    f"{type(module).__name__} with packed gate and up is not accepted: this torch's DTensor cannot "
                    "shard each half of a tensor. torch 2.13's can, and torch_fused_ops.nn.MLP does without"
                ) from error
            setattr(module, key, nn.Parameter(shared, requires_grad=parameter.requires_grad))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        return outputs.to_local() if use_local_output else outputs


# What the linears before and after the activation are called. The first that a module has.
_NAMES = (
    (("linear_fc1",), "linear_fc2"),
    (("fc1",), "fc2"),
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("gate", "up"), "down"),
    (("up",), "down"),
    (("w1", "w3"), "w2"),
)


def tensor_parallel_plan(mlp: nn.Module, sequence_parallel: bool | None = None) -> dict[str, ParallelStyle]:
    """What ``torch.distributed.tensor.parallel.parallelize_module`` is to do with an MLP's linears.

        parallelize_module(mlp, mesh["tp"], tensor_parallel_plan(mlp))

    Parameters become DTensors. Packed [gate | up] weights are shared out half by half, so that each rank computes gate
    and up of the same columns.

    Args:
        mlp: ``nn.MLP``, or a module whose children are two or three linears of usual names (fc1 and fc2; gate_proj,
            up_proj and down_proj; …), which passes tensors between them as they are.
        sequence_parallel: tokens are shared out along the first axis outside; by default as ``mlp.config`` says.

    Raises:
        ValueError: the module has no such children.
    """
    children = dict(mlp.named_children())
    for columns, rows in _NAMES:
        if rows in children and all(name in children for name in columns):
            break
    else:
        names = ", ".join(f"{name} ({type(child).__name__})" for name, child in children.items())
        raise ValueError(
            f"{type(mlp).__name__} is not accepted: of its children, {names or 'none'}, none are an MLP's linears"
        )
    if sequence_parallel is None:
        sequence_parallel = getattr(getattr(mlp, "config", None), "sequence_parallel", None) or False
        if sequence_parallel not in (False, True):
            raise TypeError(f"sequence_parallel={sequence_parallel!r} is not accepted: it must be True or False")
    if isinstance(children[rows], Shardable):
        return {name: SharedLinear(sequence_parallel) for name in (*columns, rows)}
    outside: Any = Shard(0) if sequence_parallel else Replicate()
    first: Any = children[columns[0]]
    second: Any = children[rows]
    packed = len(columns) == 1 and first.out_features == 2 * second.in_features
    style = PackedColwiseParallel if packed else ColwiseParallel
    plan: dict[str, ParallelStyle] = {name: style(input_layouts=outside) for name in columns}
    return plan | {rows: RowwiseParallel(output_layouts=outside)}
