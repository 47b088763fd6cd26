"""A step's parts: their live bytes and times."""

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
    head: int = 0  # bytes of gradients that are complete by its end, and that count for the step's last segment
    hole: int = 0  # bytes at its peak that PyTorch holds beyond those alive: pieces too small for later tensors
    main: int | None = None  # the main pool's largest size with shards; None without shards
    gather: int = 0  # the largest size of the pool for FSDP2's flat buffers

    @cached_property
    def peak(self) -> int:
        return max(self.points, default=0)

    @property
    def main_pool(self) -> int:
        """The most bytes that the caching allocator holds in its main pool."""
        return self.peak + self.hole if self.main is None else self.main


PlacedSegment = tuple[str, str, Segment]  # "forward" or "backward", unit or "", its segment
