"""The memory and the time of a training step, cut at its layers.

A compiled step is cut into segments, one for each layer (unit) forward and one backward. A segment has bytes alive
relative to its beginning, a net change and seconds. Joined in execution order the segments are exactly the step's
live-bytes timeline. A layer's memory level changes its own segments only, so segments of several levels estimate a step
with mixed levels. Estimates only rank; every reported step is compiled (``plan.py``). A segment begins and ends with
the bytes that are still to be read: a buffer that Inductor reuses later belongs to the later segment.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.figures import Capture, on_paper
from torch_fused_ops.virtual_gpu import GPU, PaperCompilation
from torch_fused_ops.virtual_gpu.roofline import Rates, Work, launches_of, prepare
from torch_fused_ops.virtual_gpu.timeline import Event, Timeline, timeline_of

if TYPE_CHECKING:
    from torch_fused_ops.planner.fsdp import FullyShard

__all__ = [
    "OFF",
    "Curve",
    "Parts",
    "Segment",
    "Step",
    "clock",
    "compiled_timeline",
    "cut",
    "measured_step",
    "parts_of",
    "policy_of",
]

log = logging.getLogger("torch_fused_ops.planner")

OFF = "off"  # a level of a whole model, never of a part


@dataclass(frozen=True)
class Segment:
    """A part of a step.

    Attributes:
        points: bytes alive at each of its calls, relative to its beginning.
        net: bytes alive at its end, relative to its beginning.
        seconds: the least time of its calls.
        gradients: bytes of the parameters' gradients that are complete by its end: its own layer's, and those that the
            compiler deferred from earlier layers.
    """

    points: tuple[int, ...] = ()
    net: int = 0
    seconds: float = 0.0
    gradients: int = 0

    @cached_property
    def peak(self) -> int:
        return max(self.points, default=0)


Piece = tuple[str, str, Segment]  # "forward" or "backward", unit or "", its segment


@dataclass(frozen=True)
class Curve:
    """A summary of a step's live-bytes timeline.

    Attributes:
        peak: the most bytes alive at once.
        saved: bytes alive between forward and backward.
        end: bytes alive after backward.
        seconds: the least time of the step.
    """

    peak: int
    saved: int
    end: int
    seconds: float


@dataclass(frozen=True)
class Parts:
    """A compiled step, cut.

    Attributes:
        entry: bytes alive before it: its arguments.
        pieces: its segments in execution order: before, in and after the units, for each graph.
    """

    entry: int
    pieces: tuple[Piece, ...]

    @cached_property
    def segments(self) -> Mapping[tuple[str, str], Segment]:
        """The units' segments."""
        return {(graph, unit): segment for graph, unit, segment in self.pieces if unit}


@dataclass(frozen=True)
class Step:
    """A model's compiled step at each level.

    Attributes:
        units: in the order of the model.
        mlps: the units that have MLPs, for which levels are chosen.
        parts: the compiled steps, by the level that all of their units are at.
        shards: what has parameters in shards, if they are.
    """

    units: tuple[str, ...]
    mlps: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, Parts]
    shards: FullyShard | None = None

    def segment(self, graph: str, unit: str, level: str) -> Segment:
        """A unit's forward or backward at a level; an empty one where nothing of it runs."""
        return self.parts[level].segments.get((graph, unit), Segment())

    def default(self, levels: Mapping[str, str]) -> str:
        """The level outside the units with MLPs: the common level of those, or "free" if they differ."""
        chosen = {levels.get(unit, "free") for unit in self.mlps}
        return chosen.pop() if len(chosen) == 1 else "free"

    def pieces(self, levels: Mapping[str, str]) -> Iterator[Piece]:
        """The segments in the order of the step, without shards."""
        default = self.default(levels)
        for graph, unit, segment in self.parts[default].pieces:
            level = levels.get(unit, default)
            yield graph, unit, segment if level == default else self.segment(graph, unit, level)

    @property
    def entry(self) -> int:
        """Bytes alive before the step: its arguments."""
        return next(iter(self.parts.values())).entry

    def sharded(self, pieces: Iterable[Piece], each_call: bool = False) -> Iterator[Piece]:
        """The segments, with shards if there are any."""
        return self.shards.around(pieces, each_call) if self.shards else iter(pieces)

    def curve(self, pieces: Iterable[Piece]) -> Curve:
        """Summarize consecutive segments."""
        live = peak = saved = self.entry
        seconds = 0.0
        for graph, _, segment in self.sharded(pieces):
            peak = max(peak, live + segment.peak)
            live += segment.net
            seconds += segment.seconds
            saved = live if graph == "forward" else saved
        return Curve(peak, saved, live, seconds)

    def at(self, levels: Mapping[str, str]) -> Curve:
        """The step with a memory level for each unit; "free" is the default."""
        return self.curve(self.pieces(levels))

    def checkpointed(self, inputs: Mapping[str, int]) -> Curve:
        """Estimate the step with a checkpoint around each whole unit, which saves its input and runs forward again.

        Args:
            inputs: the bytes of each unit's inputs from the one before.
        """

        def pieces() -> Iterator[Piece]:
            for graph, unit, segment in self.pieces({}):
                if unit:
                    forward, backward = (self.segment(kind, unit, "free") for kind in ("forward", "backward"))
                    nbytes = inputs.get(unit, 0)
                    if graph == "forward":
                        segment = Segment(forward.points, nbytes, forward.seconds)
                    else:
                        again = (*forward.points, *(forward.net + point for point in backward.points))
                        net = forward.net + backward.net - nbytes
                        seconds = forward.seconds + backward.seconds
                        segment = Segment(again, net, seconds, backward.gradients)
                yield graph, unit, segment

        return self.curve(pieces())

    def points(self, levels: Mapping[str, str]) -> list[int]:
        """Bytes alive at each call of the step."""
        live, points = self.entry, [self.entry]
        for _, _, segment in self.sharded(self.pieces(levels), each_call=True):
            points += [live + point for point in segment.points]
            live += segment.net
        return [*points, live]


