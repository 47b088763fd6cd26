"""Compute the bytes that FSDP2 adds to a step on one GPU, from the step's segments.

By default, ``fully_shard`` is applied to each layer and to the root. Between steps a GPU has only shards; while a layer
runs, its parameters are gathered. This module adds and frees bytes in the same order as the Python code
of torch/distributed/fsdp/_fully_shard (torch 2.13), and counts them as ``torch.cuda.memory_allocated`` does:

* ``foreach_all_gather`` (_fsdp_collectives.py) gathers all parameters of a layer into one flat buffer, from which
  ``foreach_all_gather_copy_out`` copies each parameter. In forward, the flat buffer lives until the next layer is
  copied out (``FSDPParamGroup.wait_for_unshard``, _fsdp_param_group.py: ``comm_ctx.all_gather_state``; torch 2.15
  frees it slightly earlier). The last layer's buffer lives until the root's forward ends (``FSDPState._post_forward``,
  _fsdp_state.py). In backward, a layer's buffer is freed right after the copies, but by then the next layer's buffer
  is already allocated, because ``_backward_prefetch`` gathers it early.
* A layer's parameters are freed after its forward and after its backward (``reshard``). The root's parameters are
  gathered first, and freed at the end of backward (``_lazy_init``: the root does not reshard after forward).
* ``post_backward`` frees the layer's parameters and the flat buffer of the previous reduce-scatter. Then it copies the
  layer's gradients into a new flat buffer (``foreach_reduce``), frees them, and reduces this buffer to shards. The new
  buffer lives until the next ``post_backward``. The root's ``post_backward`` runs last
  (``_root_post_backward_final_callback``).

With a ``MixedPrecisionPolicy``, each element of a parameter takes 4 bytes in its shard (float32), 2 bytes when gathered
(bfloat16), and 4 bytes in the buffer that reduces its gradient (float32).

The caching allocator has a pool for each stream, and does not use one pool's free memory for another stream. All-gather
allocates its flat buffers on the copy-in stream, and reduce-scatter its results on a third stream. PyTorch therefore
holds the sum of the pools' largest sizes, although the pools do not reach these sizes at the same time.

Parameters are sharded along dimension 0 into pieces of equal size; shorter ones are padded
(``FSDPParam._init_sharded_param``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_fused_ops.planner.model import EMBEDDING, HEAD, LOSS


@dataclass(frozen=True)
class Segment:
    """A part of a step. Bytes are relative to those alive at its beginning."""

    points: tuple[int, ...] = ()  # bytes alive at each of its calls
    net: int = 0  # bytes alive at its end
    seconds: float = 0.0  # the least time of its calls
    # Bytes of parameters' gradients that are complete by its end: gradients of its own layer, and of layers before it
    # in backward if the compiler deferred them.
    gradients: int = 0
    head: int = 0  # bytes of gradients that are complete by its end, but that the last segment counts
    hole: int = 0  # free bytes at its peak that PyTorch cannot use: pieces too small for later tensors
    main: int | None = None  # the main pool's largest size; None if the step is not sharded
    gather: int = 0  # the largest size of the pool for all-gather's flat buffers

    @cached_property
    def peak(self) -> int:
        return max(self.points, default=0)

    @property
    def main_pool(self) -> int:
        """The most bytes that the caching allocator holds in its main pool."""
        return self.peak + self.hole if self.main is None else self.main


PlacedSegment = tuple[str, str, Segment]  # "forward" or "backward"; its unit, "" outside units; the segment


@dataclass(frozen=True)
class Group:
    """The bytes, per GPU, of parameters that FSDP2 gathers together: a layer's parameters, or those outside layers."""

    shard: int = 0  # bytes of the parameters' shards, counted in the dtype of the gathered parameters
    gradients: int = 0  # bytes of the gradients' shards, in the dtype of the reduction


class Additional(NamedTuple):
    """The bytes that FSDP2 adds at one point of a step, by the allocator's pool."""

    main: int
    gather: int


# At a segment's start, during its calls, at its end, and after it.
AtTimes = tuple[Additional, Additional, Additional, Additional]


