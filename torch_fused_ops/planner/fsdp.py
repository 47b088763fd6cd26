"""FSDP2's effect on a step's memory on one GPU, computed from the step's segments.

``fully_shard`` is applied to each layer and to the root, with PyTorch's defaults. Between steps a GPU has shards; a
layer is whole while it runs. The additional bytes follow torch/distributed/fsdp/_fully_shard (torch 2.13), in the order
in which its Python code allocates and frees, as ``torch.cuda.memory_allocated`` counts:

* ``foreach_all_gather`` (_fsdp_collectives.py) gathers all of a layer's parameters in one flat buffer;
  ``foreach_all_gather_copy_out`` copies it to a tensor for each parameter. In forward the flat buffer lives until the
  next layer is copied out (``FSDPParamGroup.wait_for_unshard``, _fsdp_param_group.py: ``comm_ctx.all_gather_state``;
  torch 2.15 frees it slightly earlier), the last one until the root's forward is over (``FSDPState._post_forward``,
  _fsdp_state.py). In backward it is freed at once, and the next layer's flat buffer is there instead: it is prefetched
  (``_backward_prefetch``).
* A layer's parameters are freed after its forward and after its backward (``reshard``). The root's parameters are
  gathered first, and freed at the end of backward (``_lazy_init``: the root does not reshard after forward).
* ``post_backward`` frees the layer's parameters, then the flat buffer that the reduce-scatter before read, then copies
  the layer's gradients into such a buffer of their own (``foreach_reduce``), frees them, and has shards. That buffer
  lives until the next layer's ``post_backward``. The root's turn is the last (``_root_post_backward_final_callback``).

With a ``MixedPrecisionPolicy`` a parameter has three sizes: 4 bytes in its shard (float32), 2 bytes when gathered
(bfloat16), and 4 bytes in the buffer that reduces its gradient (float32).

The caching allocator has a pool for each stream, and memory that is free in one is not used in another. Flat buffers of
gathering are allocated on the copy-in stream, results of reduce-scatter on a stream of their own. So PyTorch holds the
most of each pool, although the pools are not largest at the same time.

Parameters are cut along dimension 0 in equal pieces, the last one padded (``FSDPParam._init_sharded_param``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_fused_ops.planner.model import EMBEDDING, HEAD, LOSS
from torch_fused_ops.planner.segments import PlacedSegment, Segment


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together: of one layer, or outside layers. Bytes are per GPU."""

    shard: int = 0  # bytes of the parameters' shards in the dtype of the gathered parameters
    gradients: int = 0  # bytes of the reduced gradients
    reduced: int = 0  # bytes of the gradients in the dtype of the reduction


class Additional(NamedTuple):
    """Additional bytes at one time, by pool."""

    main: int
    gather: int


