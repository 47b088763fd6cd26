"""Memory independent of levels: parameters, gradients after backward, optimizer state, or one GPU's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops.planner.fsdp import FullyShard, Group, shard_shape
from torch_fused_ops.planner.optimizers import optimizer_memory

__all__ = ["Resident", "ResidentTensor", "check_shards", "check_whole", "resident_tensors"]


@dataclass(frozen=True)
class ResidentTensor:
    """A parameter or a buffer.

    Attributes:
        name: its path in the model.
        unit: its layer, "" if it is in none.
        shape: its shape on one GPU, before FSDP2 shards it.
        dtype: the dtype of it and its gradient.
        is_parameter: True for a parameter, False for a buffer.
        trained: True if it needs a gradient.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    trained: bool

    def in_shards(self, dp: int) -> ResidentTensor:
        """One GPU's shard of it; a buffer whole."""
        return replace(self, shape=shard_shape(self.shape, dp)) if self.is_parameter and dp > 1 else self

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def resident_tensors(
    model: Callable[..., Any],
    unit_of: Callable[[str], str],
    gets_gradient: Callable[[str], bool] = lambda path: True,
) -> list[ResidentTensor]:
    """List a model's parameters and buffers; a function has none.

    Args:
        model: a module or a function.
        unit_of: the layer of a module, by its path.
        gets_gradient: True if backward reaches the parameter at a path; others are not trained.
    """
    if not isinstance(model, nn.Module):
        return []
    reached = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if gets_gradient(name)}
    named: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in model.named_parameters()]
    named += [(name, buffer, False) for name, buffer in model.named_buffers()]
    return [
        ResidentTensor(
            name,
            unit_of(name.rpartition(".")[0]),
            tuple(t.shape),
            t.dtype,
            is_parameter,
            t.requires_grad and id(t) in reached,
        )
        for name, t, is_parameter in named
    ]


def check_whole(model: Callable[..., Any], dp: int) -> None:
    """Check that a model for several GPUs is a whole module.

    Raises:
        ValueError: it is a function, or has parameters in shards already.
    """
    if dp == 1:
        return
    if not isinstance(model, nn.Module):
        raise ValueError(f"dp={dp} is not accepted: model={model!r} is a function; it must be a module")
    sharded = next((path for path, p in model.named_parameters() if hasattr(p, "device_mesh")), None)  # a DTensor
    if sharded is not None:
        raise ValueError(f"dp={dp} is not accepted: {sharded} is in shards already; plan the whole model")


def check_shards(model: Callable[..., Any], unit_of: Callable[[str], str], dp: int) -> None:
    """Check a model for what ``fully_shard`` refuses.

    Raises:
        ValueError: as ``check_whole``; or parameters are scalars, or in several layers, or trained ones of several
            dtypes in a layer.
    """

    def refuse(why: str) -> None:
        raise ValueError(f"dp={dp} is not accepted: {why}")

    check_whole(model, dp)
    assert isinstance(model, nn.Module)
    units: dict[int, tuple[str, str]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = unit_of(name.rpartition(".")[0])
        first, its_unit = units.setdefault(id(p), (name, unit))
        if p.dim() == 0:
            refuse(f"{name} is a scalar, which FSDP2 does not shard; make it a tensor of one element")
        if unit != its_unit:
            refuse(f"{name} is {first}, and FSDP2 does not shard a parameter in two layers")
        if p.requires_grad and dtypes.setdefault(unit, p.dtype) != p.dtype:
            refuse(
                f"{name} is {p.dtype}, other parameters of {unit or 'no layer'} are {dtypes[unit]}; FSDP2 reduces the "
                "gradients of one dtype"
            )


@dataclass(frozen=True)
class Resident:
    """Bytes that do not depend on levels.

    Attributes:
        parameters: bytes of parameters and buffers.
        gradients: bytes of all parameters' gradients, after backward.
        state: bytes of optimizer state.
        transient: bytes that the optimizer's step allocates and frees.
        by_unit: bytes of parameters and buffers, and of gradients, by layer.
        shards: the shards, if there are any.
        batch: bytes of the caller's arguments and results that are alive while the optimizer runs.
    """

    parameters: int
    gradients: int
    state: int
    transient: int
    by_unit: Mapping[str, tuple[int, int]]
    shards: FullyShard | None
    batch: int = 0

    @property
    def dp(self) -> int:
        """The number of GPUs with shards; 1 without shards."""
        return self.shards.dp if self.shards else 1

    @property
    def nbytes(self) -> int:
        """Bytes alive all the time."""
        return self.parameters + self.state

    @property
    def optimizer_peak(self) -> int:
        """The most bytes alive in the optimizer's step."""
        return self.nbytes + self.gradients + self.transient + self.batch

    @classmethod
    def of(cls, whole: Sequence[ResidentTensor], optimizer: str, dp: int) -> Resident:
        """The resident memory of one of ``dp`` GPUs.

        Args:
            whole: the parameters and buffers.
            optimizer: one of ``OPTIMIZERS``.
            dp: the number of GPUs with shards; 1: no shards.
        """
        local = [t.in_shards(dp) for t in whole]
        trained = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in local if t.trained]
        needs = optimizer_memory(optimizer, trained)
        units = dict.fromkeys(t.unit for t in local)
        by_unit = {unit: (_nbytes(_of(local, unit)), _nbytes(_of(local, unit, trained=True))) for unit in units}
        total, gradients = (sum(t[i] for t in by_unit.values()) for i in (0, 1))
        groups = {
            unit: Group(_nbytes(p for p in _of(local, unit) if p.is_parameter), by_unit[unit][1]) for unit in units
        }
        return cls(total, gradients, needs.state, needs.transient, by_unit, FullyShard(dp, groups) if dp > 1 else None)


def _of(tensors: Sequence[ResidentTensor], unit: str, trained: bool = False) -> Iterator[ResidentTensor]:
    return (t for t in tensors if t.unit == unit and t.trained >= trained)


def _nbytes(tensors: Iterator[ResidentTensor]) -> int:
    return sum(t.nbytes for t in tensors)
