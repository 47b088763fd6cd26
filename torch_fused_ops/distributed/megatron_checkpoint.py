"""Parts of parameters as Megatron core's ``dist_checkpointing`` takes them, under its keys.

A layer of Megatron's asks each module for its ``sharded_state_dict``, with ``metadata["dp_cp_group"]``, and wants its
own ``ShardedTensor``s: which box of a whole tensor a rank has, counted in boxes of that size. A packed [gate; up]
parameter is two boxes, and so a ``ShardedTensorFactory``, which cuts a tensor of the parameter's shape and puts it
together again: Megatron's optimizers have theirs cut likewise, and find them by the parameter itself, which is why an
entry's ``data`` is that, and why experts that are stacked in one parameter are one entry.

Of Megatron three classes are needed, and two functions; they are imported here, when they are asked for. What is
written is what ``MLP`` and ``TEGroupedMLP`` of Megatron core write (0.16, and its main branch of August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torch_fused_ops.distributed.shard_spec import Shardable

if TYPE_CHECKING:
    from torch_fused_ops.distributed.checkpoint import Offsets

__all__ = ["asked_for", "gate_and_up", "of_block", "of_linear", "with_group"]


def asked_for(metadata: dict[str, Any] | None) -> bool:
    """Whether it is a layer of Megatron's that asks."""
    return "dp_cp_group" in (metadata or {})


