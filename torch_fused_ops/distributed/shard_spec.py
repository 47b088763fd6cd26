"""``ShardSpec``: a parameter's sharding, without importing DTensor, which takes 0.4 s."""

from __future__ import annotations

from typing import NamedTuple


class ShardSpec(NamedTuple):
    """A rank's shard of a parameter: a part of each of ``groups`` groups along ``axis``; all of it if axis is None."""

    axis: int | None
    groups: int = 1  # 2: [gate | up] along the axis
