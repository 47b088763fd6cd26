"""``plan``: fit a training step into a GPU's memory with the cheapest memory levels."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_fused_ops.graphs.capture import check_model
from torch_fused_ops.policy import MEMORY, FusionPolicy, is_level

if TYPE_CHECKING:
    from torch_fused_ops.planner.max_batch import Largest
    from torch_fused_ops.planner.model import CapturedModel
    from torch_fused_ops.planner.search import Candidate
    from torch_fused_ops.planner.static_memory import Resident, ResidentTensor
    from torch_fused_ops.planner.step import Curve, Parts, Step
    from torch_fused_ops.virtual_gpu import GPU

__all__ = ["LayerRow", "LevelRow", "Plan", "bytes_of", "plan"]

DP = tuple(2**n for n in range(1, 11))  # numbers of GPUs to try if nothing fits
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def bytes_of(memory: str | int) -> int:
    """Parse bytes: "72GiB", "800 MiB", "80GB", or a number.

    Raises:
        ValueError: memory is not such a size, or not above 0.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    bare = bool(match and not match[2] and size < _UNITS["MiB"])
    if size <= 0 or bare:
        why = "; plan chooses the levels itself" if is_level(memory) else ""
        why = f"; {memory.strip()} without a unit means bytes" if bare and isinstance(memory, str) else why
        accepted = (
            f'it must be a size such as "72GiB", "800MiB" or bytes, with one of {", ".join(filter(None, _UNITS))}'
        )
        raise ValueError(f"memory={memory!r} is not accepted: {accepted}{why}")
    return size


@dataclass(frozen=True)
class LevelRow:
    """A whole step with every MLP at one memory level.

    Attributes:
        level: a level of ``FusionPolicy(memory=…)``; "checkpoint": an estimate for checkpoints around whole layers.
        peak: the most bytes alive at once in forward and backward, with parameters and optimizer state.
        seconds: the least time of forward and backward.
        missing: bytes beyond the limit, as ``Plan.missing``; of the optimizer's step, if it needs more.
    """

    level: str
    peak: int
    seconds: float
    missing: int

    @property
    def fits(self) -> bool:
        """True if no bytes are missing."""
        return not self.missing


