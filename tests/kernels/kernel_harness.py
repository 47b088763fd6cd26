"""What the kernels' tests share: a device that is a GPU or Triton's interpreter, and machine code on paper."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fused_ops import virtual_gpu
from torch_fused_ops.kernels import launching
from torch_fused_ops.testing import precision
from torch_fused_ops.virtual_gpu.machine_code import specialization


class Device:
    """Where the kernels run, and what was launched there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.really_launch = launching.launch
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
        """operator(*args) on this device, results on the CPU; ``launches`` are those of this call."""
        self.launches.clear()
        moved = [self.moved(a) if isinstance(a, Tensor) else a for a in args]
        result = operator(*moved)
        if isinstance(result, Tensor):
            return result.cpu()
        return tuple(None if r is None else r.cpu() for r in result)

    def moved(self, t: Tensor) -> Tensor:
        """With the same strides."""
        if self.name == "cpu":
            return t
        base = t.new_empty(0).set_(t.untyped_storage()).to(self.name)
        return base.as_strided(t.size(), t.stride(), t.storage_offset())

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.launches]


def assert_close(actual: Tensor, expected: Tensor, gradient: bool = False, absolute: Tensor | float = 0.0) -> None:
    """Within the contract of actual's dtype of the float64 value; ``absolute``: an error allowed on top.

    A kernel rounds once: where the contract has 1 ulp, the value or its neighbor, it is within half of one of the
    exact value, and where it has 2 within one and a half.
    """
    assert expected.dtype == torch.float64
    assert actual.shape == expected.shape
    dtype, error = actual.dtype, (actual.double() - expected).abs()
    limit = precision.LIMITS["gradient" if gradient else "forward", dtype]
    if dtype not in precision.HALF:
        allowed = limit * expected.abs()
    else:
        tiny = torch.finfo(dtype).tiny  # below it all numbers are as far apart
        exponent = expected.to(dtype).double().abs().clamp(min=tiny).frexp()[1] - 1
        ulp = torch.finfo(dtype).eps * torch.exp2(exponent.double())
        allowed = (limit - 0.5 + 1e-3) * ulp  # in ulps of the rounded result, from the exact one
    allowed = torch.maximum(allowed, torch.tensor(precision.FLOORS[dtype], dtype=torch.float64)) + absolute
    wrong = ~((error <= allowed) | (actual == expected.to(dtype)) | (actual.isnan() & expected.isnan()))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.numel()}: {actual[wrong][:5]} for {expected[wrong][:5]}"


def recorded(operator: Callable[..., Any], *args: Any) -> list[launching.Launch]:
    """The launches of a call, none of them carried out. Tensors may be "meta"."""
    with launching.recorded() as launches:
        operator(*args)
    return launches


def wide(args: Sequence[Any]) -> list[Any]:
    """Arguments with float64 in place of narrower numbers."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


GPUS = [virtual_gpu.A100, virtual_gpu.H100, virtual_gpu.B200, virtual_gpu.MI300X]


def assemble(gpu: virtual_gpu.GPU, operator: Callable[..., Any], *args: Any) -> list[virtual_gpu.MachineCode]:
    """Machine code of each kernel that a call launches, specialized as Triton does: absent tensors, ones, alignment."""
    return [
        virtual_gpu.assemble(kernel, gpu, **specialization(kernel, (*tensors, *integers), constants))
        for kernel, _, tensors, integers, constants in recorded(operator, *args)
    ]
