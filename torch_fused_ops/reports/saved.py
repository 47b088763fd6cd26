"""``Report.saved`` and ``Report.attention``: the tensors that a training step saves for backward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_fused_ops.graphs.capture import said
from torch_fused_ops.graphs.listing import AttentionSite, SavedRow, merged, merged_attention
from torch_fused_ops.reports.captures import Capture, fused_graph
from torch_fused_ops.reports.text import size

if TYPE_CHECKING:
    from torch_fused_ops.virtual_gpu import GPU

log = logging.getLogger("torch_fused_ops")


@dataclass(frozen=True, repr=False)
class Saved:
    """The tensors that a report's graphs save for backward, without parameters and buffers. Printable.

    Attributes:
        rows: the tensors, in graph order; identical layers share a row.
        totals: the bytes saved under each setting that saves less than the policy.
        skipped: the reason for each missing graph.
        attention: the attention calls whose policy is not "off", and the effect of the level.
    """

    rows: tuple[SavedRow, ...]
    totals: dict[str, int]
    skipped: tuple[str, ...] = ()
    attention: tuple[AttentionSite, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all rows, except tensors that move to the host."""
        return sum(row.nbytes for row in self.rows if not row.moves)

    def __repr__(self) -> str:
        lines = [f"saved for backward: {size(self.nbytes)}"]
        on_host = sum(row.nbytes for row in self.rows if row.moves)
        lines += [f"  {size(on_host)} more move to the host"] if on_host else []
        lines += [f"  {size(total, self.nbytes)} with {name}" for name, total in self.totals.items()]
        small = [row for row in self.rows if row.nbytes < self.nbytes / 1000]
        lines += [f"{size(row.nbytes):>10}  {row.text}" for row in self.rows if row not in small]
        if small:
            count = sum(row.count for row in small)
            lines.append(f"{size(sum(row.nbytes for row in small)):>10}  in {count} small tensors")
        return "\n".join(lines + [f"a graph is missing: {reason}" for reason in self.skipped])


def saved(captures: Sequence[Capture], gpu: GPU, *, compare: bool = True) -> Saved:
    """List the tensors that graphs save for backward. Partitions them without a device; generates no code.

    Args:
        captures: the results of ``capture``.
        gpu: the GPU to partition for.
        compare: False to leave out which settings would save less, which takes a partition for each setting.
    """
    from torch_fused_ops.lowerings import passes
    from torch_fused_ops.lowerings.saved_variants import Partitioned, Variants
    from torch_fused_ops.virtual_gpu import compile_graph_on_paper

    done: list[Variants] = []
    skipped: dict[str, None] = {}
    for captured in captures:
        partitioner = Variants(replace(captured.policy, strict=False), compare=compare)
        try:
            if captured.graph is None or captured.graph.needs_gradients:
                graph = fused_graph(captured, gpu, captured.policy)
                config = passes.options_without_us() | {"custom_partitioner_fn": partitioner}
                compile_graph_on_paper(graph, gpu=gpu, config=config)
        except Partitioned:
            done.append(partitioner)
        except Exception as error:
            skipped[said(error)] = None
    for reason in skipped:
        log.warning("saved tensors of a graph are not listed: %s", reason)
    settings = [name for name in (done[0].totals if done else ()) if all(name in v.totals for v in done)]
    totals = {name: sum(v.totals[name] for v in done) for name in settings}
    smaller = {name: total for name, total in totals.items() if total < totals[""]}
    attention = merged_attention(site for v in done for site in v.attention)
    return Saved(tuple(merged(row for v in done for row in v.rows)), smaller, tuple(skipped), tuple(attention))
