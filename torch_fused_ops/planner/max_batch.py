"""Find the largest batch or sequence with which a step fits, at each memory level.

Bytes alive at a call are affine in the size as long as the compiler generates the same calls, so two compiled sizes
predict the largest that fits. Compiling this size and the next confirms it: the first fits, the second does not.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.planner.setup import LEVELS
from torch_fused_ops.planner.step import Step, clock, compiled_timeline, cut, policy_at
from torch_fused_ops.reports.captures import said
from torch_fused_ops.virtual_gpu import GPU, PaperCompilation
from torch_fused_ops.virtual_gpu.timeline import Timeline

log = logging.getLogger("torch_fused_ops.planner")

DIMENSIONS = {"batch": 0, "tokens": 1}  # dimensions of the argument tensors
GUESSES = 6  # after this many samples, ``_guess`` halves the interval instead of assuming affine bytes


@dataclass(frozen=True)
class LargestRow:
    """The largest size that fits with every layer at one level."""

    level: str  # one of ``setup.LEVELS``
    size: int  # the largest size that fits; 0 if no size fits
    peak: int  # the peak at this size, with parameters and optimizer state
    seconds: float  # the least time of forward and backward at this size
    over: int  # bytes beyond the limit at the next size; 0 if the next size did not run or was not tried


@dataclass(frozen=True)
class Largest:
    """The largest sizes that fit."""

    dimension: str  # "batch" or "tokens"
    given: int  # the size that the model was called with
    step: int  # only its multiples are tried
    rows: tuple[LargestRow, ...]  # one for each level
    stopped: str = ""  # the last size that failed, and its error; "" if every size ran


@dataclass(frozen=True)
class Sample:
    """A step at one size."""

    size: int
    points: Sequence[int]  # bytes alive at each call

    @property
    def peak(self) -> int:
        return max(self.points)


def size_of(args: Any, dimension: str) -> int:
    """Return the size of the first argument tensor that has this dimension.

    Raises:
        ValueError: no argument tensor has this dimension.
    """
    i = DIMENSIONS[dimension]
    size = next((t.shape[i] for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim() > i and t.shape[i]), None)
    if size is None:
        raise ValueError(
            f"maximum={dimension!r} is not accepted: none of the model's input tensors has a dimension {i}"
        )
    return int(size)


def resized(args: Any, dimension: str, size: int) -> Any:
    """Cut or repeat the argument tensors whose size in ``dimension`` is ``size_of(args, dimension)``."""
    i, old = DIMENSIONS[dimension], size_of(args, dimension)

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= i or value.shape[i] != old:
            return value
        index = torch.arange(size, device=value.device) % old
        return value.detach().index_select(i, index).requires_grad_(value.requires_grad)

    return tree_map(resize, args)


def step_of(size: int, dimension: str) -> int:
    """Return the spacing of sizes: 1 for batches; for tokens, the largest power of 2 in ``size``, up to 128."""
    return 1 if dimension == "batch" else min(size & -size, 128)


class Sizes:
    """Captures a model once at each size, and compiles it at memory levels.

    Args:
        capture: captures the model at a size.
        dimension: "batch" or "tokens".
        given: the size that the model was called with.
        gpu: the target device.
        step: the compiled step at the given size.
    """

    def __init__(
        self, capture: Callable[[int], CapturedModel], dimension: str, given: int, gpu: GPU, step: Step
    ) -> None:
        self.capture, self.dimension, self.given, self.gpu, self.step = capture, dimension, given, gpu, step
        self.between = step_of(given, dimension)
        self.captured: dict[int, CapturedModel | None] = {}
        self.bound, self.stopped = 0, ""  # the largest size with which the model runs; 0 if no size has failed
        self.compiled = functools.cache(self._compiled)

    def largest(self, resident: int, available: int) -> Largest:
        """Find the largest size at each level.

        Args:
            resident: bytes of parameters and optimizer state.
            available: bytes for everything else.
        """
        rows = []
        for level in sorted(self.step.parts, key=LEVELS.index):
            levels = dict.fromkeys(self.step.mlps, level)
            first = Sample(self.given, self.step.points(levels))
            sample = functools.partial(self.sample, level)
            fits, over = bisected(sample, available, first, self.between) if available > 0 else (None, None)
            row = LargestRow(level, 0, 0, 0.0, over.peak - available if over else 0)
            if fits:
                step = self.step if fits is first else self.step_at(level, fits.size, timed=True)
                row = replace(row, size=fits.size, peak=resident + fits.peak, seconds=step.at_levels(levels).seconds)
            rows.append(row)
        return Largest(self.dimension, self.given, self.between, tuple(rows), self.stopped)

    def sample(self, level: str, size: int) -> Sample | int:
        """Return the step at a size, with every MLP at a level. If the model fails, return the largest that works."""
        if not self.runs(size):
            return self.bound
        step = self.step_at(level, size)
        return Sample(size, step.points(dict.fromkeys(step.mlps, level)))

    def step_at(self, level: str, size: int, timed: bool = False) -> Step:
        """Return the step at a size, with every MLP at a level. Times need machine code, and are 0 unless ``timed``."""
        captured, timeline, papers = self.compiled(level, size)
        parts = cut(timeline, captured, clock(papers, self.gpu) if timed else lambda call: 0.0)
        return replace(self.step, units=captured.units, mlps=captured.mlps, parts={level: parts})

    def _compiled(self, level: str, size: int) -> tuple[CapturedModel, Timeline, tuple[PaperCompilation, ...]]:
        log.info('compiling: %s %d, every MLP at "%s"', self.dimension, size, level)
        captured = self.captured[size]
        assert captured is not None
        return captured, *compiled_timeline(captured, self.gpu, policy_at(level))

    def runs(self, size: int) -> bool:
        """Return True if the model runs at a size. If it fails, ``bound`` is then the largest size at which it runs."""
        if size not in self.captured and not 0 < self.bound < size and not self._capture(size):
            low, high = max((n for n in (self.given, *self.captured) if n < size), default=0), size
            while high - low > self.between:
                middle = _middle(low, high, self.between)
                low, high = (middle, high) if self._capture(middle) else (low, middle)
            self.bound = low
        return self.captured.get(size) is not None

    def _capture(self, size: int) -> bool:
        log.info("capturing: %s %d", self.dimension, size)
        tensors = logging.getLogger("torch._subclasses.fake_tensor")  # logs an error with its trace, then raises it
        level = tensors.level
        tensors.setLevel(logging.CRITICAL)
        try:
            self.captured[size] = self.capture(size)
        except Exception as error:  # from the model, whose positions, caches and masks have fixed sizes
            quoted = re.search(r"got (\w+)\((['\"])(.*?)\2\)", str(error))  # Dynamo quotes the operator's error
            self.captured[size] = None
            self.stopped = f"{size}: {f'{quoted[1]}: {quoted[3]}' if quoted else said(error)}"
        finally:
            tensors.setLevel(level)
        return self.captured[size] is not None


def _middle(low: int, high: int, step: int) -> int:
    return low + (high - low) // (2 * step) * step


def bisected(
    sample: Callable[[int], Sample | int], available: int, first: Sample, step: int
) -> tuple[Sample | None, Sample | None]:
    """Find the largest size whose step fits into ``available`` bytes, and the next size; sample both.

    Args:
        sample: returns the step at a size. If the model fails, it returns the largest size that works, an int.
        available: bytes.
        first: the first sample.
        step: the step between sizes, which divides the first size.

    Returns:
        The largest sample that fits, or None; and the next size's sample, or None if the model fails at it.
    """
    low, high = 0, 0  # low: the largest size that fits; high: the smallest that does not; 0 if unknown
    seen = {first.size: first}
    sampled: Sample | int = first
    while True:
        if isinstance(sampled, int):
            high = sampled + step
        elif sampled.peak <= available:
            low = sampled.size
        else:
            high = sampled.size
        if high and high - low == step:
            return seen.get(low), seen.get(high)
        size = _guess(list(seen.values()), available, low, high, step)
        sampled = sample(size)
        if isinstance(sampled, Sample):
            seen[size] = sampled


def _guess(seen: Sequence[Sample], available: int, low: int, high: int, step: int) -> int:
    """Return the next size to try: above ``low``, which fits, and below ``high``, which does not fit."""
    halved = _middle(low, high, step) if high else 2 * low
    if len(seen) > GUESSES:
        return halved
    guess = crossing(*seen[-2:], available=available) if len(seen) > 1 else seen[0].size * available / seen[0].peak
    if guess == math.inf and not high:
        return halved
    least, most = low + step, high - step if high else math.inf
    return int(min(max(guess // step * step if guess < math.inf else guess, least), most))


def crossing(a: Sample, b: Sample, *, available: int) -> float:
    """Return the smallest size at which a call reaches ``available`` bytes; infinity if bytes do not grow.

    Assumes that each call's bytes are affine in the size; if the numbers of calls differ, that peaks are.
    """
    same = len(a.points) == len(b.points)
    pairs = zip(a.points, b.points, strict=True) if same else [(a.peak, b.peak)]
    slopes = [(x, (y - x) / (b.size - a.size)) for x, y in pairs]
    return min((a.size + (available - x) / slope for x, slope in slopes if slope > 0), default=math.inf)
