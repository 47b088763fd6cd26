"""An optimizer's state, and the memory of its step: run PyTorch's own optimizer on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops.virtual_gpu.timeline import Storages

__all__ = ["OPTIMIZERS", "OptimizerMemory", "optimizer_memory"]

# foreach is PyTorch's default on GPUs; fused must be requested.
OPTIMIZERS: Mapping[str, Callable[[Sequence[Tensor]], torch.optim.Optimizer] | None] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, foreach=True),
    "none": None,
}


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes: ``state`` that lives on between steps, and ``transient``, which a step allocates and frees."""

    state: int
    transient: int


def optimizer_memory(name: str, parameters: Sequence[Tensor]) -> OptimizerMemory:
    """Measure an optimizer's memory beside parameters and gradients.

    Args:
        name: one of ``OPTIMIZERS``.
        parameters: its parameters; only sizes and dtypes matter.
    """
    make = OPTIMIZERS[name]
    if make is None or not parameters:
        return OptimizerMemory(0, 0)
    twins = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in parameters]
    gradients = [torch.empty_like(twin) for twin in twins]
    for twin, gradient in zip(twins, gradients, strict=True):
        twin.grad = gradient
    optimizer: Any = make(twins)
    storages = Storages()
    for tensor in (*twins, *gradients):
        storages.add(tensor, counted=False)
    with storages:
        optimizer.step()
        state = storages.live
        storages.most = state
        optimizer.step()
    return OptimizerMemory(state, storages.most - state)
