"""Split a training step's memory and time into segments at layer boundaries.

A compiled step has two segments for each layer (unit): one in forward, one in backward. A segment has bytes alive
relative to its start, their net change, and seconds. Joined in execution order, the segments are exactly the step's
live-bytes timeline. A layer's level changes mostly the layer's own segments, so segments of several levels can estimate
a step with mixed levels; a later layer may also reuse the layer's buffers. Such estimates only rank candidates: the
chosen step is compiled (``plan.py``). At a segment's start and end, only buffers that a later call reads are counted. A
buffer that waits for reuse by Inductor counts for the later segment.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch_fused_ops.planner.fsdp import FullyShard, PlacedSegment, Segment
from torch_fused_ops.planner.model import LOSS, CapturedModel
from torch_fused_ops.planner.offload import Link, Schedule, in_order, moved
from torch_fused_ops.planner.pieces import signature
from torch_fused_ops.policy import FusionPolicy, enclosing_modules
from torch_fused_ops.reports.captures import Capture, fused_graph, on_paper
from torch_fused_ops.virtual_gpu import GPU, roofline
from torch_fused_ops.virtual_gpu.eager import EagerGraph
from torch_fused_ops.virtual_gpu.timeline import Event, Part, Stored, Timeline, timeline_of


@dataclass(frozen=True)
class StepSummary:
    """A summary of a step's live-bytes timeline."""

    peak: int  # the most bytes alive at once
    saved: int  # bytes alive between forward and backward
    end: int  # bytes alive after backward
    seconds: float  # the least time of the step
    pools: int  # the largest sizes of the caching allocator's pools, summed


@dataclass(frozen=True)
class SegmentedStep:
    """A compiled step, split into segments."""

    entry: int  # bytes alive before the step: its arguments
    pieces: tuple[PlacedSegment, ...]  # in execution order: for each graph, before, in and after the units
    trained: frozenset[str] = frozenset()  # paths of the parameters that get a gradient
    timeline: Timeline = field(default_factory=lambda: Timeline((), 0, 0, 0))  # the step before it is split
    schedule: Schedule = field(default_factory=Schedule)

    @cached_property
    def segments(self) -> Mapping[tuple[str, str], Segment]:
        """The units' segments, by ("forward" or "backward", unit)."""
        return {(graph, unit): segment for graph, unit, segment in self.pieces if unit}


@dataclass(frozen=True)
class Step:
    """A model's compiled step at each level."""

    mlps: Mapping[str, tuple[str, ...]]  # MLPs by unit; levels are chosen for these units
    by_level: Mapping[str, SegmentedStep]  # the compiled steps, by the level of all units
    shards: FullyShard | None = None
    # When gradients are added to existing ones and freed: "layer", at each layer's end; "step", at the end; "", never.
    accumulates: str = ""
    link: Link | None = None  # to the host; None if nothing may move there

    @property
    def base(self) -> str:
        """The default level of a unit: "free" if it was compiled, else the plainest compiled level."""
        return "free" if "free" in self.by_level else next(iter(self.by_level))

    def default(self, levels: Mapping[str, str]) -> str:
        """Return the level outside the units with MLPs: these units' only level, or ``base`` if they have several."""
        chosen = {levels.get(unit, self.base) for unit in self.mlps}
        return chosen.pop() if len(chosen) == 1 else self.base

    def pieces(self, levels: Mapping[str, str]) -> Iterator[PlacedSegment]:
        """Yield the segments in execution order, without shards."""
        default = self.default(levels)
        for graph, unit, segment in self.by_level[default].pieces:
            level = levels.get(unit, default)
            segments = self.by_level[level].segments
            yield graph, unit, segment if level == default else segments.get((graph, unit), Segment())

    def sharded(self, pieces: Iterable[PlacedSegment], each_call: bool = False) -> Iterator[PlacedSegment]:
        """Yield the segments with FSDP2's bytes if the model is sharded, else with accumulated gradients freed."""
        return self.shards.around(pieces, each_call) if self.shards else self._accumulated(list(pieces))

    def _accumulated(self, pieces: Sequence[PlacedSegment]) -> Iterator[PlacedSegment]:
        gradient_bytes = sum(segment.gradients for _, _, segment in pieces)
        for i, (graph, unit, segment) in enumerate(pieces):
            last = gradient_bytes * (i == len(pieces) - 1)
            freed = {"": 0, "layer": segment.gradients, "step": last}[self.accumulates]
            yield graph, unit, replace(segment, net=segment.net - freed)

    def summary_at(self, levels: Mapping[str, str], offload: Sequence[Stored] = ()) -> StepSummary:
        """Summarize the step with a level for each unit; units without a level have ``default(levels)``.

        Args:
            levels: the levels.
            offload: saved tensors of the step at the default level that move to the host.
        """
        at_default, pieces = self.by_level[self.default(levels)], self.pieces(levels)
        schedule, moves = at_default.schedule, at_default.schedule.moves(offload)
        copies = in_order(moves) or schedule.copies
        seconds = schedule.waiting(copies, self.link.bandwidth) if self.link and copies else 0.0
        live = peak = saved = main = at_default.entry
        gather = 0
        for graph, _, segment in self.sharded(moved(pieces, moves) if moves else pieces):
            peak, main = max(peak, live + segment.peak), max(main, live + segment.main_pool)
            gather = max(gather, segment.gather)
            live += segment.net
            seconds += segment.seconds
            saved = live if graph == "forward" else saved
        reduced = self.shards.reduce_pool if self.shards else 0
        return StepSummary(peak, saved, live, seconds, main + gather + reduced)

    def summary_of(self, step: SegmentedStep) -> StepSummary:
        """Summarize a compiled step."""
        return replace(self, by_level={"free": step}).summary_at({})

    def points(self, step: SegmentedStep) -> list[int]:
        """Return the bytes alive before a compiled step, at each call, and after the step."""
        live, points = step.entry, [step.entry]
        for _, _, segment in self.sharded(step.pieces, each_call=True):
            points += [live + point for point in segment.points]
            live += segment.net
        return [*points, live]


