"""Layouts of TTGIR: the elements of a tensor that each thread of a program holds."""

from __future__ import annotations

import functools
import math
import re

import torch
from torch import Tensor

_LISTS = r"((?:\[[\d, ]*\](?:, )?)*)"


@functools.lru_cache(512)
def elements(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> Tensor | None:
    """The flat numbers of the elements in each register of each thread (threads, registers).

    None for a layout that is not read here, such as those of tensor cores.
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
        """The exclusive or of the bases whose bits are set: sizes are powers of 2, so flat numbers do."""
        result = torch.zeros_like(numbers)
        for bit, places in enumerate(bases[name]):  # a smaller tensor is held several times
            number = sum(p % size * stride for p, size, stride in zip(places, shape, strides, strict=True))
            result = result ^ ((numbers >> bit & 1) * number)
        return result

    thread = torch.arange(threads)
    of_thread = combined("lane", thread % warp_size) ^ combined("warp", thread // warp_size)
    return of_thread[:, None] ^ combined("register", torch.arange(1 << len(bases["register"])))


def _linear(encoding: str, shape: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """The place of the element to which each bit of a register's, a lane's and a warp's number leads."""
    texts = {name: re.search(rf"{name} = \[{_LISTS}\]", encoding) for name in ("register", "lane", "warp")}
    return {
        name: [[int(n) for n in basis.split(",")] for basis in re.findall(r"\[([\d, ]+)\]", match[1] if match else "")]
        for name, match in texts.items()
    }


def _blocked(encoding: str, shape: tuple[int, ...]) -> dict[str, list[list[int]]]:
    """The same of tiles: those of a thread, a warp and a program, repeated in registers."""
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
    """For each element the first thread that holds it, which is the one that stores it, and the number of threads.

    The thread is -1 where the layout is not known. A scalar is held by all.
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
    """Tell whether a warp needs elements that another one holds, so that a conversion goes through shared memory."""
    before, after = (elements(encoding, shape, threads, warp_size) for encoding in (source, target))
    if before is None or after is None:
        return True
    warp = torch.arange(threads)[:, None] // warp_size * math.prod(shape)
    return not bool(torch.isin(warp + after, warp + before).all())


@functools.lru_cache(512)
def reduces_across_warps(encoding: str, shape: tuple[int, ...], axis: int, threads: int, warp_size: int) -> bool:
    """Tell whether several warps hold the elements along an axis, so that its reduction has a barrier."""
    thread, _ = owners(encoding, shape, threads, warp_size)
    warp = (thread // warp_size).reshape(shape)
    return bool((thread < 0).any() or (warp != warp.narrow(axis, 0, 1)).any())
