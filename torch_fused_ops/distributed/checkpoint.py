"""Checkpoints that load with any number of processes, built on ``torch.distributed.checkpoint``.

Each key stores the whole tensor in one process's order: all gate rows of a packed [gate; up] weight, then all up rows.
A rank holds boxes of that tensor (one for gate, one for up). A ``ShardedTensor`` lists its boxes by PyTorch's protocol
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). PyTorch can then load the checkpoint
with another number of ranks, and it writes replicated tensors once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as _read
from torch.distributed.checkpoint.state_dict_saver import save as _write
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.graphs.modules import WRAPPED

if TYPE_CHECKING:
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

Offsets = tuple[tuple[int, int, int], ...]
"""(axis, index, size) for each axis that the checkpoint's tensor has in front of the module's axes."""


class Run(NamedTuple):
    """Consecutive rows along the sharded axis: ``start`` in the rank's shard, ``place`` in the whole tensor."""

    start: int
    length: int
    place: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """The boxes of a whole tensor that a rank holds.

    Attributes:
        shape: shape of the whole tensor.
        axis: the sharded axis.
        runs: the rows of the whole tensor that make up the rank's shard, in the shard's order.
        start: offset of the local tensor in that shard, by axis. It is 0 unless FSDP shards it.
        offsets: axes that the checkpoint has in front of the axes of ``shape``.
    """

    shape: torch.Size
    axis: int
    runs: tuple[Run, ...]
    start: tuple[int, ...]
    offsets: Offsets = ()