# ---- compiled and cut ------------------------------------------------------------------------------------------------


def segmented_step(
    model: CapturedModel, gpu: GPU, policy: FusionPolicy, known: dict[object, Part] | None = None
) -> SegmentedStep:
    """Compile a captured model's graphs under a policy, join their live-bytes timelines, and split the step.

    Args:
        model: the model.
        gpu: the target device.
        policy: the policy.
        known: a cache of compiled pieces, to which this call adds, so that equal pieces are compiled once.

    Raises:
        ValueError: a graph could not be captured, or no graph has a backward.
    """
    programs: list[Part] = []
    known = {} if known is None else known
    for i, graph in enumerate(model.graphs):
        unit = model.pieces[i] if model.pieces else None
        is_eager, piece_policy, calls = i in model.eager, policy, signature(graph.gm)
        key: object = i, calls, policy
        if unit is not None:
            memory: Any = policy.memory_of(model.mlps.get(unit, ()))
            memory = "free" if unit == LOSS and memory != "off" else memory  # a loss has neither MLPs nor attention
            attention: Any = policy.attention_of({unit} - {LOSS})
            rows = policy.offload if isinstance(policy.offload, tuple) and unit else ()
            inside = tuple(row for row in rows if unit in enclosing_modules([row[0]]))
            offload: Any = dict(inside) if inside else policy.offload is True
            piece_policy = replace(policy, memory=memory, attention=attention, offload=offload)
            # Equal layers are compiled once, so the key has no names of layers.
            moving = offload is True, tuple((pattern.removeprefix(unit), moves) for pattern, moves in inside)
            compiled_as = (graph.parameters, graph.autocast, graph.training, is_eager, moving)
            key = (calls, *compiled_as, replace(piece_policy, offload=False))
        if key not in known:
            capture, collects = Capture(graph, piece_policy), gc.isenabled()
            gc.disable()  # collecting garbage takes a tenth of a compilation's time
            try:
                known[key] = EagerGraph(graph, gpu) if is_eager else on_paper(capture, gpu, piece_policy)
            finally:
                if collects:
                    gc.enable()
        programs.append(known[key])
    rates = roofline.estimated_rates(gpu)
    assert rates is not None

    def seconds(call: Event) -> float:
        if call.call.startswith("ao."):  # on the copy stream
            return 0.0
        return rates.seconds([roofline.Work(call.flop, call.nbytes)])

    timeline = timeline_of(programs, model.links, units=model.pieces, shared=model.shared, retained=model.retained)
    if not timeline.gradients and all(event.graph != "backward" for event in timeline.events):
        raise ValueError("model: nothing in it needs a gradient, so there is no training step to plan")
    return cut(timeline, model, seconds)


def alike_at(model: CapturedModel, gpu: GPU, *levels: str) -> bool:
    """Return True if fusion gives equal graphs at these levels, as "input" and "tiled" do if no MLP is tiled."""
    policies = map(model.policy_at, levels)
    graphs = [[signature(fused_graph(Capture(g, p), gpu, p).gm) for g in model.graphs] for p in policies]
    return all(at_level == graphs[0] for at_level in graphs)


AFTER_UNITS = "(after units)"  # never a module's name


