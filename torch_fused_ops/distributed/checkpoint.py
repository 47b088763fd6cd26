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
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from torch_fused_ops.distributed.shard_spec import ShardSpec
from torch_fused_ops.graphs.modules import WRAPPED

if TYPE_CHECKING:
    from torch_fused_ops.distributed.tensor_parallel import TensorParallel

Offsets = tuple[tuple[int, int, int], ...]
"""(axis, index, size) for each axis that the checkpoint's tensor has in front of the module's axes."""


class Box(NamedTuple):
    """The rows from ``start`` to ``stop`` of a rank's data, and their ``offset`` in the whole tensor."""

    start: int
    stop: int
    offset: tuple[int, ...]


class ShardedTensor(Tensor):
    """A checkpoint's tensor, of which this rank holds boxes. It can be saved and loaded in place, not computed with.

    Attributes:
        key: the tensor's name in the checkpoint.
        source: the parameter or optimizer state, or this rank's shard of it; a DTensor if FSDP2 shards it.
        boxes: the places of ``local`` in the whole tensor. The checkpoint may have more axes in front.
    """

    key: str
    source: Tensor
    boxes: Sequence[Box]

    @staticmethod
    def __new__(cls, key: str, size: Sequence[int], source: Tensor, boxes: Sequence[Box]) -> ShardedTensor:
        tensor: ShardedTensor = Tensor._make_wrapper_subclass(cls, size, dtype=source.dtype, device=source.device)
        tensor.key, tensor.source, tensor.boxes = key, source.detach(), boxes
        return tensor

    @property
    def local(self) -> Tensor:
        """This rank's data."""
        return self.source.to_local() if isinstance(self.source, DTensor) else self.source

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
        axis = spec.axis if spec else None
        local, start = parameter, [0] * parameter.ndim
        if isinstance(parameter, DTensor):
            if not all(type(p) in (Shard, Replicate) for p in parameter.placements):
                raise ValueError(f"a DTensor placed as {parameter.placements} is not accepted: it must come from FSDP")
            local, start = parameter.to_local(), [*parameter.__create_chunk_list__()[0].offsets]
        in_front = sorted(offsets)
        size = [*(n for _, _, n in in_front), *parameter.shape]
        offset = [*(place for _, place, _ in in_front), *start]
        if parallel is not None and axis is not None:
            offset[axis - parameter.ndim] += parallel.rank * parameter.shape[axis]
            size[axis - parameter.ndim] *= parallel.size
        rows = local.shape[0] if local.ndim else 1
        boxes = (Box(0, rows, tuple(offset)),) if local.numel() else ()
        return cls(key, size, parameter, boxes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} is not accepted of a ShardedTensor: only save and load it; the local shard is .local"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedTensor({self.key}, {tuple(self.shape)}, {self.local.dtype})"

    def _views(self) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield (offset in the whole tensor, view of the data) for each box."""
        local = self.local
        for start, stop, offset in self.boxes:
            view = local[start:stop] if local.ndim else local
            yield torch.Size(offset), view[(None,) * (self.ndim - local.ndim)]

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
    packed, axis = original_sh_ten, len(sharded_offsets)
    rows = packed.source.shape[0]  # of this rank's [gate; up]. If FSDP2 shards it, ``local`` has fewer
    half, size = rows // 2, list(packed.shape)
    up_start = size[axis] // 2  # the first row of up in the whole tensor
    if singleton_local_shards:
        size[axis], up_start = up_start, 0
    keys = [packed.key + suffix for suffix in (("_w", "_v") if singleton_local_shards else ("", ""))]
    boxes: dict[str, list[Box]] = {key: [] for key in keys}
    for i, key in enumerate(keys):
        for start, stop, offset in packed.boxes:
            rank, first = divmod(offset[axis], rows)
            low, high = max(first, i * half), min(first + stop - start, (i + 1) * half)
            if low < high:
                place = list(offset)
                place[axis] = i * up_start + rank * half + low - i * half
                boxes[key].append(Box(start + low - first, start + high - first, tuple(place)))
    return {key: ShardedTensor(key, size, packed.source, of_key) for key, of_key in boxes.items()}


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
    for hook in module._state_dict_pre_hooks.values():  # FSDP2's puts shards in place of gathered parameters
        hook(module, prefix, False)
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
    _write(_checkpoint_state(model, optimizer), checkpoint_id=checkpoint_id, process_group=process_group)


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
    state = _checkpoint_state(model, optimizer)
    _read(state, checkpoint_id=checkpoint_id, process_group=process_group)
    if optimizer is not None:
        loaded = tree_map_only(ShardedTensor, lambda t: t.source, state["optimizer"])
        set_optimizer_state_dict(model, optimizer, loaded)


def _checkpoint_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the state as a checkpoint has it. Its tensors share memory with the model and the optimizer.

    Optimizer tensors are sharded like their parameter. Before an optimizer's first step, PyTorch initializes its state
    with a step on zero gradients, which counts as a step (torch 2.11 to 2.15).
    """
    parameters = sharded_state_dict(model)
    if optimizer is None:
        return {"model": parameters}
    of_optimizer: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state = {
        name: {kind: _shard_like(f"{name}.{kind}", t, parameters.get(name)) for kind, t in values.items()}
        for name, values in of_optimizer["state"].items()
    }
    return {"model": parameters, "optimizer": {**of_optimizer, "state": state}}


def _shard_like(key: str, value: Any, parameter: Any) -> Any:
    """Return the checkpoint's entry for one value of a parameter's optimizer state, sharded like the parameter."""
    if not isinstance(parameter, ShardedTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    sharded = ShardedTensor(key, parameter.shape, value, parameter.boxes)
    if sharded.local.shape != parameter.local.shape:
        raise ValueError(
            f"{key} has shape {tuple(sharded.local.shape)}, which is not accepted: it must have its parameter's shape, "
            f"{tuple(parameter.local.shape)}"
        )
    return sharded
