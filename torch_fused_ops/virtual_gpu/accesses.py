"""Find faults in a launch's memory accesses from evaluated addresses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import owners
from .ttgir import Access, Grid

Fault = tuple[str, str, str]  # kind, accesses, evidence


class Memory(NamedTuple):
    """An argument's memory."""

    storage: int  # the storage's number; arguments with equal numbers share memory
    offset: int  # bytes before the argument's first element
    nbytes: int  # bytes of the whole storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of_tensor(cls, tensor: Tensor, storages: dict[int, int]) -> Memory:
        """Describe a tensor's memory. A new storage gets the next number in ``storages``."""
        storage = tensor.untyped_storage()
        number = storages.setdefault(storage._cdata, len(storages))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return cls(number, offset, storage.nbytes(), tuple(tensor.shape), tensor.stride(), tensor.element_size())

    def addresses(self, unit: int, elements: int) -> Tensor:
        """Return the storage addresses of the argument's first elements, one for each ``unit`` bytes."""
        number = torch.arange(elements)
        first = torch.full_like(number, self.offset)
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            first, number = first + number % size * (stride * self.itemsize), number // size
        return (first[:, None] + torch.arange(0, self.itemsize, unit)).flatten()


class _Records(NamedTuple):
    """Accesses to one storage, sorted by address. Each active element has a row for each unit of bytes."""

    address: Tensor
    program: Tensor
    access: Tensor  # the access's index in the list
    element: Tensor  # the element's index in the access
    first: Tensor  # the first thread that holds the element; -1 if the layout is unknown
    threads: Tensor  # the number of threads that hold the element

    def rows(self, rows: Tensor) -> _Records:
        return _Records(*(column[rows] for column in tuple(self)))


def faults(
    accesses: Sequence[Access],
    memory: Mapping[str, Memory],
    grid: Grid,
    complete: bool,
    zeroed: Collection[str] = (),
) -> Iterator[Fault]:
    """Yield a launch's faults: races, accesses out of bounds, overflows, bytes written twice or not at all.

    Args:
        accesses: the evaluated loads and stores.
        memory: the arguments' memory by name.
        grid: the launch's programs.
        complete: True if all programs were evaluated.
        zeroed: names of arguments that have values before the launch; the kernel need not write all of their bytes.
    """
    by_storage: dict[int, list[Access]] = defaultdict(list)
    with torch.device("cpu"):
        for access in accesses:
            if access.argument in memory:
                by_storage[memory[access.argument].storage].append(access)
                if access.mask_known:
                    yield from _address_faults(access, memory[access.argument], grid)
        for used in by_storage.values():
            storage = _Storage(used, memory, grid)
            stores = storage.records("store")
            if len(stores.address):
                yield from storage.written(stores)
                yield from storage.unwritten(stores, zeroed) if complete else ()
                yield from storage.races(storage.records("load"), stores)


def _address_faults(access: Access, memory: Memory, grid: Grid) -> Iterator[Fault]:
    """Yield a fault if one of the access's addresses has overflowed, or lies outside of the memory."""
    begin = access.address + memory.offset
    outside = (begin < 0) | (begin + access.itemsize > memory.nbytes)
    overflow = torch.zeros_like(outside) if access.overflowed is None else access.overflowed
    for kind, bad, text in (
        ("overflow", overflow, "the index of {0} in {1} does not fit into 32 bits: its byte should be {2:,}"),
        ("out of bounds", outside, "{0} in {1} is at byte {2:,}, but the memory has {3:,} bytes"),
    ):
        if (bad & access.active).any():
            row, element = (bad & access.active).nonzero()[0]
            program = grid.program(access.programs[row])
            evidence = text.format(f"element {element}", program, int(begin[row, element]), memory.nbytes)
            yield kind, str(access), evidence
            return


