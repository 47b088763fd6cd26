"""Faults in a launch's accesses to memory, and the sectors that they move, from evaluated addresses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import owners
from .ttgir import Access, Grid

SECTOR = 32  # bytes that a GPU moves at least
Fault = tuple[str, str, str]  # its kind, the accesses, and what shows it


class Memory(NamedTuple):
    """The memory of an argument."""

    storage: int  # arguments with the same number share memory
    offset: int  # bytes before the argument's first element
    nbytes: int  # of the storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Tensor, storages: dict[int, int]) -> Memory:
        """The memory of a tensor; storages are numbered as they come."""
        storage = tensor.untyped_storage()
        number = storages.setdefault(storage._cdata, len(storages))
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return cls(number, offset, storage.nbytes(), tuple(tensor.shape), tensor.stride(), tensor.element_size())

    def places(self, unit: int, elements: int) -> Tensor:
        """The places in the storage of the argument's first elements, in units of so many bytes."""
        number = torch.arange(elements)
        first = torch.full_like(number, self.offset)
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            first, number = first + number % size * (stride * self.itemsize), number // size
        return (first[:, None] + torch.arange(0, self.itemsize, unit)).flatten()


class _Records(NamedTuple):
    """Accesses to one storage, one for each unit of bytes of each active element, in the order of addresses."""

    address: Tensor
    program: Tensor
    access: Tensor  # its number in the list
    place: Tensor  # the element
    first: Tensor  # the first thread that holds the element; -1 if the layout is not known
    threads: Tensor  # how many do

    def rows(self, rows: Tensor) -> _Records:
        return _Records(*(column[rows] for column in tuple(self)))


def faults(
    accesses: Sequence[Access], memory: Mapping[str, Memory], grid: Grid, whole: bool, filled: Collection[str] = ()
) -> Iterator[Fault]:
    """Yield the faults of a launch: races, accesses out of bounds, overflows, bytes written twice or not at all.

    Args:
        accesses: addresses of loads and stores.
        memory: the memory of the arguments.
        grid: the launch's programs.
        whole: the accesses are those of all programs, not of some.
        filled: arguments that have values before the launch, so that a kernel need not write all of their bytes.
    """
    by_storage: dict[int, list[Access]] = defaultdict(list)
    with torch.device("cpu"):
        for access in accesses:
            if access.argument in memory:
                by_storage[memory[access.argument].storage].append(access)
                if access.masked:
                    yield from _places(access, memory[access.argument], grid)
        for used in by_storage.values():
            storage = _Storage(used, memory, grid)
            stores = storage.records("store")
            if len(stores.address):
                yield from storage.written(stores)
                yield from storage.unwritten(stores, filled) if whole else ()
                yield from storage.races(storage.records("load"), stores)


def _places(access: Access, memory: Memory, grid: Grid) -> Iterator[Fault]:
    """Yield an access whose address has overflowed, or is outside of the memory."""
    begin = access.address + memory.offset
    outside = (begin < 0) | (begin + access.itemsize > memory.nbytes)
    overflow = torch.zeros_like(outside) if access.wrong is None else access.wrong
    for kind, bad, text in (
        ("overflow", overflow, "the index of {0} of {1} does not fit into 32 bits: the byte should be {2:,}"),
        ("out of bounds", outside, "{0} of {1} is at byte {2:,} of a memory of {3:,} bytes"),
    ):
        if (bad & access.active).any():
            row, place = (bad & access.active).nonzero()[0]
            program = grid.program(access.programs[row])
            evidence = text.format(f"element {place}", program, int(begin[row, place]), memory.nbytes)
            yield kind, str(access), evidence
            return


