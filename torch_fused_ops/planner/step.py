"""The memory and the time of a training step, put together from its layers' own.

A compiled step is cut into segments, one for each layer (unit) forward and one backward: bytes alive relative to the
segment's beginning, what it leaves, and its seconds. Equal layers have equal segments, and a layer's memory level
changes its own segments: so the curve of a model with any number of layers, at any levels, is a sum over segments. A
segment begins and ends with what is still to be read: memory that Inductor holds for a later result is the later one's.
What is not exact in it: in a longer graph Inductor may order the work in another way.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from torch_fused_ops.planner.model import CapturedModel, Stack, stack_of
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.figures import Capture, on_paper
from torch_fused_ops.virtual_gpu import GPU, PaperCompilation
from torch_fused_ops.virtual_gpu.roofline import Rates, Work, launches_of, prepare
from torch_fused_ops.virtual_gpu.timeline import Moment, Timeline, timeline_of

__all__ = [
    "KEPT",
    "MARGIN",
    "OFF",
    "Curve",
    "Parts",
    "Segment",
    "Step",
    "assembled",
    "clock",
    "compiled_timeline",
    "cut",
    "measured_step",
    "policy_of",
]

log = logging.getLogger("torch_fused_ops.planner")

OFF = "off"  # a level of a whole model, never of a part
# Inductor puts some of the last layers' work off to the end of backward, and the first layer may hold something of
# its own that the second frees (of blocks without attention a product in place of the residual). So two at each end
# stand for themselves, and one for all between.
BEGINNING = ENDING = 2
KEPT = BEGINNING + 1 + ENDING
# What a curve that was put together may be short of the whole model's.
MARGIN = 0.02


@dataclass(frozen=True)
class Segment:
    """A part of a step.

    Attributes:
        points: bytes alive at each of its calls, relative to its beginning.
        net: bytes alive at its end, relative to its beginning.
        seconds: the least time of its calls.
        gradients: bytes of the parameters' gradients that are whole by its end: of its layer's own, and of those that
            the compiler put off from layers before.
    """

    points: tuple[int, ...] = ()
    net: int = 0
    seconds: float = 0.0
    gradients: int = 0

    @cached_property
    def peak(self) -> int:
        return max(self.points, default=0)


Piece = tuple[str, str, Segment]  # "forward" or "backward", unit or "", its segment


class Around(Protocol):
    """What changes a step's segments: shards of its parameters (``fsdp.FullyShard``)."""

    def around(self, pieces: Iterable[Piece], each_call: bool = False) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Curve:
    """A step's curve.

    Attributes:
        peak: the most bytes alive at once.
        kept: bytes alive between forward and backward.
        end: bytes alive behind backward.
        seconds: the least time of the step.
    """

    peak: int
    kept: int
    end: int
    seconds: float


@dataclass(frozen=True)
class Parts:
    """A compiled step, cut: what stands before, in and behind its units."""

    entry: int
    before: Segment
    forward: Mapping[str, Segment]
    between: tuple[Segment, Segment]  # behind the last unit's forward, before its backward
    backward: Mapping[str, Segment]
    behind: Segment


