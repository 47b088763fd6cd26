"""Tensor parallelism of two linears with an activation between them (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank holds rows of the first weight (gate rows and up rows of a packed [gate | up] weight) and the matching columns
of the second weight. The activation needs no communication. The first linear's input and the second linear's output
are plain tensors; each is wrapped in a DTensor, redistributed, and unwrapped:

    forward    nothing on entering            all-reduce on leaving
    backward   all-reduce                     nothing

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) tokens are sharded outside the MLP:

    forward    all-gather                     reduce-scatter
    backward   reduce-scatter                 all-gather

Backward also sums a per-token scale's gradient over ranks and, with sequence parallelism, the second bias's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from torch_fused_ops.distributed.shard_spec import ShardSpec


class TensorParallel:
    """The processes that shard a linear's weight, and the collectives on its inputs, outputs and parameters.

    Args:
        group: the processes.
        sequence_parallel: True if each rank's input and output have only its own tokens, sharded along the first axis.
    """

    def __init__(self, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        available = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        kinds = [device.type for device in group._device_types if device.type in available]
        self.meshes = {kind: DeviceMesh.from_group(group, kind) for kind in kinds}
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.sequence_parallel = sequence_parallel
        self._outside: Any = Shard(0) if sequence_parallel else Replicate()

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # the same processes shard a copied module

    # ---- activations

    def enter(self, x: Tensor) -> Tensor:
        """Return x for all tokens, gathered if tokens are sharded. Backward sums the ranks' gradients."""
        return self._redistribute(x, self._outside, Replicate(), [Partial()])

    def leave(self, y: Tensor) -> Tensor:
        """Sum y over ranks. If tokens are sharded, each rank gets the sum for its own tokens."""
        return self._redistribute(y, Partial(), self._outside)

    def _redistribute(self, local: Tensor, before: Any, after: Any, grad_placements: Any = None) -> Tensor:
        t = DTensor.from_local(local, self.meshes[local.device.type], [before], run_check=False)
        result: Tensor = t.redistribute(placements=[after]).to_local(grad_placements=grad_placements)
        return result

    # ---- parameters

    def shard(self, parameter: Tensor, spec: ShardSpec) -> Tensor:
        """Return this rank's shard of the first rank's parameter, so that ranks may have different seeds."""
        features = 0 if spec.axis is None else parameter.shape[spec.axis]
        if features % (spec.groups * self.size):
            raise ValueError(
                f"{features // spec.groups} features are not accepted with tensor parallelism over {self.size} ranks: "
                "they do not divide evenly"
            )
        shape = [n // self.size if axis == spec.axis else n for axis, n in enumerate(parameter.shape)]
        if parameter.is_meta:
            return parameter.new_empty(shape)
        # A parameter may be created on a device without a mesh, and moved later.
        mesh = self.meshes.get(parameter.device.type) or next(iter(self.meshes.values()))
        if spec.axis is None:
            shards = distribute_tensor(parameter, mesh, [Replicate()])
        else:
            shards = distribute_tensor(parameter.unflatten(spec.axis, (spec.groups, -1)), mesh, [Shard(spec.axis + 1)])
        return shards.to_local().reshape(shape).to(parameter.device)

    def replicated(self, bias: Tensor) -> Tensor:
        """Return a bias that each rank adds to its own tokens. Backward sums the bias's gradients over ranks."""
        return self._redistribute(bias, Replicate(), Replicate(), [Partial()]) if self.sequence_parallel else bias
