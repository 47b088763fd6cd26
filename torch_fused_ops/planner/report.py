"""A plan as text, and as a page: ``plan.html``, filled in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch_fused_ops.reports.page import template
from torch_fused_ops.reports.text import aligned, change, size

if TYPE_CHECKING:
    from torch_fused_ops.planner.max_batch import Largest
    from torch_fused_ops.planner.plan import Plan

__all__ = ["page", "text"]


def duration(seconds: float) -> str:
    """Format seconds: "1.23 ms"; less than a hundredth of a microsecond is a rounding error, shown as 0."""
    seconds = seconds if abs(seconds) >= 1e-8 else 0.0
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def headline(plan: Plan) -> str:
    """The verdict, in one line."""
    verdict = "fits" if plan.fits else f"does not fit: {size(plan.missing)} are missing"
    group = f", one of {plan.dp}" if plan.dp > 1 else ""
    enlarged = f"; {most(plan.largest)}" if plan.largest else ""
    return f"{plan.title} in {size(plan.limit)} of an {plan.gpu}{group}: {verdict}{enlarged}"


def most(largest: Largest) -> str:
    """The largest size at any level, the plainest level that has it, and the largest size at "off"."""
    best = max(largest.rows, key=lambda row: row.size)
    if not best.size:
        return f"{largest.dimension}: none fits"
    off = next((f', {row.size} at "off"' for row in largest.rows if row.level == "off" and row is not best), "")
    return f'{largest.dimension}: at most {best.size}, every MLP at "{best.level}"{off}'


def cost(plan: Plan) -> str:
    """The cost of the levels: '+1.2 % beside "off"'."""
    changed = change(plan.off_seconds, plan.seconds)
    return 'as with "off"' if changed == "same" else f'{changed} beside "off"'


def chosen(plan: Plan) -> str:
    """The policy as code; long mappings as counts."""
    memory = plan.policy.memory
    if isinstance(memory, str):
        return f'FusionPolicy(memory="{memory}")'
    if len(memory) <= 4:
        return f"FusionPolicy(memory={dict(memory)!r})"
    counted = ", ".join(f"{count} at {level!r}" for level, count in Counter(dict(memory).values()).items())
    many = f"a level for each of {len(memory)} MLPs: {counted}"
    return f"FusionPolicy(memory={{…}}), {many} (all of it: plan.policy, --json)"


def part_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The parts of the peak."""
    shards = plan.dp > 1
    parts = [
        ("parameters, in shards, and buffers" if shards else "parameters and buffers", plan.parameters),
        (f"optimizer state ({plan.optimizer}{', in shards' if shards else ''})", plan.optimizer_state),
        (f"saved for backward{', the root gathered' if shards else ''}", plan.kept),
        ("transient, gradients so far included", plan.transient),
        ("peak of forward and backward", plan.step_peak),
        ("peak of the optimizer's step, gradients included", plan.optimizer_peak),
    ]
    return [("", "bytes"), *((name, size(nbytes)) for name, nbytes in parts)]


def communication(plan: Plan) -> str:
    """The bytes that a GPU sends; "" for a single GPU."""
    if not plan.sent:
        return ""
    return (
        f"each GPU sends {size(plan.sent)} a step (FSDP2): {duration(plan.link_seconds)} within a node by the links' "
        "data sheet, without overlap, not included in the least time; bytes and batch are per GPU"
    )


def layer_rows(plan: Plan) -> list[tuple[str, ...]]:
    head = ("layers", "level", "parameters", "gradients", "optimizer", "saved", "least time")
    return [head] + [
        (row.name, row.level, *map(size, (row.parameters, row.gradients, row.optimizer_state, row.kept)),
         duration(row.seconds))
        for row in plan.layers
    ]  # fmt: skip


