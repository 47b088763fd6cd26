"""Read TTGIR layouts, which assign the elements of a tensor to the threads of a program."""

from __future__ import annotations

import functools
import math
import re

import torch
from torch import Tensor

_LISTS = r"((?:\[[\d, ]*\](?:, )?)*)"


@functools.lru_cache(512)
def elements(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> Tensor | None:
    """Return the flat element numbers in each thread's registers (threads, registers).

    Return None for unsupported layouts, such as tensor cores' layouts.
    """
    sliced = re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", encoding)
    if sliced:
        dim = int(sliced[1])
        return elements(sliced[2], (*shape[:dim], 1, *shape[dim:]), threads, warp_size)
    if not encoding.startswith(("#ttg.blocked", "#ttg.linear")):
        return None
    bases = (_linear if "linear" in encoding else _blocked)(encoding, shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def combined(name: str, numbers: Tensor) -> Tensor:
        """Combine the bases of the set bits by exclusive or. Sizes are powers of 2, so flat numbers can be combined."""
        result = torch.zeros_like(numbers)
        for bit, places in enumerate(bases[name]):  # `% size`: threads share the elements of a small tensor
            number = sum(p % size * stride for p, size, stride in zip(places, shape, strides, strict=True))
            result = result ^ ((numbers >> bit & 1) * number)
        return result

    thread = torch.arange(threads)
    of_thread = combined("lane", thread % warp_size) ^ combined("warp", thread // warp_size)
    return of_thread[:, None] ^ combined("register", torch.arange(1 << len(bases["register"])))


def _linear(encoding: str, shape: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """Read a linear layout: the index offset for each bit of the register, lane and warp numbers."""
    bases = {}
    for name in ("register", "lane", "warp"):
        match = re.search(rf"{name} = \[{_LISTS}\]", encoding)
        offsets = re.findall(r"\[([\d, ]+)\]", match[1]) if match else []
        bases[name] = [[int(n) for n in offset.split(",")] for offset in offsets]
    return bases


def _blocked(encoding: str, shape: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """Convert a blocked layout to index offsets per bit. Registers repeat the tiles of thread, warp and program."""
    bases: dict[str, list[list[int]]] = {"register": [], "lane": [], "warp": []}
    steps = [1] * len(shape)
    counts = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA|order) = \[([\d, ]+)\]", encoding)
    sizes, lanes, warps, order = ([int(n) for n in text.split(",")] for text in counts)
    for name, tile in (("register", sizes), ("lane", lanes), ("warp", warps), ("register", shape)):
        for dim in order:
            repeats = tile[dim] if tile is not shape else max(1, shape[dim] // steps[dim])
            for _ in range(repeats.bit_length() - 1):
                bases[name].append([steps[dim] * (dim == axis) for axis in range(len(shape))])
                steps[dim] *= 2
    return bases


@functools.lru_cache(512)
def owners(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> tuple[Tensor, Tensor]:
    """Return each element's first thread, which stores it, and the number of threads that hold it.

    The thread is -1 if the layout is unknown. All threads hold a scalar.
    """
    if not shape:
        return torch.zeros(1, dtype=torch.int64), torch.tensor([threads])
    numbers, size = elements(encoding, shape, threads, warp_size), math.prod(shape)
    if numbers is None:
        return torch.full((size,), -1), torch.ones(size, dtype=torch.int64)
    pairs = torch.unique(numbers * threads + torch.arange(threads)[:, None])
    element, thread = pairs // threads, pairs % threads
    first = torch.full((size,), threads).scatter_reduce(0, element, thread, "amin")
    return first, torch.bincount(element, minlength=size)


@functools.lru_cache(512)
def crosses_warps(source: str, target: str, shape: tuple[int, ...], threads: int, warp_size: int) -> bool:
    """Return True if a conversion uses shared memory, because a warp needs elements that another warp holds."""
    before, after = (elements(encoding, shape, threads, warp_size) for encoding in (source, target))
    if before is None or after is None:
        return True
    warp = torch.arange(threads)[:, None] // warp_size * math.prod(shape)
    return not bool(torch.isin(warp + after, warp + before).all())


@functools.lru_cache(512)
def reduces_across_warps(encoding: str, shape: tuple[int, ...], axis: int, threads: int, warp_size: int) -> bool:
    """Return True if a reduction has a barrier, because several warps hold the elements along its axis."""
    thread, _ = owners(encoding, shape, threads, warp_size)
    warp = (thread // warp_size).reshape(shape)
    return bool((thread < 0).any() or (warp != warp.narrow(axis, 0, 1)).any())
