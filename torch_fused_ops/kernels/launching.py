"""Import Triton for the hand-written kernels, those of float8, and launch them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as error:
    raise ImportError(
        "torch_fused_ops needs Triton to run its float8 operators on a GPU, and it cannot be imported. "
        "Install it with: pip install triton numpy (GPU builds of PyTorch bring the Triton that fits "
        "them). With TORCH_FUSED_OPS_WITHOUT=float8_kernels in the environment they run as plain PyTorch"
    ) from error

__all__ = ["libdevice", "tl", "triton"]  # kernels import them from here, for the error above

INT32_MAX = 2**31 - 1

# The formulas' cost and accuracy depend on fused multiply-adds, which Triton 3.10 turns off by default.
OPTIONS = {"enable_fp_fusion": True}


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    device: torch.device,
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int | None, ...],
    constants: dict[str, Any],
) -> None:
    """Launch a kernel on the tensors' device, which may differ from the current one. All launches go through here.

    Args:
        kernel: a kernel with arguments ``tensors``, ``integers``, ``constants``, in this order.
        grid: the number of programs along each axis.
        device: the tensors' device.
        tensors, integers: the kernel's positional arguments.
        constants: ``tl.constexpr`` arguments and Triton's options, by name.
    """
    with torch.accelerator.device_index(device.index):
        try:
            kernel[grid](*tensors, *integers, **constants)
        except Exception as error:
            raise RuntimeError(
                f"the kernel {kernel.__name__} of torch_fused_ops cannot be compiled or launched on {device}: {error}\n"
                "With TORCH_FUSED_OPS_WITHOUT=float8_kernels in the environment, float8 operators run as plain "
                "PyTorch. Please report it."
            ) from error
