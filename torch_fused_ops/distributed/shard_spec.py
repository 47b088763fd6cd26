"""What a layer and the processes that share it out have to agree upon; it imports no DTensor, which takes 0.4 s."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

__all__ = ["ShardSpec", "Shardable"]


class ShardSpec(NamedTuple):
    """Which part of a parameter a rank holds: its share of an axis, in each of so many groups; of None, all of it."""

    axis: int | None
    groups: int = 1  # 2: [gate | up] along the axis


class Shardable(nn.Module):
    """A layer that shares its own parameters out, as ``torch_fused_ops.nn``'s linears do."""

    def share(self, parallel: TensorParallel | None, as_dtensors: bool = False) -> None:
        """Keep this rank's parts of the parameters: plain tensors, or DTensors, in the parameters' places.

        Raises:
            ValueError: what is to be shared out does not divide evenly.
        """
        raise NotImplementedError
