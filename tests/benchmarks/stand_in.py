"""A GPU's clock and memory without a GPU: what the benchmarks' harness uses of ``torch.cuda``, on the CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from torch_fused_ops.benchmarks.harness import Cuda


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        assert StandIn.synchronized
        return 1e3 * (end.at - self.at)


class StandIn:
    """What the harness uses of ``torch.cuda``, on the CPU; every name of it must be one of torch.cuda's."""

    Event = Event
    synchronized = True

    @staticmethod
    def get_device_properties(device: torch.device) -> Any:
        return SimpleNamespace(name="Stand-in 9000", total_memory=1 << 30, L2_cache_size=1 << 12)

    @staticmethod
    def get_device_capability(device: torch.device) -> tuple[int, int]:
        return 9, 0

    @staticmethod
    def synchronize(device: torch.device) -> None:
        StandIn.synchronized = True

    @staticmethod
    def _sleep(cycles: int) -> None:
        assert isinstance(cycles, int) and cycles > 0
        StandIn.synchronized = False

    @staticmethod
    def set_device(index: int) -> None: ...

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def reset_peak_memory_stats(device: torch.device) -> None: ...

    @staticmethod
    def memory_allocated(device: torch.device) -> int:
        return 100

    @staticmethod
    def max_memory_allocated(device: torch.device) -> int:
        return 350


def stand_in() -> Cuda:
    return Cuda(torch.device("cpu"), StandIn)
