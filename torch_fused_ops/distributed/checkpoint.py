"""Checkpoints that do not know how many processes wrote them: ``torch.distributed.checkpoint`` of tensors in parts.

What is written under a key is the whole tensor, as one process would have it: of a packed [gate; up] weight all gate
rows, then all up rows. A rank holds boxes of it (one for gate, one for up), and a ``ShardedTensor`` tells
``torch.distributed.checkpoint`` which: it takes any object for a tensor that says what its chunks are
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). Reading for another number of ranks
is then upstream's work, as are replicas, which are written once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as _read
from torch.distributed.checkpoint.state_dict_saver import save as _write
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.distributed.tensor_parallel import TensorParallel

__all__ = ["Offsets", "ShardedTensor", "apply_swiglu_sharded_factory", "load", "save", "sharded_state_dict"]

Offsets = tuple[tuple[int, int, int], ...]
"""(axis, place, size) of each axis that a checkpoint has in front of a tensor's own."""


class Run(NamedTuple):
    """Rows of a rank's part and where they are in the whole tensor, along the axis that is shared out."""

    start: int
    length: int
    place: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which boxes of a whole tensor a rank holds.

    Attributes:
        shape: of the whole tensor.
        axis: the one along which ranks have parts.
        runs: of which rows of the whole tensor a rank's part is made.
        start: where in its part begins what it holds, which is a box of it where FSDP shards it once more.
        offsets: axes of the checkpoint in front of the tensor's own.
    """

    shape: torch.Size
    axis: int
    runs: tuple[Run, ...]
    start: tuple[int, ...]
    offsets: Offsets = ()

    def size(self) -> torch.Size:
        """Of the tensor in the checkpoint."""
        return torch.Size((*(size for _, _, size in sorted(self.offsets)), *self.shape))

    def boxes(self, local: Tensor) -> Iterator[tuple[torch.Size, Tensor]]:
        """(place in the checkpoint's tensor, view of what this rank holds of it)"""
        front = tuple(place for _, place, _ in sorted(self.offsets))
        within = (None,) * len(front)
        if not self.shape:
            yield torch.Size(front), local[within]
        elif local.numel():
            first = self.start[self.axis]
            for run in self.runs:
                low, high = max(first, run.start), min(first + local.shape[self.axis], run.start + run.length)
                if low < high:
                    place = list(self.start)
                    place[self.axis] = run.place + low - run.start
                    view = local.narrow(self.axis, low - first, high - low)
                    yield torch.Size((*front, *place)), view[within]


class ShardedTensor(Tensor):
    """A tensor of a checkpoint, of which this rank holds boxes. It is saved and loaded (in place), not computed with.

    Attributes:
        key: its name in the checkpoint.
        local: what this rank holds.
        sharding: what that is of the whole.
    """

    key: str
    local: Tensor
    sharding: Layout

    @staticmethod
    def __new__(cls, key: str, local: Tensor, layout: Layout) -> ShardedTensor:
        whole: ShardedTensor = Tensor._make_wrapper_subclass(cls, layout.size(), dtype=local.dtype, device=local.device)
        whole.key, whole.local, whole.sharding = key, local, layout
        return whole

    @classmethod
    def of_parameter(
        cls,
        key: str,
        parameter: Tensor,
        part: ShardSpec | None = None,
        parallel: TensorParallel | None = None,
        as_dtensors: bool = False,
        offsets: Offsets = (),
        experts: tuple[int, int] | None = None,
    ) -> ShardedTensor:
        """A parameter of which each rank of ``parallel`` has a part.

        Args:
            as_dtensors: whether the parameter, if it is a DTensor, is one over ``parallel``'s mesh, too.
            experts: (the first, of how many) of those whose parameters are stacked in this one along its first axis.
        """
        part = part or ShardSpec(None)
        local, part_shape, start = _box(parameter, part, parallel, as_dtensors)
        if experts is not None:
            start = (start[0] + experts[0], *start[1:])
            part_shape = torch.Size((experts[1], *part_shape[1:]))
        ranks, rank = (1, 0) if parallel is None or part.axis is None else (parallel.size, parallel.rank)
        axis = part.axis or 0
        shape = torch.Size(n * ranks if i == axis else n for i, n in enumerate(part_shape))
        own = part_shape[axis] if part_shape else 1
        return cls(key, local, Layout(shape, axis, (Run(0, own, rank * own),), start, tuple(offsets)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a ShardedTensor: it is saved and loaded; its part here is .local")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensor({self.key}, {tuple(self.shape)}, {self.local.dtype})"

    # What torch.distributed.checkpoint asks.

    def _boxes(self) -> Iterator[tuple[torch.Size, Tensor]]:
        return self.sharding.boxes(self.local)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.local), self.sharding.size()
        return [
            WriteItem(
                index=MetadataIndex(fqn, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(place, box.size()), properties, size),
            )
            for place, box in self._boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, box.size()) for place, box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for place, box in self._boxes() if place == index.offset)


def _local(t: Tensor) -> Tensor:
    if not isinstance(t, DTensor):
        return t
    local: Tensor = t.to_local()
    return local


def _box(
    parameter: Tensor, part: ShardSpec, parallel: TensorParallel | None, as_dtensors: bool
) -> tuple[Tensor, torch.Size, tuple[int, ...]]:
    """(what this rank holds, its part's shape, where in its part that begins)"""
    data = parameter.detach()
    shape, start = list(data.shape), [0] * data.ndim
    if not isinstance(data, DTensor):
        return data, torch.Size(shape), tuple(start)
    # FSDP's mesh dimensions come first, and share out what the one after them, the DTensor's own, has left.
    beyond = data.device_mesh.ndim
    if as_dtensors and parallel is not None:
        beyond -= 1
        shape = list(parallel.shape(data.shape, part))
    left = list(shape)
    for dimension, placement in enumerate(data.placements[:beyond]):
        axis = getattr(placement, "dim", None)
        if axis is not None:
            each = -(-left[axis] // data.device_mesh.size(dimension))
            first = min(each * data.device_mesh.get_local_rank(dimension), left[axis])
            start[axis], left[axis] = start[axis] + first, min(each, left[axis] - first)
    local = _local(data)
    if list(local.shape) != left and local.numel():
        raise ValueError(f"a DTensor placed as {data.placements} is not understood: only FSDP's are, of plain shards")
    return local, torch.Size(shape), tuple(start)


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor, sharded_offsets: Offsets, singleton_local_shards: bool = False
) -> dict[str, ShardedTensor]:
    """A packed [gate; up] parameter's parts, each rank's gate and up in their places, by key.

    Args:
        original_sh_ten: as ``Linear.sharded_state_dict`` has it: the part of one tensor that is shared out along one
            axis, its first, or, of experts, its second; each rank's part is [gate_r; up_r].
        sharded_offsets: the axes in front of the tensor's own.
        singleton_local_shards: gate and up are two tensors, ``{key}_w`` and ``{key}_v``.

    Returns:
        {key: [gate_0 … gate_p, up_0 … up_p]}, or the two.

    Raises:
        TypeError: for another kind of tensor: Megatron's are for its function.

    Source: the function of this name in ``megatron.core.transformer.mlp``, which returns a factory of such.
    """
    if not isinstance(original_sh_ten, ShardedTensor):
        raise TypeError(
            f"original_sh_ten of type {type(original_sh_ten).__module__}.{type(original_sh_ten).__name__} is not "
            "accepted: it must be a torch_fused_ops.distributed.checkpoint.ShardedTensor. Megatron's function of this "
            "name takes Megatron's"
        )
    key, local = original_sh_ten.key, original_sh_ten.local
    layout = dataclasses.replace(original_sh_ten.sharding, offsets=tuple(sharded_offsets))
    ((_, length, place),) = layout.runs
    n, half = layout.shape[layout.axis] // 2, length // 2
    gate, up = Run(0, half, place // 2), Run(half, half, place // 2)
    if singleton_local_shards:
        shape = torch.Size(n if axis == layout.axis else size for axis, size in enumerate(layout.shape))
        alone = dataclasses.replace(layout, shape=shape)
        return {
            name: ShardedTensor(name, local, dataclasses.replace(alone, runs=(run,)))
            for name, run in ((f"{key}_w", gate), (f"{key}_v", up))
        }
    return {key: ShardedTensor(key, local, dataclasses.replace(layout, runs=(gate, up._replace(place=n + up.place))))}


def sharded_state_dict(
    module: nn.Module, prefix: str = "", sharded_offsets: Offsets = (), metadata: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A model's state for ``torch.distributed.checkpoint``: modules that have a ``sharded_state_dict`` say theirs.

    All else is as ``state_dict`` has it: tensors that every rank has, and DTensors.
    """
    own = getattr(module, "sharded_state_dict", None)
    if own is not None:
        found: dict[str, Any] = own(prefix, sharded_offsets, metadata)
        return found
    state: dict[str, Any] = {}
    module._save_to_state_dict(state, prefix, keep_vars=False)
    packed = {key: one for key, t in state.items() if (one := _packed(key, t, sharded_offsets)) is not None}
    if sharded_offsets:
        rest = {key: t for key, t in state.items() if key not in packed}
        state = {key: ShardedTensor.of_parameter(key, t, offsets=sharded_offsets) for key, t in rest.items()}
    state |= packed
    for name, child in module.named_children():
        state |= sharded_state_dict(child, f"{prefix}{name}.", sharded_offsets, metadata)
    return state


def _packed(key: str, t: Any, offsets: Offsets) -> ShardedTensor | None:
    """A DTensor of which each of several pieces is sharded, as ``tensor_parallel_plan`` makes of packed gate and up.

    ``torch.distributed.checkpoint`` takes its part for one box of the whole, and refuses the overlap.
    """
    if not isinstance(t, DTensor) or t.device_mesh.ndim != 1 or not isinstance(t.placements[0], _StridedShard):
        return None
    axis, pieces = t.placements[0].dim, t.placements[0].split_factor
    ranks, rank, local = t.device_mesh.size(), t.device_mesh.get_local_rank(), _local(t).detach()
    length, whole = t.shape[axis] // (pieces * ranks), t.shape[axis] // pieces
    runs = tuple(Run(i * length, length, i * whole + rank * length) for i in range(pieces))
    return ShardedTensor(key, local, Layout(t.shape, axis, runs, (0,) * t.ndim, tuple(offsets)))


# ---- a model and its optimizer ---------------------------------------------------------------------------------------


def _optimizer_state(model: nn.Module, optimizer: Optimizer, of_model: Mapping[str, Any]) -> tuple[Any, Any]:
    """(the optimizer's state by parameter names, and the same as it goes into a checkpoint)

    What is as large as a parameter is shared out as it is. A parameter that is two tensors in the checkpoint has two
    states there.
    """
    fresh = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if fresh:  # no step has been made
        for of_parameter in state["state"].values():
            if "step" in of_parameter:
                of_parameter["step"] = torch.zeros_like(torch.as_tensor(of_parameter["step"]))
    saved: dict[str, Any] = {}
    for name, of_parameter in state["state"].items():
        places = [k for k in (name, f"{name}_w", f"{name}_v") if isinstance(of_model.get(k), ShardedTensor)]
        for key in places or [name]:
            place = of_model.get(key)
            saved[key] = {what: _state_of(f"{key}.{what}", value, place) for what, value in of_parameter.items()}
    return state, {"state": saved, "param_groups": state["param_groups"]}


def _state_of(key: str, value: Any, parameter: Any) -> Any:
    """A part of an optimizer's state of a parameter, as it goes into a checkpoint."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    local = _local(value).detach()
    if local.shape != parameter.local.shape:
        raise ValueError(
            f"{key} has shape {tuple(local.shape)}, its parameter {tuple(parameter.local.shape)}: which part of the "
            "whole it is, is not known"
        )
    return ShardedTensor(key, local, parameter.sharding)


def save(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    metadata: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model, and its optimizer, of which every process of the group holds its parts.

    Args:
        checkpoint_id: a folder.
        metadata: see ``MLP.sharded_state_dict``.
    """
    with _untouched(optimizer):
        _write(_whole(model, optimizer, metadata)[0], checkpoint_id=checkpoint_id, process_group=process_group)


@contextlib.contextmanager
def _untouched(optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, an optimizer that has made no step yet may get its state; behind it, it has none again.

    Upstream makes that state by a step without gradients, which counts as the first one (torch 2.11 to 2.15).
    """
    fresh = optimizer is not None and not optimizer.state
    try:
        yield
    finally:
        if fresh and optimizer is not None:
            optimizer.state.clear()


def _whole(
    model: nn.Module, optimizer: Optimizer | None, metadata: dict[str, Any] | None
) -> tuple[dict[str, Any], Any]:
    of_model = sharded_state_dict(model, metadata=metadata)
    if optimizer is None:
        return {"model": of_model}, None
    state, of_optimizer = _optimizer_state(model, optimizer, of_model)
    return {"model": of_model, "optimizer": of_optimizer}, state


def load(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    metadata: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> None:
    """Load what ``save`` has saved, with any number of processes: all of it, or nothing.

    Args:
        verify: compare what is read with its check sums (``torch.serialization.set_crc32_options(False)`` writes none).

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is missing, which is named.
        ValueError: the checkpoint lacks a tensor, or has another shape or dtype for it; the key is named. Model and
            optimizer are as before.
        RuntimeError: what is stored under a key is damaged; likewise.
    """
    with _untouched(optimizer):
        state, of_optimizer = _whole(model, optimizer, metadata)
        fresh = _map(state, _empty_like)
        reader = _Reader(checkpoint_id, verify)
        try:
            _read(fresh, storage_reader=reader, planner=_Planner(), process_group=process_group)
        except CheckpointException as error:
            for reason, _ in error.failures.values():
                if isinstance(reason, (_Missing, _Mismatch, _Damage)):
                    kind: Any = type(reason).__base__
                    raise kind(f"checkpoint {checkpoint_id}: {reason}; nothing was loaded") from None
            raise RuntimeError(f"checkpoint {checkpoint_id} cannot be read; nothing was loaded") from error
    with torch.no_grad():
        for target, source in zip(_leaves(state), _leaves(fresh), strict=True):
            if isinstance(target, ShardedTensor):
                for (_, into), (_, box) in zip(target._boxes(), source._boxes(), strict=True):
                    into.copy_(box)
            elif isinstance(target, Tensor):
                target.copy_(source)
    if optimizer is not None:
        of_optimizer["param_groups"] = fresh["optimizer"]["param_groups"]
        set_optimizer_state_dict(model, optimizer, of_optimizer)


class _Missing(FileNotFoundError):
    """The checkpoint is not there, or not whole."""


class _Mismatch(ValueError):
    """The checkpoint is not of this model."""


class _Damage(RuntimeError):
    """The checkpoint is not as it was written."""


class _Reader(FileSystemReader):
    """Upstream's, which first looks at check sums: ``torch.save`` writes them, ``torch.load`` does not compare."""

    def __init__(self, path: str | os.PathLike[str], verify: bool) -> None:
        super().__init__(path)
        self.verify = verify
        self.failure: Exception | None = None

    def read_metadata(self, *_: Any) -> Metadata:
        # Upstream logs what is raised here, and goes on; what set_up_storage_reader raises is told to every process.
        try:
            return super().read_metadata()
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            what = "it has no .metadata" if os.path.isdir(self.path) else "there is no such folder"
            self.failure = _Missing(what) if gone else _Damage(f".metadata cannot be read ({error})")
        except Exception as error:
            self.failure = _Damage(f".metadata is damaged ({type(error).__name__}: {error})")
        return Metadata({}, storage_data={})

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        if self.failure is not None:
            raise self.failure
        super().set_up_storage_reader(*args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        for index in {item.storage_index: None for item in plan.items}:
            item = self.storage_data[index]
            path = os.path.join(self.path, item.relative_path)
            if not os.path.exists(path):
                raise _Missing(f"its file {item.relative_path}, which holds {index.fqn}, is missing")
            if not self.verify:
                continue
            try:
                with open(path, "rb") as file:
                    file.seek(item.offset)
                    with zipfile.ZipFile(io.BytesIO(file.read(item.length))) as archive:
                        whole = archive.testzip() is None
            except (OSError, zipfile.BadZipFile):
                whole = False
            if not whole:
                raise _Damage(f"what is stored under {index.fqn}, in {item.relative_path}, is damaged")
        future: torch.futures.Future[None] = super().read_data(plan, planner)
        return future


class _Planner(DefaultLoadPlanner):
    """Upstream's, which first compares what is wanted with what is there."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for key, wanted in self.state_dict.items():
            _check(key, wanted, self.metadata)
        plan: LoadPlan = super().create_local_plan()
        return plan


def _check(key: str, wanted: Any, metadata: Metadata) -> None:
    there = metadata.state_dict_metadata.get(key)
    if there is None:
        raise _Mismatch(f"{key} is not in the checkpoint")
    if not isinstance(wanted, Tensor):
        return
    if not isinstance(there, TensorStorageMetadata):
        raise _Mismatch(f"{key} is not a tensor in the checkpoint")
    if there.size != wanted.shape:
        raise _Mismatch(f"{key} has shape {tuple(there.size)} in the checkpoint, {tuple(wanted.shape)} here")
    if there.properties.dtype != wanted.dtype:
        raise _Mismatch(f"{key} has dtype {there.properties.dtype} in the checkpoint, {wanted.dtype} here")
    if sum(math.prod(chunk.sizes) for chunk in there.chunks) != math.prod(there.size):
        raise _Mismatch(f"{key} is not complete in the checkpoint")


def _map(state: Any, fn: Any) -> Any:
    if isinstance(state, dict):
        return {key: _map(value, fn) for key, value in state.items()}
    return fn(state)


def _leaves(state: Any) -> Iterable[Any]:
    if isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    else:
        yield state


def _empty_like(t: Any) -> Any:
    if isinstance(t, ShardedTensor):
        return ShardedTensor(t.key, torch.empty_like(t.local), t.sharding)
    return torch.empty_like(t) if isinstance(t, Tensor) else t
