"""Choose levels: the fastest assignment that fits, out of a fixed list.

The list does not depend on the limit, so a higher limit never gives a slower plan if the estimated peaks are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_fused_ops.planner.offload import host_bytes
from torch_fused_ops.planner.setup import OFF
from torch_fused_ops.planner.step import Step, StepSummary
from torch_fused_ops.virtual_gpu.timeline import Stored

DEFAULT = ("free", "fp8", "fp8+attention", "input", "input+attention", "tiled")  # the levels to compile by default
MISSES = 4  # once this many compiled mixed assignments did not fit, skip the others
ALIKE = 1e-3  # a relative difference that rooflines cannot resolve


@dataclass(frozen=True)
class Candidate:
    """A level for each unit, tensors that move to the host, and the step's summary."""

    levels: Mapping[str, str]
    summary: StepSummary
    offload: tuple[Stored, ...] = ()

    @property
    def is_mixed(self) -> bool:
        """True if units have different levels."""
        return len(set(self.levels.values())) > 1

    @property
    def is_estimate(self) -> bool:
        """True if this step was not compiled: units have different levels, or tensors move to the host."""
        return self.is_mixed or bool(self.offload)


def candidates(step: Step, levels: Sequence[str]) -> list[Candidate]:
    """List assignments of levels, the fastest first. The list does not depend on the limit.

    It contains, for each level, the assignment of that level to all units, and the assignments of ``greedy``. With a
    link to the host, it also contains each level with tensors on the host. A level without an advantage (``useful``) is
    not mixed with other levels, and comes last. If steps take equally long, the fewest bytes on the host come first.

    Args:
        step: the compiled step.
        levels: memory levels, the plainest first.
    """
    used = useful(step, levels)
    alike = (dict.fromkeys(step.mlps, level) for level in (*levels, OFF))
    assigned = {tuple(sorted(chosen.items())): chosen for chosen in (*greedy(step, used), *alike)}
    every = [Candidate(chosen, step.summary_at(chosen)) for chosen in assigned.values()]
    for level in levels:
        chosen = dict.fromkeys(step.mlps, level)
        schedule = step.by_level[step.default(chosen)].schedule
        choices = dict.fromkeys(schedule.choices(step.link) if step.link else ())
        every += [Candidate(chosen, step.summary_at(chosen, moving), moving) for moving in choices if moving]
    unused = set(levels).difference(used)

    def rank(candidate: Candidate) -> tuple[object, ...]:
        seconds, is_unused = candidate.summary.seconds, not unused.isdisjoint(candidate.levels.values())
        rounded, host = round(math.log(max(seconds, 1e-12)) / ALIKE), host_bytes(s.nbytes for s in candidate.offload)
        return is_unused, rounded, host, seconds, candidate.summary.peak

    return sorted(every, key=rank)


def useful(step: Step, levels: Sequence[str]) -> list[str]:
    """Return the levels that have an advantage over every plainer level. ``levels`` begins with the plainest.

    An advantage is a lower peak, fewer bytes saved for backward, or less time (by more than ``ALIKE``).
    """
    used: dict[str, StepSummary] = {}
    for level in levels:
        summary = step.summary_at(dict.fromkeys(step.mlps, level))
        if not any(
            plainer.peak <= summary.peak
            and plainer.saved <= summary.saved
            and plainer.seconds <= summary.seconds * (1 + ALIKE)
            for plainer in used.values()
        ):
            used[level] = summary
    return list(used)


def best(
    every: Sequence[Candidate],
    limit: int,
    exactly: Callable[[Candidate], int] = lambda candidate: candidate.summary.pools,
) -> Candidate | None:
    """Return the fastest candidate whose pools hold at most ``limit`` bytes; None if no candidate fits.

    Args:
        every: the candidates, the fastest first.
        limit: bytes.
        exactly: returns a candidate's exact bytes; called if its estimate fits. If these exceed the limit, later
            estimates are raised by the error. After ``MISSES`` misses, estimates are skipped.
    """
    short = misses = 0
    for candidate in every:
        pools = candidate.summary.pools + short * candidate.is_estimate
        if pools > limit or (candidate.is_estimate and misses == MISSES):
            continue
        exact = exactly(candidate)
        if exact <= limit:
            return candidate
        short, misses = max(short, exact - candidate.summary.pools), misses + 1
    return None


def greedy(step: Step, levels: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield assignments, first all units at the first level. Each next one changes the unit that saves most per ms."""
    now = dict.fromkeys(step.mlps, levels[0])
    summary = step.summary_at(now)
    yield dict(now)
    while True:
        moves = []
        for unit in step.mlps:
            for level in levels[levels.index(now[unit]) + 1 :]:
                changed = {**now, unit: level}
                then = step.summary_at(changed)
                gain = summary.peak - then.peak
                moves.append((gain / max(then.seconds - summary.seconds, 1e-12), gain, changed, then))
        lower = [move for move in moves if move[1] > 0]
        # If no single change lowers the peak, two may: choose the change that leaves the fewest saved bytes.
        chosen = max(lower, key=lambda move: move[0]) if lower else min(moves, key=lambda m: m[3].saved, default=None)
        if chosen is None:
            return
        now, summary = chosen[2], chosen[3]
        yield dict(now)
