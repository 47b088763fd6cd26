"""Apply dropout to the shards of DTensors.

``fused::dropout_add``'s mask depends on an element's index in its argument, here the shard. So the shards' masks differ
from the whole tensor's mask, and shards with equal seeds have equal masks. ``functional.bias_dropout_add`` gives each
shard a seed (``dropout_add_by_shards``). Direct calls of the operator on DTensors need a seed that differs by rank
(``functional.shard_seed``), and gradients with the result's placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# SplitMix64's constants, as int64: 0x9E3779B97F4A7C15; 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB with their shifts.
_SPLITMIX_STEP = 0x9E3779B97F4A7C15 - 2**64
_SPLITMIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)


def shard_seed(seed: Tensor, *coordinates: int | Tensor) -> Tensor:
    """Derive a shard's seed: ``seed`` with the shard's coordinates mixed in, in tensor arithmetic.

    Each coordinate is a step of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195), a bijection whose
    every output bit depends on every input bit. With the same seed, different coordinates give different seeds.

    Args:
        seed: int64.
        *coordinates: the shard's index along each mesh dimension (or group of ranks) that shards the tensor. Without
            coordinates, the result is seed.

    Returns:
        int64, with seed's shape.

    Raises:
        TypeError: seed is not a tensor.
    """
    if isinstance(seed, type) or not hasattr(seed, "__torch_function__"):
        raise TypeError(f"seed={seed!r} is not accepted: it must be a tensor, not {type(seed).__name__}")
    unit = torch.ones_like(seed)  # int64 tensors wrap around
    for coordinate in coordinates:
        z = seed + (unit * coordinate + unit) * _SPLITMIX_STEP
        for shift, factor in _SPLITMIX:
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor
        seed = z ^ (z >> 31 & (1 << 33) - 1)
    return seed


def _placements(t: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return placements for t, a bias over its last axis, and the bias's gradient (partial sums over other axes).

    If t has partial sums, they are added first, because dropout must apply to the total.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    places = tuple(Replicate() if place.is_partial() else place for place in t.placements)
    columns = [place.is_shard(t.ndim - 1) or place.is_shard(-1) for place in places]
    bias = tuple(Shard(0) if column else Replicate() for column in columns)
    bias_grad = tuple(
        Partial() if place.is_shard() and not column else bias_place
        for place, column, bias_place in zip(places, columns, bias, strict=True)
    )
    return places, bias, bias_grad


def dropout_add_by_shards(x: Any, bias: Any, residual: Any, seed: Tensor, p: float) -> Tensor:
    """Apply ``fused::dropout_add`` to every rank's shard of a DTensor x, with a seed per shard.

    Bias, residual and gradients are redistributed to x's placements, so that backward uses forward's masks.
    """
    from torch._prims_common import make_contiguous_strides_for
    from torch.distributed.tensor import DTensor, Replicate

    mesh, (places, bias_places, bias_grad) = x.device_mesh, _placements(x)

    def local(t: Any, target: Sequence[Any], grads: Sequence[Any]) -> Tensor | None:
        if t is None:
            return None
        if not isinstance(t, DTensor):  # the same on all ranks
            t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
        result: Tensor = t.redistribute(mesh, target).to_local(grad_placements=grads)
        return result

    coordinate = mesh.get_coordinate() or [0] * mesh.ndim  # None if this rank is not in the mesh
    seed = shard_seed(seed, *(index for index, place in zip(coordinate, places, strict=True) if place.is_shard()))
    out = torch.ops.fused.dropout_add(
        local(x, places, places), local(bias, bias_places, bias_grad), local(residual, places, places), seed, p
    )
    return DTensor.from_local(
        out, mesh, places, run_check=False, shape=x.shape, stride=make_contiguous_strides_for(x.shape)
    )
