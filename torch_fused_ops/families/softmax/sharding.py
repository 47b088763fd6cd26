"""Define DTensor rules for softmax."""

from __future__ import annotations

from typing import Any

from torch_fused_ops.distributed.sharding import RULES, Sharding
from torch_fused_ops.families.softmax.formulas import window_edges


def _softmax_axes(data: Any, *window: int) -> range:
    """Return the axes that may be sharded: never keys, and queries only without causality and window."""
    return range(data.ndim - (1 if window_edges(*window) == (None, None) else 2))


def _scaled_masked_softmax(input: Any, mask: Any, sink: Any, scale: float = 1.0, *window: int) -> list[Sharding]:
    from torch.distributed.tensor import Replicate, Shard

    replicate, heads = Replicate(), input.ndim - 3

    def sharding(axis: int | None) -> Sharding:
        placement = replicate if axis is None else Shard(axis)
        of_mask: Any = replicate
        of_sink: Any = Shard(0) if axis == heads else replicate
        if axis is not None and mask is not None:
            mask_axis = axis - (input.ndim - mask.ndim)  # the mask is broadcast from the right
            of_mask = Shard(mask_axis) if mask_axis >= 0 and mask.shape[mask_axis] != 1 else replicate
        return [placement], [placement, None if mask is None else of_mask, None if sink is None else of_sink]

    return [sharding(None), *map(sharding, _softmax_axes(input, *window))]


def _scaled_masked_softmax_backward(grad: Any, output: Any, scale: float, *values: Any) -> list[Sharding]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    *window, _, output_mask = values

    def sharding(axis: int | None) -> Sharding:
        placement = Replicate() if axis is None else Shard(axis)
        of_sink = placement if axis is None else Shard(0) if axis == output.ndim - 3 else Partial()
        results = [
            result if requested else None for result, requested in zip((placement, of_sink), output_mask, strict=True)
        ]
        return results, [placement, placement]

    return [sharding(None), *map(sharding, _softmax_axes(output, *window))]


RULES["scaled_masked_softmax"] = _scaled_masked_softmax
RULES["scaled_masked_softmax_backward"] = _scaled_masked_softmax_backward
