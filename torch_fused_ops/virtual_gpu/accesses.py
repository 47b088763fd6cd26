"""Faults in a launch's accesses to memory, and the sectors that they move, from evaluated addresses."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import owners
from .ttgir import Access, Trace

SECTOR = 32  # bytes that a GPU moves at least
_MOST_PAIRS = 1 << 24  # of a load and a store of the same byte, judged at once


class Fault(NamedTuple):
    """A fault of a launch: its kind, the accesses or the instruction, and what shows it."""

    kind: str
    where: str
    evidence: str


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

    def places(self, unit: int) -> Tensor:
        """The places in the storage of the argument's elements, in units of so many bytes."""
        places = torch.tensor([self.offset])
        for size, stride in zip(self.shape, self.stride, strict=True):
            places = (places[:, None] + torch.arange(size) * stride * self.itemsize).flatten()
        return (places[:, None] + torch.arange(0, self.itemsize, unit)).flatten()


class _Records(NamedTuple):
    """Accesses to one storage, one for each unit of bytes of each active element."""

    address: Tensor
    program: Tensor
    access: Tensor  # its number in the list
    place: Tensor  # the element
    first: Tensor  # the first thread that holds the element; -1 if the layout is not known
    threads: Tensor  # how many do
    barriers: Tensor  # passed before

    def rows(self, rows: Tensor) -> _Records:
        return _Records(*(column[rows] for column in tuple(self)))