def with_group(module: nn.Module, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """The metadata with ``dp_cp_group``, where Megatron asks, or one of the module's linears is Megatron's; or None.

    Raises:
        ValueError: a linear is Megatron's, and its global state, which it would ask, has no such group.
    """
    if asked_for(metadata):
        return metadata
    theirs = [
        f"{name} of type {type(child).__name__}"
        for name, child in module.named_children()
        if not isinstance(child, Shardable) and hasattr(child, "sharded_state_dict")
    ]
    if not theirs:
        return None
    from megatron.core import parallel_state

    try:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    except AssertionError as error:
        raise ValueError(
            f"metadata={metadata!r} is not accepted with {theirs[0]}, whose tensors are Megatron's: without "
            "metadata['dp_cp_group'], the process group that holds the same parameters, its parallel state must be "
            f"initialized ({error})"
        ) from None
    return {**(metadata or {}), "dp_cp_group": group}


def of_linear(linear: Any, prefix: str, offsets: Offsets, metadata: Any) -> dict[str, Any]:
    """A linear's state, as Megatron's ``ColumnParallelLinear`` and ``TEColumnParallelGroupedLinear`` give it.

    Args:
        linear: ``nn.linear.Linear``; of several experts each has its entries, weight0, weight1, …
    """
    apart = bool(metadata.get("singleton_local_shards"))
    if linear.experts is None:
        entries = {
            f"{prefix}{name}": _entry(linear, name, p, f"{prefix}{name}", offsets, metadata)
            for name, p in linear.named_parameters(recurse=False)
        }
        return entries | _extra_states(linear, prefix, prefix, offsets, metadata)
    state: dict[str, Any] = {}
    for i in range(linear.experts.here):
        expert = linear.experts.first + i
        key, place = _of_expert(prefix, expert, linear.experts.total, offsets, apart)
        for name, p in linear.named_parameters(recurse=False):
            state[f"{prefix}{name}{i}"] = _entry(linear, name, p, f"{key}{name}", place, metadata, i)
    return state | _extra_states(linear, prefix, prefix, offsets, metadata)


def of_block(
    block: nn.Module,
    prefix: str,
    offsets: Offsets,
    metadata: dict[str, Any],
    packed: Sequence[str],
    grouped: bool,
) -> dict[str, Any]:
    """An MLP's state, as Megatron's ``MLP`` gives it, or, ``grouped``, experts', as its ``TEGroupedMLP``.

    Args:
        packed: the children whose weight and bias are [gate; up].
    """
    apart = bool(metadata.get("singleton_local_shards"))
    state: dict[str, Any] = {}
    for name, child in block.named_children():
        if grouped and isinstance(child, Shardable):
            state |= _of_stacked(child, prefix, f"{name}.", offsets, metadata, name in packed)
            continue
        own = _of_child(child, f"{name}." if grouped else f"{prefix}{name}.", offsets, metadata)
        if name in packed:
            own = {
                key: gate_and_up(one, apart=apart) if re.search(r"\.(weight|bias)\d*$", key) else one
                for key, one in own.items()
            }
        for one in own.values() if grouped else ():
            one.key = f"{prefix}experts.{one.key}"
        state |= {f"{prefix}{key}": one for key, one in own.items()} if grouped else own
    return state


def _of_child(child: nn.Module, prefix: str, offsets: Offsets, metadata: dict[str, Any]) -> dict[str, Any]:
    if isinstance(child, Shardable):
        return of_linear(child, prefix, offsets, metadata)
    if not child.state_dict():
        return {}
    from megatron.core.transformer.utils import sharded_state_dict_default

    found: dict[str, Any] = sharded_state_dict_default(child, prefix, offsets, metadata)
    return found


def _of_stacked(
    linear: Any, prefix: str, tail: str, offsets: Offsets, metadata: dict[str, Any], packed: bool
) -> dict[str, Any]:
    """A grouped linear's state with one entry for all experts: as tensors are stacked, so are the boxes of them."""
    state: dict[str, Any] = {}
    key, apart = f"{prefix}experts.{tail}", bool(metadata.get("singleton_local_shards"))
    for name, p in linear.named_parameters(recurse=False):
        entry = _entry(linear, name, p, f"{key}{name}", offsets, metadata)
        if apart:
            entry = _experts_apart(entry, linear.experts.first, f"{tail}{name}", packed)
        elif packed:
            entry = gate_and_up(entry, 1)
        state[f"{prefix}{tail}{name}"] = entry
    return state | _extra_states(linear, f"{prefix}{tail}", key, offsets, metadata)


def _of_expert(key: str, expert: int, total: int, offsets: Offsets, apart: bool) -> tuple[str, Offsets]:
    """(the beginning of an expert's keys, its tensors' place); ``key`` is that of all: "mlp.experts.linear_fc1." """
    if not apart:
        return key, (*offsets, (len(offsets), expert, total))
    head, dot, linear = key[:-1].rpartition(".")
    return f"{head}{dot}{expert}.{linear}.", tuple(offsets)


def _replica(linear: Any, metadata: dict[str, Any]) -> int:
    """Which of the processes that hold the same parameters this one is."""
    if linear.replica is not None:
        own: int = linear.replica
        return own
    if linear.experts is not None and linear.experts.here < linear.experts.total:
        raise ValueError(
            "an ep_group alone is not accepted where Megatron saves: which processes have the same experts is in "
            "pg_collection.expt_dp; give pg_collection"
        )
    rank: int = metadata["dp_cp_group"].rank()
    return rank


def _entry(
    linear: Any, name: str, parameter: Tensor, key: str, offsets: Offsets, metadata: Any, expert: int | None = None
) -> Any:
    """This rank's box of a parameter, or of one expert's, which is the place that ``offsets`` ends with."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(parameter, DTensor):
        raise ValueError(f"{key} is a DTensor, of which Megatron's checkpoints know nothing: use distributed.save")
    part, front = linear.parts[name], len(offsets)
    ranks, rank = (1, 0) if linear.parallel is None else (linear.parallel.size, linear.parallel.rank)
    axis = part.axis
    own = [] if axis is None else [(front + axis - (expert is not None), rank, ranks)]
    data = parameter if expert is None else parameter[expert]
    if linear.experts is not None and expert is None and linear.experts.total > linear.experts.here:
        here = linear.experts.here
        own.append((front, linear.experts.first // here, linear.experts.total // here))
    replica = (0, rank if axis is None else 0, _replica(linear, metadata))
    return ShardedTensor.from_rank_offsets(key, data, *offsets, *own, replica_id=replica, prepend_axis_num=front)


def _extra_states(linear: Any, prefix: str, key: str, offsets: Offsets, metadata: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's linears ask a checkpoint for besides: TransformerEngine's state for fp8. Here it is None."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank = 0 if linear.parallel is None else linear.parallel.rank
    apart = bool(metadata.get("singleton_local_shards"))
    state: dict[str, Any] = {}
    for i in range(1 if linear.experts is None else linear.experts.here):
        own, place = key, tuple(offsets)
        if linear.experts is not None:
            own, place = _of_expert(key, linear.experts.first + i, linear.experts.total, offsets, apart)
        ordered = sorted(place) or [(0, 0, 1)]
        state[f"{prefix}_extra_state{i or ''}"] = ShardedObject(
            f"{own}_extra_state",
            None,
            tuple(size for *_, size in ordered),
            tuple(at for _, at, _ in ordered),
            (0, rank, _replica(linear, metadata)),
        )
    return state


def _places(entry: Any) -> tuple[Offsets, Offsets]:
    """(of the axes in front of an entry's own, of its own axes that are shared out)"""
    front = entry.prepend_axis_num
    before = tuple((i, entry.global_offset[i], entry.global_shape[i]) for i in range(front))
    own = tuple(
        (front + i, entry.global_offset[front + i] // n, entry.axis_fragmentations[front + i])
        for i, n in enumerate(entry.local_shape)
    )
    return before, own


def gate_and_up(entry: Any, axis: int = 0, apart: bool = False) -> Any:
    """The entry of a packed [gate; up] parameter, whose part is placed as if it were one, as a factory of two.

    Of p ranks' parts the whole is [gate_0 … gate_p, up_0 … up_p]; with ``apart`` there are two, ``{key}_w`` and
    ``{key}_v``.

    Source: ``apply_swiglu_sharded_factory`` of ``megatron.core.transformer.mlp``.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    before, own = _places(entry)
    front = len(before)
    _, rank, ranks = own[axis]
    others = (*before, *own[:axis], *own[axis + 1 :])
    places = [(rank, ranks)] * 2 if apart else [(rank, 2 * ranks), (ranks + rank, 2 * ranks)]

    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
        names = (f"{key}_w", f"{key}_v") if apart else (key, key)
        return [
            ShardedTensor.from_rank_offsets(
                name, half, *others, (front + axis, *place), replica_id=replica_id, prepend_axis_num=front
            )
            for name, half, place in zip(names, t.detach().chunk(2, axis), places, strict=True)
        ]

    def merge(halves: list[Tensor]) -> Tensor:
        return torch.cat(halves, axis)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def _experts_apart(entry: Any, first: int, tail: str, packed: bool) -> Any:
    """The entry of stacked experts as a factory of one for each, or two, under keys of their own.

    Args:
        first: which of all experts the first one here is.
        tail: what stands behind the expert's number: "linear_fc1.weight".
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    before, (_, *own) = _places(entry)
    front = len(before)
    places = [(axis - 1, *place) for axis, *place in own]

    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
        head = key.removesuffix(tail)
        pieces: list[Any] = []
        for i, one in enumerate(t.detach().unbind()):
            alone = ShardedTensor.from_rank_offsets(
                f"{head}{first + i}.{tail}",
                one,
                *before,
                *places,
                replica_id=replica_id,
                prepend_axis_num=front,
            )
            pieces += gate_and_up(alone, apart=True).build() if packed else [alone]
        return pieces

    def merge(pieces: list[Tensor]) -> Tensor:
        if packed:
            pieces = [torch.cat(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
        return torch.stack(pieces)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)
