"""``ShardSpec``: a parameter's sharding, without importing DTensor, which takes 0.4 s."""

from __future__ import annotations

from typing import NamedTuple


class ShardSpec(NamedTuple):
    """A parameter's sharding along ``axis``: a rank has a part of each group. If axis is None, it has everything."""

    axis: int | None
    groups: int = 1  # 2 if gate and up are packed along the axis