# ---- compiled and cut ------------------------------------------------------------------------------------------------


def policy_of(mlps: Mapping[str, Sequence[str]], levels: Mapping[str, str]) -> FusionPolicy:
    """The policy that gives the MLPs of each unit its level."""
    chosen = {module: levels.get(unit, "free") for unit, modules in mlps.items() for module in modules}
    if len(set(chosen.values())) == 1:
        return FusionPolicy(memory=next(iter(chosen.values())))  # type: ignore[arg-type]
    return FusionPolicy(memory={module: level for module, level in chosen.items() if level != "free"})


def compiled_timeline(
    model: CapturedModel, gpu: GPU, policy: FusionPolicy
) -> tuple[Timeline, tuple[PaperCompilation, ...]]:
    """Compile a captured model's graphs under a policy, and join their live-bytes timelines.

    Raises:
        ValueError: a graph could not be captured, or none has a backward.
    """
    papers = tuple(
        on_paper(Capture(captured.graph, policy, captured.reason), gpu, policy).paper for captured in model.graphs
    )
    if all(paper.backward is None for paper in papers):
        raise ValueError("model: nothing in it needs a gradient, so there is no training step to plan")
    return timeline_of(papers, model.links), papers


def parts_of(model: CapturedModel, gpu: GPU, rates: Rates, instructions: bool, policy: FusionPolicy) -> Parts:
    """Compile a captured model with a policy, and cut its step; as for ``measured_step``."""
    timeline, papers = compiled_timeline(model, gpu, policy)
    return cut(timeline, model, clock(papers, rates, instructions))


def measured_step(model: CapturedModel, gpu: GPU, rates: Rates, instructions: bool, levels: Sequence[str]) -> Step:
    """Compile a captured model at each level.

    Args:
        model: the captured model.
        gpu: the target device.
        rates: its rates.
        instructions: assemble kernels, and count their instructions.
        levels: memory levels for MLPs, without "off".
    """
    parts = {}
    for level in (*levels, OFF) if model.mlps else levels[:1]:
        log.info('compiling: every MLP at "%s"', level)
        policy = FusionPolicy(memory=level)  # type: ignore[arg-type]
        parts[level] = parts_of(model, gpu, rates, instructions, policy)
    return Step(model.units, model.mlps, parts)


def clock(papers: Sequence[PaperCompilation], rates: Rates, instructions: bool) -> Callable[[Event], float]:
    """The least time of a call; as for ``measured_step``."""
    counted: dict[tuple[str, str], float] = {}
    papers = papers if instructions else ()
    prepare(graph for paper in papers for graph in paper.graphs.values())
    for paper in papers:
        for kind, graph in paper.graphs.items():
            for name, lane_instructions in launches_of(graph).items():
                counted[kind, name] = max(counted.get((kind, name), 0.0), lane_instructions)
    return lambda call: rates.seconds([Work(call.flop, call.nbytes, counted.get((call.graph, call.call), 0.0))])