@dataclass(frozen=True)
class LayerRow:
    """A layer of the model, or several equal ones with the same level.

    Attributes:
        name: its path, "model.layers.0", or "model.layers.0 to 15" for several. "(other)": the remainder of the model.
        count: the number of layers.
        level: the memory level of its MLPs; "" if it has none.
        parameters: bytes of parameters and buffers, of all these layers together; so are the others.
        gradients: bytes of gradients.
        optimizer_state: bytes of optimizer state.
        kept: bytes saved for backward.
        seconds: the least time of forward and backward.
    """

    name: str
    count: int
    level: str
    parameters: int
    gradients: int
    optimizer_state: int
    kept: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A model's training step in a GPU's memory.

    Attributes:
        title: the model's class.
        gpu: the GPU's name.
        limit: bytes that may be used.
        optimizer: its name.
        fits: True if forward, backward and the optimizer's step stay within the limit.
        peak_bytes: the most bytes alive at once, the greater of the two following.
        step_peak: the peak of forward and backward, with parameters and optimizer state.
        optimizer_peak: the peak of the optimizer's step: parameters, gradients, state, its allocations, and the batch.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer_state: bytes of optimizer state.
        kept: bytes saved for backward, without parameters.
        transient: bytes at the peak beyond those, parameters and optimizer state.
        seconds: the least time of forward and backward on this GPU (roofline).
        off_seconds: the same with ``memory="off"``, even if that does not fit.
        off_peak: its peak.
        policy: the policy to compile with.
        choices: the memory level of each MLP, by module.
        levels: the whole step at each level.
        layers: the bytes by layer.
        missing: bytes beyond the limit, 0 if it fits.
        help: advice to make it fit, or cheaper.
        dp: GPUs with shards of parameters, gradients and optimizer state (FSDP2); bytes are per GPU, with its own
            batch.
        sent: bytes that a GPU sends in a step.
        link_seconds: the time to send them by the GPU's data sheet, not included in ``seconds``.
        largest: the largest batch or sequence that fits, if ``maximum`` requests it.
    """

    title: str
    gpu: str
    limit: int
    optimizer: str
    fits: bool
    peak_bytes: int
    step_peak: int
    optimizer_peak: int
    parameters: int
    gradients: int
    optimizer_state: int
    kept: int
    transient: int
    seconds: float
    off_seconds: float
    off_peak: int
    policy: FusionPolicy
    choices: Mapping[str, str]
    levels: tuple[LevelRow, ...]
    layers: tuple[LayerRow, ...]
    missing: int
    help: tuple[str, ...]
    dp: int = 1
    sent: int = 0
    link_seconds: float = 0.0
    largest: Largest | None = None
    curve: tuple[int, ...] = field(default=(), repr=False)
    off_curve: tuple[int, ...] = field(default=(), repr=False)
    _recompiled_peak: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    _within: Callable[[int, int], Plan] | None = field(default=None, repr=False, compare=False)

    def within(self, memory: str | int, dp: int | None = None) -> Plan:
        """Plan for another limit, or number of GPUs, without ``largest``. Only a choice of mixed levels is compiled.

        Raises:
            ValueError: as ``plan``, for memory and dp.
        """
        assert self._within is not None
        return self._within(bytes_of(memory), self.dp if dp is None else _check_dp(dp))

    def recompiled_peak_bytes(self) -> int:
        """Recompute ``step_peak``: capture the model and compile it with the plan's policy; seconds a layer."""
        assert self._recompiled_peak is not None
        return self._recompiled_peak()

    def as_dict(self) -> dict[str, Any]:
        """The attributes for JSON, without live-bytes timelines, and with the policy's memory levels."""
        left_out = {"policy", "curve", "off_curve", "_recompiled_peak", "_within"}
        shallow = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in left_out}
        rows: dict[str, Any] = {"layers": [asdict(row) for row in self.layers]}
        rows["levels"] = [{**asdict(row), "fits": row.fits} for row in self.levels]
        rows["largest"] = asdict(self.largest) if self.largest else None
        memory = self.policy.memory
        return {**shallow, **rows, "memory": memory if isinstance(memory, str) else dict(memory)}

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one self-contained page, with the step's live-bytes timeline before and after.

        Raises:
            ValueError: path cannot be written.
        """
        from torch_fused_ops.planner.report import page
        from torch_fused_ops.reports.page import writable

        writable(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from torch_fused_ops.planner.report import text

        return text(self)


def _check_dp(dp: Any) -> int:
    if not isinstance(dp, int) or isinstance(dp, bool) or dp < 1:
        raise ValueError(f"dp={dp!r} is not accepted: it must be a number of GPUs, 1 or more")
    return dp


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
    from torch_fused_ops.planner.optimizers import OPTIMIZERS
    from torch_fused_ops.planner.static_memory import Resident, check_shards, check_whole, resident_tensors
    from torch_fused_ops.planner.step import measured_step, parts_of, policy_of
    from torch_fused_ops.virtual_gpu import gpus, roofline

    check_model(model)
    limit = bytes_of(memory)
    if str(gpu).upper() not in gpus.GPUS:
        raise ValueError(f"gpu={gpu!r} is not known; accepted: {', '.join(gpus.GPUS)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is not known; accepted: {', '.join(OPTIMIZERS)}")
    if maximum is not None and maximum not in max_batch.DIMENSIONS:
        raise ValueError(f"maximum={maximum!r} is not known; accepted: {', '.join(max_batch.DIMENSIONS)}, None")
    _check_dp(dp)
    size = max_batch.size_of((args, kwargs), maximum) if maximum is not None else 0
    described = gpus.by_name(gpu)
    gpus.import_triton()  # fail at once, not after capturing the model
    rates = roofline.estimated_rates(described)
    assert rates is not None
    lowerings.require()
    levels = search.levels_for(lossless)
    module = getattr(model, "_orig_mod", model)
    check_whole(module, dp)

    captured = models.captured_model(model, args, kwargs)
    whole = resident_tensors(module, captured.unit_of, captured.gets_gradient)

    @functools.cache
    def resident_over(dp: int) -> Resident:
        if dp > 1:
            check_shards(module, captured.unit_of, dp)
        return Resident.of(whole, optimizer, dp)

    resident_over(dp)  # errors come before minutes of compiling
    instructions = roofline.rates_of(described) is not None
    measured = measured_step(captured, described, rates, instructions, levels)

    def recompile(levels: Mapping[str, str]) -> Parts:
        again = models.captured_model(model, args, kwargs)
        return parts_of(again, described, rates, instructions, policy_of(again.mlps, levels))

    @functools.cache
    def over(dp: int) -> _Planned:
        resident = resident_over(dp)
        step = replace(measured, shards=resident.shards)
        resident = replace(resident, batch=max(step.entry, step.at({}).end - resident.gradients))
        every = search.candidates(step, levels)
        return _Planned(model, captured, step, whole, resident, every, described, optimizer, recompile, over)

    planned = over(dp)
    result = planned.within(limit, dp)
    if maximum is None:
        return result
    step, resident = planned.step, planned.resident

    def sized(size: int) -> CapturedModel:
        its_args, its_kwargs = max_batch.resized((args, kwargs), maximum, size)
        return models.captured_model(model, its_args, its_kwargs)

    sizes = max_batch.Sizes(sized, maximum, size, described, rates, instructions, resident.shards)
    room = limit - resident.nbytes if resident.optimizer_peak <= limit else 0
    return replace(result, largest=sizes.largest(step, resident.nbytes, room))


@dataclass(frozen=True)
class _Planned:
    """A compiled model, to be planned for any limit."""

    model: Callable[..., Any]
    captured: CapturedModel
    step: Step
    whole: Sequence[ResidentTensor]
    resident: Resident
    every: Sequence[Candidate]
    gpu: GPU
    optimizer: str
    recompile: Callable[[Mapping[str, str]], Parts]
    over: Callable[[int], _Planned]
    _exact: dict[tuple[tuple[str, str], ...], Step] = field(default_factory=dict)

    def recompiled(self, chosen: Candidate) -> Step:
        """Capture and compile the model again at these levels; the step has the same parts for any level."""
        return replace(self.step, parts=dict.fromkeys(self.step.parts, self.recompile(chosen.levels)))

    def exact(self, chosen: Candidate) -> Step:
        """The step compiled at these levels; mixed levels are compiled once, on demand."""
        if not chosen.is_mixed:
            return self.step
        key = tuple(chosen.levels.items())
        if key not in self._exact:
            self._exact[key] = self.recompiled(chosen)
        return self._exact[key]

    def peak(self, chosen: Candidate, step: Step | None = None) -> int:
        """The compiled peak of forward and backward at these levels."""
        return self.resident.nbytes + (step or self.exact(chosen)).at(chosen.levels).peak

    def within(self, limit: int, dp: int) -> Plan:
        """The plan for a limit, over so many GPUs."""
        from torch_fused_ops.planner import search

        if dp != self.resident.dp:
            return self.over(dp).within(limit, dp)
        room = limit - self.resident.nbytes
        chosen = search.best(self.every, room, lambda candidate: self.peak(candidate) - self.resident.nbytes)
        if chosen is not None:
            return self.plan(chosen, True, limit)
        ordered = sorted(self.every, key=lambda candidate: candidate.curve.peak)
        alike = next(candidate for candidate in ordered if not candidate.is_mixed)
        return self.plan(min(ordered[0], alike, key=self.peak), False, limit)

    def plan(self, chosen: Candidate, met: bool, limit: int) -> Plan:
        """The plan with these levels."""
        from torch_fused_ops.planner.step import OFF, policy_of
        from torch_fused_ops.virtual_gpu import roofline

        model, step, resident, exact = self.model, self.step, self.resident, self.exact(chosen)
        curve, step_peak = exact.at(chosen.levels), self.peak(chosen)
        off_levels = dict.fromkeys(step.mlps, OFF)
        off = step.at(off_levels)
        alike = [candidate for candidate in self.every if candidate.levels and not candidate.is_mixed]
        curves = {next(iter(candidate.levels.values())): candidate.curve for candidate in alike}
        inputs = _unit_inputs(self.captured)
        checkpointed = step.checkpointed(inputs) if inputs and step.units else None
        if checkpointed is not None:
            curves["checkpoint"] = checkpointed
        order = (*MEMORY, "checkpoint")

        rows = [
            LevelRow(level, of_all, its_curve.seconds, self.beyond(limit, of_all))
            for level, its_curve in sorted(curves.items(), key=lambda of: order.index(of[0]))
            for of_all in [resident.nbytes + its_curve.peak]
        ]
        missing = self.beyond(limit, step_peak)
        sent = resident.shards.sent if resident.shards else 0
        return Plan(
            title=type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", ""),
            gpu=self.gpu.name,
            limit=limit,
            optimizer=self.optimizer,
            fits=met and not missing,
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
            help=tuple(self.help(curve, checkpointed, limit, met)),
            dp=resident.dp,
            sent=sent,
            link_seconds=sent / roofline.link_rate(self.gpu),
            curve=tuple(resident.nbytes + point for point in exact.points(chosen.levels)),
            off_curve=tuple(resident.nbytes + point for point in step.points(off_levels)),
            _recompiled_peak=lambda: self.peak(chosen, self.recompiled(chosen)),
            _within=self.within,
        )

    def beyond(self, limit: int, peak: int) -> int:
        """Bytes that are missing for a step with this peak, or for the optimizer's step."""
        return max(0, peak - limit, self.resident.optimizer_peak - limit)

    def help(self, curve: Curve, checkpointed: Curve | None, limit: int, met: bool) -> Iterator[str]:
        """Yield advice to make the step fit, or cheaper."""
        from torch_fused_ops.reports.text import size

        resident = self.resident
        if not self.step.mlps:
            yield "No MLP is fused, so there is no level to choose."
        if resident.optimizer_peak > limit and resident.optimizer_peak - resident.transient <= limit:
            beside = f"{size(resident.transient)} beside its state"
            yield f"The optimizer's step allocates {beside}; with fused=True it does not."
        if met:
            return
        if checkpointed is not None and checkpointed.peak < curve.peak:
            peak = resident.nbytes + checkpointed.peak
            short = self.beyond(limit, peak)
            verdict = f"{size(short)} are missing then, too" if short else "fits"
            if short and peak <= limit:
                verdict = "forward and backward fit then"
            yield (
                f"torch.utils.checkpoint around each whole layer: a peak of {size(peak)}, by arithmetic, and "
                f"{checkpointed.seconds / curve.seconds:.2f} times as long as the chosen levels; {verdict}."
            )
        fewer = "fewer tokens" if checkpointed is not None else "fewer tokens, or checkpoints"
        if resident.optimizer_peak > limit:  # independent of forward and backward
            alone = f"The optimizer's step takes {size(resident.optimizer_peak)} by itself"
            yield f"{alone}, however few tokens there are: shards, another optimizer, or fewer parameters."
        yield self.shards_that_would_do(limit, fewer)

    def shards_that_would_do(self, limit: int, fewer: str) -> str:
        """Find the least power of two of GPUs over which the step fits with FSDP2, every MLP at one level.

        Args:
            limit: bytes.
            fewer: the advice if shards alone do not suffice.
        """
        from torch_fused_ops.planner.static_memory import Resident, check_shards
        from torch_fused_ops.reports.text import size

        try:
            check_shards(getattr(self.model, "_orig_mod", self.model), self.captured.unit_of, 2 * self.resident.dp)
        except ValueError as error:
            return f"FSDP2 does not help: {error}."
        alike = [candidate.levels for candidate in self.every if not candidate.is_mixed]
        need = dp = 0
        for dp in (n for n in DP if n > self.resident.dp):
            resident = replace(Resident.of(self.whole, self.optimizer, dp), batch=self.resident.batch)
            step = replace(self.step, shards=resident.shards)
            needs = [
                (max(resident.nbytes + step.at(levels).peak, resident.optimizer_peak), number)
                for number, levels in enumerate(alike)
            ]
            need, number = min(needs)
            if need <= limit:
                level = next(iter(alike[number].values()), "")
                where = f', every MLP at "{level}"' if level else ""
                gpus = f"{dp} GPUs (dp={dp}), each with a batch as given"
                return f"FSDP2 over {gpus}: it fits{where}, a peak of {size(need)}."
        if not need:
            return f"Use {fewer}."
        return f"Shards by themselves do not help: over {dp} GPUs the peak is {size(need)}. Besides them: {fewer}."


