"""Convert a plan's figures to text, to JSON, and to a page, with the template ``plan.html``."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_fused_ops.planner.setup import FRAGMENTATION, Setup, bytes_of
from torch_fused_ops.reports.page import template
from torch_fused_ops.reports.text import aligned, change, size
from torch_fused_ops.settings.environment import writable

if TYPE_CHECKING:
    from torch_fused_ops.planner.max_batch import Largest
    from torch_fused_ops.policy import FusionPolicy


@dataclass(frozen=True)
class LevelRow:
    """A whole step with every MLP at one memory level."""

    level: str  # one of ``setup.LEVELS`` or ``pieces.CHECKPOINTS``, or "eager mode"
    peak: int  # the most bytes alive at once in forward and backward, with parameters and optimizer state
    seconds: float  # the least time of forward and backward
    reserved: int  # about how many bytes PyTorch reserves, for the optimizer's step if it needs more
    missing: int  # reserved bytes beyond the limit, as ``Plan.missing``; 0 if the step fits

    @property
    def fits(self) -> bool:
        """True if no bytes are missing."""
        return not self.missing


@dataclass(frozen=True)
class Offloaded:
    """Saved tensors that a step moves to the host (``FusionPolicy(offload=…)``), and back in backward."""

    bandwidth: float  # bytes/s of the link, as given
    nbytes: int  # bytes that move
    host_bytes: int  # bytes of pinned memory for each rank: each tensor is rounded up to a power of 2
    waiting: float  # the part of ``Plan.seconds`` in which calls wait for copies
    slower: float  # ``Plan.seconds`` if the link has 20 % less bandwidth


@dataclass(frozen=True)
class Plan:
    """The result of ``plan``: the chosen levels and their figures. ``within`` plans again for another limit.

    Attributes:
        title: the model's class.
        gpu: the GPU's name.
        limit: bytes that may be used.
        fits: True if the bytes that PyTorch reserves stay within the limit.
        reserved_bytes: about how many bytes PyTorch reserves: ``held_bytes`` and a margin for fragmentation.
        held_bytes: the largest sizes of the caching allocator's pools, added.
        peak_bytes: the most bytes alive at once: the greater of ``step_peak`` and ``optimizer_peak``.
        step_peak: the peak of forward and backward, with parameters and optimizer state.
        optimizer_peak: the peak of the optimizer's step: parameters, gradients, state, its allocations, and the batch.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer_state: bytes of optimizer state.
        saved: bytes saved for backward, without parameters.
        transient: bytes at ``step_peak`` that are neither ``saved`` nor alive throughout forward and backward.
        seconds: the least time of forward and backward on this GPU (roofline).
        off_seconds: ``seconds`` with ``memory="off"``, at which checkpoints stay, even if that step does not fit.
        policy: the policy to compile with.
        choices: each MLP's level (``setup.LEVELS``), by module.
        levels: the whole step at each level.
        missing: reserved bytes beyond the limit; 0 if the step fits.
        help: advice to make the step fit, or cheaper.
        setup: how the model is trained. All bytes are per GPU, for one GPU's batch.
        offloaded: the saved tensors on the host; None if all stay on the GPU.
        largest: the largest batch or sequence that fits; None unless ``maximum`` requests it.
        baseline: the row of ``off_seconds``: "off", or "checkpoint" if the model has checkpoints.
    """

    title: str
    gpu: str
    limit: int
    fits: bool
    reserved_bytes: int
    held_bytes: int
    peak_bytes: int
    step_peak: int
    optimizer_peak: int
    parameters: int
    gradients: int
    optimizer_state: int
    saved: int
    transient: int
    seconds: float
    off_seconds: float
    policy: FusionPolicy
    choices: Mapping[str, str]
    levels: tuple[LevelRow, ...]
    missing: int
    help: tuple[str, ...]
    setup: Setup = field(default_factory=Setup)
    offloaded: Offloaded | None = None
    largest: Largest | None = None
    baseline: str = "off"
    curve: tuple[int, ...] = field(default=(), repr=False)
    off_curve: tuple[int, ...] = field(default=(), repr=False)
    _planner: Any = field(default=None, repr=False, compare=False)
    _snapshot: Callable[[], Any] = field(default=dict, repr=False, compare=False)

    def within(self, capacity: str | int) -> Plan:
        """Plan again for another limit, without ``largest``. Mixed levels compile the whole model again.

        Raises:
            ValueError: ``plan`` would not accept this capacity.
        """
        plan: Plan = self._planner.within(bytes_of(capacity))
        return plan

    def as_dict(self) -> dict[str, Any]:
        """Convert the attributes to plain types, without live-bytes timelines, and with the policy's levels."""
        left_out = {"policy", "curve", "off_curve", "_planner", "_snapshot"}
        shallow = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        rows: dict[str, Any] = {"levels": [{**asdict(row), "fits": row.fits} for row in self.levels]}
        rows["largest"] = asdict(self.largest) if self.largest else None
        rows["setup"] = asdict(self.setup)
        rows["offloaded"] = asdict(self.offloaded) if self.offloaded else None
        for name in ("memory", "attention", "checkpoints", "offload"):
            value = getattr(self.policy, name)
            rows[name] = dict(value) if isinstance(value, tuple) else value
        return {**shallow, **rows}

    def to_json(self) -> str:
        """Convert the plan to JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one self-contained page, with live-bytes timelines at the chosen levels and at "off".

        Raises:
            ValueError: path cannot be written.
        """
        writable(f"path={str(path)!r}", path).write_text(page(self), encoding="utf-8")

    def to_snapshot(self, path: str | Path) -> None:
        """Write the planned step as a memory snapshot, for PyTorch's viewer (pytorch.org/memory_viz).

        Frames name modules and kernels. Blocks do not share segments, so nothing is fragmented.

        Raises:
            ValueError: path cannot be written, or FSDP2, DDP or earlier micro-batches change the step's memory.
        """
        if self.setup.dp > 1 or self.setup.accumulate > 1:
            values = f"dp={self.setup.dp}, accumulate={self.setup.accumulate}"
            raise ValueError(f"{values}: a planned snapshot is for one GPU and one batch; both must be 1")
        writable(f"path={str(path)!r}", path).write_bytes(pickle.dumps(self._snapshot()))

    def __str__(self) -> str:
        return text(self)