def level_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The peak and time of each level by itself, and its missing bytes."""
    rows: list[tuple[str, ...]] = [
        ("every MLP at", "peak, forward and backward", "least time", f"in {size(plan.limit)}")
    ]
    for row in plan.levels:
        lacking = f"{size(row.missing)} missing"
        if row.missing == plan.optimizer_peak - plan.limit:
            lacking += " for the optimizer's step"
        rows.append((row.level, size(row.peak), duration(row.seconds), "fits" if row.fits else lacking))
    return rows


def level_note(plan: Plan) -> str:
    """The reason why two levels have the same peak; "" if they differ."""
    peaks = {row.level: row.peak for row in plan.levels}
    if "tiled" not in peaks or peaks["tiled"] != peaks.get("input"):
        return ""
    return (
        '"tiled" has the peak of "input": too few tokens for two tiles, no MLP that can be tiled, or a peak outside '
        "of MLPs"
    )


def largest_rows(plan: Plan, largest: Largest) -> list[tuple[str, ...]]:
    """The largest size at each level, its peak, and the bytes by which the next size exceeds the limit."""
    head = (
        "every MLP at",
        f"{largest.dimension}, at most",
        "beside off",
        "peak",
        "one step more",
        "least time",
        "for each",
    )
    off = next((row.size for row in largest.rows if row.level == "off"), 0)
    rows: list[tuple[str, ...]] = [head]
    for row in largest.rows:
        if not row.size:
            rows.append((row.level, "none", "", "", f"{size(row.over)} over" if row.over else "", "", ""))
            continue
        more = f"{size(row.over)} over" if row.over else "does not run"
        times = f"{row.size / off:.2f}" if off else ""
        per_item = duration(row.seconds / row.size)
        rows.append((row.level, str(row.size), times, size(row.peak), more, duration(row.seconds), per_item))
    return rows


def largest_note(largest: Largest) -> str:
    """The method and the steps of the sizes."""
    steps = f"in steps of {largest.step}, " if largest.step > 1 else ""
    note = f"each size, and the next that does not fit, was compiled; {steps}from {largest.given}"
    return f"{note}; the model does not run with {largest.dimension} {largest.stopped}" if largest.stopped else note


def text(plan: Plan) -> str:
    """The plan as lines of text."""
    lines = [
        headline(plan),
        "",
        *aligned(part_rows(plan)),
        "",
        *aligned(layer_rows(plan)),
        "",
        *aligned(level_rows(plan)),
        *filter(None, [level_note(plan)]),
        "",
        *([*aligned(largest_rows(plan, plan.largest)), largest_note(plan.largest), ""] if plan.largest else ()),
        f"chosen: {chosen(plan)}",
        f"least time of forward and backward: {duration(plan.seconds)}, {cost(plan)}",
        *filter(None, [communication(plan)]),
        *plan.help,
    ]
    return "\n".join(lines)


def page(plan: Plan) -> str:
    """The plan as a self-contained page. Text from the model is escaped."""
    highest = 1.05 * max(plan.limit, *plan.curve, *plan.off_curve)
    return template("planner/plan.html").render(
        plan=plan,
        headline=headline(plan),
        cost=cost(plan),
        communication=communication(plan),
        chosen=chosen(plan),
        duration=duration(plan.seconds),
        parts=part_rows(plan),
        layers=layer_rows(plan),
        levels=level_rows(plan),
        level_note=level_note(plan),
        largest=largest_rows(plan, plan.largest) if plan.largest else (),
        largest_note=largest_note(plan.largest) if plan.largest else "",
        before=_polyline(plan.off_curve, highest),
        after=_polyline(plan.curve, highest),
        limit_at=f"{300 * (1 - plan.limit / highest):.1f}",
        base=f"{300 * (1 - (plan.parameters + plan.optimizer_state) / highest):.1f}",
        limit=size(plan.limit),
        resident=size(plan.parameters + plan.optimizer_state),
    )


def _polyline(points: tuple[int, ...], highest: float) -> str:
    """The points of a live-bytes timeline in a box of 1000 by 300; a step's calls, evenly spaced."""
    count = max(len(points) - 1, 1)
    return " ".join(f"{1000 * i / count:.1f},{300 * (1 - point / highest):.1f}" for i, point in enumerate(points))
