"""Call independent functions in several processes at once."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")
_BYTES = 2 << 30  # free memory for each process: compiling a model with 32 layers took 1.1 GiB
_functions: Sequence[Callable[[], Any]] = ()  # in a child process


def results_of(functions: Sequence[Callable[[], _T]]) -> Iterator[_T]:
    """Yield each function's result, in order. Functions run in forked processes if that is safe.

    It is safe if no thread of this process can hold a lock, and CUDA has not started. Forked processes have the modules
    and registered activations of this process. Results are pickled. A function that fails runs again in this process,
    so that its error has a trace.
    """
    processes = min(len(functions), _processes())
    if processes < 2:
        yield from (function() for function in functions)
        return
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, fork, initializer=_start, initargs=(functions,)) as pool:
        futures = [pool.submit(_call, number) for number in range(len(functions))]
        try:
            for function, future in zip(functions, futures, strict=True):
                yield function() if future.exception() else future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _processes() -> int:
    """Return the number of processes that may run at once."""
    threads = {thread.name for thread in threading.enumerate()} - {threading.current_thread().name, "tqdm_monitor"}
    if threads or torch.cuda.is_initialized() or not hasattr(os, "sched_getaffinity"):
        return 1
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return min(len(os.sched_getaffinity(0)), (int(available[1]) << 10) // _BYTES if available else 1)


def _start(functions: Sequence[Callable[[], Any]]) -> None:
    global _functions
    _functions = functions
    torch.set_num_threads(1)  # a forked process has no threads of OpenMP


def _call(number: int) -> Any:
    return _functions[number]()
