"""The levels to choose among, and the choice: the fastest of a fixed list of assignments whose peak meets the limit.

The list does not depend on the limit. So of curves that are exact more memory never gives a slower plan: what met the
smaller limit meets the larger one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_fused_ops.planner.step import OFF, Curve, Step
from torch_fused_ops.policy import MEMORY

__all__ = ["LOSSY", "Candidate", "best", "candidates", "levels_for"]

LOSSY = ("fp8",)  # levels whose gradients are not the plain ones
ALL = 2_500  # so many assignments of any level to any unit are tried one by one
ENUMERATED = 20_000  # so many with equal levels side by side; beyond, the greedy ones
MISSES = 4  # so many mixed assignments are compiled that do not fit
ALIKE = 1e-3  # least times that differ by this part are one: rooflines do not tell them apart


def levels_for(lossless: bool) -> tuple[str, ...]:
    """The levels that an MLP can have for itself, from the one that keeps most."""
    return tuple(level for level in MEMORY if level != OFF and not (lossless and level in LOSSY))


@dataclass(frozen=True)
class Candidate:
    """Levels by unit, and the step's curve with them: exact where all units have one, else an estimate."""

    levels: Mapping[str, str]
    curve: Curve

    @property
    def is_mixed(self) -> bool:
        """Whether units differ in their levels."""
        return len(set(self.levels.values())) > 1


def candidates(step: Step, levels: Sequence[str]) -> list[Candidate]:
    """Assignments of levels, which come from the plainest on, the fastest first, whatever the limit.

    Of a few layers all assignments. In rows of more (``_rows``) those at one level stand together, in both orders; how
    many there are of each is tried out. Where there are too many ways, the greedy ones: from all at the first level,
    always the change that lowers the peak most for its time. A level that gives what a plainer one does (``useful``) is
    not mixed with others, and comes last.
    """
    if not step.mlps:
        return [Candidate({}, step.at({}))]
    used = useful(step, levels)
    rows = _rows(step)
    ways = math.prod(2 * math.comb(len(row) + len(used) - 1, len(used) - 1) for row in rows)
    found: Iterator[dict[str, str]]
    if len(used) ** len(step.mlps) <= ALL:
        every_way = itertools.product(used, repeat=len(step.mlps))
        found = (dict(zip(step.mlps, way, strict=True)) for way in every_way)
    else:
        found = _counted(rows, used) if ways <= ENUMERATED else greedy(step, used)
    assigned = {tuple(sorted(one.items())): one for one in (*found, *(dict.fromkeys(step.mlps, one) for one in levels))}
    assigned[(OFF,)] = dict.fromkeys(step.mlps, OFF)  # type: ignore[index]
    every = [Candidate(one, step.at(one)) for one in assigned.values()]
    unused = set(levels).difference(used)
    return sorted(
        every, key=lambda one: (not unused.isdisjoint(one.levels.values()), one.curve.seconds, one.curve.peak)
    )


def useful(step: Step, levels: Sequence[str]) -> list[str]:
    """``levels``, which come from the plainest on, without those that save nothing over one before.

    With every MLP at such a level the step has as many bytes at its peak and between forward and backward as with every
    MLP at the plainer, or more, and takes as long (``ALIKE``).
    """
    found: dict[str, Curve] = {}
    for level in levels:
        curve = step.at(dict.fromkeys(step.mlps, level))
        if not any(
            one.peak <= curve.peak and one.kept <= curve.kept and one.seconds <= curve.seconds * (1 + ALIKE)
            for one in found.values()
        ):
            found[level] = curve
    return list(found)


def best(
    every: Sequence[Candidate], limit: int, peak: Callable[[Candidate], int] = lambda one: one.curve.peak
) -> Candidate | None:
    """The fastest whose peak is no more than ``limit`` bytes; None if there is none.

    Args:
        every: the fastest first.
        limit: bytes.
        peak: the exact one, asked for where the curve meets the limit. Where mixed levels have a higher peak than their
            curve, the others' are taken to be as much higher; after a few such (``MISSES``) they are given up.
    """
    short = misses = 0
    for one in every:
        if one.curve.peak + short * one.is_mixed > limit or (one.is_mixed and misses == MISSES):
            continue
        exact = peak(one)
        if exact <= limit:
            return one
        short, misses = max(short, exact - one.curve.peak), misses + 1
    return None


def _rows(step: Step) -> list[list[str]]:
    """Units with MLPs; those of one list whose MLPs have the same names are in one row."""
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
        ways.append([dict(zip(row, run, strict=True)) for one in ordered for run in {one, one[::-1]}])
    for chosen in itertools.product(*ways):
        yield {unit: level for way in chosen for unit, level in way.items()}


def greedy(step: Step, levels: Sequence[str]) -> Iterator[dict[str, str]]:
    """Always the next change of one unit that lowers the peak most for the time that it costs."""
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
        # Where no single change lowers the peak, two together may: go on with the one that keeps least.
        chosen = max(lower, key=lambda move: move[0]) if lower else min(moves, key=lambda m: m[3].kept, default=None)
        if chosen is None:
            return
        now, at = chosen[2], chosen[3]
        yield dict(now)
