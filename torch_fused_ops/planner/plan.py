"""``plan``: fit a training step into a GPU's memory with the cheapest memory levels."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from torch_fused_ops.graphs.capture import check_model, name_of
from torch_fused_ops.planner import max_batch, search
from torch_fused_ops.planner import model as models
from torch_fused_ops.planner.model import CapturedModel
from torch_fused_ops.planner.offload import Link, host_bytes, patterns
from torch_fused_ops.planner.pieces import CHECKPOINTS, checkpointed, divided
from torch_fused_ops.planner.processes import results_of
from torch_fused_ops.planner.report import LevelRow, Offloaded, Plan
from torch_fused_ops.planner.search import Candidate
from torch_fused_ops.planner.setup import LEVELS, OFF, WITH_ATTENTION, Setup, bytes_of, check
from torch_fused_ops.planner.snapshot import snapshot_of
from torch_fused_ops.planner.static_memory import Resident, check_shards, resident_tensors
from torch_fused_ops.planner.step import SegmentedStep, Step, StepSummary, alike_at, segmented_step
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.captures import beside_loss
from torch_fused_ops.reports.text import size
from torch_fused_ops.virtual_gpu import GPU, gpus

__all__ = ["Plan", "plan"]

log = logging.getLogger("torch_fused_ops.planner")


def plan(
    model: Callable[..., Any],
    *args: Any,
    capacity: str | int,
    gpu: str = "H200",
    optimizer: str = "adamw",
    levels: Sequence[str] | None = None,
    maximum: str | None = None,
    loss: str | Callable[[Any], Tensor] | None = None,
    keep_logits: bool = False,
    dp: int = 1,
    parallel: str = "fsdp2",
    mixed_precision: bool = False,
    root: str = "with",
    reshard: str = "always",
    master_weights: str | None = None,
    accumulate: int = 1,
    compiled: str = "model",
    expandable_segments: bool = False,
    offload_bandwidth: float | None = None,
    host_memory: str | int | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan a training step: estimate its memory on a GPU, and choose the cheapest memory levels with which it fits.

    The whole model is compiled for the GPU at each level, and at mixed levels that may be chosen. This takes seconds
    for each layer and level, works without a GPU, and allocates nothing on a device. The model runs only if Dynamo
    captures it as several graphs.

    Args:
        model: a module or a function that returns its loss, or a result to call ``loss`` with. Without ``loss``,
            backward begins with all results.
        *args: its arguments on one GPU. Model and arguments may be on the meta device: data does not matter.
        capacity: the limit, "72GiB", "800MiB" or bytes. Leave room for the CUDA context, NCCL and libraries.
        gpu: one of ``setup.GPUS``, such as "H200" or "RTX 5090".
        optimizer: PyTorch's "adamw", "adamw-fused" or "sgd", with default settings; or "none".
        levels: the levels to choose among, from ``setup.LEVELS``. "input+attention" is ``memory="input",
            attention="input"``. The default is all levels except "free+attention", since each level takes minutes.
        maximum: "batch" or "tokens": also find the largest size that fits at each level (``Plan.largest``). Resizes
            dimension 0 or 1 of all argument tensors that have the first tensor's size in it. Takes minutes; the logger
            "torch_fused_ops.planner" reports progress at level INFO.
        loss: a loss outside of the compiled model: a function of the model's result, which runs in eager mode unless
            ``torch.compile`` returned it; or "eager" or "compiled", for the mean cross entropy of float32 logits.
        keep_logits: True if the caller references the model's result until the step ends.
        dp: the number of GPUs over which FSDP2 shards the model: ``fully_shard`` is applied to each layer and to the
            model, with default settings. Bytes and ``args`` are then per GPU.
        parallel: "fsdp2", or "ddp" for ``DistributedDataParallel``.
        mixed_precision: True for float32 shards and ``MixedPrecisionPolicy(bfloat16, reduce_dtype=float32)``.
        root: "with", or "apart" if embedding, and norm with head, are separate FSDP2 groups (``planner.setup``).
        reshard: which groups FSDP2 frees after forward: "always", all except the root; "not-last", all except the root
            and the last one; "never", none.
        master_weights: "float32": float32 weights and state, forward under bfloat16 autocast (Trainer's ``bf16=True``).
        accumulate: the number of micro-batches for each step of the optimizer.
        compiled: "model"; "layers", if each layer is compiled separately; or "none".
        expandable_segments: True if the allocator uses expandable segments; otherwise PyTorch reserves more.
        offload_bandwidth: GB/s of a copy between GPU and pinned host memory while all ranks copy: also choose saved
            tensors to move to the host (``FusionPolicy(offload=…)``). By default they stay on the GPU.
        host_memory: the pinned host memory for each rank, as for ``capacity``. By default as much as needed.
        **kwargs: the model's keyword arguments.

    Returns:
        A ``Plan``: print it, take its ``policy``, write it as JSON or as a page.

    Raises:
        TypeError: model is not callable, or is a class.
        ValueError: a setting is not accepted (``setup.SettingError``); the model cannot be sharded; nothing in it
            needs a gradient; or the model is not captured as a whole.
        ModuleNotFoundError: Triton is not installed.
    """
    from torch_fused_ops import lowerings

    started = time.monotonic()
    model = check_model(model)
    for name, value in {"capacity": capacity, "gpu": gpu, "maximum": maximum, "levels": levels}.items():
        check(name, value)
    sharing, offloading = (dp, parallel, mixed_precision, root, reshard), (offload_bandwidth, host_memory)
    setup = Setup(optimizer, *sharing, master_weights, accumulate, compiled, expandable_segments, *offloading)
    limit, described = bytes_of(capacity), gpus.by_name(gpu)
    link = Link(1e9 * offload_bandwidth, bytes_of(host_memory or sys.maxsize)) if offload_bandwidth else None
    loss_function, loss_runs = models.loss_of(loss)
    weights = torch.bfloat16 if mixed_precision else torch.float32 if master_weights else None
    first_size = max_batch.size_of((args, kwargs), maximum) if maximum is not None else 0
    gpus.import_triton()  # fail at once, not after capturing the model
    lowerings.require()

    def capture(at_size: int) -> CapturedModel:
        resized = max_batch.resized((args, kwargs), maximum, at_size) if maximum is not None else (args, kwargs)
        if mixed_precision:
            resized = tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, resized)
        with models.weights_as(model, weights):
            captured = models.captured_model(model, resized[0], resized[1], loss_function)
        if not master_weights:
            return captured
        return replace(captured, graphs=tuple(replace(graph, autocast=torch.bfloat16) for graph in captured.graphs))

    divide = functools.partial(divided, gpu=described, compiled=compiled, loss=loss_runs, keep_logits=keep_logits)
    captured = capture(first_size)
    if setup.sharded:
        check_shards(model, dp, captured.unregistered)  # raise errors before minutes of compiling
    mlps = captured.mlps if compiled != "none" else {}
    has_attention = captured.calls("attention", "softmax")
    default = [level for level in search.DEFAULT if has_attention or not level.endswith(WITH_ATTENTION)]
    requested = set(levels or default) - {OFF}
    chosen_among = tuple(level for level in LEVELS if level in requested) or ("free",)
    ready = divide(captured)
    advice = [f"{note} (docs/out-of-memory.md)." for note in beside_loss(captured.graphs[-1].gm) if not loss_runs]
    results = [node.meta.get("example_value") for node in captured.graphs[-1].gm.graph.output_node().all_input_nodes]
    if loss_function is None and all(result.dim() for result in results if isinstance(result, Tensor)):
        advice.append(
            'The model returns no scalar. If a loss is computed outside of it, pass loss="eager" (--loss eager).'
        )
    to_compile = (*chosen_among, OFF) if mlps else chosen_among[:1]
    units = [unit for unit in captured.units if unit != models.OTHER]
    kinds = {} if captured.has_checkpoints or not units else CHECKPOINTS
    kinds = {kind: context_fn for kind, context_fn in kinds.items() if not context_fn or captured.calls("dot_product")}
    compiled_pieces: dict[object, Any] | None = {} if ready.pieces else None  # of all rows in one process

    def at_level(level: str) -> SegmentedStep | None:
        if level == "tiled" and "input" in to_compile and alike_at(ready, described, "input", level):
            return None
        return segmented_step(ready, described, ready.policy_at(level), compiled_pieces)

    def with_checkpoint(context_fn: Callable[[], Any] | None) -> SegmentedStep | None:
        try:
            # It warns of writes in place, which these layers lack.
            quiet = mock.patch.object(logging.getLogger("torch._higher_order_ops.wrap"), "disabled", True)
            with quiet, checkpointed(model, units, context_fn):
                around_units = divide(capture(first_size))
                return segmented_step(around_units, described, ready.policy_at(OFF), compiled_pieces)
        except Exception:  # a layer that cannot be checkpointed, such as one that writes its argument
            log.debug("no row for checkpoints", exc_info=True)
            return None

    rows = [functools.partial(at_level, level) for level in to_compile]
    rows += [functools.partial(with_checkpoint, context_fn) for context_fn in kinds.values()]
    every: dict[str, SegmentedStep | None] = {}
    log.info("compiling %d rows", len(rows))
    for name, row in zip((*to_compile, *kinds), results_of(rows), strict=True):
        every[name] = row
        peak = row.timeline.peak if row else 0
        needs = f" needs {size(peak)} beyond parameters and optimizer state" if peak else ""
        log.info("%s%s; %d of %d rows, %.0f s", name, needs, len(every), len(rows), time.monotonic() - started)
    by_level = {level: row for level in to_compile if (row := every[level] or every["input"])}
    with_checkpoints = {kind: row for kind in kinds if (row := every[kind])}
    if captured.has_checkpoints:
        levels_replace = 'The other rows have levels in their place: checkpoints="replace" (docs/checkpoints.md).'
        advice.append(f'The model has checkpoints, and the row "checkpoint" is the model as it is. {levels_replace}')
    first = next(iter(by_level.values()))
    tensors = resident_tensors(model, captured.unit_of, first.trained.__contains__, captured.unregistered)
    resident = Resident.of(tensors, setup, ready.group_of)
    ends = ("step" if compiled == "model" else "layer") if resident.accumulated else ""
    step = Step(mlps, by_level, resident.shards, ends, link)
    gradients = 0 if resident.accumulated else resident.gradients
    resident = replace(resident, batch=max(first.entry, step.summary_at({}).end - gradients))
    planner = _Planner(name_of(model), ready, step, resident, described, chosen_among, setup, with_checkpoints, advice)
    result = planner.within(limit)
    if maximum is None:
        return result
    available = setup.available(limit)
    slack = max(c.summary.pools - c.summary.peak for c in planner.candidates)  # pools beyond the peak
    available_for_step = available - resident.nbytes - slack if resident.optimizer_peak <= available else 0
    sizes = (lambda n: divide(capture(n)), maximum, first_size, described, planner.step)
    return replace(result, largest=max_batch.largest_sizes(*sizes, resident.nbytes, available_for_step))