@dataclass(frozen=True)
class FullyShard:
    """Shards over ``dp`` GPUs.

    Attributes:
        dp: the number of GPUs.
        groups: by layer; "": the root; or ``EMBEDDING`` and ``HEAD``, if these are apart from the root.
        reshard: which groups are freed after forward: "always", all except the root; "not-last", all except the root
            and the last one; "never", none.
        accumulate: True if the reduced gradients are added to ones that exist.
    """

    dp: int
    groups: Mapping[str, Group]
    reshard: str = "always"
    accumulate: bool = False

    def gathered(self, unit: str) -> int:
        """Bytes of a layer's whole parameters; of the flat buffer that they are gathered in; with padding."""
        return self.dp * self.groups.get(unit, Group()).shard

    def reduced(self, unit: str) -> int:
        """Bytes of the flat buffer from which a layer's gradients are reduced and scattered; with padding."""
        return self.dp * self.groups.get(unit, Group()).reduced

    def stay_gathered(self, forward: Sequence[str]) -> frozenset[str]:
        """The groups that stay gathered between forward and backward, without the root."""
        groups = [unit for unit in forward if unit not in ("", LOSS)]
        return frozenset({"always": [], "not-last": groups[-1:], "never": groups}[self.reshard])

    @property
    def sent(self) -> int:
        """Bytes that a GPU sends in a step, as rings send them: (dp - 1)/dp of each buffer.

        The root, and a group that stays gathered, is gathered once, others before forward and before backward.
        """
        order = [*(unit for unit in self.groups if unit != HEAD), *(unit for unit in self.groups if unit == HEAD)]
        once = {"", *self.stay_gathered(order)}
        buffers = sum((2 - (unit in once)) * self.gathered(unit) + self.reduced(unit) for unit in self.groups)
        return buffers * (self.dp - 1) // self.dp

    def around(self, pieces: Iterable[PlacedSegment], each_call: bool = False) -> Iterator[PlacedSegment]:
        """Add FSDP2's live bytes to a step's segments; whole gradients become shards as layers end.

        Args:
            pieces: the segments of a step without shards, in the order of the step.
            each_call: return all points of a segment, not only the highest.
        """
        step = [(graph, unit, segment) for graph, unit, segment in pieces if segment.points or not unit]
        forward, backward = (self._named(step, graph) for graph in ("forward", "backward"))
        alive = shards = 0  # additional bytes, shards of gradients minus whole ones included
        gradients = 0  # bytes of the gradients' shards so far
        additional = [*self._forward(forward), *self._backward(backward, self.stay_gathered(forward))]
        groups = [*forward, *backward]
        for i, ((graph, unit, segment), name, four) in enumerate(zip(step, groups, additional, strict=True)):
            start, during, end, after = map(sum, four)
            live = segment.points if each_call else (segment.peak,) if segment.points else ()
            points = (start, *(during + point for point in live), segment.net + end)
            points = tuple(shards + point - alive for point in points)
            shards_before, gradients_before = shards, gradients
            if graph == "backward" and ((name and name != LOSS) or i == len(step) - 1):
                gradients += self.groups.get(name, Group()).gradients * (not self.accumulate)
                shards += self.groups.get(name, Group()).gradients * (not self.accumulate)
            first, inside, last, _ = (at_time.main - gradients_before for at_time in four)
            main_pool = max(first, inside + segment.peak + segment.hole, last + segment.net) + shards_before - alive
            shards -= segment.gradients + (segment.head if name == HEAD else 0)
            shards += sum(s.head for _, _, s in step) if name == EMBEDDING and graph == "backward" else 0
            net = segment.net + after + shards - alive
            alive = after + shards
            gather_pool = max(at_time.gather for at_time in four)
            yield graph, unit, Segment(points, net, segment.seconds, main=main_pool, gather=gather_pool)

    @property
    def reduce_pool(self) -> int:
        """Bytes of the pool that reduce-scatter's results are allocated in; none if they are added to existing ones."""
        return sum(group.gradients for group in self.groups.values()) * (not self.accumulate)

    def _named(self, step: Sequence[PlacedSegment], graph: str) -> list[str]:
        """Name each segment's group, in forward or in backward."""
        units = [unit for kind, unit, _ in step if kind == graph]
        if EMBEDDING in self.groups or HEAD in self.groups:
            outer = [i for i, unit in enumerate(units) if not unit]
            ends = (EMBEDDING, HEAD) if graph == "forward" else (HEAD, EMBEDDING)
            units[outer[0]], units[outer[-1]] = ends
        return units

    def _forward(self, units: Sequence[str]) -> Iterator[tuple[Additional, Additional, Additional, Additional]]:
        """Yield a forward segment's additional bytes: at its beginning, during it, at its end, and after it."""
        main = self.gathered("")
        flat = main
        stays_gathered, last = self.stay_gathered(units), max(i for i, unit in enumerate(units) if unit != LOSS)
        for i, unit in enumerate(units):
            layer = self.gathered(unit) if unit else 0
            start = Additional(main + layer, flat + layer)
            flat = layer if unit and unit != LOSS else flat
            inside = Additional(main + layer, flat)
            main += layer * (unit in stays_gathered)
            flat *= i != last  # the root's forward is over
            yield start, inside, inside, Additional(main, flat)

    def _backward(
        self, units: Sequence[str], stays_gathered: frozenset[str]
    ) -> Iterator[tuple[Additional, Additional, Additional, Additional]]:
        """Yield a backward segment's additional bytes. Both copies of its gradients are alive at its end."""
        root, reducing = self.gathered(""), 0
        main = root + sum(map(self.gathered, stays_gathered))

        def flat(i: int) -> int:
            unit = units[i] if i < len(units) else ""
            return 0 if unit in ("", LOSS, *stays_gathered) else self.gathered(unit)

        for i, unit in enumerate(units):
            if unit == LOSS:
                yield (Additional(main, 0),) * 4
            elif not unit and i < len(units) - 1:
                yield (Additional(main, flat(i + 1) if root else 0),) * 4
            else:
                layer, gone = self.gathered(unit), unit in stays_gathered or not unit
                main -= layer * gone
                start = Additional(main + layer + reducing, flat(i))
                during = Additional(main + layer + reducing, flat(i + 1))
                reducing = self.reduced(unit)
                end = Additional(main + reducing, flat(i + 1))
                yield start, during, end, end if i < len(units) - 1 else Additional(0, 0)