def cut(timeline: Timeline, model: CapturedModel, seconds: Callable[[Event], float]) -> SegmentedStep:
    """Split a compiled step into segments at its units. ``seconds`` returns a call's least time."""
    first = sum(event.graph != "backward" for event in timeline.events)  # the first event of backward
    before, after = timeline.events[:first], timeline.events[first:]
    times = [seconds(event) for event in timeline.events]
    backward = _owners(after, model)
    in_forward = _segments(before, _owners(before, model), timeline.entry, times[:first])
    in_backward = _segments(after, backward, timeline.between, times[first:])
    # A gradient is complete at the end of its layer, or later if the compiler deferred it.
    owners = dict.fromkeys(["", *(owner for owner in backward if owner != AFTER_UNITS), AFTER_UNITS])
    order = {owner: i for i, owner in enumerate(owners)}
    gradient_bytes: Counter[str] = Counter()
    head = 0
    for (graph, number), (call, nbytes) in timeline.gradients.items():
        created_in = backward[call - first] if call >= first else ""
        owner_unit = model.unit_of(model.parameter(graph, number).rpartition(".")[0]) or AFTER_UNITS
        ordered = owner_unit if owner_unit in order else ""
        gradient_bytes[max(created_in, ordered, key=order.__getitem__)] += nbytes
        head += nbytes * (created_in == "" and owner_unit == AFTER_UNITS)
    for owner, nbytes in (+gradient_bytes).items():
        in_backward[owner] = replace(in_backward.get(owner, Segment()), gradients=nbytes)
    in_backward[""] = replace(in_backward.get("", Segment()), head=head)
    of_loss = [i for i, event in enumerate(timeline.events) if event.modules == (LOSS,)]
    if of_loss:
        hole = timeline.hole(of_loss[0], of_loss[-1])
        in_backward[LOSS] = replace(in_backward[LOSS], hole=hole)
    pieces: list[PlacedSegment] = []
    change = timeline.between - timeline.entry, timeline.end - timeline.between
    for kind, by_owner, nbytes in zip(("forward", "backward"), (in_forward, in_backward), change, strict=True):
        # Bytes freed between the last call and the graph's return count for the segment after the units.
        remaining = nbytes - sum(segment.net for segment in by_owner.values())
        loss = [LOSS] * (LOSS in by_owner)
        placed = ["", *(owner for owner in by_owner if owner not in ("", AFTER_UNITS, LOSS)), AFTER_UNITS]
        placed = [*placed, *loss] if kind == "forward" else [*loss, *placed]
        last = by_owner.get(placed[-1], Segment())
        by_owner[placed[-1]] = replace(last, net=last.net + remaining)
        pieces += [(kind, owner.replace(AFTER_UNITS, ""), by_owner.get(owner, Segment())) for owner in placed]
    trained = frozenset(model.parameter(*key) for key in timeline.gradients)
    schedule = Schedule.of(timeline, times)
    return SegmentedStep(timeline.entry + model.unread, tuple(pieces), trained, timeline, schedule)


def _owners(events: Sequence[Event], model: CapturedModel) -> list[str]:
    """Assign each call to a unit, or LOSS; "" before all units, AFTER_UNITS after them.

    The compiler may run some calls of a unit early, so units are ordered by their middle calls, and a unit begins with
    its first call after the middle call of the previous unit.
    """
    calls: dict[str, list[int]] = {}
    for i, event in enumerate(events):
        votes = Counter(model.layers.get(path, "") for path in event.modules)
        unit = votes.most_common(1)[0][0] if votes else ""
        if unit in model.units:
            calls.setdefault(unit, []).append(i)
    middles = {unit: numbers[len(numbers) // 2] for unit, numbers in calls.items()}
    is_loss = [event.modules == (LOSS,) for event in events]
    owners = [""] * len(events)
    middle = last = -1
    for unit in sorted(calls, key=middles.__getitem__):
        begin = next(i for i in calls[unit] if i > middle)
        owners[begin:] = [unit] * (len(owners) - begin)
        middle, last = middles[unit], calls[unit][-1]
    if calls:
        owners[last + 1 :] = [AFTER_UNITS] * (len(owners) - last - 1)
    return [LOSS if loss else owner for owner, loss in zip(owners, is_loss, strict=True)]


def _segments(events: Sequence[Event], owners: Sequence[str], start: int, times: Sequence[float]) -> dict[str, Segment]:
    """Return the segment of each owner, whose calls are adjacent."""
    segments = {}
    for owner, calls in itertools.groupby(zip(owners, events, times, strict=True), key=lambda call: call[0]):
        _, of_owner, seconds = zip(*calls, strict=True)
        end = of_owner[-1].after - of_owner[-1].waiting  # a buffer that waits for reuse counts for its next writer
        segments[owner] = Segment(tuple(m.live - start for m in of_owner), end - start, sum(seconds))
        start = end
    return segments