@dataclass(frozen=True)
class _Planner:
    """Plans a compiled model's step for any limit."""

    title: str
    captured: CapturedModel
    step: Step  # at each level, with shards if FSDP2 shards the model
    resident: Resident
    gpu: GPU
    levels: Sequence[str]  # the plainest first
    setup: Setup
    with_checkpoints: Mapping[str, SegmentedStep]  # by ``pieces.CHECKPOINTS``
    advice: Sequence[str]  # sentences that do not depend on the limit
    _compiled: dict[FusionPolicy, SegmentedStep] = field(default_factory=dict, init=False)

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """The assignments of levels, the fastest first."""
        return search.candidates(self.step, self.levels)

    def exact(self, chosen: Candidate) -> SegmentedStep:
        """Return the step compiled as chosen. A step that was only estimated is compiled at the first call."""
        if not chosen.is_estimate:
            return self.step.by_level[self.step.default(chosen.levels)]
        policy = self.policy(chosen)
        if policy not in self._compiled:
            self._compiled[policy] = segmented_step(self.captured, self.gpu, policy)
        return self._compiled[policy]

    def policy(self, chosen: Candidate) -> FusionPolicy:
        """Return a candidate's policy."""
        stored = self.step.by_level[self.step.default(chosen.levels)].schedule.stored
        return replace(self.captured.policy_of(chosen.levels), offload=patterns(stored, chosen.offload))

    def exact_pools(self, chosen: Candidate) -> int:
        """Return the bytes of PyTorch's pools, without resident bytes, in the step compiled at these levels."""
        return self.step.summary_of(self.exact(chosen)).pools

    def held(self, summary: StepSummary) -> int:
        """Return the bytes of PyTorch's pools in a whole step: forward, backward and the optimizer's step."""
        return max(self.resident.nbytes + summary.pools, self.resident.optimizer_peak)

    def row(self, level: str, summary: StepSummary, limit: int) -> LevelRow:
        """Return the row of a step in the plan's table of levels."""
        reserved = self.setup.reserved(self.held(summary))
        peak = self.resident.nbytes + summary.peak
        return LevelRow(level, peak, summary.seconds, reserved, max(0, reserved - limit))

    def within(self, limit: int) -> Plan:
        """Make the plan for a limit in bytes."""
        step, resident = self.step, self.resident
        uniform = [candidate for candidate in self.candidates if not candidate.is_estimate]
        available = self.setup.available(limit) - resident.nbytes
        chosen = search.best(self.candidates, available, self.exact_pools)
        if chosen is not None and chosen.is_estimate:  # compare with uniform levels by compiled times
            plainer = search.best(uniform, available)
            if plainer is not None and plainer.summary.seconds <= step.summary_of(self.exact(chosen)).seconds:
                chosen = plainer
        if chosen is None:
            least = resident.optimizer_peak - resident.nbytes  # saving more would only cost time
            groups = (self.candidates, uniform)
            lowest = (min(group, key=lambda c: max(c.summary.pools, least)) for group in groups)
            chosen = min(lowest, key=lambda candidate: max(self.exact_pools(candidate), least))
        compiled = self.exact(chosen)
        summary = step.summary_of(compiled)
        row = self.row("chosen", summary, limit)
        plainest = step.by_level.get(OFF) or next(iter(step.by_level.values()))
        summaries = {level: candidate.summary for candidate in uniform for level in candidate.levels.values()}
        if not summaries:
            summaries["eager mode" if self.setup.compiled == "none" else step.base] = summary
        plainest_name = "checkpoint" if self.captured.has_checkpoints else OFF
        if OFF in summaries:
            summaries[plainest_name] = summaries.pop(OFF)
        for kind, wrapped in self.with_checkpoints.items():
            summaries[kind] = step.summary_of(wrapped)
        levels = [level for level in ("eager mode", *LEVELS, *CHECKPOINTS) if level in summaries]
        rows = tuple(self.row(level, summaries[level], limit) for level in levels)
        rivals = [row for row in rows if row.level in self.with_checkpoints]
        return Plan(
            title=self.title,
            gpu=self.gpu.name,
            limit=limit,
            fits=row.fits,
            reserved_bytes=row.reserved,
            held_bytes=self.held(summary),
            peak_bytes=max(row.peak, resident.optimizer_peak),
            step_peak=row.peak,
            optimizer_peak=resident.optimizer_peak,
            parameters=resident.parameters,
            gradients=resident.gradients,
            optimizer_state=resident.state,
            saved=summary.saved,
            transient=summary.peak - summary.saved,
            seconds=summary.seconds,
            off_seconds=step.summary_of(plainest).seconds,
            policy=self.policy(chosen),
            baseline=plainest_name,
            choices={mlp: level for unit, level in chosen.levels.items() for mlp in step.mlps.get(unit, ())},
            levels=rows,
            missing=row.missing,
            help=(*self.advice, *self.help(summary, rivals, limit)),
            setup=self.setup,
            offloaded=self.offloaded(compiled),
            curve=tuple(resident.nbytes + point for point in step.points(compiled)),
            off_curve=tuple(resident.nbytes + point for point in step.points(plainest)),
            _planner=self,
            _snapshot=functools.partial(snapshot_of, compiled.timeline, self.captured.unread, resident),
        )

    def offloaded(self, compiled: SegmentedStep) -> Offloaded | None:
        """Return the bytes and costs of a compiled step's copies; None if it has no copies."""
        copies, link = compiled.schedule.copies, self.step.link
        if not copies or link is None:
            return None
        slower = replace(self.step, link=replace(link, bandwidth=0.8 * link.bandwidth)).summary_of(compiled).seconds
        sizes = [copy.nbytes for copy in copies[: len(copies) // 2]]  # the others copy back
        waiting = compiled.schedule.waiting(copies, link.bandwidth)
        return Offloaded(link.bandwidth, sum(sizes), host_bytes(sizes), waiting, slower)

    def help(self, chosen: StepSummary, with_checkpoints: Sequence[LevelRow], limit: int) -> Iterator[str]:
        """Yield advice to make the step fit, or cheaper.

        Args:
            chosen: the step at the chosen levels.
            with_checkpoints: rows of the model with checkpoints.
            limit: bytes.
        """
        resident, available = self.resident, self.setup.available(limit)
        if limit > self.gpu.total_memory:
            yield f"{size(limit)} are more than an {self.gpu.name} has: {size(self.gpu.total_memory)}."
        if self.setup.compiled == "none":
            yield "Nothing is compiled, so there is no level to choose."
        elif not self.step.mlps:
            yield "No MLP is fused, so there is no level to choose."
        if resident.optimizer_peak > available and resident.optimizer_peak - resident.transient <= available:
            beside = f"{size(resident.transient)} beside its state"
            yield f"The optimizer's step allocates {beside}; with fused=True (--optimizer adamw-fused) it does not."
        expandable = replace(self, setup=replace(self.setup, expandable_segments=True))
        if self.row("", chosen, limit).missing and expandable.row("", chosen, limit).fits:
            yield "With PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits (plan: --expandable-segments)."
        if resident.nbytes + chosen.pools <= available:
            return
        for row in with_checkpoints:
            if row.peak < resident.nbytes + chosen.peak:
                verdict = f"{size(row.missing)} are missing then, too" if row.missing else "fits"
                yield (
                    f"torch.utils.checkpoint around each layer ({row.level}): a peak of {size(row.peak)}, and "
                    f"{row.seconds / chosen.seconds:.2f} times as long as the chosen levels; {verdict}."
                )
        if resident.optimizer_peak > available:  # independent of forward and backward
            alone = f"The optimizer's step takes {size(resident.optimizer_peak)} by itself"
            yield f"{alone}, however few tokens there are: shards, another optimizer, or fewer parameters."
        checkpoints = "" if with_checkpoints or self.captured.has_checkpoints else ", checkpoints"
        yield f"Otherwise use fewer tokens{checkpoints}, or FSDP2 over more GPUs (dp=, --dp)."