class _Storage:
    """The accesses to one storage."""

    def __init__(self, accesses: list[Access], memory: Mapping[str, Memory], grid: Grid) -> None:
        self.accesses, self.memory, self.grid = accesses, memory, grid
        # the largest number of bytes that divides all sizes and addresses
        self.unit = math.gcd(16, *(n for a in accesses for n in (a.itemsize, memory[a.argument].offset)))
        if any((access.address % self.unit).any() for access in accesses):
            self.unit = 1

    def records(self, kind: str) -> _Records:
        """Return the rows of all loads or all stores."""
        parts = [_Records(*[torch.zeros(0, dtype=torch.int64)] * 6)]
        for number, access in enumerate(self.accesses):
            if access.kind != kind or not access.mask_known:
                continue  # the mask depends on data, so the active elements are unknown
            row, element = access.active.nonzero(as_tuple=True)
            address = access.address[row, element] + self.memory[access.argument].offset
            thread, count = owners(access.encoding, access.shape, self.grid.threads, self.grid.warp_size)
            columns = access.programs[row], torch.full_like(element, number), element, thread[element], count[element]
            units = torch.arange(0, access.itemsize, self.unit)
            repeated = (column.repeat_interleave(len(units)) for column in columns)
            parts.append(_Records((address[:, None] + units).flatten(), *repeated))
        records = _Records(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        return records.rows(records.address.argsort(stable=True))

    def written(self, stores: _Records) -> Iterator[Fault]:
        """Yield a fault if two programs write the same byte, or one store writes a byte twice."""
        address, program, access, element, *_ = tuple(stores)
        by_programs = program[1:] != program[:-1]
        by_elements = (access[1:] == access[:-1]) & (element[1:] != element[:-1])
        twice = (address[1:] == address[:-1]) & (by_programs | by_elements)
        if twice.any():
            row = int(twice.nonzero()[0])
            by = "program" if by_programs[row] else "element"
            writers = [f"{self.grid.program(program[i])} as element {int(element[i])}" for i in (row, row + 1)]
            evidence = f"byte {int(address[row]):,} is written by more than one {by}: {' and '.join(writers)}"
            evidence += f"; {int(twice.sum()) * self.unit:,} bytes in all"
            yield "written twice", str(self.accesses[access[row]]), evidence

    def unwritten(self, stores: _Records, zeroed: Collection[str]) -> Iterator[Fault]:
        """Yield a fault for each result (an argument that is only stored) with bytes that no program writes."""
        for argument in dict.fromkeys(access.argument for access in self.accesses):
            accesses = [access for access in self.accesses if access.argument == argument]
            known = (access.kind == "store" and access.mask_known and not access.in_part for access in accesses)
            if argument in zeroed or not all(known):
                continue
            memory = self.memory[argument]
            elements = math.prod(memory.shape)
            # Examine a small result completely, and more elements of a large result than the stores can write.
            examined = min(elements, max(1 << 20, 2 * len(stores.address)))
            addresses = memory.addresses(self.unit, examined)
            missing = torch.unique(addresses[~torch.isin(addresses, stores.address)]) - memory.offset
            if not len(missing):
                continue
            count = f"{len(missing) * self.unit:,} of the first {len(addresses) * self.unit:,} bytes"
            evidence = f"no program writes {count}; the first of them is byte {int(missing[0]):,}"
            yield "unwritten", f"store of {argument}", evidence

    def races(self, loads: _Records, stores: _Records) -> Iterator[Fault]:
        """Yield a fault for each load and store of the same byte whose order is undefined."""
        low = torch.searchsorted(stores.address, loads.address)
        count = torch.searchsorted(stores.address, loads.address, right=True) - low
        row = torch.arange(len(count)).repeat_interleave(count)
        before = (count.cumsum(0) - count).repeat_interleave(count)
        load, store = loads.rows(row), stores.rows(low[row] + torch.arange(len(row)) - before)
        same_program, known = load.program == store.program, (load.first >= 0) & (store.first >= 0)
        other_thread = known & ((load.first != store.first) | (load.threads > 1))
        code = load.access * len(self.accesses) + store.access
        for pair in torch.unique(code).tolist():
            a, b = (self.accesses[number] for number in divmod(pair, len(self.accesses)))
            rows = code == pair
            unordered = rows & same_program & other_thread & (a.barriers == b.barriers)
            if a.value & b.value and a.order < b.order:  # the stored value depends on the load
                is_permuted = a.shape == b.shape and bool((load.element[rows] != store.element[rows]).any())
                unordered &= load.element != store.element if is_permuted else torch.tensor(False)
            elif not a.crosses_threads:  # nothing uses the copies that other threads hold
                unordered &= load.first != store.first
            later = rows & same_program & (a.argument != b.argument and a.order > b.order)
            for bad, text in (
                (rows & ~same_program, "{1} overwrites values that {0} reads, and programs run in any order"),
                (later, "in {0} the load comes after the store"),
                (unordered, "in {0} thread {2}{4} loads and thread {3} stores, with no barrier between them"),
            ):
                if bad.any():
                    first = int(bad.nonzero()[0])
                    copies = f" or another one of {load.threads[first]}" if load.threads[first] > 1 else ""
                    programs = (self.grid.program(records.program[first]) for records in (load, store))
                    text = text.format(*programs, load.first[first], store.first[first], copies)
                    evidence = f"{text}; byte {load.address[first]:,} of the memory they share"
                    yield "race", f"{a}, {b}", evidence
                    break
