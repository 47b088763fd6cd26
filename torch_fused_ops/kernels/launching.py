# mypy: disable-error-code="no-untyped-call"
"""Provide the parts that hand-written Triton kernels share: Triton's import, tensors as matrices, launches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError as error:
    raise ImportError(
        "torch_fused_ops needs Triton to run its operators on a GPU in eager mode, and it cannot be imported. "
        "Install it with: pip install triton numpy (GPU builds of PyTorch bring the Triton that fits "
        "them). With TORCH_FUSED_OPS_WITHOUT=kernels in the environment they run as plain PyTorch"
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
                "With TORCH_FUSED_OPS_WITHOUT=kernels in the environment operators run as plain PyTorch. "
                "Please report it."
            ) from error


class Launch(NamedTuple):
    """A recorded call of ``launch``."""

    kernel: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Tensors and integers by name."""
        return dict(zip(self.kernel.arg_names, (*self.tensors, *self.integers), strict=False))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches inside the block in a list instead of executing them: tensors may be on "meta"."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, device: torch.device, tensors: Any, integers: Any, constants: Any) -> None:
        launches.append(Launch(kernel, grid, tensors, integers, constants))

    with mock.patch.object(sys.modules[__name__], "launch", record):
        yield launches


class Matrix(NamedTuple):
    """A tensor as a matrix: element (r, c) has offset ``row·r + column·c``."""

    row: int = 0
    column: int = 0
    columns: int = 0
    itemsize: int = 0  # 0 for an absent tensor


def matrix(t: Tensor | None) -> tuple[Tensor | None, Matrix]:
    """View (..., n) as a matrix with n columns; copy it if the leading axes have no common stride."""
    if t is None:
        return None, Matrix()
    columns = t.shape[-1]
    row = columns if t.is_contiguous() else common_stride(t.shape[:-1], t.stride()[:-1])
    if row is None:
        t, row = t.contiguous(), columns
    return t, Matrix(row, t.stride(-1), columns, t.element_size())


def common_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of these axes merged into one; None if they cannot be merged."""
    common, elements = 0, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if elements == 1:
            common = stride
        elif stride != common * elements:
            return None
        elements *= size
    return common


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def power_of_2(size: int) -> int:
    """Return the smallest power of 2 that is at least ``size``."""
    return 1 << (size - 1).bit_length()