class _Storage:
    """The accesses to one storage."""

    def __init__(self, accesses: list[Access], memory: Mapping[str, Memory], grid: Grid) -> None:
        self.accesses, self.memory, self.grid = accesses, memory, grid
        # the most bytes that divide all sizes and addresses
        self.unit = math.gcd(16, *(n for a in accesses for n in (a.itemsize, memory[a.argument].offset)))
        if any((access.address % self.unit).any() for access in accesses):
            self.unit = 1

    def records(self, kind: str) -> _Records:
        """The loads or the stores."""
        parts = [_Records(*[torch.zeros(0, dtype=torch.int64)] * 6)]
        for number, access in enumerate(self.accesses):
            if access.kind != kind or not access.masked:
                continue  # elements that a mask lets through are not known where it depends on data
            row, place = access.active.nonzero(as_tuple=True)
            address = access.address[row, place] + self.memory[access.argument].offset
            thread, count = owners(access.encoding, access.shape, self.grid.threads, self.grid.warp_size)
            columns = access.programs[row], torch.full_like(place, number), place, thread[place], count[place]
            units = torch.arange(0, access.itemsize, self.unit)
            repeated = (column.repeat_interleave(len(units)) for column in columns)
            parts.append(_Records((address[:, None] + units).flatten(), *repeated))
        records = _Records(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
        return records.rows(records.address.argsort(stable=True))

    def written(self, stores: _Records) -> Iterator[Fault]:
        """Yield bytes that two programs write, or one store twice."""
        address, program, access, place, *_ = tuple(stores)
        elsewhere = program[1:] != program[:-1]
        twice = (address[1:] == address[:-1]) & (elsewhere | (access[1:] == access[:-1]) & (place[1:] != place[:-1]))
        if twice.any():
            at = int(twice.nonzero()[0])
            by = "program" if elsewhere[at] else "element"
            writers = [f"{self.grid.program(program[i])} as element {int(place[i])}" for i in (at, at + 1)]
            evidence = f"byte {int(address[at]):,} is written by more than one {by}: {' and '.join(writers)}"
            evidence += f"; in all {int(twice.sum()) * self.unit:,} bytes"
            yield "written twice", str(self.accesses[access[at]]), evidence

    def unwritten(self, stores: _Records, filled: Collection[str]) -> Iterator[Fault]:
        """Yield bytes of a result, an argument that is only stored, that no program writes."""
        for argument in dict.fromkeys(access.argument for access in self.accesses):
            mine = [access for access in self.accesses if access.argument == argument]
            if argument in filled or any(access.kind != "store" or not access.masked for access in mine):
                continue
            memory = self.memory[argument]
            elements = math.prod(memory.shape)
            looked_at = min(elements, max(1 << 20, 2 * len(stores.address)))  # of more, some are unwritten
            places = memory.places(self.unit, looked_at)
            missing = torch.unique(places[~torch.isin(places, stores.address)]) - memory.offset
            if not len(missing):
                continue
            first = torch.cat([torch.tensor([True]), missing.diff() != self.unit]).nonzero().flatten()
            last = torch.cat([first[1:], torch.tensor([len(missing)])]) - 1
            ends = zip(missing[first].tolist(), (missing[last] + self.unit - 1).tolist(), strict=True)
            ranges = [f"{begin:,} to {end:,}" for begin, end in ends]
            if looked_at < elements:
                evidence = f"no program writes bytes {ranges[0]} and others"
            else:
                more = f" and {len(ranges) - 3:,} more ranges" if len(ranges) > 3 else ""
                evidence = f"no program writes {len(missing) * self.unit:,} of its {len(places) * self.unit:,} bytes: "
                evidence += f"bytes {', '.join(ranges[:3])}{more}"
            yield "unwritten", f"store of {argument}", evidence

    def races(self, loads: _Records, stores: _Records) -> Iterator[Fault]:
        """Yield pairs of a load and a store of the same byte, in an order that nothing ensures."""
        low = torch.searchsorted(stores.address, loads.address)
        count = torch.searchsorted(stores.address, loads.address, right=True) - low
        which = torch.arange(len(count)).repeat_interleave(count)
        before = (count.cumsum(0) - count).repeat_interleave(count)
        load, store = loads.rows(which), stores.rows(low[which] + torch.arange(len(which)) - before)
        same_program, known = load.program == store.program, (load.first >= 0) & (store.first >= 0)
        other_thread = known & ((load.first != store.first) | (load.threads > 1))
        code = load.access * len(self.accesses) + store.access
        for pair in torch.unique(code).tolist():
            a, b = (self.accesses[number] for number in divmod(pair, len(self.accesses)))
            here = code == pair
            unordered = here & same_program & other_thread & (a.barriers == b.barriers)
            if a.value & b.value and a.order < b.order:  # the stored value needs what was loaded
                is_permuted = a.shape == b.shape and bool((load.place[here] != store.place[here]).any())
                unordered &= load.place != store.place if is_permuted else torch.tensor(False)
            elif not a.spread:  # the copies of other threads go nowhere
                unordered &= load.first != store.first
            later = here & same_program & (a.argument != b.argument and a.order > b.order)
            for bad, text in (
                (here & ~same_program, "{1} overwrites what {0} reads, and programs run in any order"),
                (later, "in {0} the load comes after the store"),
                (unordered, "in {0} thread {2}{4} loads and thread {3} stores, with no barrier between them"),
            ):
                if bad.any():
                    at = int(bad.nonzero()[0])
                    copies = f" or another one of {load.threads[at]}" if load.threads[at] > 1 else ""
                    programs = (self.grid.program(records.program[at]) for records in (load, store))
                    text = text.format(*programs, load.first[at], store.first[at], copies)
                    evidence = f"{text}; byte {load.address[at]:,} of the memory they share"
                    yield "race", f"{a}, {b}", evidence
                    break


# ---- sectors ---------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """The bytes of an access in a program: those it names, and those of the sectors that hold them."""

    access: Access
    used: int
    in_sectors: int


def traffic(accesses: Sequence[Access]) -> Iterator[Traffic]:
    """Yield the sectors of each access in one program, each counted once: caches hold them while it runs."""
    groups: dict[str, list[Access]] = defaultdict(list)
    for access in accesses:
        if access.argument:
            groups[access.name].append(access)
    for same in groups.values():
        addresses = torch.unique(torch.cat([access.address[access.active] for access in same]))
        in_sectors = len(torch.unique(addresses // SECTOR)) * SECTOR
        yield Traffic(same[0], len(addresses) * same[0].itemsize, in_sectors)
