"""Memory that levels do not change: parameters, gradients after backward and optimizer state, on one GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_fused_ops.planner.fsdp import FullyShard, Group
from torch_fused_ops.planner.setup import SettingError, Setup
from torch_fused_ops.virtual_gpu.timeline import Storages

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer] | None] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "none": None,
}


def optimizer_memory(name: str, parameters: Sequence[Tensor]) -> tuple[int, int]:
    """Measure the memory of an optimizer, by running it on meta tensors.

    Args:
        name: one of ``OPTIMIZERS``, or "adamw-fused".
        parameters: the trained parameters.

    Returns:
        Bytes of state that stays alive between steps, and the peak bytes of a step's temporary tensors.
    """
    make: Any = OPTIMIZERS[name.removesuffix("-fused")]
    if make is None or not parameters:
        return 0, 0
    copies = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters]
    optimizer = make(copies, lr=1e-3, foreach=True)  # foreach is PyTorch's default on GPUs
    storages = Storages()
    for p in copies:
        p.grad = torch.empty_like(p)
        storages.add(p, counted=False)
        storages.add(p.grad, counted=False)
    with storages:
        optimizer.step()
        state = storages.live
        storages.most = state
        optimizer.step()
    # Fused kernels, which do not run on meta tensors, work in place.
    return state, 0 if name.endswith("-fused") else storages.most - state


class ResidentTensor(NamedTuple):
    """A parameter, a buffer, or an unregistered tensor that stays in memory."""

    name: str  # its path in the model
    unit: str  # its layer; "" outside layers
    tensor: Tensor  # on the meta device, before sharding
    is_parameter: bool  # False for a buffer or an unregistered tensor
    trained: bool  # True if it needs a gradient


def resident_tensors(
    model: Callable[..., Any],
    unit_of: Callable[[str], str],
    gets_gradient: Callable[[str], bool] = lambda path: True,
    unregistered: Mapping[str, Tensor] | None = None,
) -> list[ResidentTensor]:
    """List a step's parameters and buffers, registered or not.

    Args:
        model: a module or a function.
        unit_of: returns the layer of the module at a path; "" outside layers.
        gets_gradient: returns True if backward reaches the parameter at a path; other parameters are not trained.
        unregistered: parameters and buffers that the step reads and the model does not register, by path.
    """
    others = list((unregistered or {}).items())
    module = model if isinstance(model, nn.Module) else nn.Module()
    every = [*module.named_parameters(remove_duplicate=False), *others]
    reached = {id(p) for name, p in every if gets_gradient(name)}
    tensors = []
    for is_parameter, named in ((True, module.named_parameters()), (False, [*module.named_buffers(), *others])):
        for name, t in named:
            unit, trained = unit_of(name.rpartition(".")[0]), t.requires_grad and id(t) in reached
            on_meta = torch.empty(t.shape, dtype=t.dtype, device="meta")
            tensors.append(ResidentTensor(name, unit, on_meta, is_parameter, trained))
    return tensors


def check_shards(model: Callable[..., Any], dp: int, unregistered: Mapping[str, Tensor] | None = None) -> None:
    """Raise if the plan of a sharded model would be wrong. ``fully_shard`` itself rejects other models.

    Raises:
        SettingError: the model is a function, has sharded parameters, or trains a parameter that it does not register.
    """
    why = ""
    path = next((name for name, t in (unregistered or {}).items() if t.requires_grad), None)
    if not isinstance(model, nn.Module):
        why = f"model={model!r} is a function; it must be a module"
    elif path is not None:
        why = f"the model does not register {path}, so FSDP2 does not shard it"
    elif any(hasattr(p, "device_mesh") for p in model.parameters()):  # a DTensor
        why = "the model is sharded already; plan the unsharded model"
    if why:
        raise SettingError("dp", dp, f"is not accepted: {why}")


@dataclass(frozen=True)
class Resident:
    """Bytes that do not depend on levels."""

    parameters: int  # and buffers
    gradients: int  # all parameters' gradients after backward
    state: int  # the optimizer's state
    transient: int  # peak bytes of temporary tensors in the optimizer's step
    shards: FullyShard | None  # None if parameters are not sharded
    buckets: int = 0  # DDP's buckets, which are copies of the gradients
    accumulated: int = 0  # gradients of earlier micro-batches
    batch: int = 0  # the caller's arguments and results that are alive while the optimizer runs
    sizes: tuple[tuple[str, int], ...] = ()  # (path, bytes) of each parameter and buffer

    @property
    def nbytes(self) -> int:
        """Bytes alive throughout forward and backward."""
        return self.parameters + self.state + self.buckets + self.accumulated

    @property
    def optimizer_peak(self) -> int:
        """The most bytes alive in the optimizer's step."""
        return self.nbytes - self.accumulated + self.gradients + self.transient + self.batch

    @classmethod
    def of(
        cls, tensors: Sequence[ResidentTensor], setup: Setup, group_of: Callable[[str], str] = lambda path: ""
    ) -> Resident:
        """Compute the resident memory of one GPU.

        Args:
            tensors: the parameters and buffers, not sharded.
            setup: how the model is trained.
            group_of: returns the FSDP2 group of the parameter at a path outside layers; used for ``root="apart"``.
        """
        dp, trained = setup.dp if setup.sharded else 1, []
        sizes: list[tuple[str, int]] = []
        groups: dict[str, Group] = {}
        for path, unit, t, is_parameter, needs_gradient in tensors:
            if is_parameter and dp > 1:  # the first GPU's shard is the largest; others are padded to its size
                t = t[: math.ceil(len(t) / dp)]
            is_cast = is_parameter and t.is_floating_point()
            if is_cast and (setup.mixed_precision or setup.master_weights):
                t = t.float()
            if needs_gradient:
                trained.append(t)
            sizes.append((path, t.nbytes))
            name = unit or (group_of(path) if setup.root == "apart" else "")
            group = groups.get(name, Group())
            gathered = t.bfloat16() if setup.mixed_precision and is_cast else t
            shard = group.shard + gathered.nbytes * is_parameter
            groups[name] = Group(shard, group.gradients + t.nbytes * needs_gradient)
        gradients = sum(t.nbytes for t in trained)
        shards = FullyShard(dp, groups, setup.reshard, setup.accumulate > 1) if dp > 1 else None
        buckets = gradients if setup.dp > 1 and setup.parallel == "ddp" else 0
        accumulated = gradients if setup.accumulate > 1 else 0
        memory = optimizer_memory(setup.optimizer, trained)
        total = sum(nbytes for _, nbytes in sizes)
        return cls(total, gradients, *memory, shards, buckets, accumulated, sizes=tuple(sizes))
