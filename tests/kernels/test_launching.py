"""Launches run on the tensors' device, and errors name the switch that avoids the kernels."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch_fused_ops.families.float8 import kernels

SIZES, CONSTANTS = (3, 5), {"WIDTH": 16, "num_warps": 4, **kernels.OPTIONS}


class Kernel:
    """A stub of a kernel: ``kernel[grid](...)`` calls ``run``."""

    __name__ = "_kernel"

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **options: self.run(grid, *args, **options)


def test_launches_run_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = [0]
    launches: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def device_index(index: int) -> Any:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    kernel = Kernel(lambda *args, **options: launches.append((current[-1], args, options)))
    x = torch.ones(3)
    kernels.launch(kernel, (1, 2, 3), torch.device("cuda", 1), (x, None), SIZES, CONSTANTS)
    assert launches == [(1, ((1, 2, 3), x, None, *SIZES), CONSTANTS)] and current == [0]


def test_errors_name_the_switch_for_kernels() -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise ValueError("ptxas: no")

    with pytest.raises(
        RuntimeError, match=r"_kernel of torch_fused_ops .* cpu: ptxas: no\n.*TORCH_FUSED_OPS_WITHOUT=float8_kernels"
    ):
        kernels.launch(Kernel(fails), (1, 1, 1), torch.device("cpu"), (None,), SIZES, CONSTANTS)