class Section(NamedTuple):
    """A table of a plan; its first row is the heading."""

    title: str
    rows: list[tuple[str, ...]]
    note: str = ""


def duration(seconds: float) -> str:
    """Format seconds as "1.23 ms". Less than a hundredth of a microsecond is a rounding error, shown as 0."""
    seconds = seconds if abs(seconds) >= 1e-8 else 0.0
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def headline(plan: Plan) -> str:
    """Format the verdict in one line."""
    verdict = "fits" if plan.fits else f"does not fit: {size(plan.missing)} are missing"
    group = f", one of {plan.setup.dp}" if plan.setup.dp > 1 else ""
    enlarged = f"; {most(plan.largest)}" if plan.largest else ""
    return f"{plan.title} in {size(plan.limit)} of an {plan.gpu}{group}: {verdict}{enlarged}"


def most(largest: Largest) -> str:
    """Name the largest size at any level, the plainest level that reaches it, and the largest size at "off"."""
    best = max(largest.rows, key=lambda row: row.size)
    if not best.size:
        return f"{largest.dimension}: none fits"
    off = next((f', {row.size} at "off"' for row in largest.rows if row.level == "off" and row is not best), "")
    return f'{largest.dimension}: at most {best.size}, every MLP at "{best.level}"{off}'