class ShardedTensor(Tensor):
    """A checkpoint's tensor, of which this rank holds boxes. It can be saved and loaded in place, not computed with.

    Attributes:
        key: the tensor's name in the checkpoint.
        local: this rank's data.
        sharding: the place of ``local`` in the whole tensor.
    """

    key: str
    local: Tensor
    sharding: Layout

    @staticmethod
    def __new__(cls, key: str, local: Tensor, layout: Layout) -> ShardedTensor:
        size = torch.Size((*(size for _, _, size in sorted(layout.offsets)), *layout.shape))
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype, device=local.device)
        tensor.key, tensor.local, tensor.sharding = key, local, layout
        return tensor

    @classmethod
    def of_parameter(
        cls,
        key: str,
        parameter: Tensor,
        spec: ShardSpec | None = None,
        parallel: TensorParallel | None = None,
        offsets: Offsets = (),
    ) -> ShardedTensor:
        """Wrap a parameter that the ranks of ``parallel`` shard."""
        spec, local = spec or ShardSpec(None), parameter.detach()
        shard_shape, start = local.shape, (0,) * local.ndim
        if isinstance(local, DTensor):
            placements = local.placements
            if not all(type(p) in (Shard, Replicate) for p in placements):
                raise ValueError(f"a DTensor placed as {placements} is not accepted: it must come from FSDP")
            _, start = compute_local_shape_and_global_offset(shard_shape, local.device_mesh, placements)
            local = local.to_local()
        ranks, rank = (1, 0) if parallel is None or spec.axis is None else (parallel.size, parallel.rank)
        axis = spec.axis or 0
        shape = torch.Size(n * ranks if i == axis else n for i, n in enumerate(shard_shape))
        rows = shard_shape[axis] if shard_shape else 1
        return cls(key, local, Layout(shape, axis, (Run(0, rows, rank * rows),), tuple(start), tuple(offsets)))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} is not accepted of a ShardedTensor: only save and load it; the local shard is .local"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensor({self.key}, {tuple(self.shape)}, {self.local.dtype})"

    def _boxes(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield (offset in the checkpoint's tensor, view of the data) for each box of this rank."""
        local, layout = self.local, self.sharding
        front = tuple(place for _, place, _ in sorted(layout.offsets))
        within = (None,) * len(front)
        if not layout.shape:
            yield torch.Size(front), local[within]
        elif local.numel():
            first = layout.start[layout.axis]
            for run in layout.runs:
                low, high = max(first, run.start), min(first + local.shape[layout.axis], run.start + run.length)
                if low < high:
                    place = list(layout.start)
                    place[layout.axis] = run.place + low - run.start
                    view = local.narrow(layout.axis, low - first, high - low)
                    yield torch.Size((*front, *place)), view[within]

    # The protocol of torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.local), self.size()
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


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor, sharded_offsets: Offsets, singleton_local_shards: bool = False
) -> dict[str, ShardedTensor]:
    """Return a packed [gate; up] parameter's shards by key, so that the whole tensor has all gate rows first.

    Args:
        original_sh_ten: an entry of ``ColumnParallelLinear.sharded_state_dict``. Each rank's shard is [gate_r; up_r].
        sharded_offsets: axes that the checkpoint has in front of the parameter's axes.
        singleton_local_shards: save gate and up as two tensors, ``{key}_w`` and ``{key}_v``.

    Returns:
        {key: [gate_0 … gate_p, up_0 … up_p]}, or with ``singleton_local_shards`` the two tensors by their keys.

    Raises:
        TypeError: original_sh_ten has another type, such as Megatron's ShardedTensor.

    Source: the function of this name in ``megatron.core.transformer.mlp``, which returns a ``ShardedTensorFactory``.
    """
    if not isinstance(original_sh_ten, ShardedTensor):
        raise TypeError(
            f"original_sh_ten of type {type(original_sh_ten).__module__}.{type(original_sh_ten).__name__} is not "
            "accepted: it must be a torch_fused_ops.distributed.checkpoint.ShardedTensor. Megatron's function of this "
            "name accepts Megatron's tensors"
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
    """Return a model's state for ``torch.distributed.checkpoint``, from its modules' ``sharded_state_dict`` methods.

    Modules without this method have their ``state_dict`` entries: DTensors, or tensors equal on all ranks. Keys omit
    wrappers (``torch.compile``, DDP, checkpoint and offload wrappers), as in PyTorch's ``get_model_state_dict``.

    Raises:
        TypeError: a module is wrapped in FSDP1, whose parameters are flat.
    """
    if isinstance(module, FullyShardedDataParallel):
        raise TypeError(
            f"{prefix.removesuffix('.') or 'model'} of type FullyShardedDataParallel is not accepted: its parameters "
            "are flat. Use fully_shard (FSDP2), or get_model_state_dict of torch.distributed.checkpoint.state_dict"
        )
    state: dict[str, Any] = {}
    if hasattr(type(module), "sharded_state_dict"):  # not hasattr(module, …): wrappers forward attributes
        return {**module.sharded_state_dict(prefix, sharded_offsets, metadata)}  # type: ignore[operator]
    module._save_to_state_dict(state, prefix, keep_vars=False)
    if sharded_offsets:
        for key, t in state.items():
            state[key] = ShardedTensor.of_parameter(key, t, offsets=sharded_offsets)
    for name, child in module.named_children():
        is_wrapped = name in WRAPPED or isinstance(module, DistributedDataParallel)
        inside = prefix if is_wrapped else f"{prefix}{name}."
        state |= sharded_state_dict(child, inside, sharded_offsets, metadata)
    return state


# ---- a model and its optimizer ---------------------------------------------------------------------------------------


def save(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    metadata: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model that the group's processes shard, and its optimizer unless that is None.

    Args:
        checkpoint_id: path of the checkpoint's folder.
        metadata: passed to ``sharded_state_dict``; see ``MLP.sharded_state_dict``.
    """
    with _untouched(optimizer):
        _write(
            _checkpoint_state(model, optimizer, metadata)[0], checkpoint_id=checkpoint_id, process_group=process_group
        )


@contextlib.contextmanager
def _untouched(optimizer: Optimizer | None) -> Iterator[None]:
    """On exit, empty the optimizer's state again if it was empty on entry, before the optimizer's first step.

    PyTorch initializes an empty state with a step on zero gradients, which counts as a step (torch 2.11 to 2.15).
    """
    fresh = optimizer is not None and not optimizer.state
    try:
        yield
    finally:
        if fresh and optimizer is not None:
            optimizer.state.clear()


def _checkpoint_state(
    model: nn.Module, optimizer: Optimizer | None, metadata: dict[str, Any] | None
) -> tuple[dict[str, Any], Any]:
    """Return the state as written to a checkpoint, and the optimizer's state by parameter names.

    Optimizer tensors are sharded like their parameter. If the checkpoint stores a parameter as two tensors (gate and
    up), it also stores two optimizer states.
    """
    of_model = sharded_state_dict(model, metadata=metadata)
    if optimizer is None:
        return {"model": of_model}, None
    fresh = not optimizer.state
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if fresh:  # before the first step
        for of_parameter in state["state"].values():
            if "step" in of_parameter:
                of_parameter["step"] = torch.zeros_like(torch.as_tensor(of_parameter["step"]))
    saved: dict[str, Any] = {}
    for name, of_parameter in state["state"].items():
        places = [k for k in (name, f"{name}_w", f"{name}_v") if isinstance(of_model.get(k), ShardedTensor)]
        for key in places or [name]:
            place = of_model.get(key)
            saved[key] = {n: _state_of(f"{key}.{n}", value, place) for n, value in of_parameter.items()}
    return {"model": of_model, "optimizer": {"state": saved, "param_groups": state["param_groups"]}}, state


def _state_of(key: str, value: Any, parameter: Any) -> Any:
    """Return the checkpoint's entry for one value of a parameter's optimizer state, sharded like the parameter."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    if local.shape != parameter.local.shape:
        raise ValueError(
            f"{key} has shape {tuple(local.shape)}, which is not accepted: it must have its parameter's shape, "
            f"{tuple(parameter.local.shape)}"
        )
    return ShardedTensor(key, local, parameter.sharding)


def load(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    metadata: dict[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint that ``save`` wrote, with any number of processes.

    Raises:
        CheckpointException: PyTorch raises it if a tensor is missing or has another size (nothing is loaded then), or
            if a file is missing or unreadable.
    """
    with _untouched(optimizer):
        state, of_optimizer = _checkpoint_state(model, optimizer, metadata)
        _read(state, checkpoint_id=checkpoint_id, process_group=process_group)
    if optimizer is not None:
        of_optimizer["param_groups"] = state["optimizer"]["param_groups"]
        set_optimizer_state_dict(model, optimizer, of_optimizer)
