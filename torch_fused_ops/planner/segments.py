"""Parts of a training step, with their live bytes and times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Segment:
    """A part of a step. Bytes are relative to those alive at its beginning."""

    points: tuple[int, ...] = ()  # bytes alive at each of its calls
    net: int = 0  # bytes alive at its end
    seconds: float = 0.0  # the least time of its calls
    # Bytes of parameters' gradients that are complete by its end: gradients of its own layer, and of earlier layers if
    # the compiler deferred them.
    gradients: int = 0
    head: int = 0  # bytes of gradients that are complete by its end, but in ``gradients`` of the last segment
    hole: int = 0  # free bytes at its peak that PyTorch cannot use: pieces too small for later tensors
    main: int | None = None  # the main pool's largest size; None if the step is not sharded
    gather: int = 0  # the largest size of the pool for FSDP2's flat buffers

    @cached_property
    def peak(self) -> int:
        return max(self.points, default=0)

    @property
    def main_pool(self) -> int:
        """The most bytes that the caching allocator holds in its main pool."""
        return self.peak + self.hole if self.main is None else self.main


PlacedSegment = tuple[str, str, Segment]  # "forward" or "backward"; its unit, "" outside units; the segment
