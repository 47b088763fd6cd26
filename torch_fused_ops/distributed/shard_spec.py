"""``ShardSpec``: a parameter's sharding, without importing DTensor, which takes 0.4 s."""

from __future__ import annotations

from typing import NamedTuple


class ShardSpec(NamedTuple):
    """A parameter's sharding: a rank has its part of each group along ``axis``. If axis is None, it has everything."""

    axis: int | None
    groups: int = 1  # 2: [gate | up] along the axis