class _Launch:
    """The accesses of a launch's evaluated programs."""

    def __init__(self, traces: Sequence[Trace], memory: Mapping[str, Memory], threads: int, warp_size: int) -> None:
        self.memory, self.threads, self.warp_size = memory, threads, warp_size
        self.accesses: list[Access] = []
        self.spread: list[bool] = []
        self.by_storage: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.programs = torch.cat([trace.programs for trace in traces])
        first = 0
        for trace in traces:
            for access in trace.accesses:
                if access.argument in memory:
                    passed = bisect.bisect(trace.barriers, access.order)
                    self.by_storage[memory[access.argument].storage].append((len(self.accesses), first, passed))
                self.accesses.append(access)
                self.spread.append(bool(access.value & trace.spread))
            first += len(trace.programs)

    def records(self, storage: int, kind: str, unit: int) -> _Records:
        """The loads or the stores of a storage, in units of bytes."""
        parts = [_Records(*[torch.zeros(0, dtype=torch.int64)] * 7)]
        for number, first, passed in self.by_storage[storage]:
            access = self.accesses[number]
            if access.kind != kind:
                continue
            program, place = access.active.nonzero(as_tuple=True)
            address = access.address[program, place] + self.memory[access.argument].offset
            thread, count = _holders(access, self.threads, self.warp_size)
            same = torch.full_like(place, number), place, thread[place], count[place], torch.full_like(place, passed)
            units = torch.arange(0, access.itemsize, unit)
            repeated = (column.repeat_interleave(len(units)) for column in (program + first, *same))
            parts.append(_Records((address[:, None] + units).flatten(), *repeated))
        return _Records(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def unit(self, storage: int) -> int:
        """The most bytes that divide all sizes and addresses of a storage's accesses."""
        unit = 16
        for number, _, _ in self.by_storage[storage]:
            access = self.accesses[number]
            unit = math.gcd(unit, access.itemsize, self.memory[access.argument].offset)
            if (access.address % unit).any():
                return 1
        return unit

    def named(self, number: int) -> str:
        return described(self.accesses[number])

    def program(self, number: Tensor) -> str:
        return f"program {tuple(self.programs[int(number)].tolist())}"


def described(access: Access) -> str:
    """An access as a person reads it."""
    return f"{access.kind} of {access.argument} ({access.name})"


def _holders(access: Access, threads: int, warp_size: int) -> tuple[Tensor, Tensor]:
    """For each element the first thread that holds it, -1 where the layout is not known, and how many do."""
    if not access.shape:
        return torch.zeros(1, dtype=torch.int64), torch.tensor([threads])
    unknown = torch.full((math.prod(access.shape),), -1)
    return owners(access.encoding, access.shape, threads, warp_size) or (unknown, -unknown)


def faults(
    traces: Sequence[Trace], memory: Mapping[str, Memory], threads: int, warp_size: int, whole: bool
) -> Iterator[Fault]:
    """Yield the faults of a launch: races, accesses out of bounds, overflows, bytes written twice or not at all.

    The traces are of all programs if ``whole``, or else of some of them.
    """
    with torch.device("cpu"):
        launch = _Launch(traces, memory, threads, warp_size)
        for number, access in enumerate(launch.accesses):
            if access.argument in memory and access.masked:
                yield from _places(launch, number, access)
        for storage in launch.by_storage:
            unit = launch.unit(storage)
            stores = launch.records(storage, "store", unit)
            if len(stores.address):
                yield from _written(launch, storage, stores, unit, whole)
                yield from _races(launch, launch.records(storage, "load", unit), stores)


def _places(launch: _Launch, number: int, access: Access) -> Iterator[Fault]:
    """Yield accesses whose address has overflowed, or is outside of the memory."""
    memory = launch.memory[access.argument]
    begin = access.address + memory.offset
    outside = (begin < 0) | (begin + access.itemsize > memory.nbytes)
    overflow = torch.zeros_like(outside) if access.wrong is None else access.wrong
    for kind, bad, text in (
        ("overflow", overflow, "the index of {0} of {1} does not fit into 32 bits: the byte should be {2:,}"),
        ("out of bounds", outside, "{0} of {1} is at byte {2:,} of a memory of {3:,} bytes"),
    ):
        if (bad & access.active).any():
            program, place = (bad & access.active).nonzero()[0]
            at = int(begin[program, place])
            evidence = text.format(f"element {place}", launch.program(program), at, memory.nbytes)
            yield Fault(kind, launch.named(number), evidence)
            return


def _written(launch: _Launch, storage: int, stores: _Records, unit: int, whole: bool) -> Iterator[Fault]:
    """Yield bytes that two programs write, or one store twice, and bytes of a result that no program writes."""
    order = stores.address.argsort(stable=True)
    ordered = stores.rows(order)
    equal = ordered.address[1:] == ordered.address[:-1]
    elsewhere = equal & (ordered.program[1:] != ordered.program[:-1])
    again = equal & ~elsewhere & (ordered.access[1:] == ordered.access[:-1]) & (ordered.place[1:] != ordered.place[:-1])
    for twice, by in ((elsewhere, "program"), (again, "element")):
        if twice.any():
            at = int(twice.nonzero()[0])
            writers = [
                f"{launch.program(ordered.program[at + i])} as element {int(ordered.place[at + i])}" for i in (0, 1)
            ]
            yield Fault(
                "written twice",
                launch.named(int(ordered.access[at])),
                f"byte {int(ordered.address[at]):,} is written by more than one {by}: {' and '.join(writers)}; in all "
                f"{int(twice.sum()) * unit:,} bytes",
            )
    used = [launch.accesses[number] for number, _, _ in launch.by_storage[storage]]
    for argument in dict.fromkeys(access.argument for access in used):
        mine = [access for access in used if access.argument == argument]
        if not whole or any(access.kind != "store" or not access.masked for access in mine):
            continue  # a result is only stored
        places = launch.memory[argument].places(unit)
        near = torch.searchsorted(ordered.address, places).clamp(max=len(ordered.address) - 1)
        missing = int((ordered.address[near] != places).sum())
        if missing:
            evidence = f"no program writes {missing * unit:,} of its {len(places) * unit:,} bytes"
            yield Fault("unwritten", f"store of {argument}", evidence)


def _races(launch: _Launch, loads: _Records, stores: _Records) -> Iterator[Fault]:
    """Yield pairs of a load and a store of the same byte, in an order that nothing ensures."""
    order = stores.address.argsort(stable=True)
    addresses = stores.address[order]
    low = torch.searchsorted(addresses, loads.address)
    count = torch.searchsorted(addresses, loads.address, right=True) - low
    for rows in torch.split(torch.arange(len(loads.address)), _MOST_PAIRS):
        which = rows.repeat_interleave(count[rows])
        before = (count[rows].cumsum(0) - count[rows]).repeat_interleave(count[rows])
        load = loads.rows(which)
        store = stores.rows(order[low[which] + torch.arange(len(which)) - before])
        yield from _judged(launch, load, store)


def _judged(launch: _Launch, load: _Records, store: _Records) -> Iterator[Fault]:
    same_program = load.program == store.program
    known = (load.first >= 0) & (store.first >= 0)
    same_thread = (load.first == store.first) & (load.threads == 1)
    ordered = same_thread | (load.barriers != store.barriers) | ~known
    code = load.access * len(launch.accesses) + store.access
    for pair in torch.unique(code).tolist():
        first, second = divmod(pair, len(launch.accesses))
        a, b = launch.accesses[first], launch.accesses[second]
        here = code == pair
        unordered = here & same_program & ~ordered
        if a.value & b.value and a.order < b.order:  # the stored value needs what was loaded
            is_permuted = a.shape == b.shape and bool((load.place[here] != store.place[here]).any())
            unordered = unordered & (load.place != store.place) if is_permuted else torch.zeros_like(unordered)
        elif not launch.spread[first]:  # the copies of other threads go nowhere
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
                programs = launch.program(load.program[at]), launch.program(store.program[at])
                text = text.format(*programs, load.first[at], store.first[at], copies)
                evidence = f"{text}; byte {load.address[at]:,} of the memory they share"
                yield Fault("race", f"{launch.named(first)}, {launch.named(second)}", evidence)
                break


# ---- sectors ---------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """The bytes of an access in the evaluated programs: those it names, and those of the sectors that hold them."""

    access: Access
    used: int
    in_sectors: int


def traffic(traces: Sequence[Trace], memory: Mapping[str, Memory] | None = None) -> list[Traffic]:
    """The sectors of each access, each counted once a program: caches hold them while a program runs."""
    groups: dict[str, list[Access]] = defaultdict(list)
    for trace in traces:
        for access in trace.accesses:
            if access.argument:
                groups[access.name].append(access)
    result = []
    for first, *others in groups.values():
        used = in_sectors = 0
        offset = memory[first.argument].offset if memory and first.argument in memory else 0
        for program in range(len(first.address)):
            parts = [access.address[program][access.active[program]] for access in (first, *others)]
            addresses = torch.unique(torch.cat(parts)) + offset
            used += len(addresses) * first.itemsize
            in_sectors += len(torch.unique(addresses // SECTOR)) * SECTOR
        result.append(Traffic(first, used, in_sectors))
    return result