@dataclass(frozen=True)
class FullyShard:
    """A model that FSDP2 shards over ``dp`` GPUs.

    Attributes:
        dp: the number of GPUs.
        groups: the group of each layer. The root's key is "", or with ``root="apart"`` ``EMBEDDING`` and ``HEAD``.
        reshard: which groups are freed after forward: "always", all except the root; "not-last", all except the root
            and the last one; "never", none.
        accumulate: True if the reduced gradients are added to existing gradients.
    """

    dp: int
    groups: Mapping[str, Group]
    reshard: str = "always"
    accumulate: bool = False

    def gathered(self, unit: str) -> int:
        """Return the bytes of a layer's gathered parameters, with padding. Their flat buffer has the same size."""
        return self.dp * self.groups.get(unit, Group()).shard

    def gradients(self, unit: str) -> int:
        """Return the bytes of a layer's gradients' shards."""
        return self.groups.get(unit, Group()).gradients

    def stay_gathered(self, forward: Sequence[str]) -> frozenset[str]:
        """Return the groups, except the root, that stay gathered between forward and backward."""
        groups = [unit for unit in forward if unit not in ("", LOSS)]
        return frozenset({"always": [], "not-last": groups[-1:], "never": groups}[self.reshard])

    def around(self, pieces: Iterable[PlacedSegment], each_call: bool = False) -> Iterator[PlacedSegment]:
        """Add FSDP2's live bytes to a step's segments. At the end of a layer, its gradients become shards.

        Args:
            pieces: the segments of a step without shards, in execution order.
            each_call: True to return every call's point of a segment; False to return only the highest.
        """
        step = [(graph, unit, segment) for graph, unit, segment in pieces if segment.points or not unit]
        forward, backward = (self._named(step, graph) for graph in ("forward", "backward"))
        alive = shards = 0  # alive: bytes that FSDP2 adds; shards: of these, gradients' shards without whole gradients
        gradients = 0  # bytes of the gradients' shards so far
        additional = [*self._forward(forward), *self._backward(backward, self.stay_gathered(forward))]
        groups = [*forward, *backward]
        for i, ((graph, unit, segment), name, four) in enumerate(zip(step, groups, additional, strict=True)):
            start, during, end, after = map(sum, four)
            highest = (segment.peak,) if segment.points else ()
            live = segment.points if each_call else highest
            points = (start, *(during + point for point in live), segment.net + end)
            points = tuple(shards + point - alive for point in points)
            first, inside, last, _ = (at_time.main + shards - gradients - alive for at_time in four)
            main_pool = max(first, inside + segment.peak + segment.hole, last + segment.net)
            reduces = (name and name != LOSS) or i == len(step) - 1
            if graph == "backward" and reduces and not self.accumulate:
                gradients += self.gradients(name)
                shards += self.gradients(name)
            shards -= segment.gradients + (segment.head if name == HEAD else 0)
            shards += sum(s.head for _, _, s in step) if name == EMBEDDING and graph == "backward" else 0
            net = segment.net + after + shards - alive
            alive = after + shards
            gather_pool = max(at_time.gather for at_time in four)
            yield graph, unit, Segment(points, net, segment.seconds, main=main_pool, gather=gather_pool)

    @property
    def reduce_pool(self) -> int:
        """Bytes of the pool for reduce-scatter's results; 0 if these are added to existing gradients."""
        return sum(group.gradients for group in self.groups.values()) * (not self.accumulate)

    def _named(self, step: Sequence[PlacedSegment], graph: str) -> list[str]:
        """Return the name of each segment's group. ``graph`` is "forward" or "backward"."""
        units = [unit for kind, unit, _ in step if kind == graph]
        if EMBEDDING in self.groups or HEAD in self.groups:
            outer = [i for i, unit in enumerate(units) if not unit]
            ends = (EMBEDDING, HEAD) if graph == "forward" else (HEAD, EMBEDDING)
            units[outer[0]], units[outer[-1]] = ends
        return units

    def _forward(self, units: Sequence[str]) -> Iterator[AtTimes]:
        """Yield each forward segment's additional bytes."""
        main = self.gathered("")
        flat = main
        stays_gathered, last = self.stay_gathered(units), max(i for i, unit in enumerate(units) if unit != LOSS)
        for i, unit in enumerate(units):
            layer = self.gathered(unit) if unit else 0
            start = Additional(main + layer, flat + layer)
            flat = layer if unit and unit != LOSS else flat
            inside = Additional(main + layer, flat)
            main += layer * (unit in stays_gathered)
            flat *= i != last  # the end of the root's forward frees the last flat buffer
            yield start, inside, inside, Additional(main, flat)

    def _backward(self, units: Sequence[str], stays_gathered: frozenset[str]) -> Iterator[AtTimes]:
        """Yield each backward segment's additional bytes. At its end, gradients and their flat copy are both alive."""
        root, reducing = self.gathered(""), 0
        main = root + sum(map(self.gathered, stays_gathered))
        without_flat = ("", LOSS, *stays_gathered)
        flat = [0 if unit in without_flat else self.gathered(unit) for unit in (*units, "")]
        for i, unit in enumerate(units):
            if unit == LOSS:
                yield (Additional(main, 0),) * 4
            elif not unit and i < len(units) - 1:
                yield (Additional(main, flat[i + 1] if root else 0),) * 4
            else:
                layer, gone = self.gathered(unit), unit in stays_gathered or not unit
                main -= layer * gone
                start = Additional(main + layer + reducing, flat[i])
                during = Additional(main + layer + reducing, flat[i + 1])
                reducing = self.dp * self.gradients(unit)  # the flat buffer that reduces them, with padding
                end = Additional(main + reducing, flat[i + 1])
                yield start, during, end, end if i < len(units) - 1 else Additional(0, 0)
