"""Helpers for kernel tests: a device (a GPU or Triton's interpreter), and machine code for absent GPUs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import kernels
from torch_fused_ops.testing import precision


class Device:
    """Runs kernels on a GPU or in Triton's interpreter, and records their launches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.really_launch = kernels.launch
        self.launches: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        device: torch.device,
        tensors: tuple[Any, ...],
        integers: tuple[Any, ...],
        constants: dict[str, Any],
    ) -> None:
        self.launches.append((kernel.__name__, (*tensors, *integers), constants))
        if self.name == "cpu":
            virtual_gpu.interpret(kernel, *tensors, *integers, grid=grid, **constants)
        else:
            self.really_launch(kernel, grid, device, tensors, integers, constants)

    def run(self, operator: Callable[..., Any], *args: Any) -> Any:
        """Run operator(*args) on this device, record only this call's ``launches``, and return results on the CPU."""
        self.launches.clear()
        result = operator(*(self.copy_of(a) if isinstance(a, Tensor) else a for a in args))
        if isinstance(result, Tensor):
            return result.cpu()
        return tuple(None if r is None else r.cpu() for r in result)

    def copy_of(self, t: Tensor) -> Tensor:
        """Copy a tensor to this device with the same strides."""
        if self.name == "cpu":
            return t
        base = t.new_empty(0).set_(t.untyped_storage()).to(self.name)
        return base.as_strided(t.size(), t.stride(), t.storage_offset())

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.launches]


def assert_close(actual: Tensor, expected: Tensor, gradient: bool = False, absolute: Tensor | float = 0.0) -> None:
    """Check actual against the float64 value by its dtype's contract; ``absolute`` is an additional allowed error.

    A kernel rounds once. If the contract allows 1 ulp, the error to the exact value is at most 0.5 ulp; if it allows 2,
    1.5 ulp.
    """
    assert expected.dtype == torch.float64
    assert actual.shape == expected.shape
    dtype, error = actual.dtype, (actual.double() - expected).abs()
    limit = precision.LIMITS["gradient" if gradient else "forward", dtype]
    if dtype not in precision.HALF:
        allowed = limit * expected.abs()
    else:
        tiny = torch.finfo(dtype).tiny  # smaller numbers are equally spaced
        exponent = expected.to(dtype).double().abs().clamp(min=tiny).frexp()[1] - 1
        ulp = torch.finfo(dtype).eps * torch.exp2(exponent.double())
        allowed = (limit - 0.5 + 1e-3) * ulp  # in ulps of the rounded result, from the exact one
    allowed = torch.maximum(allowed, torch.tensor(precision.FLOORS[dtype], dtype=torch.float64)) + absolute
    failed = ~((error <= allowed) | (actual == expected.to(dtype)) | (actual.isnan() & expected.isnan()))
    assert not failed.any(), f"{failed.sum()} of {failed.numel()}: {actual[failed][:5]} for {expected[failed][:5]}"


class Launch(NamedTuple):
    """A recorded call of ``kernels.launch``."""

    kernel: Any
    grid: tuple[int, int, int]
    device: torch.device
    tensors: tuple[Tensor | None, ...]
    integers: tuple[int | None, ...]
    constants: dict[str, Any]


def recorded(operator: Callable[..., Any], *args: Any) -> list[Launch]:
    """Return the launches of a call without executing them. Tensors may be "meta"."""
    launches: list[Launch] = []
    with mock.patch.object(kernels, "launch", lambda *call: launches.append(Launch(*call))):
        operator(*args)
    return launches


def wide(args: Sequence[Any]) -> list[Any]:
    """Convert floating-point arguments to float64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


GPUS = [virtual_gpu.A100, virtual_gpu.H100, virtual_gpu.B200, virtual_gpu.MI300X]


def assemble(gpu: virtual_gpu.GPU, operator: Callable[..., Any], *args: Any) -> list[virtual_gpu.MachineCode]:
    """Return the machine code of each kernel of a call, specialized like Triton: absent tensors, ones, alignment."""
    return [
        virtual_gpu.assemble(kernel, gpu, *tensors, *integers, **constants)
        for kernel, _, _, tensors, integers, constants in recorded(operator, *args)
    ]
