"""The choice of levels: the fastest of a fixed list of assignments whose peak meets the limit.

The list does not depend on the limit. So more memory never gives a slower plan, if the estimated peaks are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_fused_ops.planner.setup import LEVELS, WITH_ATTENTION
from torch_fused_ops.planner.step import OFF, Curve, Step

LOSSY = ("fp8", "fp8+attention")  # levels that round gradients
MISSES = 4  # the most mixed assignments that are compiled and do not fit
ALIKE = 1e-3  # a relative difference that rooflines cannot resolve


def levels_for(lossless: bool, attention: bool) -> tuple[str, ...]:
    """The levels to compile by default, but "off", the plainest first.

    Args:
        lossless: leave out those that round gradients.
        attention: with those of attention; of the plain levels only the best one has it, since each takes minutes.
    """
    without = {OFF, *(LOSSY if lossless else ("free+attention",))}
    levels = (level for level in LEVELS if level not in without)
    return tuple(level for level in levels if attention or not level.endswith(WITH_ATTENTION))


@dataclass(frozen=True)
class Candidate:
    """Levels by unit, and the step's curve: exact if all units have the same level, else an estimate."""

    levels: Mapping[str, str]
    curve: Curve

    @property
    def is_mixed(self) -> bool:
        """True if units have different levels."""
        return len(set(self.levels.values())) > 1


def candidates(step: Step, levels: Sequence[str]) -> list[Candidate]:
    """List assignments of levels, independent of the limit, the fastest first.

    The list is greedy: from all at the first level, always the change of a unit that lowers the peak most for its time.
    Assignments of one level to all are in it, too. A level without an advantage (``useful``) is not mixed with others,
    and comes last.

    Args:
        step: the compiled step.
        levels: memory levels, the plainest first.
    """
    if not step.mlps:
        return [Candidate({}, step.at({}))]
    used = useful(step, levels)
    alike = (dict.fromkeys(step.mlps, level) for level in (*levels, OFF))
    assigned = {tuple(sorted(chosen.items())): chosen for chosen in (*greedy(step, used), *alike)}
    every = [Candidate(chosen, step.at(chosen)) for chosen in assigned.values()]
    unused = set(levels).difference(used)
    return sorted(every, key=lambda c: (not unused.isdisjoint(c.levels.values()), c.curve.seconds, c.curve.peak))


def useful(step: Step, levels: Sequence[str]) -> list[str]:
    """Return ``levels`` (the plainest first) without those that have no advantage over a plainer one.

    With every MLP at such a level, the step's peak, its bytes saved for backward and its time (``ALIKE``) are no lower.
    """
    used: dict[str, Curve] = {}
    for level in levels:
        curve = step.at(dict.fromkeys(step.mlps, level))
        if not any(
            plainer.peak <= curve.peak
            and plainer.saved <= curve.saved
            and plainer.seconds <= curve.seconds * (1 + ALIKE)
            for plainer in used.values()
        ):
            used[level] = curve
    return list(used)


def best(
    every: Sequence[Candidate], limit: int, exactly: Callable[[Candidate], int] = lambda candidate: candidate.curve.held
) -> Candidate | None:
    """The fastest candidate of which PyTorch holds at most ``limit`` bytes; None if there is none.

    Args:
        every: the candidates, the fastest first.
        limit: bytes.
        exactly: the exact bytes, called if the estimate meets the limit. If they are more for mixed levels, the
            estimates of the others are raised as much; after ``MISSES`` of these, mixed levels are skipped.
    """
    short = misses = 0
    for candidate in every:
        if candidate.curve.held + short * candidate.is_mixed > limit or (candidate.is_mixed and misses == MISSES):
            continue
        exact = exactly(candidate)
        if exact <= limit:
            return candidate
        short, misses = max(short, exact - candidate.curve.held), misses + 1
    return None


def greedy(step: Step, levels: Sequence[str]) -> Iterator[dict[str, str]]:
    """Repeat the change of one unit that lowers the peak most for its cost in time."""
    now = dict.fromkeys(step.mlps, levels[0])
    at = step.at(now)
    yield dict(now)
    while True:
        moves = []
        for unit in step.mlps:
            for level in levels[levels.index(now[unit]) + 1 :]:
                changed = {**now, unit: level}
                curve = step.at(changed)
                gain = at.peak - curve.peak
                moves.append((gain / max(curve.seconds - at.seconds, 1e-12), gain, changed, curve))
        lower = [move for move in moves if move[1] > 0]
        # If no single change lowers the peak, two together may: take the one that saves least for backward.
        chosen = max(lower, key=lambda move: move[0]) if lower else min(moves, key=lambda m: m[3].saved, default=None)
        if chosen is None:
            return
        now, at = chosen[2], chosen[3]
        yield dict(now)
