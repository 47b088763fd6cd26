"""Emulate the part of ``torch.cuda`` that the benchmarks' harness uses, on a CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from torch_fused_ops.benchmarks.harness import Cuda

synchronized = True


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        assert synchronized
        return 1e3 * (end.at - self.at)


def synchronize(device: torch.device) -> None:
    global synchronized
    synchronized = True


def _sleep(cycles: int) -> None:
    global synchronized
    assert isinstance(cycles, int) and cycles > 0
    synchronized = False


PROPERTIES = SimpleNamespace(name="Stand-in 9000", total_memory=1 << 30, L2_cache_size=1 << 12)
# torch.cuda must have every name of this stand-in.
CUDA = SimpleNamespace(
    Event=Event,
    get_device_properties=lambda device: PROPERTIES,
    get_device_capability=lambda device: (9, 0),
    synchronize=synchronize,
    _sleep=_sleep,
    set_device=lambda index: None,
    empty_cache=lambda: None,
    reset_peak_memory_stats=lambda device: None,
    memory_allocated=lambda device: 100,
    max_memory_allocated=lambda device: 350,
)


def stand_in() -> Cuda:
    return Cuda(torch.device("cpu"), CUDA)
