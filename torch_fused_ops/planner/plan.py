"""``plan``: fit a training step into a GPU's memory with the cheapest memory levels."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_fused_ops.graphs.capture import check_model, name_of
from torch_fused_ops.planner.report import LayerRow, LevelRow, PlanFigures
from torch_fused_ops.planner.setup import bytes_of, check
from torch_fused_ops.policy import MEMORY, FusionPolicy

if TYPE_CHECKING:
    from torch_fused_ops.planner.model import CapturedModel
    from torch_fused_ops.planner.search import Candidate
    from torch_fused_ops.planner.static_memory import Resident, ResidentTensor
    from torch_fused_ops.planner.step import Curve, Step
    from torch_fused_ops.virtual_gpu import GPU

log = logging.getLogger("torch_fused_ops.planner")

DP = tuple(2**n for n in range(1, 11))  # numbers of GPUs to try if nothing fits


@dataclass(frozen=True)
class Plan(PlanFigures):
    """A model's training step in a GPU's memory, which can be planned again for another limit."""

    _planner: _Planner | None = field(default=None, repr=False, compare=False)
    _chosen: Candidate | None = field(default=None, repr=False, compare=False)

    def within(self, memory: str | int, dp: int | None = None) -> Plan:
        """Plan for another limit, or number of GPUs, without ``largest``. Only a choice of mixed levels is compiled.

        Raises:
            ValueError: as ``plan``, for memory and dp.
        """
        assert self._planner is not None
        limit = bytes_of(memory)
        return self._planner.over(self.dp if dp is None else dp).within(limit)

    def recompiled_peak_bytes(self) -> int:
        """Recompute ``step_peak``: capture the model and compile it with the plan's policy; seconds a layer."""
        assert self._planner is not None and self._chosen is not None
        return self._planner.peak(self._chosen, self._planner.recompiled(self._chosen))


def plan(
    model: Callable[..., Any],
    *args: Any,
    memory: str | int,
    gpu: str = "H200",
    optimizer: str = "adamw",
    lossless: bool = False,
    maximum: str | None = None,
    dp: int = 1,
    **kwargs: Any,
) -> Plan:
    """Plan a training step: estimate its memory on a GPU, and choose the cheapest memory levels with which it fits.

    The whole model is compiled at each level for a target device, without that device; this takes seconds for each
    layer and level. A choice of mixed levels is compiled, too, so every reported fit is compiled. Nothing is allocated
    on a device. A model that is captured as one graph does not run.

    Args:
        model: a module or a function that returns its loss. Backward begins with all results.
        *args: its arguments on one GPU. Model and arguments may be meta tensors: only sizes and dtypes matter.
        memory: the limit, "72GiB", "800MiB" or bytes. Leave room for what is not counted (``docs/plan.md``).
        gpu: "A100", "H100", "H200", "B200" or "MI300X".
        optimizer: "adamw", "sgd", PyTorch's own with their default settings, or "none".
        lossless: do not choose levels that round gradients ("fp8").
        maximum: "batch" or "tokens": also find the largest that fits at each level (``Plan.largest``): dimension 0, or
            1, of all argument tensors with the first one's size in it. Takes minutes; the logger
            "torch_fused_ops.planner" reports progress at level INFO.
        dp: the number of GPUs over which FSDP2 shards the model, by ``fully_shard`` of each layer and of the model,
            with its defaults. Bytes and ``args`` are then per GPU.
        **kwargs: the model's keyword arguments.

    Returns:
        A ``Plan``: print it, take its ``policy``, write it as JSON or as a page.

    Raises:
        TypeError: model is not callable, or a class.
        ValueError: memory, gpu, optimizer or maximum is not known; dp is not a number of GPUs, or FSDP2 cannot shard
            the model; nothing in the model needs a gradient; it is not captured as a whole.
        ModuleNotFoundError: Triton is not installed.
    """
    from torch_fused_ops import lowerings
    from torch_fused_ops.planner import max_batch, search
    from torch_fused_ops.planner import model as models
    from torch_fused_ops.planner.static_memory import check_shards, check_whole, resident_tensors
    from torch_fused_ops.planner.step import OFF, Step, parts_of
    from torch_fused_ops.virtual_gpu import gpus

    model = check_model(model)
    given = {"memory": memory, "gpu": gpu, "optimizer": optimizer, "maximum": maximum, "dp": dp}
    for name, value in given.items():
        check(name, value)
    limit, described = bytes_of(memory), gpus.by_name(gpu)
    size = max_batch.size_of((args, kwargs), maximum) if maximum is not None else 0
    gpus.import_triton()  # fail at once, not after capturing the model
    lowerings.require()
    levels = search.levels_for(lossless)
    check_whole(model, dp)

    def captured_at(size: int) -> CapturedModel:
        resized = max_batch.resized((args, kwargs), maximum, size) if maximum is not None else (args, kwargs)
        return models.captured_model(model, *resized)

    captured = captured_at(size)
    check_shards(model, captured.unit_of, dp, captured.unregistered)  # its errors come before minutes of compiling
    parts = {}
    for level in (*levels, OFF) if captured.mlps else levels[:1]:
        log.info('compiling: every MLP at "%s"', level)
        parts[level] = parts_of(captured, described, FusionPolicy(memory=level))  # type: ignore[arg-type]
    step = Step(captured.units, captured.mlps, parts)
    trained = parts[levels[0]].trained.__contains__
    tensors = resident_tensors(model, captured.unit_of, trained, captured.unregistered)
    planner = _Planner(model, lambda: captured_at(size), captured, step, tensors, described, optimizer, levels, dp)
    result, resident = planner.within(limit), planner.resident
    if maximum is None:
        return result
    room = limit - resident.nbytes if resident.optimizer_peak <= limit else 0
    sizes = max_batch.Sizes(captured_at, maximum, size, described, planner.step)
    return replace(result, largest=sizes.largest(resident.nbytes, room))


