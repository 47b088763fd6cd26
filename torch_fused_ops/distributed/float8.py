"""DTensor: float8's operators on shards (``sharding.py`` registers these rules).

A shard is stored by itself where it has whole blocks: along rows wherever a block is a row; else where each rank's part
is a multiple of 128, or 32. Scales stand with what they scale: those of blocks of one row are transposed, (blocks of a
row, rows), so that values sharded along one axis have scales sharded along the other. What is one block as a whole, a
row or all of a matrix, is on every rank before it is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch_fused_ops.float8 import columns_of
from torch_fused_ops.float8_recipes import BLOCK, MX_BLOCK

__all__ = ["RULES", "multiples"]

Placements = Sequence[Any]  # one for each tensor argument or result, None for what is none
Ways = list[tuple[Placements, Placements]]


def multiples(weight: Any, multiple: int) -> tuple[list[tuple[Any, int]], str]:
    """Each of a weight's last two sizes with what it is to be a multiple of; and, in words, multiples of what.

    Of a DTensor each rank's part is to be one.
    """
    sharded = hasattr(weight, "device_mesh")
    cuts = list(zip(weight.device_mesh.shape, weight.placements, strict=True)) if sharded else []
    found = []
    for axis in range(max(weight.ndim - 2, 0), weight.ndim):
        shards = math.prod(ranks for ranks, placement in cuts if placement.is_shard(axis))
        found.append((weight.shape[axis], multiple * shards))
    return found, f"{multiple} in each shard" if sharded else str(multiple)


def _whole_blocks(t: Any, axis: int, block: int) -> bool:
    """Whether each rank's part of an axis is of whole blocks, however many dimensions of the mesh share it."""
    return block in (BLOCK, MX_BLOCK) and bool(t.shape[axis] % (block * t.mesh.size()) == 0)


def _stored(t: Any, axis: int, rows: int, columns: int) -> tuple[Any, Any] | None:
    """(of the values, of the scales) of a matrix that is sharded along an axis; None where blocks would be cut."""
    from torch.distributed.tensor import Shard

    block = rows if axis == 0 else columns
    if block != 1 and not _whole_blocks(t, axis, block):
        return None
    return Shard(axis), Shard(1 - axis if rows == 1 else axis)


def _quantize(input: Any, rows: int, columns: int = BLOCK) -> Ways:
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    ways: Ways = [([whole, whole], [whole, None, None])]
    for axis in (0, 1):
        if found := _stored(input, axis, rows, columns):
            ways.append(([*found], [found[0], None, None]))
    return ways


def _quantize_by(input: Any, scales: Any) -> Ways:
    from torch.distributed.tensor import Replicate, Shard

    whole, by_rows = Replicate(), scales.shape[-1] > 1
    if input.ndim == 3:  # experts, which no way of tensor parallelism cuts
        return [([whole], [whole, whole])]
    return [
        ([whole], [whole, whole]),
        ([Shard(0)], [Shard(0), Shard(1) if by_rows else whole]),
        ([Shard(1)], [Shard(1), whole]),
    ]


def _dequantize(values: Any, scales: Any, rows: int, dtype: Any) -> Ways:
    from torch.distributed.tensor import Replicate

    whole = Replicate()
    ways: Ways = [([whole], [whole, whole, None, None])]
    for axis in (0, 1):
        if found := _stored(values, axis, rows, columns_of(values, scales, rows)):
            ways.append(([found[0]], [*found, None, None]))
    return ways


def _scaled_mm(a: Any, a_scales: Any, b: Any, b_scales: Any, bias: Any, rows: int, dtype: Any) -> Ways:
    from torch.distributed.tensor import Partial, Replicate, Shard

    columns, whole = columns_of(a, a_scales, 1), Replicate()

    def way(out: Any, of_a: Placements | None, of_b: Placements | None, of_bias: Any) -> tuple[Placements, Placements]:
        both = [*(of_a or (whole, whole)), *(of_b or (whole, whole))]
        return [out], [*both, None if bias is None else of_bias, None, None]

    a_rows, b_rows = _stored(a, 0, 1, columns), _stored(b, 0, rows, columns)
    a_columns, b_columns = _stored(a, 1, 1, columns), _stored(b, 1, rows, columns)
    ways = [way(whole, None, None, whole)]
    if a_rows:
        ways.append(way(Shard(0), a_rows, None, whole))
    if b_rows:
        ways.append(way(Shard(1), None, b_rows, Shard(0)))
    if a_columns and b_columns:  # what is summed over; the bias is added once
        ways.append(way(Partial(), a_columns, b_columns, Partial()))
    return ways


RULES: dict[str, Callable[..., Ways]] = {
    "quantize": _quantize,
    "quantize_by": _quantize_by,
    "dequantize": _dequantize,
    "scaled_mm": _scaled_mm,
}
