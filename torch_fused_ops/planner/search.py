"""The choice of levels: the fastest of a fixed list of assignments whose peak meets the limit.

The list does not depend on the limit. So more memory never gives a slower plan, if the estimated peaks are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_fused_ops.planner.step import OFF, Curve, Step
from torch_fused_ops.policy import MEMORY

LOSSY = ("fp8",)  # levels that round gradients
ALL = 2_500  # the most assignments of any level to any unit that are tried
ENUMERATED = 20_000  # the most assignments with equal levels side by side; more are searched greedily
MISSES = 4  # the most mixed assignments that are compiled and do not fit
ALIKE = 1e-3  # a relative difference that rooflines cannot resolve


def levels_for(lossless: bool) -> tuple[str, ...]:
    """The levels of a single MLP, the one that saves most bytes for backward first."""
    return tuple(level for level in MEMORY if level != OFF and not (lossless and level in LOSSY))


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

    For a few layers the list has all assignments. In longer rows (``_rows``) layers of the same level are adjacent, in
    both orders, and all counts are tried. If that is too many, the list is greedy: from all at the first level, always
    the change that lowers the peak most for its time. A level without an advantage (``useful``) is not mixed with
    others, and comes last.

    Args:
        step: the compiled step.
        levels: memory levels, the plainest first.
    """
    if not step.mlps:
        return [Candidate({}, step.at({}))]
    used = useful(step, levels)
    rows = _rows(step)
    number = math.prod(2 * math.comb(len(row) + len(used) - 1, len(used) - 1) for row in rows)
    assignments: Iterator[dict[str, str]]
    if len(used) ** len(step.mlps) <= ALL:
        every_way = itertools.product(used, repeat=len(step.mlps))
        assignments = (dict(zip(step.mlps, way, strict=True)) for way in every_way)
    else:
        assignments = _counted(rows, used) if number <= ENUMERATED else greedy(step, used)
    alike = (dict.fromkeys(step.mlps, level) for level in levels)
    assigned = {tuple(sorted(chosen.items())): chosen for chosen in (*assignments, *alike)}
    assigned[(OFF,)] = dict.fromkeys(step.mlps, OFF)  # type: ignore[index]
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


def _rows(step: Step) -> list[list[str]]:
    """Group the units with MLPs: units of one list whose MLPs have the same names form a row."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for unit, mlps in step.mlps.items():
        kind = unit.rpartition(".")[0], tuple(mlp.removeprefix(unit) for mlp in mlps)
        rows.setdefault(kind, []).append(unit)
    return list(rows.values())


def _counted(rows: Sequence[Sequence[str]], levels: Sequence[str]) -> Iterator[dict[str, str]]:
    ways = []
    for row in rows:
        runs = itertools.combinations_with_replacement(range(len(levels)), len(row))  # from the first level to the last
        ordered = [tuple(levels[i] for i in run) for run in runs]
        ways.append([dict(zip(row, run, strict=True)) for ascending in ordered for run in {ascending, ascending[::-1]}])
    for chosen in itertools.product(*ways):
        yield {unit: level for way in chosen for unit, level in way.items()}


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