@dataclass(frozen=True)
class _Planner:
    """A compiled model, to be planned for any limit, on one of ``dp`` GPUs."""

    model: Callable[..., Any]
    capture: Callable[[], CapturedModel]
    captured: CapturedModel
    measured: Step  # at each level, without shards
    tensors: Sequence[ResidentTensor]
    gpu: GPU
    optimizer: str
    levels: Sequence[str]  # the plainest first
    dp: int = 1
    _mixed: dict[tuple[tuple[str, str], ...], Step] = field(default_factory=dict, init=False)  # compiled, by levels

    def over(self, dp: int) -> _Planner:
        """The same for one of so many GPUs.

        Raises:
            ValueError: as ``check_shards``.
        """
        from torch_fused_ops.planner.static_memory import check_shards

        check_shards(self.model, self.captured.unit_of, dp, self.captured.unregistered)
        return self if dp == self.dp else replace(self, dp=dp)

    @cached_property
    def resident(self) -> Resident:
        """The memory that does not depend on levels."""
        from torch_fused_ops.planner.static_memory import Resident

        resident = Resident.of(self.tensors, self.optimizer, self.dp)
        step = replace(self.measured, shards=resident.shards)
        return replace(resident, batch=max(step.entry, step.at({}).end - resident.gradients))

    @cached_property
    def step(self) -> Step:
        """The step at each level, with shards if there are any."""
        return replace(self.measured, shards=self.resident.shards)

    @cached_property
    def candidates(self) -> list[Candidate]:
        from torch_fused_ops.planner import search

        return search.candidates(self.step, self.levels)

    def recompiled(self, chosen: Candidate) -> Step:
        """Capture and compile the model again at these levels; the step has the same parts for any level."""
        from torch_fused_ops.planner.step import parts_of, policy_of

        parts = parts_of(self.capture(), self.gpu, policy_of(self.step.mlps, chosen.levels))
        return replace(self.step, parts=dict.fromkeys(self.step.parts, parts))

    def exact(self, chosen: Candidate) -> Step:
        """The step compiled at these levels; mixed levels are compiled once, on demand."""
        if not chosen.is_mixed:
            return self.step
        key = tuple(chosen.levels.items())
        if key not in self._mixed:
            self._mixed[key] = self.recompiled(chosen)
        return self._mixed[key]

    def peak(self, chosen: Candidate, step: Step | None = None) -> int:
        """The compiled peak of forward and backward at these levels."""
        return self.resident.nbytes + (step or self.exact(chosen)).at(chosen.levels).peak

    def missing(self, limit: int, peak: int) -> int:
        """Bytes that are missing for a step with this peak, or for the optimizer's step."""
        return max(0, peak - limit, self.resident.optimizer_peak - limit)

    def within(self, limit: int) -> Plan:
        """The plan for a limit."""
        from torch_fused_ops.planner import search
        from torch_fused_ops.planner.step import OFF, policy_of
        from torch_fused_ops.virtual_gpu import roofline

        step, resident = self.step, self.resident
        uniform = [candidate for candidate in self.candidates if not candidate.is_mixed]
        room = limit - resident.nbytes
        chosen = search.best(self.candidates, room, lambda candidate: self.peak(candidate) - resident.nbytes)
        if chosen is None:
            lowest = (min(candidates, key=lambda c: c.curve.peak) for candidates in (self.candidates, uniform))
            chosen = min(lowest, key=self.peak)
        exact = self.exact(chosen)
        curve, step_peak = exact.at(chosen.levels), self.peak(chosen)
        off_levels = dict.fromkeys(step.mlps, OFF)
        off = step.at(off_levels)
        curves = {level: candidate.curve for candidate in uniform for level in candidate.levels.values()}
        inputs = _unit_inputs(self.captured)
        checkpointed = step.checkpointed(inputs) if inputs and step.units else None
        if checkpointed is not None:
            curves["checkpoint"] = checkpointed
        rows = []
        for level in (*MEMORY, "checkpoint"):
            if level in curves:
                peak = resident.nbytes + curves[level].peak
                rows.append(LevelRow(level, peak, curves[level].seconds, self.missing(limit, peak)))
        missing = self.missing(limit, step_peak)
        sent = resident.shards.sent if resident.shards else 0
        return Plan(
            title=name_of(self.model),
            gpu=self.gpu.name,
            limit=limit,
            optimizer=self.optimizer,
            fits=not missing,
            peak_bytes=max(step_peak, resident.optimizer_peak),
            step_peak=step_peak,
            optimizer_peak=resident.optimizer_peak,
            parameters=resident.parameters,
            gradients=resident.gradients,
            optimizer_state=resident.state,
            kept=curve.saved,
            transient=step_peak - resident.nbytes - curve.saved,
            seconds=curve.seconds,
            off_seconds=off.seconds,
            off_peak=resident.nbytes + off.peak,
            policy=policy_of(step.mlps, chosen.levels) if step.mlps else FusionPolicy(),
            choices={mlp: level for unit, level in chosen.levels.items() for mlp in step.mlps.get(unit, ())},
            levels=tuple(rows),
            layers=tuple(_layers(exact, resident, chosen.levels)),
            missing=missing,
            help=tuple(self.help(curve, checkpointed, limit)),
            dp=self.dp,
            sent=sent,
            link_seconds=sent / roofline.link_rate(self.gpu),
            curve=tuple(resident.nbytes + point for point in exact.points(chosen.levels)),
            off_curve=tuple(resident.nbytes + point for point in step.points(off_levels)),
            _planner=self,
            _chosen=chosen,
        )

    def help(self, curve: Curve, checkpointed: Curve | None, limit: int) -> Iterator[str]:
        """Yield advice to make the step fit, or cheaper."""
        from torch_fused_ops.reports.text import size

        resident = self.resident
        if not self.step.mlps:
            yield "No MLP is fused, so there is no level to choose."
        if resident.optimizer_peak > limit and resident.optimizer_peak - resident.transient <= limit:
            beside = f"{size(resident.transient)} beside its state"
            yield f"The optimizer's step allocates {beside}; with fused=True it does not."
        if resident.nbytes + curve.peak <= limit:
            return
        if checkpointed is not None and checkpointed.peak < curve.peak:
            peak = resident.nbytes + checkpointed.peak
            short = self.missing(limit, peak)
            verdict = f"{size(short)} are missing then, too" if short else "fits"
            if short and peak <= limit:
                verdict = "forward and backward fit then"
            yield (
                f"torch.utils.checkpoint around each whole layer: a peak of {size(peak)}, by arithmetic, and "
                f"{checkpointed.seconds / curve.seconds:.2f} times as long as the chosen levels; {verdict}."
            )
        if resident.optimizer_peak > limit:  # independent of forward and backward
            alone = f"The optimizer's step takes {size(resident.optimizer_peak)} by itself"
            yield f"{alone}, however few tokens there are: shards, another optimizer, or fewer parameters."
        yield self.sharding(limit, "fewer tokens" if checkpointed is not None else "fewer tokens, or checkpoints")

    def sharding(self, limit: int, fewer: str) -> str:
        """Find the least power of two of GPUs over which the step fits with FSDP2, every MLP at one level.

        Args:
            limit: bytes.
            fewer: the advice if shards alone do not suffice.
        """
        from torch_fused_ops.reports.text import size

        need = 0
        for dp in (n for n in DP if n > self.dp):
            try:
                other = self.over(dp)
            except ValueError as error:
                return f"FSDP2 does not help: {error}."
            uniform = [candidate.levels for candidate in self.candidates if not candidate.is_mixed]
            resident, step = other.resident, other.step
            needs = [max(resident.nbytes + step.at(levels).peak, resident.optimizer_peak) for levels in uniform]
            need = min(needs)
            if need <= limit:
                level = next(iter(uniform[needs.index(need)].values()), "")
                where = f', every MLP at "{level}"' if level else ""
                gpus = f"{dp} GPUs (dp={dp}), each with a batch as given"
                return f"FSDP2 over {gpus}: it fits{where}, a peak of {size(need)}."
        if not need:
            return f"Use {fewer}."
        return f"Shards by themselves do not help: over {DP[-1]} GPUs the peak is {size(need)}. Besides them: {fewer}."