def cost(plan: Plan) -> str:
    """Format the time that the levels cost: '+1.2 % relative to "off"'."""
    changed = change(plan.off_seconds, plan.seconds)
    return f'as with "{plan.baseline}"' if changed == "same" else f'{changed} relative to "{plan.baseline}"'


def chosen(plan: Plan) -> str:
    """Format the policy as code, with counts instead of a long mapping."""
    fields = [(name, getattr(plan.policy, name)) for name in ("memory", "attention", "checkpoints", "offload")]
    texts = [
        f"{name}={{…}}" if isinstance(value, tuple) and len(value) > 4
        else f"{name}={dict(value) if isinstance(value, tuple) else value!r}"
        for name, value in fields if name == "memory" or value not in ("keep", "off", False)
    ]  # fmt: skip
    policy = f"FusionPolicy({', '.join(texts)})"
    if texts[0] == "memory={…}":
        counted = ", ".join(f"{count} at {level!r}" for level, count in Counter(plan.choices.values()).items())
        policy += f", a level for each of {len(plan.choices)} MLPs: {counted}"
    return f"{policy} (all of it: plan.policy, --json)" if "…" in policy else policy


def level_rows(plan: Plan) -> list[tuple[str, ...]]:
    """List each level's peak, reserved bytes, time, MiB saved for each additional ms, and missing bytes."""
    columns = ("every layer at", "peak, forward and backward", "reserved, about", "least time", "MiB for each ms")
    rows: list[tuple[str, ...]] = [(*columns, f"in {size(plan.limit)}")]
    for row in plan.levels:
        lacking = f"{size(row.missing)} missing"
        if row.reserved == plan.setup.reserved(plan.optimizer_peak):
            lacking += " for the optimizer's step"
        bought, paid = (max(plan.off_curve) - row.peak) / 2**20, 1000 * (row.seconds - plan.off_seconds)
        price = f"{bought / paid:.0f}" if paid > 1e-5 * plan.off_seconds and bought > 0 else ""
        figures = (size(row.peak), size(row.reserved), duration(row.seconds), price)
        rows.append((row.level, *figures, "fits" if row.fits else lacking))
    return rows


def largest_rows(largest: Largest) -> list[tuple[str, ...]]:
    """List the largest size at each level, its peak and its time."""
    off = next((row.size for row in largest.rows if row.level == "off"), 0)
    columns = ("every MLP at", f"{largest.dimension}, at most", "relative to off", "peak", "least time", "for each")
    rows: list[tuple[str, ...]] = [columns]
    for row in largest.rows:
        if row.size:
            times = (duration(row.seconds), duration(row.seconds / row.size))
            rows.append((row.level, str(row.size), f"{row.size / off:.2f}" if off else "", size(row.peak), *times))
        else:
            rows.append((row.level, "none", "", "", "", ""))
    return rows


def notes(plan: Plan) -> Iterator[str]:
    """Yield remarks: the meaning of the figures, and costs that are not modeled."""
    margin = FRAGMENTATION[plan.setup.expandable_segments]
    kind = "with" if plan.setup.expandable_segments else "without"
    yield (
        f"Reserved: what PyTorch's pools hold, and {margin:.0%} for fragmentation, {kind} expandable segments. The "
        "CUDA context, NCCL and libraries take another 0.6 to 1.3 GB."
    )
    if plan.optimizer_state:
        yield f"The first step lacks {size(plan.optimizer_state)} of optimizer state: if it fits, later ones may not."
    yield "Least time: published training steps took 1.2 to 1.9 times as long (collectives, optimizer, data)."
    yield (
        "Not modeled: tensor, context and pipeline parallelism, HSDP, parameters and optimizer state on the host, "
        "float8 gathering, reference cycles."
    )


