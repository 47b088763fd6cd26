"""``plan``: does a training step fit into a GPU's memory, which memory levels make it fit, and what do they cost?"""

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

from torch_fused_ops.capture import check_model
from torch_fused_ops.policy import MEMORY, FusionPolicy, is_level

if TYPE_CHECKING:
    from torch_fused_ops.planner.max_batch import Largest
    from torch_fused_ops.planner.model import CapturedModel
    from torch_fused_ops.planner.search import Candidate
    from torch_fused_ops.planner.static_memory import Held, Resident
    from torch_fused_ops.planner.step import Curve, Parts, Step
    from torch_fused_ops.planner.tensor_parallel import Split
    from torch_fused_ops.virtual_gpu import GPU

__all__ = ["LayerRow", "LevelRow", "Plan", "bytes_of", "plan"]

DP = tuple(2**n for n in range(1, 11))  # numbers of GPUs that a plan tries where nothing fits
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("iB", 1024), ("B", 1000))
}


def bytes_of(memory: str | int) -> int:
    """Bytes that are written as a number with a unit: "72GiB", "800 MiB", "80GB", or as a number.

    Raises:
        ValueError: it is none of these, or not above 0.
    """
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    bare = bool(found and not found[2] and size < _UNITS["MiB"])
    if size <= 0 or bare:
        why = "; a plan chooses the levels itself" if is_level(memory) else ""
        why = f"; that is {memory.strip()} bytes, and its unit is missing" if bare and isinstance(memory, str) else why
        accepted = (
            f'it must be a size such as "72GiB", "800MiB" or bytes, with one of {", ".join(filter(None, _UNITS))}'
        )
        raise ValueError(f"memory={memory!r} is not accepted: {accepted}{why}")
    return size