def _layers(step: Step, resident: Resident, levels: Mapping[str, str]) -> list[LayerRow]:
    """A row for each run of neighboring layers with the same level, and one for the remainder."""
    factor = resident.state / resident.gradients if resident.gradients else 0.0
    default = step.default(levels)
    rows: list[LayerRow] = []
    left = dict(resident.by_unit)

    def alike(unit: str) -> tuple[str, str]:
        return unit.rpartition(".")[0], levels.get(unit, default) if unit in step.mlps else ""

    for (_, level), group in itertools.groupby(step.units, alike):
        units = list(group)
        segments = [
            step.segment(graph, unit, levels.get(unit, default)) for graph in ("forward", "backward") for unit in units
        ]
        nbytes = [left.pop(unit, (0, 0)) for unit in units]
        state = sum(round(factor * trained) for _, trained in nbytes)
        total, trained = (sum(pair[i] for pair in nbytes) for i in (0, 1))
        kept, seconds = sum(s.net for s in segments[: len(units)]), sum(s.seconds for s in segments)
        name = f"{units[0]} to {units[-1].rpartition('.')[2]}" if len(units) > 1 else units[0]
        rows.append(LayerRow(name, len(units), level, total, trained, state, kept, seconds))
    curve = step.at(levels)
    total, trained = (sum(pair[i] for pair in left.values()) for i in (0, 1))
    kept, seconds = curve.saved - sum(row.kept for row in rows), curve.seconds - sum(row.seconds for row in rows)
    rows.append(LayerRow("(other)", 1, "", total, trained, round(factor * trained), kept, seconds))
    return rows


def _unit_inputs(captured: CapturedModel) -> dict[str, int]:
    """The bytes of each unit's inputs from the one before it, in the captured graph."""
    from torch_fused_ops.graphs.modules import module_stack

    def unit_of(node: torch.fx.Node) -> str:
        return captured.unit_of(next(reversed(module_stack(node)), ""))

    inputs: dict[str, int] = {}
    seen: set[torch.fx.Node] = set()
    nodes = (node for part in captured.graphs if part.graph is not None for node in part.graph.gm.graph.nodes)
    for node in nodes:
        unit = unit_of(node)
        for source in node.all_input_nodes if unit else ():
            value = source.meta.get("example_value")
            outside = source.op not in ("placeholder", "get_attr") and unit_of(source) != unit
            if outside and source not in seen and isinstance(value, Tensor):
                seen.add(source)
                inputs[unit] = inputs.get(unit, 0) + value.numel() * value.element_size()
    return inputs
