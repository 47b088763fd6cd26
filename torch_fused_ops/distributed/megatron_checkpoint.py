"""Parameter shards for Megatron core's ``dist_checkpointing``, under Megatron's keys.

Megatron's layers call each module's ``sharded_state_dict`` with ``metadata["dp_cp_group"]`` and expect Megatron's own
``ShardedTensor``: a rank's box of a whole tensor, with its offset counted in boxes. A packed [gate; up] parameter has
two boxes, so its entry is a ``ShardedTensorFactory``, which splits tensors of the parameter's shape and joins them
again. Megatron's optimizers split a parameter's state in the same way and find it by the parameter object. So an
entry's ``data`` is the parameter, and experts that are stacked in one parameter are one entry.

Megatron is imported on first use. The checkpoints equal the checkpoints of Megatron core's ``MLP`` and
``TEGroupedMLP`` (0.16, and its main branch of August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Return a linear's state as Megatron's ``ColumnParallelLinear`` or ``TEColumnParallelGroupedLinear`` would.

    Args:
        linear: ``nn.linear.Linear``. If it has experts, each has its own entries: weight0, weight1, …
    """
    state: dict[str, Any] = {}
    for i, (key, place) in enumerate(_expert_prefixes(linear, prefix, offsets, metadata)):
        number, expert = ("", None) if linear.experts is None else (i, i)
        for name, p in linear.named_parameters(recurse=False):
            state[f"{prefix}{name}{number}"] = _entry(linear, name, p, f"{key}{name}", place, metadata, expert)
    return state | _extra_states(linear, prefix, prefix, offsets, metadata)


def mlp_state(
    block: nn.Module,
    prefix: str,
    offsets: Offsets,
    metadata: dict[str, Any],
    packed: Sequence[str],
    grouped: bool,
) -> dict[str, Any]:
    """Return an MLP's state as Megatron's ``MLP`` would, or with ``grouped`` as its ``TEGroupedMLP`` would.

    Args:
        packed: names of the children whose weight and bias are [gate; up].
    """
    separate_keys = bool(metadata.get("singleton_local_shards"))
    state: dict[str, Any] = {}
    for name, child in block.named_children():
        if grouped and is_ours(child):
            state |= _stacked_state(child, prefix, f"{name}.", offsets, metadata, name in packed)
            continue
        head = f"{name}." if grouped else f"{prefix}{name}."
        if is_ours(child):
            entries = linear_state(child, head, offsets, metadata)
        elif child.state_dict():
            from megatron.core.transformer.utils import sharded_state_dict_default

            entries = sharded_state_dict_default(child, head, offsets, metadata)
        else:
            continue
        for key, entry in entries.items():
            if name in packed and re.search(r"\.(weight|bias)\d*$", key):
                entry = gate_and_up_factory(entry, separate_keys=separate_keys)
            if grouped:
                key, entry.key = f"{prefix}{key}", f"{prefix}experts.{entry.key}"
            state[key] = entry
    return state


def _stacked_state(
    linear: Any, prefix: str, tail: str, offsets: Offsets, metadata: dict[str, Any], packed: bool
) -> dict[str, Any]:
    """Return a grouped linear's state: each stacked parameter is one entry for all local experts."""
    state: dict[str, Any] = {}
    key, separate_keys = f"{prefix}experts.{tail}", bool(metadata.get("singleton_local_shards"))
    for name, p in linear.named_parameters(recurse=False):
        entry = _entry(linear, name, p, f"{key}{name}", offsets, metadata)
        if separate_keys:
            entry = _expert_factory(entry, linear.experts.first, f"{tail}{name}", packed)
        elif packed:
            entry = gate_and_up_factory(entry, 1)
        state[f"{prefix}{tail}{name}"] = entry
    return state | _extra_states(linear, f"{prefix}{tail}", key, offsets, metadata)


def _expert_prefixes(linear: Any, key: str, offsets: Offsets, metadata: dict[str, Any]) -> list[tuple[str, Offsets]]:
    """Return (prefix, offsets) per local expert, or once without experts; ``key``: "mlp.experts.linear_fc1." """
    experts = linear.experts
    if experts is None:
        return [(key, tuple(offsets))]
    numbers = range(experts.first, experts.first + experts.local)
    if not metadata.get("singleton_local_shards"):
        return [(key, (*offsets, (len(offsets), n, experts.total))) for n in numbers]
    head, dot, name = key[:-1].rpartition(".")
    return [(f"{head}{dot}{n}.{name}.", tuple(offsets)) for n in numbers]


def _replica_id(linear: Any, metadata: dict[str, Any]) -> int:
    """Return this process's number among the processes with the same parameters."""
    if linear.replica is not None:
        return int(linear.replica)
    if linear.experts is not None and linear.experts.local < linear.experts.total:
        raise ValueError(
            "an ep_group alone is not accepted in Megatron's checkpoints: pass pg_collection, as pg_collection.expt_dp "
            "has the processes with the same experts"
        )
    return int(metadata["dp_cp_group"].rank())


