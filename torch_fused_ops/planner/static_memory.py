"""What a GPU holds whatever the levels: parameters, gradients behind backward, optimizer state; or its shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops.planner.fsdp import FullyShard, Group, shard_shape
from torch_fused_ops.planner.optimizers import optimizer_memory
from torch_fused_ops.planner.tensor_parallel import Split

__all__ = ["Held", "Resident", "check_shards", "check_whole", "held"]


@dataclass(frozen=True)
class Held:
    """A parameter or a buffer.

    Attributes:
        name: its path in the model.
        unit: the layer that it is in, "" if it is in none.
        shape: what one GPU works with, before FSDP2 cuts it.
        dtype: its dtype; so is its gradient's.
        is_parameter: it is no buffer.
        trained: it needs a gradient.
        is_split: a tensor-parallel group has a part of it on each GPU.
    """

    name: str
    unit: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    trained: bool
    is_split: bool = False

    def in_shards(self, dp: int) -> Held:
        """One GPU's shard of it; of a buffer all."""
        return replace(self, shape=shard_shape(self.shape, dp)) if self.is_parameter and dp > 1 else self

    @property
    def is_left_whole(self) -> bool:
        """It is a matrix, or more, of which every GPU of a tensor-parallel group has all."""
        return self.is_parameter and len(self.shape) > 1 and not self.is_split

    @property
    def place(self) -> str:
        """Its path, layers' numbers as "*"."""
        return re.sub(r"\.\d+(?=\.)", ".*", self.name)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def held(
    model: Callable[..., Any],
    unit_of: Callable[[str], str],
    split: Split | None = None,
    gets_gradient: Callable[[str], bool] = lambda path: True,
) -> list[Held]:
    """All parameters and buffers of a model; of a function none.

    Args:
        model: a module or a function.
        unit_of: the layer that a module is in, by its path.
        split: what one GPU has a part of.
        gets_gradient: whether backward reaches the parameter of a path; one that it does not reach is not trained.
    """
    if not isinstance(model, nn.Module):
        return []
    reached = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if gets_gradient(name)}
    named: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in model.named_parameters()]
    named += [(name, buffer, False) for name, buffer in model.named_buffers()]
    return [
        Held(
            name,
            unit_of(name.rpartition(".")[0]),
            split.shape(name, t.shape) if split else tuple(t.shape),
            t.dtype,
            is_parameter,
            t.requires_grad and id(t) in reached,
            split is not None and split.shape(name, t.shape) != tuple(t.shape),
        )
        for name, t, is_parameter in named
    ]


def check_whole(model: Callable[..., Any], dp: int, tp: int) -> None:
    """What is planned for several GPUs is a module, whole.

    Raises:
        ValueError: it is a function, or has parameters in shards already.
    """
    for name, count in (("dp", dp), ("tp", tp)):
        if count == 1:
            continue
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name}={count} is not accepted: model={model!r} is a function; it must be a module")
        found = next((path for path, p in model.named_parameters() if hasattr(p, "device_mesh")), None)  # a DTensor
        if found is not None:
            raise ValueError(f"{name}={count} is not accepted: {found} is in shards already; plan the whole model")


def check_shards(model: Callable[..., Any], unit_of: Callable[[str], str], dp: int) -> None:
    """What ``fully_shard`` refuses.

    Raises:
        ValueError: as ``check_whole``; or parameters are scalars, or in several layers, or trained ones of several
            dtypes in a layer.
    """

    def refuse(why: str) -> None:
        raise ValueError(f"dp={dp} is not accepted: {why}")

    check_whole(model, dp, 1)
    assert isinstance(model, nn.Module)
    units: dict[int, tuple[str, str]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        unit = unit_of(name.rpartition(".")[0])
        first, its_unit = units.setdefault(id(p), (name, unit))
        if p.dim() == 0:
            refuse(f"{name} is a scalar, which FSDP2 does not shard; make it a tensor of one element")
        if unit != its_unit:
            refuse(f"{name} is {first}, and FSDP2 shards no parameter in two layers")
        if p.requires_grad and dtypes.setdefault(unit, p.dtype) != p.dtype:
            refuse(
                f"{name} is {p.dtype}, other parameters of {unit or 'no layer'} are {dtypes[unit]}; FSDP2 reduces the "
                "gradients of one dtype"
            )


@dataclass(frozen=True)
class Resident:
    """Bytes that do not depend on levels.

    Attributes:
        parameters: of parameters and buffers.
        gradients: of all parameters' gradients, behind backward.
        state: that the optimizer keeps.
        transient: that its step allocates and frees.
        by_unit: of parameters and buffers, and of gradients, by layer.
        shards: the shards, if there are any.
        batch: of the arguments and results that the caller still holds while the optimizer runs.
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
        """The number of GPUs that have shards; 1 where all is whole."""
        return self.shards.dp if self.shards else 1

    @property
    def nbytes(self) -> int:
        """What is alive all the time."""
        return self.parameters + self.state

    @property
    def optimizer_peak(self) -> int:
        """What is alive at most in the optimizer's step."""
        return self.nbytes + self.gradients + self.transient + self.batch

    @classmethod
    def of(cls, whole: Sequence[Held], optimizer: str, dp: int) -> Resident:
        """What one of ``dp`` GPUs holds.

        Args:
            whole: the parameters and buffers.
            optimizer: one of ``OPTIMIZERS``.
            dp: the number of GPUs that have shards; with 1 all is whole.
        """
        own = [each.in_shards(dp) for each in whole]
        trained = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in own if each.trained]
        needs = optimizer_memory(optimizer, trained)
        units = dict.fromkeys(each.unit for each in own)
        by_unit = {unit: (_nbytes(_of(own, unit)), _nbytes(_of(own, unit, trained=True))) for unit in units}
        total, gradients = (sum(each[i] for each in by_unit.values()) for i in (0, 1))
        groups = {unit: Group(_nbytes(p for p in _of(own, unit) if p.is_parameter), by_unit[unit][1]) for unit in units}
        return cls(total, gradients, needs.state, needs.transient, by_unit, FullyShard(dp, groups) if dp > 1 else None)


def _of(tensors: Sequence[Held], unit: str, trained: bool = False) -> Iterator[Held]:
    return (each for each in tensors if each.unit == unit and each.trained >= trained)


def _nbytes(tensors: Iterator[Held]) -> int:
    return sum(each.nbytes for each in tensors)
