"""The device that a captured graph is compiled for. It may differ from the device of its tensors."""

from __future__ import annotations

from contextvars import ContextVar

import torch

# The GPU that an emulator captures for with CPU and meta tensors; None outside emulators.
emulated: ContextVar[torch.device | None] = ContextVar("torch_fused_ops_emulated_device", default=None)


def target_device(device: torch.device) -> torch.device:
    """Return the target device of a graph with tensors on `device`: `device` itself, or the GPU emulated on it.

    `torch.cuda.get_device_capability` and its like then describe that GPU.
    """
    return (emulated.get() or device) if device.type in ("cpu", "meta") else device
