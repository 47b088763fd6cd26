"""Parameter shards for Megatron core's ``dist_checkpointing``, under Megatron's keys.

Megatron's layers call each module's ``sharded_state_dict`` with ``metadata["dp_cp_group"]`` and expect Megatron's own
``ShardedTensor``: a rank's box of a whole tensor, with its offset counted in boxes. A packed [gate; up] parameter has
two boxes, so its entry is a ``ShardedTensorFactory``, which splits tensors of the parameter's shape and joins them
again. Megatron's optimizers split a parameter's state in the same way and find it by the parameter object. So an
entry's ``data`` is the parameter.

Megatron is imported on first use. The checkpoints equal the checkpoints of Megatron core's ``MLP`` (0.16, and its main
branch of August 2026).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch_fused_ops.distributed.checkpoint import Offsets


def is_ours(child: nn.Module) -> bool:
    """Return True if a child is a linear of ``torch_fused_ops.nn``, which this module cannot import."""
    return hasattr(child, "shard_specs")


def is_megatron_call(metadata: dict[str, Any] | None) -> bool:
    """Return True if one of Megatron's layers made the call: it passes ``dp_cp_group``."""
    return "dp_cp_group" in (metadata or {})


def check_linears(module: nn.Module) -> None:
    """Raise ValueError for a linear of Megatron: ``torch.distributed.checkpoint`` does not support its tensors."""
    for name, child in module.named_children():
        if not is_ours(child) and hasattr(child, "sharded_state_dict"):
            raise ValueError(
                f"metadata without dp_cp_group is not accepted with {name} of type {type(child).__name__}, a linear of "
                "Megatron: dp_cp_group must be the process group that holds the same parameters"
            )


def linear_state(linear: Any, prefix: str, offsets: Offsets, metadata: Any) -> dict[str, Any]:
    """Return the state of a ``ParallelLinear`` as Megatron's ``ColumnParallelLinear`` would.

    It has an ``_extra_state``, in which TransformerEngine stores its fp8 state; ours is None.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    named = linear.named_parameters(recurse=False)
    state = {f"{prefix}{name}": _entry(linear, name, p, f"{prefix}{name}", offsets, metadata) for name, p in named}
    _, places, sizes = zip(*(sorted(offsets) or [(0, 0, 1)]), strict=True)
    replica = (0, 0 if linear.parallel is None else linear.parallel.rank, int(metadata["dp_cp_group"].rank()))
    key = f"{prefix}_extra_state"
    return {**state, key: ShardedObject(key, None, sizes, places, replica)}


def _entry(linear: Any, name: str, parameter: Tensor, key: str, offsets: Offsets, metadata: Any) -> Any:
    """Return this rank's box of a parameter."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(parameter, DTensor):
        raise ValueError(f"{key} is a DTensor, which Megatron's checkpoints do not support: use distributed.save")
    axis, front = linear.shard_specs[name].axis, len(offsets)
    ranks, rank = (1, 0) if linear.parallel is None else (linear.parallel.size, linear.parallel.rank)
    fragments = [] if axis is None else [(front + axis, rank, ranks)]
    replica = (0, rank if axis is None else 0, int(metadata["dp_cp_group"].rank()))
    return ShardedTensor.from_rank_offsets(
        key, parameter, *offsets, *fragments, replica_id=replica, prepend_axis_num=front
    )


def child_state(child: Any, prefix: str, offsets: Offsets, metadata: Any) -> dict[str, Any]:
    """Return the state of an MLP's child as Megatron's ``MLP`` would."""
    if is_ours(child):
        return linear_state(child, prefix, offsets, metadata)
    if not child.state_dict():
        return {}
    from megatron.core.transformer.utils import sharded_state_dict_default

    state: dict[str, Any] = sharded_state_dict_default(child, prefix, offsets, metadata)
    return state


def gate_and_up_factory(entry: Any, separate_keys: bool) -> Any:
    """Return a factory that splits a packed [gate; up] parameter, whose entry places the shard as one piece.

    The whole tensor is [gate_0, gate_1, …, up_0, up_1, …], numbered by rank. With ``separate_keys``, gate and
    up are two tensors instead: ``{key}_w`` and ``{key}_v``.

    Source: ``apply_swiglu_sharded_factory`` of ``megatron.core.transformer.mlp``.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    front = entry.prepend_axis_num
    offsets = [(i, entry.global_offset[i], entry.global_shape[i]) for i in range(front)]
    rank, ranks = entry.global_offset[front] // entry.local_shape[0], entry.axis_fragmentations[front]
    places = [(rank, ranks)] * 2 if separate_keys else [(rank, 2 * ranks), (ranks + rank, 2 * ranks)]

    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
        settings = {"replica_id": replica_id, "prepend_axis_num": front}
        keys = (f"{key}_w", f"{key}_v") if separate_keys else (key, key)
        pieces = zip(keys, t.detach().chunk(2), places, strict=True)
        return [
            ShardedTensor.from_rank_offsets(name, half, *offsets, (front, *place), **settings)
            for name, half, place in pieces
        ]

    return ShardedTensorFactory(entry.key, entry.data, build, torch.cat, entry.replica_id)
