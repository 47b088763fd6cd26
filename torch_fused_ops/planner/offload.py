"""Choose saved tensors that move to the host's memory (``FusionPolicy(offload=…)``), and compute the time it costs.

A step has two streams. The compute stream runs its calls one after the other, in their least times. The copy stream
runs the copies one after the other, in the order in which they are queued, at the link's bandwidth. As in PyTorch
(``ao::offload``), one stream serves both directions: forward copies to the host, and backward copies back. A call that
waits for a copy delays all later calls.

``Schedule.moves`` places copies and waits with the windows of ``lowerings/offload.py``. Its figures only rank
candidates: the chosen step is compiled, and the copies of the generated code are simulated.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_fused_ops.lowerings.offload import MIN_BYTES, windows
from torch_fused_ops.planner.fsdp import PlacedSegment
from torch_fused_ops.policy import enclosing_modules, without_numbers
from torch_fused_ops.virtual_gpu.timeline import Copy, Stored, Timeline

LATENCY = 20e-6  # seconds of a copy's launch and completion; assumed
# How long a step may wait for copies, relative to its time, and shares of the tensors that may then move. Small shares
# need less of the host's memory, and are chosen if they suffice.
CHOICES = {0.0: (0.25, 0.5, 0.75, 1.0), 0.02: (1.0,), 0.1: (1.0,), math.inf: (1.0,)}


@dataclass(frozen=True)
class Link:
    """The connection between a GPU and the host.

    Attributes:
        bandwidth: bytes/s of a copy from or to pinned memory.
        host_memory: bytes of pinned memory for each rank.
    """

    bandwidth: float
    host_memory: float = math.inf


@dataclass(frozen=True)
class Schedule:
    """The times of a step's calls, and its copies.

    Attributes:
        seconds: the least time of each call.
        gemms: the numbers of the calls that multiply matrices, ascending.
        copies: the compiled step's copies.
        stored: the saved tensors that can move, in forward's order.
    """

    seconds: tuple[float, ...] = ()
    gemms: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    stored: tuple[Stored, ...] = ()

    @classmethod
    def of(cls, timeline: Timeline, seconds: Sequence[float]) -> Schedule:
        """Return the schedule of a timeline whose calls take ``seconds``."""
        gemms = tuple(i for i, event in enumerate(timeline.events) if event.flop)
        schedule = cls(tuple(seconds), gemms, timeline.copies)
        large = (s for s in timeline.stored if s.nbytes >= MIN_BYTES and schedule.can_hide(s))
        return replace(schedule, stored=tuple(sorted(large, key=lambda s: s.ready)))

    def can_hide(self, stored: Stored) -> bool:
        """Return True if a GEMM of forward, and one of backward, can run while the tensor is copied."""
        return self._gemms_before(stored.ready) < self._gemms_before(stored.ends) and (
            self._gemms_before(stored.starts) < self._gemms_before(stored.read)
        )

    def _gemms_before(self, call: int) -> int:
        return bisect_left(self.gemms, call)

    def waiting(self, copies: Iterable[Copy], bandwidth: float) -> float:
        """Return the seconds for which the step's calls wait for copies."""
        start = [0.0, *itertools.accumulate(self.seconds)]
        link = delay = 0.0
        arrival: dict[int, float] = {}
        moments = [(call, i, copy) for i, copy in enumerate(copies) for call in (copy.queued, copy.awaited)]
        for call, i, copy in sorted(moments, key=lambda moment: moment[:2]):
            now = start[call] + delay
            if i in arrival:
                delay += max(0.0, arrival[i] - now)
            else:
                link = arrival[i] = max(link, now) + LATENCY + copy.nbytes / bandwidth
        return delay

    def moves(self, chosen: Iterable[Stored]) -> list[tuple[Copy, Copy]]:
        """Return each chosen tensor's copies, to the host and back, as ``lowerings/offload.py`` places them."""
        copies: list[tuple[Copy, Copy]] = []
        for ends, graph in itertools.groupby(sorted(chosen, key=lambda s: (s.ends, s.ready)), key=lambda s: s.ends):
            tensors = list(graph)
            places = [(self._gemms_before(s.ready), self._gemms_before(s.read)) for s in tensors]
            kinds = [(without_numbers(s.saved.module), s.saved.shape, s.saved.dtype) for s in tensors]
            modules = [s.saved.module for s in tensors]
            window, back = windows(zip(modules, kinds, *zip(*places, strict=True), strict=True))
            last, first = self._gemms_before(ends), self._gemms_before(tensors[0].starts)
            for s, (before, read) in zip(tensors, places, strict=True):
                awaited = self.gemms[before + window] if before + window < last else ends
                out = Copy(s.nbytes, s.ready, awaited)
                copies.append((out, Copy(s.nbytes, self.gemms[max(first, read - back)], s.read)))
        return copies

    def choices(self, link: Link) -> Iterator[tuple[Stored, ...]]:
        """Yield sets of tensors to move. The tensors of a module move together, and early modules come first."""
        modules: dict[str, list[Stored]] = {}
        for s in self.stored:
            modules.setdefault(s.saved.module, []).append(s)
        for budget, shares in CHOICES.items():
            chosen: list[list[Stored]] = []
            for group in modules.values():
                trial = [s for tensors in (*chosen, group) for s in tensors]
                waiting = self.waiting(in_order(self.moves(trial)), link.bandwidth)
                fits = host_bytes(s.nbytes for s in trial) <= link.host_memory
                if fits and waiting <= budget * sum(self.seconds):
                    chosen.append(group)
            for share in shares:
                yield tuple(s for group in chosen[: math.ceil(share * len(chosen))] for s in group)


def in_order(moves: Iterable[tuple[Copy, Copy]]) -> list[Copy]:
    """Return all copies in the order in which they are queued; at one call, in the order of their readers."""
    return sorted(itertools.chain.from_iterable(moves), key=lambda copy: (copy.queued, copy.awaited))


def host_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of pinned memory. PyTorch's allocator of pinned memory rounds each tensor up to a power of 2."""
    return sum(1 << (nbytes - 1).bit_length() for nbytes in sizes)


def patterns(stored: Iterable[Stored], chosen: Iterable[Stored]) -> dict[str, bool] | bool:
    """Return the policy's ``offload`` that moves the chosen tensors out of all ``stored`` ones."""
    moving, every = {s.saved.module for s in chosen}, dict.fromkeys(s.saved.module for s in stored)
    if not moving or moving == every.keys():
        return bool(moving)
    inner_first = sorted(every, key=lambda module: -module.count("."))
    return {m: m in moving for m in inner_first if not moving.isdisjoint(enclosing_modules([m]))}


def moved(pieces: Iterable[PlacedSegment], moves: Iterable[tuple[Copy, Copy]]) -> Iterator[PlacedSegment]:
    """Yield a step's segments without the bytes that are on the host."""
    freed, allocated = Counter[int](), Counter[int]()
    for out, back in moves:
        freed[out.awaited] += out.nbytes
        allocated[back.queued] += back.nbytes
    call, change = 0, -freed[0]
    for graph, unit, segment in pieces:
        start, points = change, []
        for point in segment.points:
            change += allocated[call]
            points.append(point + change - start)
            call += 1
            change -= freed[call]
        yield graph, unit, replace(segment, points=tuple(points), net=segment.net + change - start)
