"""Define DTensor rules for the float8 operators (``distributed/sharding.py`` registers them).

A shard can be quantized separately if it consists of whole blocks. Blocks of one row allow any division of the rows.
Other divisions need shards whose size is a multiple of the block's 128 or 32. If shards would cut a block, such as a
whole row or tensor, the tensor is replicated before it is quantized. Scales are on their values' rank. Scales of
one-row blocks are transposed, (blocks per row, rows): shards along one axis have scales sharded along the other.
"""

from __future__ import annotations

import math
from typing import Any

from torch_fused_ops.distributed.sharding import RULES, Placements, Sharding
from torch_fused_ops.families.float8.formulas import block_of_columns, columns_of
from torch_fused_ops.families.float8.recipes import BLOCK, MX_BLOCK

Shardings = list[Sharding]


def multiples(weight: Any, multiple: int) -> tuple[list[tuple[Any, int]], str]:
    """Return (size, required divisor) for each of a weight's last two axes, and the requirement in words.

    The requirement holds for each rank's shard of a DTensor.
    """
    sharded = hasattr(weight, "device_mesh")
    cuts = list(zip(weight.device_mesh.shape, weight.placements, strict=True)) if sharded else []
    sizes = []
    for axis in range(max(weight.ndim - 2, 0), weight.ndim):
        shards = math.prod(ranks for ranks, placement in cuts if placement.is_shard(axis))
        sizes.append((weight.shape[axis], multiple * shards))
    return sizes, f"{multiple} in each shard" if sharded else str(multiple)


def _whole_blocks(t: Any, axis: int, block: int) -> bool:
    """Return True if an axis has shards of whole blocks, even if all dimensions of the mesh shard the axis."""
    return block in (BLOCK, MX_BLOCK) and bool(t.shape[axis] % (block * t.mesh.size()) == 0)


def _stored(t: Any, axis: int, rows: int, columns: int) -> tuple[Any, Any] | None:
    """Return (values' placement, scales' placement) of a matrix sharded along an axis; None if shards cut a block."""
    from torch.distributed.tensor import Shard

    block = rows if axis == 0 else columns
    if block != 1 and not _whole_blocks(t, axis, block):
        return None
    return Shard(axis), Shard(1 - axis if rows == 1 else axis)


def _placements(t: Any, rows: int, columns: int) -> list[tuple[Any, Any]]:
    """Return (values' placement, scales' placement) for a replicated matrix and for each axis that can be sharded."""
    from torch.distributed.tensor import Replicate

    sharded = (_stored(t, axis, rows, columns) for axis in (0, 1))
    return [(Replicate(), Replicate()), *filter(None, sharded)]


def _quantize(input: Any, rows: int, columns: int = BLOCK) -> Shardings:
    return [([values, scales], [values, None, None]) for values, scales in _placements(input, rows, columns)]


def _requantize(values: Any, scales: Any) -> Shardings:
    from torch.distributed.tensor import Replicate, Shard

    columns, replicated = columns_of(values, scales, 1), Replicate()
    rows_t, columns_t = block_of_columns(columns)
    shardings: Shardings = [([replicated, replicated], [replicated, replicated])]
    for axis, block in ((0, columns_t), (1, rows_t)):
        stored = _stored(values, axis, 1, columns)
        if stored and (block == 1 or _whole_blocks(values, axis, block)):
            shardings.append(([Shard(1 - axis), Shard(axis if rows_t == 1 else 1 - axis)], [*stored]))
    return shardings


def _scaled_mm(a: Any, a_scales: Any, b: Any, b_scales: Any, bias: Any, rows: int, dtype: Any) -> Shardings:
    from torch.distributed.tensor import Partial, Replicate, Shard

    columns, replicated = columns_of(a, a_scales, 1), Replicate()

    def sharding(out: Any, of_a: Placements | None, of_b: Placements | None, of_bias: Any) -> Sharding:
        operands = [*(of_a or (replicated, replicated)), *(of_b or (replicated, replicated))]
        return [out], [*operands, None if bias is None else of_bias, None, None]

    a_rows, b_rows = _stored(a, 0, 1, columns), _stored(b, 0, rows, columns)
    a_columns, b_columns = _stored(a, 1, 1, columns), _stored(b, 1, rows, columns)
    shardings = [sharding(replicated, None, None, replicated)]
    if a_rows:
        shardings.append(sharding(Shard(0), a_rows, None, replicated))
    if b_rows:
        shardings.append(sharding(Shard(1), None, b_rows, Shard(0)))
    if a_columns and b_columns:  # the summed axis; one rank adds the bias
        shardings.append(sharding(Partial(), a_columns, b_columns, Partial()))
    return shardings


RULES.update(
    {
        "quantize": _quantize,
        "requantize": _requantize,
        "scaled_mm": _scaled_mm,
    }
)