def _layers(step: Step, fixed: Resident, levels: Mapping[str, str]) -> list[LayerRow]:
    """A row for each run of neighboring layers with the same level, and one for the remainder."""
    factor = fixed.state / fixed.gradients if fixed.gradients else 0.0
    default = step.default(levels)
    rows: list[LayerRow] = []
    left = dict(fixed.by_unit)
    for unit in step.units:
        at = levels.get(unit, default)
        level = at if unit in step.mlps else ""
        forward, backward = (step.segment(graph, unit, at) for graph in ("forward", "backward"))
        total, trained = left.pop(unit, (0, 0))
        nbytes = (total, trained, round(factor * trained), forward.net)
        row = LayerRow(unit, 1, level, *nbytes, forward.seconds + backward.seconds)
        before = rows[-1] if rows else None
        if (
            before
            and before.level == level
            and before.name.partition(" ")[0].rpartition(".")[0] == unit.rpartition(".")[0]
        ):
            first = before.name.partition(" ")[0]
            row = LayerRow(
                f"{first} to {unit.rpartition('.')[2]}",
                before.count + 1,
                level,
                before.parameters + total,
                before.gradients + trained,
                before.optimizer_state + nbytes[2],
                before.kept + forward.net,
                before.seconds + row.seconds,
            )
            rows.pop()
        rows.append(row)
    curve = step.at(levels)
    total, trained = (sum(pair[i] for pair in left.values()) for i in (0, 1))
    kept, seconds = curve.saved - sum(row.kept for row in rows), curve.seconds - sum(row.seconds for row in rows)
    rows.append(LayerRow("(other)", 1, "", total, trained, round(factor * trained), kept, seconds))
    return rows


def _unit_inputs(captured: CapturedModel) -> dict[str, int]:
    """The bytes of each unit's inputs from the one before it, in the captured graph."""
    inputs: dict[str, int] = {}
    seen: set[torch.fx.Node] = set()
    for part in captured.graphs:
        if part.graph is None:
            continue
        for node in part.graph.gm.graph.nodes:
            unit = _unit_of_node(node, captured)
            for source in node.all_input_nodes if unit else ():
                value = source.meta.get("example_value")
                outside = source.op not in ("placeholder", "get_attr") and _unit_of_node(source, captured) != unit
                if outside and source not in seen and isinstance(value, Tensor):
                    seen.add(source)
                    inputs[unit] = inputs.get(unit, 0) + value.numel() * value.element_size()
    return inputs


def _unit_of_node(node: torch.fx.Node, captured: CapturedModel) -> str:
    from torch_fused_ops.graphs.modules import module_stack

    return captured.unit_of(next(reversed(module_stack(node)), ""))
