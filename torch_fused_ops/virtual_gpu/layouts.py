"""Layouts of TTGIR: the elements of a tensor that each thread of a program holds."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.lru_cache(512)
def elements(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> Tensor | None:
    """The flat numbers of the elements in each register of each thread (threads, registers).

    None for a layout that is not read here, such as those of tensor cores.
    """
    sliced = re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", encoding)
    if sliced:
        dim = int(sliced[1])
        return elements(sliced[2], (*shape[:dim], 1, *shape[dim:]), threads, warp_size)
    if encoding.startswith("#ttg.blocked"):
        return _blocked(encoding, shape, threads, warp_size)
    if encoding.startswith("#ttg.linear"):
        return _linear(encoding, shape, threads, warp_size)
    return None


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _blocked(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> Tensor:
    names = ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")
    matches = [re.search(rf"{name} = \[([\d, ]+)\]", encoding) for name in names]
    sizes, lanes, warps, order = ([int(n) for n in match[1].split(",")] for match in matches if match)
    thread, strides = torch.arange(threads), _strides(shape)
    lane, warp = thread % warp_size, thread // warp_size
    numbers = torch.zeros(threads, 1, dtype=torch.int64)
    for dim in order:
        first = (warp % warps[dim] * lanes[dim] + lane % lanes[dim]) * sizes[dim]
        lane, warp = lane // lanes[dim], warp // warps[dim]
        tile = sizes[dim] * lanes[dim] * warps[dim]
        registers = torch.arange(max(1, -(-shape[dim] // tile)))[:, None] * tile + torch.arange(sizes[dim])
        places = (first[:, None] + registers.flatten()) % shape[dim]  # a smaller tensor is held several times
        numbers = (numbers[:, None, :] + places[:, :, None] * strides[dim]).flatten(1)
    return numbers


def _linear(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> Tensor:
    strides = _strides(shape)

    def combined(name: str, numbers: Tensor) -> Tensor:
        """The exclusive or of the bases whose bits are set: sizes are powers of 2, so flat numbers do."""
        bases = re.search(rf"{name} = \[((?:\[[\d, ]*\](?:, )?)*)\]", encoding)
        result = torch.zeros_like(numbers)
        for bit, basis in enumerate(re.findall(r"\[([\d, ]+)\]", bases[1] if bases else "")):
            places = (int(n) % size * stride for n, size, stride in zip(basis.split(","), shape, strides, strict=True))
            result = result ^ ((numbers >> bit & 1) * sum(places))
        return result

    registers = re.search(r"register = \[((?:\[[\d, ]*\](?:, )?)*)\]", encoding)
    count = 1 << (registers[1].count("[") if registers else 0)
    thread = torch.arange(threads)
    of_thread = combined("lane", thread % warp_size) ^ combined("warp", thread // warp_size)
    return of_thread[:, None] ^ combined("register", torch.arange(count))


@functools.lru_cache(512)
def owners(encoding: str, shape: tuple[int, ...], threads: int, warp_size: int) -> tuple[Tensor, Tensor] | None:
    """For each element the first thread that holds it, which is the one that stores it, and the number of threads."""
    numbers, size = elements(encoding, shape, threads, warp_size), math.prod(shape)
    if numbers is None:
        return None
    pairs = torch.unique(numbers * threads + torch.arange(threads)[:, None])
    element, thread = pairs // threads, pairs % threads
    first = torch.full((size,), threads).scatter_reduce(0, element, thread, "amin")
    return first, torch.bincount(element, minlength=size)


@functools.lru_cache(512)
def crosses_warps(source: str, target: str, shape: tuple[int, ...], threads: int, warp_size: int) -> bool:
    """Tell whether a warp needs elements that another one holds, so that a conversion goes through shared memory."""
    holds = []
    for encoding in (source, target):
        numbers = elements(encoding, shape, threads, warp_size)
        if numbers is None:
            return True
        elements_of_warp = torch.zeros(-(-threads // warp_size), math.prod(shape), dtype=torch.bool)
        elements_of_warp[torch.arange(threads)[:, None] // warp_size, numbers] = True
        holds.append(elements_of_warp)
    return bool((holds[1] & ~holds[0]).any())


@functools.lru_cache(512)
def reduces_across_warps(encoding: str, shape: tuple[int, ...], axis: int, threads: int, warp_size: int) -> bool:
    """Tell whether several warps hold the elements along an axis, so that its reduction has a barrier."""
    known = owners(encoding, shape, threads, warp_size)
    if known is None:
        return True
    warp = (known[0] // warp_size).reshape(shape)
    return bool((warp != warp.narrow(axis, 0, 1)).any())