def _entry(
    linear: Any, name: str, parameter: Tensor, key: str, offsets: Offsets, metadata: Any, expert: int | None = None
) -> Any:
    """Return this rank's box of a parameter, or of its local ``expert``, which ``offsets`` or ``key`` places."""
    from megatron.core.dist_checkpointing import ShardedTensor

    if isinstance(parameter, DTensor):
        raise ValueError(f"{key} is a DTensor, which Megatron's checkpoints do not support: use distributed.save")
    axis, front = linear.shard_specs[name].axis, len(offsets)
    ranks, rank = (1, 0) if linear.parallel is None else (linear.parallel.size, linear.parallel.rank)
    fragments = [] if axis is None else [(front + axis - (expert is not None), rank, ranks)]
    data = parameter if expert is None else parameter[expert]
    if linear.experts is not None and expert is None and linear.experts.total > linear.experts.local:
        local = linear.experts.local
        fragments.append((front, linear.experts.first // local, linear.experts.total // local))
    replica = (0, rank if axis is None else 0, _replica_id(linear, metadata))
    return ShardedTensor.from_rank_offsets(key, data, *offsets, *fragments, replica_id=replica, prepend_axis_num=front)


def _extra_states(linear: Any, prefix: str, key: str, offsets: Offsets, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return entries for ``_extra_state``, in which TransformerEngine stores its fp8 state; ours is None."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank = 0 if linear.parallel is None else linear.parallel.rank
    state: dict[str, Any] = {}
    for i, (head, place) in enumerate(_expert_prefixes(linear, key, offsets, metadata)):
        _, places, sizes = zip(*(sorted(place) or [(0, 0, 1)]), strict=True)
        replica = (0, rank, _replica_id(linear, metadata))
        state[f"{prefix}_extra_state{i or ''}"] = ShardedObject(f"{head}_extra_state", None, sizes, places, replica)
    return state


def _places(entry: Any) -> list[tuple[int, int, int]]:
    """Return (axis, box, number of boxes) for each axis of an entry, starting with the prepended axes."""
    front = entry.prepend_axis_num
    places = [(i, entry.global_offset[i], entry.global_shape[i]) for i in range(front)]
    axes = enumerate(entry.local_shape, front)
    return places + [(i, entry.global_offset[i] // n, entry.axis_fragmentations[i]) for i, n in axes]


def _factory(entry: Any, split: Callable[[str, Tensor], Iterable[Any]], merge: Callable[[list[Tensor]], Tensor]) -> Any:
    """Return a factory instead of an entry: ``split`` yields (key, tensor, places) pieces, ``merge`` joins pieces."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(key: str, t: Tensor, replica_id: Any, flattened_range: Any = None) -> list[Any]:
        settings = {"replica_id": replica_id, "prepend_axis_num": entry.prepend_axis_num}
        pieces = split(key, t.detach())
        return [ShardedTensor.from_rank_offsets(name, piece, *places, **settings) for name, piece, places in pieces]

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def gate_and_up_factory(entry: Any, axis: int = 0, separate_keys: bool = False) -> Any:
    """Return a factory that splits a packed [gate; up] parameter, whose entry places the shard as one piece.

    The whole tensor is [gate_0, gate_1, …, up_0, up_1, …], numbered by rank. With ``separate_keys``, gate and
    up are two tensors instead: ``{key}_w`` and ``{key}_v``.

    Source: ``apply_swiglu_sharded_factory`` of ``megatron.core.transformer.mlp``.
    """
    places = _places(entry)
    along, rank, ranks = places.pop(entry.prepend_axis_num + axis)
    gate, up = (
        [(along, rank, ranks)] * 2 if separate_keys else [(along, rank, 2 * ranks), (along, ranks + rank, 2 * ranks)]
    )

    def split(key: str, t: Tensor) -> Iterator[Any]:
        for suffix, half, place in zip(
            ("_w", "_v") if separate_keys else ("", ""), t.chunk(2, axis), (gate, up), strict=True
        ):
            yield f"{key}{suffix}", half, (*places, place)

    return _factory(entry, split, lambda t: torch.cat(t, axis))


def _expert_factory(entry: Any, first: int, tail: str, packed: bool) -> Any:
    """Return a factory that splits an entry of stacked experts: each gets its own key, or two keys if ``packed``.

    Args:
        first: the first local expert's number among all experts.
        tail: the part of the key after the expert's number: "linear_fc1.weight".
    """
    stacked = entry.prepend_axis_num  # the experts' axis, which an expert's tensor does not have
    places = [(axis - (axis > stacked), place, n) for axis, place, n in _places(entry) if axis != stacked]

    def split(key: str, t: Tensor) -> Iterator[Any]:
        for number, expert in enumerate(t.unbind(), first):
            expert_key = f"{key.removesuffix(tail)}{number}.{tail}"
            pieces = zip(("_w", "_v"), expert.chunk(2), strict=True) if packed else [("", expert)]
            yield from ((f"{expert_key}{suffix}", piece, places) for suffix, piece in pieces)

    def merge(pieces: list[Tensor]) -> Tensor:
        if packed:
            pieces = [torch.cat(pair) for pair in zip(pieces[::2], pieces[1::2], strict=True)]
        return torch.stack(pieces)

    return _factory(entry, split, merge)
