"""Checkpoints that load with any number of processes, built on ``torch.distributed.checkpoint``.

Each key stores the whole tensor in one process's order: all gate rows of a packed [gate; up] weight, then all up rows.
A rank holds boxes of that tensor (one for gate, one for up). A ``ShardedTensor`` lists its boxes by PyTorch's protocol
(``__create_write_items__``, ``__create_chunk_list__``, ``__get_tensor_shard__``). PyTorch can then load the checkpoint
with another number of ranks, and it writes replicated tensors once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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


class Box(NamedTuple):
    """Consecutive rows along the sharded axis: from ``start`` in a rank's data, and ``offset`` in the whole tensor."""

    start: int
    length: int
    offset: tuple[int, ...]


class ShardedTensor(Tensor):
    """A checkpoint's tensor, of which this rank holds boxes. It can be saved and loaded in place, not computed with.

    Attributes:
        key: the tensor's name in the checkpoint.
        local: this rank's data.
        boxes: the places of ``local`` in the whole tensor.
        axis: the sharded axis of ``local``. The checkpoint may have more axes in front.
        rows: rows of the rank's shard along ``axis``. If FSDP shards this shard, ``local`` has fewer rows.
    """

    key: str
    local: Tensor
    boxes: Sequence[Box]
    axis: int
    rows: int

    @staticmethod
    def __new__(
        cls, key: str, size: Sequence[int], local: Tensor, boxes: Sequence[Box], axis: int = 0, rows: int = 1
    ) -> ShardedTensor:
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(cls, size, dtype=local.dtype, device=local.device)
        tensor.key, tensor.local = key, local
        tensor.boxes, tensor.axis, tensor.rows = boxes, axis, rows
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
        axis, local = spec.axis if spec else None, parameter.detach()
        shape, start = local.shape, (0,) * local.ndim
        if isinstance(local, DTensor):
            placements = local.placements
            if not all(type(p) in (Shard, Replicate) for p in placements):
                raise ValueError(f"a DTensor placed as {placements} is not accepted: it must come from FSDP")
            _, start = compute_local_shape_and_global_offset(shape, local.device_mesh, placements)
            local = local.to_local()
        in_front = sorted(offsets)
        size = [n for _, _, n in in_front] + [*shape]
        offset = [place for _, place, _ in in_front] + [*start]
        if parallel is not None and axis is not None:
            offset[axis - local.ndim] += parallel.rank * shape[axis]
            size[axis - local.ndim] *= parallel.size
        rows, length = (t.shape[axis or 0] if t.ndim else 1 for t in (parameter, local))
        boxes = (Box(0, length, tuple(offset)),) if local.numel() else ()
        return cls(key, size, local, boxes, axis or 0, rows)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} is not accepted of a ShardedTensor: only save and load it; the local shard is .local"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensor({self.key}, {tuple(self.shape)}, {self.local.dtype})"

    def _views(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield (offset in the whole tensor, view of the data) for each box."""
        in_front = (None,) * (self.ndim - self.local.ndim)
        for start, length, offset in self.boxes:
            view = self.local.narrow(self.axis, start, length) if self.local.ndim else self.local
            yield torch.Size(offset), view[in_front]

    # The protocol of torch.distributed.checkpoint.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties, size = TensorProperties.create_from_tensor(self.local), self.size()
        return [
            WriteItem(
                index=MetadataIndex(fqn, place),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(ChunkStorageMetadata(place, box.size()), properties, size),
            )
            for place, box in self._views()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(place, box.size()) for place, box in self._views()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box for place, box in self._views() if place == index.offset)


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
    packed = original_sh_ten
    axis = len(sharded_offsets) + packed.axis
    half = packed.rows // 2  # rows of gate in this rank's shard
    size = list(packed.shape)
    up_start = size[axis] // 2  # the first row of up in the whole tensor
    if singleton_local_shards:
        size[axis], up_start = size[axis] // 2, 0
    suffixes = ("_w", "_v") if singleton_local_shards else ("", "")
    boxes: dict[str, list[Box]] = {packed.key + suffix: [] for suffix in suffixes}
    for i, suffix in enumerate(suffixes):
        for start, length, offset in packed.boxes:
            rank, first = divmod(offset[axis], packed.rows)
            low, high = max(first, i * half), min(first + length, (i + 1) * half)
            if low < high:
                place = list(offset)
                place[axis] = i * up_start + rank * half + low - i * half
                boxes[packed.key + suffix].append(Box(start + low - first, high - low, tuple(place)))
    return {key: ShardedTensor(key, size, packed.local, of_key, packed.axis) for key, of_key in boxes.items()}


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
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a model that the group's processes shard, and its optimizer unless that is None, in a folder."""
    _write(_checkpoint_state(model, optimizer)[0], checkpoint_id=checkpoint_id, process_group=process_group)


def load(
    checkpoint_id: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a checkpoint that ``save`` wrote, with any number of processes.

    Raises:
        CheckpointException: PyTorch raises it if a tensor is missing or has another size (nothing is loaded then), or
            if a file is missing or unreadable.
    """
    state, of_optimizer = _checkpoint_state(model, optimizer)
    _read(state, checkpoint_id=checkpoint_id, process_group=process_group)
    if optimizer is not None:
        of_optimizer["param_groups"] = state["optimizer"]["param_groups"]
        set_optimizer_state_dict(model, optimizer, of_optimizer)


def _checkpoint_state(model: nn.Module, optimizer: Optimizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state as a checkpoint has it, and the optimizer's state by parameter names, in the same memory.

    Optimizer tensors are sharded like their parameter. Before an optimizer's first step, PyTorch initializes its state
    with a step on zero gradients, which counts as a step (torch 2.11 to 2.15).
    """
    parameters = sharded_state_dict(model)
    if optimizer is None:
        return {"model": parameters}, {}
    of_optimizer: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state = {
        name: {kind: _shard_like(f"{name}.{kind}", t, parameters.get(name)) for kind, t in values.items()}
        for name, values in of_optimizer["state"].items()
    }
    return {"model": parameters, "optimizer": {**of_optimizer, "state": state}}, of_optimizer


def _shard_like(key: str, value: Any, parameter: Any) -> Any:
    """Return the checkpoint's entry for one value of a parameter's optimizer state, sharded like the parameter."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    local = (value.to_local() if isinstance(value, DTensor) else value).detach()
    if local.shape != parameter.local.shape:
        raise ValueError(
            f"{key} has shape {tuple(local.shape)}, which is not accepted: it must have its parameter's shape, "
            f"{tuple(parameter.local.shape)}"
        )
    return ShardedTensor(key, parameter.shape, local, parameter.boxes, parameter.axis)