@dataclass(frozen=True)
class Step:
    """All that is known of a model's step.

    Attributes:
        units: of the whole model, in the order of forward.
        stacks: lists of equal units, of which the first, the last and some between were compiled.
        mlps: the units that have MLPs, for which levels are chosen.
        parts: the compiled steps, by the level that all of their units are at.
        shards: what has parameters in shards, if they are.
    """

    units: tuple[str, ...]
    stacks: tuple[Stack, ...]
    mlps: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, Parts]
    shards: Around | None = None
    _found: dict[tuple[str, str], tuple[Segment, Segment]] = field(default_factory=dict, repr=False, compare=False)

    def segments(self, unit: str, level: str) -> tuple[Segment, Segment]:
        """A unit's forward and backward at a level."""
        if (unit, level) not in self._found:
            self._found[unit, level] = self._look_up(unit, level)
        return self._found[unit, level]

    def _look_up(self, unit: str, level: str) -> tuple[Segment, Segment]:
        part, like = self.parts[level], self.like(unit)
        return part.forward.get(like, Segment()), part.backward.get(like, Segment())

    def like(self, unit: str) -> str:
        """The unit that was compiled in its place: of a list the first and last two, the third for all between."""
        found = stack_of(unit, self.stacks)
        if found is None:
            return unit
        stack, number = found
        from_end = stack.length - number
        return stack.layer(min(number, BEGINNING) if from_end > ENDING else stack.kept - from_end)

    def default(self, levels: Mapping[str, str]) -> str:
        """The level of what is in no unit with MLPs: that of all of those, "free" where they differ.

        So a step that was compiled whole is exact. Of one that was put together "free" is nearer, but for "off": at the
        end of few layers the compiler orders the loss in ways that it does not at the end of many (a Llama of eight
        layers at "fp8" has a peak of 97.6 MiB; 97.6 with the ends of "free", 113.7 with those of "fp8").
        """
        found = {levels.get(unit, "free") for unit in self.mlps}
        level = found.pop() if len(found) == 1 else "free"
        return "free" if self.stacks and level != OFF else level

    def pieces(self, levels: Mapping[str, str]) -> Iterator[Piece]:
        """The segments in the order of the step, as if no parameters were in shards."""
        default = self.default(levels)
        ends = self.parts[default]
        yield "forward", "", ends.before
        for unit in self.units:
            yield "forward", unit, self.segments(unit, levels.get(unit, default))[0]
        yield "forward", "", ends.between[0]
        yield "backward", "", ends.between[1]
        for unit in reversed(self.units):
            yield "backward", unit, self.segments(unit, levels.get(unit, default))[1]
        yield "backward", "", ends.behind

    @property
    def entry(self) -> int:
        """Bytes alive before the step: its arguments."""
        return next(iter(self.parts.values())).entry

    def sharded(self, pieces: Iterable[Piece], each_call: bool = False) -> Iterator[Piece]:
        """The segments, with shards if there are any."""
        return self.shards.around(pieces, each_call) if self.shards else iter(pieces)

    def curve(self, pieces: Iterable[Piece]) -> Curve:
        """What segments one after the other come to."""
        live = peak = kept = self.entry
        seconds = 0.0
        for graph, _, segment in self.sharded(pieces):
            peak = max(peak, live + segment.peak)
            live += segment.net
            seconds += segment.seconds
            kept = live if graph == "forward" else kept
        return Curve(peak, kept, live, seconds)

    def at(self, levels: Mapping[str, str]) -> Curve:
        """The step with a memory level for each unit; those that are not named are at "free"."""
        return self.curve(self.pieces(levels))

    def reserve(self, levels: Mapping[str, str], curve: Curve | None = None) -> int:
        """Bytes by which the whole model's peak may be above that of the curve at these levels, if put together.

        Of the models that were measured none was (``docs/plan.md``): it is left for another order of the work, which
        the compiler may find in the longer graph. At the border between two levels that may keep what one layer
        rebuilds beside another's.
        """
        if not self.stacks:
            return 0
        chosen = set(levels.values())
        layer = max(
            (
                self.segments(unit, a)[0].net - self.segments(unit, b)[0].net
                for unit in self.mlps
                for a in chosen
                for b in chosen
            ),
            default=0,
        )
        return layer + int(MARGIN * (curve or self.at(levels)).peak)

    def checkpointed(self, inputs: Mapping[str, int]) -> Curve:
        """The step with a checkpoint around each whole unit, by arithmetic: it keeps its input, and runs again.

        Args:
            inputs: the bytes of what each compiled unit is given by the one before.
        """

        def pieces() -> Iterator[Piece]:
            for graph, unit, segment in self.pieces({}):
                if unit:
                    forward, backward = self.segments(unit, "free")
                    given = inputs.get(self.like(unit), 0)
                    if graph == "forward":
                        segment = Segment(forward.points, given, forward.seconds)
                    else:
                        again = (*forward.points, *(forward.net + point for point in backward.points))
                        net = forward.net + backward.net - given
                        seconds = forward.seconds + backward.seconds
                        segment = Segment(again, net, seconds, backward.gradients)
                yield graph, unit, segment

        return self.curve(pieces())

    def points(self, levels: Mapping[str, str]) -> list[int]:
        """Bytes alive at each call of the step."""
        live, found = self.entry, [self.entry]
        for _, _, segment in self.sharded(self.pieces(levels), each_call=True):
            found += [live + point for point in segment.points]
            live += segment.net
        return [*found, live]


# ---- compiled and cut ------------------------------------------------------------------------------------------------


def policy_of(mlps: Mapping[str, Sequence[str]], levels: Mapping[str, str]) -> FusionPolicy:
    """The policy that gives the MLPs of each unit its level."""
    chosen = {module: levels.get(unit, "free") for unit, modules in mlps.items() for module in modules}
    if len(set(chosen.values())) == 1:
        return FusionPolicy(memory=next(iter(chosen.values())))
    return FusionPolicy(memory={module: level for module, level in chosen.items() if level != "free"})


def compiled_timeline(
    model: CapturedModel, gpu: GPU, policy: FusionPolicy
) -> tuple[Timeline, tuple[PaperCompilation, ...]]:
    """A captured model's curve under a policy, and the graphs on paper.

    Raises:
        ValueError: a graph could not be set aside, or has no backward.
    """
    papers = tuple(on_paper(Capture(each.graph, policy, each.reason), gpu, policy).paper for each in model.graphs)
    if all(paper.backward is None for paper in papers):
        raise ValueError("model: nothing in it needs a gradient, so there is no training step to plan")
    return timeline_of(papers, model.links), papers


def measured_step(model: CapturedModel, gpu: GPU, rates: Rates, instructions: bool, levels: Sequence[str]) -> Step:
    """Compile a captured model at each level.

    Args:
        model: what was captured.
        gpu: the GPU to generate code for.
        rates: what it reaches.
        instructions: whether kernels are assembled, and their instructions counted.
        levels: memory levels for MLPs, without "off".
    """
    parts = {}
    for level in (*levels, OFF) if model.mlps else levels[:1]:
        log.info('compiling on paper: every MLP at "%s"', level)
        timeline, papers = compiled_timeline(model, gpu, FusionPolicy(memory=level))
        parts[level] = cut(timeline, model, clock(papers, rates, instructions))
    return assembled(model, parts)


