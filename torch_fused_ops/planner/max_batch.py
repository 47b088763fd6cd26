"""Find the largest batch or sequence with which a step fits, at each memory level.

The peak is affine in the size as long as the compiler generates the same calls, so two compiled sizes predict the
largest that fits. The search ends when this size fits, and the next does not.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_fused_ops.graphs.capture import said
from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.planner.setup import LEVELS, SettingError
from torch_fused_ops.planner.step import Step, StepSummary, segmented_step
from torch_fused_ops.virtual_gpu import GPU

log = logging.getLogger("torch_fused_ops.planner")

DIMENSIONS = {"batch": 0, "tokens": 1}  # dimensions of the argument tensors
GUESSES = 6  # after this many peaks, ``bisected`` halves the interval instead of assuming an affine peak


@dataclass(frozen=True)
class LargestRow:
    """The largest size that fits with every layer at one level."""

    level: str  # one of ``setup.LEVELS``
    size: int  # the largest size that fits; 0 if no size fits
    peak: int  # the peak at this size, with parameters and optimizer state
    seconds: float  # the least time of forward and backward at this size


@dataclass(frozen=True)
class Largest:
    """The largest sizes that fit."""

    dimension: str  # "batch" or "tokens"
    given: int  # the size that the model was called with
    step: int  # only its multiples are tried
    rows: tuple[LargestRow, ...]  # one for each level
    stopped: str = ""  # the smallest size that failed, and its error; "" if every size ran


def size_of(args: Any, dimension: str) -> int:
    """Return the size of the first argument tensor that has this dimension.

    Raises:
        SettingError: no argument tensor has this dimension.
    """
    i = DIMENSIONS[dimension]
    size = next((t.shape[i] for t in tree_leaves(args) if isinstance(t, Tensor) and t.dim() > i and t.shape[i]), None)
    if size is None:
        problem = f"is not accepted: none of the model's input tensors has a dimension {i}"
        raise SettingError("maximum", dimension, problem)
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


def largest_sizes(
    capture: Callable[[int], CapturedModel],
    dimension: str,
    first: int,
    gpu: GPU,
    step: Step,
    resident: int,
    available: int,
) -> Largest:
    """Find the largest size at each level.

    Args:
        capture: captures the model at a size.
        dimension: "batch" or "tokens".
        first: the size that the model was called with.
        gpu: the target device.
        step: the compiled step at the given size.
        resident: bytes of parameters and optimizer state.
        available: bytes for everything else.
    """
    failed: dict[int, str] = {}  # the model's error, by size

    @functools.cache
    def captured_at(size: int) -> CapturedModel | None:
        log.info("capturing: %s %d", dimension, size)
        try:
            # It logs an error with its trace, and then raises it.
            with mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
                return capture(size)
        except Exception as error:  # from the model, whose positions, caches and masks have fixed sizes
            failed[size] = said(error)
            return None

    @functools.cache
    def summary_at(level: str, size: int) -> StepSummary | None:
        """Summarize the step; None if the model fails."""
        if size == first:
            return step.summary_of(step.by_level[level])
        captured = captured_at(size)
        if captured is None:
            return None
        log.info('compiling: %s %d, every MLP at "%s"', dimension, size, level)
        return step.summary_of(segmented_step(captured, gpu, captured.policy_at(level)))

    def peak_at(level: str, size: int) -> int | None:
        summary = summary_at(level, size)
        return summary.peak if summary else None

    rows, between = [], step_of(first, dimension)
    for level in sorted(step.by_level, key=LEVELS.index):
        size = bisected(functools.partial(peak_at, level), available, first, between) if available > 0 else 0
        summary = summary_at(level, size) if size else None
        peak, seconds = (resident + summary.peak, summary.seconds) if summary else (0, 0.0)
        rows.append(LargestRow(level, size, peak, seconds))
    stopped = [f"{size}: {error}" for size, error in sorted(failed.items())]
    return Largest(dimension, first, between, tuple(rows), next(iter(stopped), ""))


def bisected(peak_at: Callable[[int], int | None], available: int, first: int, step: int) -> int:
    """Return the largest size whose step fits into ``available`` bytes; 0 if no size fits.

    Args:
        peak_at: returns the step's peak at a size; None if the model fails at this size.
        available: bytes.
        first: the first size to try.
        step: the spacing of sizes, which divides the first size.
    """
    low = high = 0  # low: the largest size that fits; high: the smallest that does not; 0 if unknown
    size, peaks = first, dict[int, int]()
    while not high or high - low > step:
        peak = peak_at(size)
        if peak is not None:
            peaks[size] = peak
        low, high = (size, high) if peak is not None and peak <= available else (low, size)
        guess = crossing(peaks, available) if len(peaks) <= GUESSES else math.inf
        if guess < (high or math.inf):
            size = max(int(guess) // step * step, low + step)
            size = min(size, high - step) if high else size
        else:  # bytes do not grow, or the model fails at a size that would fit
            size = low + (high - low) // (2 * step) * step if high else 2 * low
    return low


def crossing(peaks: Mapping[int, int], available: int) -> float:
    """Return the size at which the line through the last two peaks reaches ``available``; infinity if it falls."""
    (a, at_a), (b, at_b) = ((0, 0), *peaks.items())[-2:]
    return a + (available - at_a) * (b - a) / (at_b - at_a) if (at_b - at_a) * (b - a) > 0 else math.inf