def sections(plan: Plan) -> Iterator[Section]:
    """Yield the tables of a plan, for text and page."""
    shards = plan.setup.sharded
    earlier = plan.step_peak - plan.parameters - plan.optimizer_state - plan.saved - plan.transient
    parts = (
        ("parameters, in shards, and buffers" if shards else "parameters and buffers", plan.parameters),
        (f"optimizer state ({plan.setup.optimizer}{', in shards' if shards else ''})", plan.optimizer_state),
        *((("gradients of earlier micro-batches, DDP's buckets", earlier),) if earlier else ()),
        ("saved for backward, the root gathered" if shards else "saved for backward", plan.saved),
        ("transient, gradients so far included", plan.transient),
        ("peak of forward and backward", plan.step_peak),
        ("peak of the optimizer's step, gradients included", plan.optimizer_peak),
        ("held by PyTorch's pools", plan.held_bytes),
        ("reserved by PyTorch, about", plan.reserved_bytes),
    )
    yield Section("The peak", [("", "bytes"), *((name, size(nbytes)) for name, nbytes in parts)])
    peaks = {row.level: row.peak for row in plan.levels}
    note = ""
    if "tiled" in peaks and peaks["tiled"] == peaks.get("input"):
        why = "too few tokens for two tiles, no MLP that can be tiled, or a peak outside of MLPs"
        note = f'"tiled" has the peak of "input": {why}'
    yield Section("One level for all", level_rows(plan), note)
    if moving := plan.offloaded:
        rows = [
            ("the link, given", f"{moving.bandwidth / 1e9:g} GB/s"),
            ("moved to the host, and back", size(moving.nbytes)),
            ("pinned host memory for each rank", size(moving.host_bytes)),
            ("calls wait for copies", duration(moving.waiting)),
            ("a link with 20 % less bandwidth", change(plan.seconds, moving.slower)),
        ]
        note = "not run on a GPU; measure the link while all ranks copy"
        yield Section("Saved tensors on the host", [("", ""), *rows], note)
    if largest := plan.largest:
        steps = f"in steps of {largest.step}, " if largest.step > 1 else ""
        note = f"each size, and the next that does not fit, was compiled; {steps}from {largest.given}"
        if largest.stopped:
            note += f"; the model does not run with {largest.dimension} {largest.stopped}"
        yield Section(f"{largest.dimension.capitalize()}, at most", largest_rows(largest), note)


def text(plan: Plan) -> str:
    """Format the plan as lines of text."""
    lines = [headline(plan), ""]
    for section in sections(plan):
        lines += [*aligned(section.rows), *([section.note] if section.note else ()), ""]
    if plan.setup.compiled != "none":
        lines.append(f"chosen: {chosen(plan)}")
    lines.append(f"least time of forward and backward: {duration(plan.seconds)}, {cost(plan)}")
    lines += [*plan.help, "", *notes(plan)]
    return "\n".join(lines)


def page(plan: Plan) -> str:
    """Render the plan as a self-contained page. Text from the model is escaped."""
    resident, most = plan.parameters + plan.optimizer_state, max(*plan.curve, *plan.off_curve)
    highest = 1.05 * (plan.limit if most < plan.limit < 2 * most else most)  # a distant limit would flatten the curve
    step = 2.0 ** math.ceil(math.log2(highest / 8))

    def height(nbytes: float) -> str:
        return f"{300 * (1 - nbytes / highest):.1f}"

    def polyline(points: tuple[int, ...]) -> str:
        """Format a live-bytes timeline as points in a box of 1000 by 300, with evenly spaced calls."""
        count = max(len(points) - 1, 1)
        return " ".join(f"{1000 * i / count:.1f},{height(point)}" for i, point in enumerate(points))

    return template("planner/plan.html", globals()).render(
        plan=plan, resident=resident, height=height, polyline=polyline, shows_limit=plan.limit <= highest,
        bytes_marks=[int(step * i) for i in range(int(highest / step) + 1)],
        call_marks=[(250 * i, (len(plan.curve) - 1) * i // 4) for i in range(5)],
    )  # fmt: skip