@dataclass(frozen=True)
class LevelRow:
    """A whole step with every MLP at one memory level.

    Attributes:
        level: a level of ``FusionPolicy(memory=…)``; "checkpoint": a checkpoint around each whole layer, by arithmetic.
        peak: the most bytes alive at once in forward and backward, with parameters and optimizer state.
        seconds: the least time of forward and backward.
        missing: bytes beyond the limit, as ``Plan.missing``: of the optimizer's step, where that needs more.
    """

    level: str
    peak: int
    seconds: float
    missing: int

    @property
    def fits(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing


@dataclass(frozen=True)
class LayerRow:
    """A layer of the model, or several equal ones with the same level.

    Attributes:
        name: its path, "model.layers.0"; of several "model.layers.0 to 15". "(other)": what is in no layer with an MLP.
        count: how many layers.
        level: the memory level chosen for its MLPs; "" where it has none.
        parameters: bytes of parameters and buffers, of all of them together; so are the others.
        gradients: bytes of gradients.
        optimizer_state: bytes of optimizer state.
        kept: bytes that forward leaves alive for backward.
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
        fits: whether the step, and the optimizer's, stay within the limit.
        peak_bytes: the most bytes alive at once: parameters, optimizer state, and the curve's peak; or the
            optimizer's step, where that is more.
        step_peak: of forward and backward alone, with parameters and optimizer state.
        optimizer_peak: of the optimizer's step: parameters, gradients, state, what it allocates, and the batch.
        parameters: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer_state: bytes that the optimizer keeps.
        kept: bytes alive between forward and backward, without parameters.
        transient: bytes at the peak beyond what is kept, parameters and optimizer state.
        seconds: the least time of forward and backward on this GPU (roofline).
        off_seconds: the same with ``memory="off"``, whether that fits or not.
        off_peak: its peak.
        policy: what to compile with.
        choices: the memory level of each MLP, by module.
        levels: what the whole step comes to at each level.
        layers: where the bytes are.
        missing: bytes beyond the limit, 0 where it fits.
        help: what would make it fit, or make it cheaper.
        dp: GPUs that have shards of parameters, gradients and optimizer state (FSDP2); bytes are one GPU's, of its own
            batch.
        tp: GPUs that share the features of MLPs and the heads of attention; bytes are one GPU's.
        whole: with tp, parameters of two and more dimensions that every GPU has whole, layers' numbers as "*".
        sent: bytes that a GPU sends in a step, by what for: "FSDP2", "sums over tp".
        link_seconds: the time that these take on the GPU's links, by its data sheet; it is not in ``seconds``.
        largest: the largest batch or sequence that fits, if ``maximum`` asked for it.
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
    tp: int = 1
    whole: tuple[str, ...] = ()
    sent: Mapping[str, int] = field(default_factory=dict)
    link_seconds: float = 0.0
    largest: Largest | None = None
    curve: tuple[int, ...] = field(default=(), repr=False)
    off_curve: tuple[int, ...] = field(default=(), repr=False)
    _recompiled_peak: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    _within: Callable[[int, int], Plan] | None = field(default=None, repr=False, compare=False)

    def within(self, memory: str | int, dp: int | None = None) -> Plan:
        """The plan for another limit, and over so many GPUs, without ``largest``; compiled is a choice of mixed levels.

        Raises:
            ValueError: as ``plan``, for memory and dp.
        """
        assert self._within is not None
        return self._within(bytes_of(memory), self.dp if dp is None else _count("dp", dp))

    def recompiled_peak_bytes(self) -> int:
        """``step_peak`` anew: the model captured, and compiled on paper with the plan's policy; seconds a layer."""
        assert self._recompiled_peak is not None
        return self._recompiled_peak()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the attributes, but for curves; the policy as its memory levels."""
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
        """Write the plan as one self-contained page, with the curve of the step before and after.

        Raises:
            ValueError: path cannot be written.
        """
        from torch_fused_ops.planner.report import page
        from torch_fused_ops.reports.page import writable

        writable(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from torch_fused_ops.planner.report import text

        return text(self)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} is not accepted: it must be a number of GPUs, 1 or more")
    return value


def plan(
    model: Callable[..., Any],
    *args: Any,
    memory: str | int,
    gpu: str = "H200",
    optimizer: str = "adamw",
    lossless: bool = False,
    maximum: str | None = None,
    dp: int = 1,
    tp: int = 1,
    **kwargs: Any,
) -> Plan:
    """Plan a training step: what it needs of a GPU's memory, and the cheapest memory levels with which it fits.

    The whole model is compiled on paper at each level, for a GPU that need not be there: seconds for each layer and
    level. Where the levels chosen are mixed it is compiled with these, too, so that what is said to fit was compiled.
    Nothing is allocated on a device; a model that is captured as one graph does not run.

    Args:
        model: a module or a function that returns its loss. What it returns is what backward begins with.
        *args: what to call it with, on one GPU. Model and arguments may be meta tensors: sizes and dtypes are all that
            counts.
        memory: what may be used, "72GiB", "800MiB" or bytes. Leave some for what is not counted (``docs/plan.md``).
        gpu: "A100", "H100", "H200", "B200" or "MI300X".
        optimizer: "adamw", "sgd", PyTorch's own with their default settings, or "none".
        lossless: do not choose levels that round gradients ("fp8").
        maximum: "batch" or "tokens": find the largest that fits at each level, too (``Plan.largest``): dimension 0, or
            1, of the tensors that the model is called with, of all that have the first one's size in it. Minutes;
            ``logging.getLogger("torch_fused_ops.planner")`` says at level INFO what is being compiled.
        dp: over how many GPUs FSDP2 shards the model, by ``fully_shard`` of each layer and of the model, with its
            defaults. All bytes are then one GPU's, and ``args`` are what one GPU is called with.
        tp: how many GPUs share each MLP that is picked up, and attention whose shapes follow its heads, column-parallel
            and row-parallel; with dp, each of these parts is sharded. ``args`` are what all of them are called with.
            What is not split is whole on each (``Plan.whole``).
        **kwargs: what to call the model with.

    Returns:
        A ``Plan``: print it, take its ``policy``, write it as JSON or as a page.

    Raises:
        TypeError: model is not callable, or a class.
        ValueError: memory, gpu, optimizer or maximum is not known; dp is no number of GPUs, or FSDP2 does not shard the
            model; tp is no number of GPUs, does not divide heads or features, or there is nothing to split; nothing in
            the model needs a gradient; it is not captured as a whole.
        ModuleNotFoundError: Triton is not installed.
    """
    from torch_fused_ops import lowerings
    from torch_fused_ops.planner import max_batch, search
    from torch_fused_ops.planner import model as models
    from torch_fused_ops.planner.optimizers import OPTIMIZERS
    from torch_fused_ops.planner.static_memory import Resident, check_shards, check_whole, held
    from torch_fused_ops.planner.step import measured_step, parts_of, policy_of
    from torch_fused_ops.planner.tensor_parallel import split
    from torch_fused_ops.virtual_gpu import gpus, roofline

    check_model(model)
    limit = bytes_of(memory)
    if str(gpu).upper() not in gpus.GPUS:
        raise ValueError(f"gpu={gpu!r} is not known; accepted: {', '.join(gpus.GPUS)}")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is not known; accepted: {', '.join(OPTIMIZERS)}")
    if maximum is not None and maximum not in max_batch.DIMENSIONS:
        raise ValueError(f"maximum={maximum!r} is not known; accepted: {', '.join(max_batch.DIMENSIONS)}, None")
    _count("dp", dp)
    _count("tp", tp)
    given = max_batch.size_of((args, kwargs), maximum) if maximum is not None else 0
    described = gpus.by_name(gpu)
    gpus.import_triton()  # at once, not after the model was captured
    rates = roofline.estimated_rates(described)
    assert rates is not None
    lowerings.require()
    levels = search.levels_for(lossless)
    module = getattr(model, "_orig_mod", model)
    check_whole(module, dp, tp)

    def capture(args: Any, kwargs: Any) -> tuple[CapturedModel, Split | None]:
        captured = models.captured_model(model, args, kwargs)
        return split(captured, tp) if tp > 1 else (captured, None)

    captured, parts = capture(args, kwargs)
    whole = held(module, captured.unit_of, parts, captured.gets_gradient)

    @functools.cache
    def held_over(dp: int) -> Resident:
        if dp > 1:
            check_shards(module, captured.unit_of, dp)
        return Resident.of(whole, optimizer, dp)

    held_over(dp)  # what is refused is refused before minutes of compiling
    instructions = roofline.rates_of(described) is not None
    measured = measured_step(captured, described, rates, instructions, levels)

    def recompile(levels: Mapping[str, str]) -> Parts:
        again = capture(args, kwargs)[0]
        return parts_of(again, described, rates, instructions, policy_of(again.mlps, levels))

    @functools.cache
    def over(dp: int) -> _Planned:
        resident = held_over(dp)
        step = replace(measured, shards=resident.shards)
        resident = replace(resident, batch=max(step.entry, step.at({}).end - resident.gradients))
        every = search.candidates(step, levels)
        return _Planned(model, captured, parts, step, whole, resident, every, described, optimizer, recompile, over)

    planned = over(dp)
    found = planned.within(limit, dp)
    if maximum is None:
        return found
    step, resident = planned.step, planned.resident

    def sized(size: int) -> CapturedModel:
        its_args, its_kwargs = max_batch.resized((args, kwargs), maximum, size)
        return capture(its_args, its_kwargs)[0]

    sizes = max_batch.Sizes(sized, maximum, given, described, rates, instructions, resident.shards)
    room = limit - resident.nbytes if resident.optimizer_peak <= limit else 0
    return replace(found, largest=sizes.largest(step, resident.nbytes, room))


@dataclass(frozen=True)
class _Planned:
    """A model of which all is known but the limit."""

    model: Callable[..., Any]
    captured: CapturedModel
    parts: Split | None
    step: Step
    whole: Sequence[Held]
    resident: Resident
    every: Sequence[Candidate]
    gpu: GPU
    optimizer: str
    recompile: Callable[[Mapping[str, str]], Parts]
    over: Callable[[int], _Planned]
    _exact: dict[tuple[tuple[str, str], ...], Step] = field(default_factory=dict)

    def recompiled(self, chosen: Candidate) -> Step:
        """The step of the model captured and compiled anew at these levels: with the same parts for any level."""
        return replace(self.step, parts=dict.fromkeys(self.step.parts, self.recompile(chosen.levels)))

    def exact(self, chosen: Candidate) -> Step:
        """The step compiled at these levels; where they are mixed it is compiled once, when it is asked for."""
        if not chosen.is_mixed:
            return self.step
        key = tuple(chosen.levels.items())
        if key not in self._exact:
            self._exact[key] = self.recompiled(chosen)
        return self._exact[key]

    def peak(self, chosen: Candidate, step: Step | None = None) -> int:
        """Of forward and backward at these levels, compiled."""
        return self.resident.nbytes + (step or self.exact(chosen)).at(chosen.levels).peak

    def within(self, limit: int, dp: int) -> Plan:
        """The plan for a limit, over so many GPUs."""
        from torch_fused_ops.planner import search

        if dp != self.resident.dp:
            return self.over(dp).within(limit, dp)
        room = limit - self.resident.nbytes
        chosen = search.best(self.every, room, lambda one: self.peak(one) - self.resident.nbytes)
        if chosen is not None:
            return self.plan(chosen, True, limit)
        ordered = sorted(self.every, key=lambda one: one.curve.peak)
        alike = next(one for one in ordered if not one.is_mixed)
        return self.plan(min(ordered[0], alike, key=self.peak), False, limit)

    def plan(self, chosen: Candidate, met: bool, limit: int) -> Plan:
        """The plan with these levels."""
        from torch_fused_ops.planner.step import OFF, policy_of
        from torch_fused_ops.virtual_gpu import roofline

        model, step, resident, exact = self.model, self.step, self.resident, self.exact(chosen)
        curve, step_peak = exact.at(chosen.levels), self.peak(chosen)
        off_levels = dict.fromkeys(step.mlps, OFF)
        off = step.at(off_levels)
        alike = [one for one in self.every if one.levels and not one.is_mixed]
        curves = {next(iter(one.levels.values())): one.curve for one in alike}
        inputs = _unit_inputs(self.captured)
        checkpointed = step.checkpointed(inputs) if inputs and step.units else None
        if checkpointed is not None:
            curves["checkpoint"] = checkpointed
        order = (*MEMORY, "checkpoint")

        rows = [
            LevelRow(level, of_all, each.seconds, self.beyond(limit, of_all))
            for level, each in sorted(curves.items(), key=lambda of: order.index(of[0]))
            for of_all in [resident.nbytes + each.peak]
        ]
        missing = self.beyond(limit, step_peak)
        sent = {"FSDP2": resident.shards.sent} if resident.shards else {}
        if self.parts is not None:
            sent["sums over tp"] = self.parts.sent
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
            kept=curve.kept,
            transient=step_peak - resident.nbytes - curve.kept,
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
            tp=self.parts.tp if self.parts else 1,
            whole=tuple(dict.fromkeys(one.place for one in self.whole if one.is_left_whole)) if self.parts else (),
            sent=sent,
            link_seconds=sum(sent.values()) / roofline.link_rate(self.gpu),
            curve=tuple(resident.nbytes + point for point in exact.points(chosen.levels)),
            off_curve=tuple(resident.nbytes + point for point in step.points(off_levels)),
            _recompiled_peak=lambda: self.peak(chosen, self.recompiled(chosen)),
            _within=self.within,
        )

    def beyond(self, limit: int, peak: int) -> int:
        """Bytes that a step with this peak, and the optimizer's, lack."""
        return max(0, peak - limit, self.resident.optimizer_peak - limit)

    def help(self, curve: Curve, checkpointed: Curve | None, limit: int, met: bool) -> Iterator[str]:
        """What would make the step fit, or make it cheaper."""
        from torch_fused_ops.reports.text import size

        resident = self.resident
        if not self.step.mlps:
            yield "There is no MLP that is picked up, so there is no level to choose."
        if resident.optimizer_peak > limit and resident.optimizer_peak - resident.transient <= limit:
            yield (
                f"The optimizer's step allocates {size(resident.transient)} beside its state; fused=True in its "
                "constructor does without."
            )
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
                f"{checkpointed.seconds / curve.seconds:.2f} times as long as the levels chosen; {verdict}."
            )
        fewer = "fewer tokens" if checkpointed is not None else "fewer tokens, or checkpoints"
        if resident.optimizer_peak > limit:  # whatever forward and backward take
            alone = f"The optimizer's step takes {size(resident.optimizer_peak)} by itself"
            yield f"{alone}, however few tokens there are: shards, another optimizer, or fewer parameters."
        yield self.shards_that_would_do(limit, fewer)

    def shards_that_would_do(self, limit: int, fewer: str) -> str:
        """The least power of two of GPUs over which FSDP2 makes it fit, every MLP at one level; each is computed.

        Args:
            limit: bytes.
            fewer: what helps where shards alone do not.
        """
        from torch_fused_ops.planner.static_memory import Resident, check_shards
        from torch_fused_ops.reports.text import size

        try:
            check_shards(getattr(self.model, "_orig_mod", self.model), self.captured.unit_of, 2 * self.resident.dp)
        except ValueError as error:
            return f"FSDP2 does not help: {error}."
        alike = [one.levels for one in self.every if not one.is_mixed]
        need = dp = 0
        for dp in (n for n in DP if n > self.resident.dp):
            resident = replace(Resident.of(self.whole, self.optimizer, dp), batch=self.resident.batch)
            step = replace(self.step, shards=resident.shards)
            needs = [
                (max(resident.nbytes + step.at(each).peak, resident.optimizer_peak), number)
                for number, each in enumerate(alike)
            ]
            need, number = min(needs)
            if need <= limit:
                level = next(iter(alike[number].values()), "")
                where = f', every MLP at "{level}"' if level else ""
                gpus = f"{dp} GPUs (dp={dp}), each with a batch as given"
                return f"FSDP2 over {gpus}: it fits{where}, a peak of {size(need)}."
        if not need:
            return f"What helps is {fewer}."
        return f"Shards by themselves do not help: over {dp} GPUs the peak is {size(need)}. Besides them: {fewer}."