BEHIND = "(behind)"  # never a module's name


def cut(timeline: Timeline, model: CapturedModel, seconds: Callable[[Event], float]) -> Parts:
    """Cut a compiled step at its units, with the least time of each call."""
    kinds = [moment.graph == "backward" for moment in timeline.events]
    first = kinds.index(True) if True in kinds else len(kinds)
    sides = timeline.events[:first], timeline.events[first:]
    forward, backward = (_owners(side, model) for side in sides)
    segments = [
        _segments(side, owners, start, seconds)
        for side, owners, start in zip(sides, (forward, backward), (timeline.entry, timeline.between), strict=True)
    ]
    # A gradient is complete at the end of its layer, or later if the compiler deferred it.
    order = {owner: i for i, owner in enumerate(dict.fromkeys(["", *(o for o in backward if o != BEHIND), BEHIND]))}
    whole: Counter[str] = Counter()
    for (graph, number), (moment, nbytes) in timeline.gradients.items():
        born = backward[moment - first] if moment >= first else ""
        owner_unit = model.unit_of(model.parameter(graph, number).rpartition(".")[0]) or BEHIND
        whole[max(born, owner_unit if owner_unit in order else "", key=order.__getitem__)] += nbytes
    for owner, nbytes in whole.items():
        segments[1][owner] = replace(segments[1].get(owner, Segment()), gradients=nbytes)
    pieces: list[Piece] = []
    limits = (timeline.entry, timeline.between, timeline.end)
    for i, (kind, by_owner) in enumerate(zip(("forward", "backward"), segments, strict=True)):
        # Bytes freed between the last call and the graph's return count for the segment after the units.
        left = limits[i + 1] - limits[i] - sum(segment.net for segment in by_owner.values())
        before, behind = by_owner.pop("", Segment()), by_owner.pop(BEHIND, Segment())
        pieces.append((kind, "", before))
        pieces += [(kind, unit, segment) for unit, segment in by_owner.items()]
        pieces.append((kind, "", replace(behind, net=behind.net + left)))
    return Parts(timeline.entry, tuple(pieces))


def _owners(moments: Sequence[Event], model: CapturedModel) -> list[str]:
    """Assign each call to a unit; "" before all units, BEHIND after them.

    Units are ordered by their middle calls, since a compiler may run some calls of a unit, or of all units, early. A
    unit begins with its first call after the middle call of the unit before.
    """
    calls: dict[str, list[int]] = {}
    for i, moment in enumerate(moments):
        if unit := _unit(moment, model):
            calls.setdefault(unit, []).append(i)
    middles = {unit: numbers[len(numbers) // 2] for unit, numbers in calls.items()}
    owners = [""] * len(moments)
    middle = last = -1
    for unit in sorted(calls, key=middles.__getitem__):
        begin = next(i for i in calls[unit] if i > middle)
        owners[begin:] = [unit] * (len(owners) - begin)
        middle, last = middles[unit], calls[unit][-1]
    if calls:
        owners[last + 1 :] = [BEHIND] * (len(owners) - last - 1)
    return owners


def _segments(
    moments: Sequence[Event], owners: Sequence[str], start: int, seconds: Callable[[Event], float]
) -> dict[str, Segment]:
    calls: dict[str, tuple[int, list[Event]]] = {}
    for i, (moment, owner) in enumerate(zip(moments, owners, strict=True)):
        calls.setdefault(owner, (_needed(moments[i - 1]) if i else start, []))[1].append(moment)
    return {owner: _segment(beginning, of_owner, seconds) for owner, (beginning, of_owner) in calls.items()}


def _unit(moment: Event, model: CapturedModel) -> str:
    votes = Counter(model.layers.get(path, "") for path in moment.modules)
    unit = votes.most_common(1)[0][0] if votes else ""
    return unit if unit in model.units else ""


def _segment(start: int, moments: Sequence[Event], seconds: Callable[[Event], float]) -> Segment:
    points = tuple(moment.live - start for moment in moments)
    return Segment(points, _needed(moments[-1]) - start if moments else 0, sum(map(seconds, moments)))


def _needed(moment: Event) -> int:
    """Bytes after a call that are still to be read; a buffer that waits for reuse counts for its next writer."""
    return moment.after - moment.waiting
