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
* A layer's parameters are freed after its forward and after its backward (``reshard``); the root's, gathered first,
  only at the end of backward (``_lazy_init``: the root does not reshard after forward).
* ``post_backward`` frees the layer's parameters, then the flat buffer that the reduce-scatter before read, then copies
  the layer's gradients into such a buffer of their own (``foreach_reduce``), frees them, and has shards. That buffer
  lives until the next layer's ``post_backward``. The root's turn is the last (``_root_post_backward_final_callback``).

Parameters are cut along dimension 0 in equal pieces, the last one padded (``FSDPParam._init_sharded_param``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_fused_ops.planner.segments import Piece, Segment


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together: a layer's, or all outside of layers. One GPU's bytes."""

    shard: int = 0  # of the parameters
    gradients: int = 0


@dataclass(frozen=True)
class FullyShard:
    """Shards over ``dp`` GPUs."""

    dp: int
    groups: Mapping[str, Group]  # by layer; "": the root

    def gathered(self, unit: str) -> int:
        """Bytes of a layer's whole parameters; of the flat buffer that they are gathered in; with padding."""
        return self.dp * self.groups.get(unit, Group()).shard

    def reduced(self, unit: str) -> int:
        """Bytes of the flat buffer from which a layer's gradients are reduced and scattered; with padding."""
        return self.dp * self.groups.get(unit, Group()).gradients

    @property
    def sent(self) -> int:
        """Bytes that a GPU sends in a step, as rings send them: (dp - 1)/dp of each buffer.

        The root is gathered once, each layer before its forward and before its backward.
        """
        buffers = sum(2 * self.gathered(unit) + self.reduced(unit) for unit in self.groups) - self.gathered("")
        return buffers * (self.dp - 1) // self.dp

    def around(self, pieces: Iterable[Piece], each_call: bool = False) -> Iterator[Piece]:
        """Add FSDP2's live bytes to a step's segments; whole gradients become shards as layers end.

        Args:
            pieces: the segments of a step without shards, in the order of the step.
            each_call: return all points of a segment, not only the highest.
        """
        step = [(graph, unit, segment) for graph, unit, segment in pieces if segment.points or not unit]
        forward = [unit for graph, unit, _ in step if graph == "forward" and unit]
        backward = [unit for graph, unit, _ in step if graph == "backward" and unit]
        alive = shards = 0  # additional bytes, shards of gradients minus whole ones included
        beside = [*self._forward(forward), *self._backward(backward)]
        for i, ((graph, unit, segment), (start, during, end, after)) in enumerate(zip(step, beside, strict=True)):
            live = segment.points if each_call else (segment.peak,) if segment.points else ()
            points = (start, *(during + point for point in live), segment.net + end)
            points = tuple(shards + point - alive for point in points)
            if graph == "backward" and (unit or i == len(step) - 1):
                shards += self.groups.get(unit, Group()).gradients
            shards -= segment.gradients
            net = segment.net + after + shards - alive
            alive = after + shards
            yield graph, unit, Segment(points, net, segment.seconds)

    def _forward(self, units: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
        """Additional bytes at a segment's beginning, during it, at its end and after; before, in and after layers."""
        root = flat = self.gathered("")
        yield (root + flat,) * 4
        for layer in map(self.gathered, units):
            yield root + flat + 2 * layer, root + 2 * layer, root + 2 * layer, root + layer
            flat = layer
        yield *(root + flat,) * 3, root

    def _backward(self, units: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
        """The same for backward. At a segment's end its gradients are being copied, with both copies alive."""
        root, reducing = self.gathered(""), 0
        prefetched = [*map(self.gathered, units[1:]), 0]
        yield (root + (self.gathered(units[0]) if root and units else 0),) * 4
        for unit, following in zip(units, prefetched, strict=False):
            layer = self.gathered(unit)
            start, during = root + 2 * layer + reducing, root + layer + following + reducing
            reducing = self.reduced(unit)
            yield start, during, *(root + following + reducing,) * 2
        yield root + reducing, root + reducing, self.reduced(""), 0
