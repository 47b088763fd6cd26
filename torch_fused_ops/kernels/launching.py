# mypy: disable-error-code="no-untyped-call"
"""Shared by all Triton kernels: Triton, or what to install; tensors as matrices; grids; the launch."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from torch_fused_ops import formulas

try:
    import triton
    import triton.language as tl
    from triton.compiler import CompiledKernel
    from triton.language.extra import libdevice
except ImportError as error:
    raise ImportError(
        "torch_fused_ops needs Triton to run its operators on a GPU in eager mode, and it cannot be imported. "
        "Install it with: pip install triton numpy (GPU builds of PyTorch bring the Triton that fits "
        "them). With TORCH_FUSED_OPS_WITHOUT=kernels in the environment they run as plain PyTorch"
    ) from error

__all__ = ["libdevice", "tl", "triton"]  # imported from here, for the error above

INT32_MAX = 2**31 - 1
GRID_LIMIT = 65535  # of the grid's second and third axes, on every vendor's GPUs

# The formulas' cost and accuracy rest on fused multiply-adds, which Triton 3.10 turns off by default.
OPTIONS = {"enable_fp_fusion": True}


# What was compiled for launches like one that was made. Triton finds that out anew at every launch, from each argument,
# in Python. With an emulated driver, a launch of 27 and 37 arguments takes Triton 9.5 and 11.7 µs, and 5.8 and 6.2 so:
# 4.0 in Triton's ``CompiledKernel``, the rest for the key and its look-up (AMD EPYC with AVX-512, processor time).
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_MOST_COMPILED = 4096  # entries of 1 KB; then all are found anew


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    device: torch.device,
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int | None, ...],
    constants: dict[str, Any],
) -> None:
    """The one place that launches kernels: on the tensors' device, which need not be the current one.

    Triton specializes a kernel on its constants and, of each argument, on the type, whether it is None or 1 and whether
    16 divides it. Here a kernel is found by the integers themselves, which the shapes and strides give, by the tensors'
    dtypes and alignment, and by all else that Triton's ``JITFunction.run`` reads: so never a kernel that is specialized
    for something else, and a shape's first launch goes Triton's way. So does every launch where more can matter: of a
    kernel with hooks before it, under Triton's interpreter, and on GPUs whose backends look at more than a tensor's
    alignment (AMD's: at its size).

    Args:
        kernel: its arguments are ``tensors``, then ``integers``, then those of ``constants``.
        grid: how many programs there are along each axis.
        device: where the tensors are.
        tensors, integers: arguments by position.
        constants: ``tl.constexpr`` arguments and Triton's options, by name; in one order in all launches of a kernel.
    """
    with torch.accelerator.device_index(device.index):
        key = (
            id(kernel),  # an entry keeps its kernel alive, so no other one gets its id
            device.index,
            integers,
            *[None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors],
            *constants.values(),
            triton.knobs.runtime.debug,
            triton.knobs.compilation.instrumentation_mode,
        )
        found = _COMPILED.get(key)
        if found is None or kernel.pre_run_hooks or triton.knobs.runtime.add_stages_inspection_hook is not None:
            try:
                compiled = kernel[grid](*tensors, *integers, **constants)
            except Exception as error:
                raise RuntimeError(
                    f"the kernel {kernel.__name__} of torch_fused_ops cannot be compiled or launched on {device}: "
                    f"{error}\nWith TORCH_FUSED_OPS_WITHOUT=kernels in the environment operators run as plain PyTorch. "
                    "Please report it."
                ) from error
            if not isinstance(compiled, CompiledKernel):  # interpreted, or not compiled because of a hook
                return
            backend = kernel.device_caches[triton.runtime.driver.active.get_current_device()][3]
            if backend.supports_native_tensor_specialization:
                if len(_COMPILED) >= _MOST_COMPILED:
                    _COMPILED.clear()
                names = kernel.arg_names[len(tensors) + len(integers) :]
                _COMPILED[key] = compiled, tuple(constants[name] for name in names)
        else:
            compiled, values = found
            compiled[grid](*tensors, *integers, *values)


class Launch(NamedTuple):
    """The arguments of a call of ``launch``."""

    kernel: Any
    grid: tuple[int, int, int]
    tensors: tuple[Tensor | None, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that are no constants, by name."""
        return dict(zip(self.kernel.arg_names, (*self.tensors, *self.integers), strict=False))


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are put into the list and not carried out: tensors may be on "meta"."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, device: torch.device, tensors: Any, integers: Any, constants: Any) -> None:
        launches.append(Launch(kernel, grid, tensors, integers, constants))

    with mock.patch.object(sys.modules[__name__], "launch", record):
        yield launches


def row_grid(row_blocks: int) -> tuple[int, int]:
    """(high, deep): at least so many programs on the grid's second and third axes, for each of which there is a limit.

    A kernel finds its block as ``tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)``; a few may find no rows.
    """
    deep = blocks(row_blocks, GRID_LIMIT)
    return blocks(row_blocks, deep), deep


def unit(columns: int, row_strides: Sequence[int], itemsize: int) -> int:
    """By what these sizes are divided before a kernel gets them, which multiplies them by it: a ``tl.constexpr``.

    Of an integer argument Triton knows at most that 16 divides it. Where that is not so, as with 1000 columns, it would
    load and store single elements. A factor of 8, 4 or 2 that the kernel sees gives it as many at once.

    Args:
        columns: of all tensors, or a divisor of theirs.
        row_strides: in elements; 0 where there is none.
        itemsize: the least of the tensors'.
    """
    common = math.gcd(16, columns, *row_strides)
    if common == 16 or (columns % 16 == 0 and common * itemsize < 16):  # then only some tensors' rows are unaligned
        return 1
    return common


class Matrix(NamedTuple):
    """A tensor as the kernels read it: element (r, c) lies ``row·r + column·c`` elements after the first."""

    row: int = 0
    column: int = 0
    columns: int = 0
    itemsize: int = 0  # 0: there is no tensor


def matrix(t: Tensor | None) -> tuple[Tensor | None, Matrix]:
    """(..., n) as a matrix of n columns; a copy of it where no single stride walks the leading axes."""
    if t is None:
        return None, Matrix()
    columns = t.shape[-1]
    row = columns if t.is_contiguous() else common_stride(t.shape[:-1], t.stride()[:-1])
    if row is None:
        t, row = t.contiguous(), columns
    return t, Matrix(row, t.stride(-1), columns, t.element_size())


def common_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride that walks all these axes as if they were one; None if there is none."""
    common, walked = 0, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if walked == 1:
            common = stride
        elif stride != common * walked:
            return None
        walked *= size
    return common


def blocks(size: int, block: int) -> int:
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << (size - 1).bit_length()


def compute_type(*tensors: Tensor | None) -> tuple[torch.dtype, Any]:
    dtype = formulas.compute_dtype(*tensors)
    return dtype, tl.float64 if dtype == torch.float64 else tl.float32