def assembled(model: CapturedModel, parts: Mapping[str, Parts]) -> Step:
    """The step of the whole model, of which a few equal layers were compiled."""
    whole = [*model.units]
    for stack in model.stacks:
        first = whole.index(stack.layer(0))
        whole[first : first + stack.kept] = map(stack.layer, range(stack.length))
    mlps = {unit: _renamed(model, unit) for unit in whole}
    return Step(tuple(whole), model.stacks, {unit: found for unit, found in mlps.items() if found}, parts)


def _renamed(model: CapturedModel, unit: str) -> tuple[str, ...]:
    """The MLPs of a unit that is like one that was captured."""
    found = stack_of(unit, model.stacks)
    like = found[0].layer(0) if found else unit
    return tuple(f"{unit}{mlp.removeprefix(like)}" for mlp in model.mlps.get(like, ()))


def clock(papers: Sequence[PaperCompilation], rates: Rates, instructions: bool) -> Callable[[Moment], float]:
    """The least time of a call; as for ``measured_step``."""
    counted: dict[tuple[str, str], float] = {}
    papers = papers if instructions else ()
    prepare(graph for paper in papers for graph in paper.graphs.values())
    for paper in papers:
        for kind, graph in paper.graphs.items():
            for name, lane_instructions in launches_of(graph).items():
                counted[kind, name] = max(counted.get((kind, name), 0.0), lane_instructions)
    return lambda call: rates.seconds([Work(call.flop, call.nbytes, counted.get((call.graph, call.call), 0.0))])


BEHIND = "(behind)"  # no module is called so


def cut(timeline: Timeline, model: CapturedModel, seconds: Callable[[Moment], float]) -> Parts:
    """A compiled step, cut at its units, with the least time of each call."""
    kinds = [moment.graph == "backward" for moment in timeline.moments]
    first = kinds.index(True) if True in kinds else len(kinds)
    sides = timeline.moments[:first], timeline.moments[first:]
    forward, backward = (_owners(side, model) for side in sides)
    segments = [
        _segments(side, owners, start, seconds)
        for side, owners, start in zip(sides, (forward, backward), (timeline.entry, timeline.kept), strict=True)
    ]
    # A gradient is whole where its layer ends; or later, where the compiler put it off.
    order = {owner: i for i, owner in enumerate(dict.fromkeys(["", *(o for o in backward if o != BEHIND), BEHIND]))}
    whole: Counter[str] = Counter()
    for (graph, number), (moment, nbytes) in timeline.gradients.items():
        born = backward[moment - first] if moment >= first else ""
        own = model.unit_of(model.parameter(graph, number).rpartition(".")[0]) or BEHIND
        whole[max(born, own if own in order else "", key=order.__getitem__)] += nbytes
    for owner, nbytes in whole.items():
        segments[1][owner] = replace(segments[1].get(owner, Segment()), gradients=nbytes)
    ends = [(each.pop("", Segment()), each.pop(BEHIND, Segment())) for each in segments]
    return Parts(timeline.entry, ends[0][0], segments[0], (ends[0][1], ends[1][0]), segments[1], ends[1][1])


def _owners(moments: Sequence[Moment], model: CapturedModel) -> list[str]:
    """The unit that each call counts for, from its own first call on; before all units "", behind them BEHIND."""
    owners: list[str] = []
    seen: set[str] = set()
    current, last = "", 0
    for i, moment in enumerate(moments):
        unit = _unit(moment, model)
        if unit and unit not in seen:
            current = unit
            seen.add(unit)
        last = i if unit and unit == current else last
        owners.append(current)
    behind = len(owners) - 1 - last if current else 0
    return owners[: len(owners) - behind] + [BEHIND] * behind


def _segments(
    moments: Sequence[Moment], owners: Sequence[str], start: int, seconds: Callable[[Moment], float]
) -> dict[str, Segment]:
    found: dict[str, tuple[int, list[Moment]]] = {}
    for i, (moment, owner) in enumerate(zip(moments, owners, strict=True)):
        found.setdefault(owner, (_needed(moments[i - 1]) if i else start, []))[1].append(moment)
    return {owner: _segment(beginning, each, seconds) for owner, (beginning, each) in found.items()}


def _unit(moment: Moment, model: CapturedModel) -> str:
    votes = Counter(model.layers.get(path, "") for path in moment.modules)
    unit = votes.most_common(1)[0][0] if votes else ""
    return unit if unit in model.units else ""


def _segment(start: int, moments: Sequence[Moment], seconds: Callable[[Moment], float]) -> Segment:
    points = tuple(moment.live - start for moment in moments)
    return Segment(points, _needed(moments[-1]) - start if moments else 0, sum(map(seconds, moments)))


def _needed(moment: Moment) -> int:
    """Bytes behind a call that are to be read: what only waits to be written again belongs to who writes it."""
    return moment.after - moment.waiting