def _layers(step: Step, fixed: Resident, levels: Mapping[str, str]) -> list[LayerRow]:
    """A row for each run of neighboring layers with the same figures, and one for all else."""
    factor = fixed.state / fixed.gradients if fixed.gradients else 0.0
    default = step.default(levels)
    rows: list[LayerRow] = []
    left = dict(fixed.by_unit)
    for unit in step.units:
        at = levels.get(unit, default)
        level = at if unit in step.mlps else ""
        forward, backward = (step.segment(graph, unit, at) for graph in ("forward", "backward"))
        total, trained = left.pop(unit, (0, 0))
        own = (total, trained, round(factor * trained), forward.net)
        row = LayerRow(unit, 1, level, *own, forward.seconds + backward.seconds)
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
                before.optimizer_state + own[2],
                before.kept + forward.net,
                before.seconds + row.seconds,
            )
            rows.pop()
        rows.append(row)
    curve = step.at(levels)
    total, trained = (sum(each[i] for each in left.values()) for i in (0, 1))
    kept, seconds = curve.kept - sum(row.kept for row in rows), curve.seconds - sum(row.seconds for row in rows)
    rows.append(LayerRow("(other)", 1, "", total, trained, round(factor * trained), kept, seconds))
    return rows


def _unit_inputs(captured: CapturedModel) -> dict[str, int]:
    """The bytes of what each unit is given by the one before it, in the graph that was captured."""
    found: dict[str, int] = {}
    seen: set[torch.fx.Node] = set()
    for each in captured.graphs:
        if each.graph is None:
            continue
        for node in each.graph.gm.graph.nodes:
            unit = _unit_of_node(node, captured)
            for source in node.all_input_nodes if unit else ():
                value = source.meta.get("example_value")
                outside = source.op not in ("placeholder", "get_attr") and _unit_of_node(source, captured) != unit
                if outside and source not in seen and isinstance(value, Tensor):
                    seen.add(source)
                    found[unit] = found.get(unit, 0) + value.numel() * value.element_size()
    return found


def _unit_of_node(node: torch.fx.Node, captured: CapturedModel) -> str:
    from torch_fused_ops.virtual_gpu.modules import module_stack

    return captured.unit_of(next(reversed(module_stack(node)), ""))
