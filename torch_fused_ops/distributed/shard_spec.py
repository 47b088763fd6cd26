"""``ShardSpec``: a parameter's sharding, without importing DTensor, which takes 0.4 s."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class ShardSpec(NamedTuple):
    """A rank's shard of a parameter: a part of each of ``groups`` groups along ``axis``; all of it if axis is None."""

    axis: int | None
    groups: int = 1  # 2: [gate | up] along the axis


class Shardable(nn.Module):
    """A layer that shards its own parameters, as ``torch_fused_ops.nn``'s linears do."""

    def shard(self, parallel: Any, as_dtensors: bool = False) -> None:
        """Replace the parameters by this rank's shards: plain tensors or DTensors.

        Args:
            parallel: a ``TensorParallel``, or None. (Its module imports this one.)
            as_dtensors: make DTensors.

        Raises:
            ValueError: features do not divide evenly.
        """
        raise NotImplementedError
