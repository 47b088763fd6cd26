"""``plan``: its arguments, the timeline assembled from a step's layers, the chosen levels, and the printed text."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pickle
import random
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import MLP, Net, Stack, raises
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.cuda import _memory_viz
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import torch_fused_ops as tfo
import torch_fused_ops.planner.step as step_module
from torch_fused_ops.benchmarks import models
from torch_fused_ops.planner import max_batch, processes, report, search
from torch_fused_ops.planner.fsdp import FullyShard, Group
from torch_fused_ops.planner.model import (
    OTHER,
    CapturedModel,
    captured_model,
    cross_entropy,
    layers_of,
    loss_of,
    weights_as,
)
from torch_fused_ops.planner.pieces import CHECKPOINTS, checkpointed, divided, signature
from torch_fused_ops.planner.plan import LevelRow
from torch_fused_ops.planner.setup import ACCEPTED, GPUS, Setup, bytes_of
from torch_fused_ops.planner.static_memory import OPTIMIZERS, Resident, check_shards, optimizer_memory, resident_tensors
from torch_fused_ops.planner.step import PlacedSegment, Segment, SegmentedStep, Step, cut, segmented_step
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports import snapshot
from torch_fused_ops.reports.text import size
from torch_fused_ops.virtual_gpu import H100, gpus, roofline
from torch_fused_ops.virtual_gpu.timeline import Event, Pool, Timeline

MiB = 2**20
LEVELS = ("free", "fp8", "input")
SMALL = models.Config(layers=8, width=256, hidden=1024, heads=4, context=128, vocabulary=256, kv_heads=2)


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_sizes_are_parsed() -> None:
    sizes = {
        "72GiB": 72 << 30,
        "800MiB": 800 * MiB,
        "1.5 GiB": 3 << 29,
        "80GB": 80 * 10**9,
        "1048576": MiB,
        12345: 12345,
    }
    assert {capacity: bytes_of(capacity) for capacity in sizes} == sizes
    for capacity in ("", "72", "72 gigs", "GiB", "-1GiB", "0MiB", "1e9", 0, -1, True, 1.5, None):
        raises(ValueError, r"capacity=.* is not accepted: it must be a size", bytes_of, capacity)


def test_described_gpus_and_optimizers_are_accepted() -> None:
    assert tuple(gpus.GPUS) == GPUS and all(map(roofline.estimated_rates, gpus.GPUS.values()))
    assert gpus.by_name("rtx 5090") is gpus.RTX5090
    assert {*OPTIMIZERS, "adamw-fused"} == set(ACCEPTED["optimizer"])


def test_shapes_are_static_after_other_sizes_were_compiled() -> None:
    """By default, Dynamo makes the number of tokens symbolic at the second size."""
    model = Net(lambda s, x: loss(s.mlp(x)), mlp=MLP(8, 32)).to("meta")
    for length in (16, 24):
        x = torch.empty(2, length, 8, device="meta")
        torch.compile(model, backend="eager")(x)
        (graph,) = captured_model(model, (x,), {}).graphs
        values = [node.meta.get("example_value") for node in graph.gm.graph.nodes]
        assert all(type(size) is int for value in values if isinstance(value, torch.Tensor) for size in value.shape)


def test_functions_without_gradients_are_rejected() -> None:
    raises(TypeError, "model=3 is not callable", tfo.plan, 3, capacity="1GiB")
    for compiled in ("model", "none"):
        with pytest.raises(ValueError, match="nothing in it needs a gradient"):
            tfo.plan(torch.relu, torch.empty(4, 4), capacity="1GiB", compiled=compiled)


def test_optimizer_memory_is_that_of_its_step() -> None:
    parameters = [torch.empty(1024, 512, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    adamw, sgd, none = (optimizer_memory(name, parameters) for name in ("adamw", "sgd", "none"))
    assert adamw == (2 * 3 * MiB, 3 * MiB)  # two events; the second event's square roots
    assert sgd == none == (0, 0)


class Unpicklable(Exception):
    """An error that pickle writes but cannot read, such as an error of Inductor."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)


def fail(why: str, code: int) -> None:
    raise Unpicklable(why, code)


def test_rows_are_compiled_in_processes_unless_other_threads_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BYTES", 1)
    monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(processes.threading, "enumerate", lambda: [threading.current_thread()])
    numbers = list(processes.results_of([lambda i=i: (i, os.getpid()) for i in range(4)]))  # type: ignore[misc]
    assert [i for i, _ in numbers] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid in numbers}
    raises(ZeroDivisionError, "by zero", list, processes.results_of([bool, bool, lambda: 1 // 0]))
    raises(Unpicklable, "why", list, processes.results_of([bool, bool, functools.partial(fail, "why", 3)]))
    monkeypatch.setattr(processes.threading, "enumerate", lambda: [threading.current_thread(), threading.Thread()])
    assert {pid for pid in processes.results_of([os.getpid] * 3)} == {os.getpid()}


# ---- curves and the choice, on random segments -----------------------------------------------------------------------


def random_step(units: int, seed: int, equal: bool, tiled: tuple[float, float] = (0.1, 1.3)) -> Step:
    """Return a step with random bytes in each unit. Each level saves less and takes longer than the previous level.

    ``tiled``: saved bytes and time of "tiled", relative to "free".
    """
    rng = random.Random(seed)
    names = [f"layers.{i}" for i in range(units)]
    sizes = {unit: [rng.randint(50, 100), rng.randint(20, 60)] for unit in names}
    if equal:
        sizes = dict.fromkeys(names, sizes[names[0]])
    parts = {}
    for level, (saved_share, slower) in {
        "off": (1.5, 0.99),
        "free": (1.0, 1.0),
        "fp8": (0.6, 1.01),
        "input": (0.2, 1.2),
        "tiled": tiled,
    }.items():
        forward, backward = {}, {}
        for unit, (saved, transient) in sizes.items():
            net = 10 + int(saved_share * saved)
            forward[unit] = Segment((net + transient, net), net, slower * (saved + 1))
            recomputed = saved - int(saved_share * saved) if level in ("input", "tiled") else 0
            backward[unit] = Segment((recomputed + transient,), 3 - net, 2 * slower * (saved + 1))
        ends = Segment((5,), 5, 1.0), Segment((40,), 20, 1.0), Segment((30,), -20, 1.0), Segment((2,), -5, 1.0)
        parts[level] = SegmentedStep(100, pieces_in_order(forward, backward, *ends))
    return Step({name: (f"{name}.mlp",) for name in names}, parts)


def pieces_in_order(
    forward: dict[str, Segment], backward: dict[str, Segment], *ends: Segment
) -> tuple[PlacedSegment, ...]:
    """Return a step's segments. ``ends`` are the segments before and after forward's units, then backward's units."""
    pieces: list[PlacedSegment] = [("forward", "", ends[0]), *(("forward", *piece) for piece in forward.items())]
    pieces += [("forward", "", ends[1]), ("backward", "", ends[2])]
    pieces += [("backward", unit, backward[unit]) for unit in reversed(backward)]
    return (*pieces, ("backward", "", ends[3]))


def test_modules_outside_layers_have_the_common_level() -> None:
    step = random_step(6, 0, equal=False)
    for level in ("input", "off", "free"):
        assert step.default(dict.fromkeys(step.mlps, level)) == level
    assert step.default({"layers.0": "input"}) == "free"


def events_of(graph: str, *units: str, live: Sequence[int]) -> tuple[Event, ...]:
    return tuple(Event(graph, "", x + 1, x, 0, 0, 0.0, (unit,)) for unit, x in zip(units, live, strict=True))


def fake_captured_model(*units: str, names: Sequence[str] = ()) -> Any:
    return types.SimpleNamespace(
        units=units,
        layers={unit: unit for unit in units},
        unit_of=lambda path: path if path in units else "",
        parameter=lambda graph, number: names[number],
        unread=0,
    )


def test_modules_map_to_layers() -> None:
    layers = {
        "model.layers.3.mlp.up": "model.layers.3",
        "model.layers.3": "model.layers.3",
        "model.norm": "model.norm",
        "encoder.norm.inner.weight": "encoder.norm",
        "mlp.0": "mlp",
        "mlp.1": "mlp",
        "": OTHER,
    }
    assert layers_of(layers) == layers and layers_of(["0"]) == {"0": OTHER}


@pytest.mark.parametrize("backward", ["cba", "acb", "cab"])
def test_segments_in_any_order_join_to_the_timeline(backward: str) -> None:
    """Backward of Gemma 3 begins with a call of its first layer."""
    live = random.Random(0).choices(range(100), k=12)
    events = events_of("forward", "", "a", "b", "b", "c", "", live=live[:6])
    events += events_of("backward", "", *backward, "a", "", live=live[6:])
    timeline = Timeline(events, 3, 40, 5)
    step = Step({}, {"free": cut(timeline, fake_captured_model("a", "b", "c"), lambda call: 1.0)})
    summary = step.summary_at({})
    assert (summary.peak, summary.saved, summary.end, summary.seconds) == (timeline.peak, 40, 5, 12.0)
    assert step.points(step.by_level["free"])[1:-1] == [event.live for event in events]


def test_calls_that_run_early_do_not_begin_a_layer() -> None:
    """Every layer of GPT-J has calls that depend on inputs alone. Inductor runs these first."""
    ahead, layers = events_of("forward", *"abc", live=[1, 2, 3]), [13, 14, 15, 25, 26, 27, 37, 38, 39]
    events = ahead + events_of("forward", *"aaabbbccc", live=layers)
    events += events_of("backward", *"cba", live=[30, 20, 10])
    parts = cut(Timeline(events, 0, 39, 10), fake_captured_model("a", "b", "c"), lambda call: 0.0)
    assert [parts.segments["forward", unit].net for unit in "abc"] == [15, 12, 12]


# ---- checkpoints -----------------------------------------------------------------------------------------------------

TWO_LAYERS = replace(SMALL, layers=2, width=64, hidden=256, kv_heads=0)


def made(name: str, kind: str = "") -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a model on the meta device and its arguments. ``kind``: of the checkpoints around its layers; "": none."""
    with torch.device("meta"):
        if name == "MLPs":
            model: nn.Module = Stack([MLP(64, 256) for _ in range(2)], residual=True, end=loss).bfloat16()
            args: tuple[Tensor, ...] = (torch.empty(512, 64, dtype=torch.bfloat16),)
        else:
            model = getattr(models, name)(TWO_LAYERS).bfloat16()
            args = (torch.zeros(4, 128, dtype=torch.long),) * 2
    (layers,) = (module for module in model.children() if isinstance(module, nn.ModuleList))
    context_fn = CHECKPOINTS[kind] if kind else None
    for i, layer in enumerate(layers if kind else ()):
        layers[i] = checkpoint_wrapper(layer, **({"context_fn": context_fn} if context_fn else {}))
    return model, args


CHECKPOINTED = [("GPT", "checkpoint"), ("Llama", "checkpoint, attention saved"), ("MLPs", "checkpoint")]


# A checkpoint around x, as in MLPs, changes the order of inputs.
@pytest.mark.parametrize(("name", "kind"), [pytest.param(*CHECKPOINTED[0], marks=pytest.mark.slow), CHECKPOINTED[1]])
def test_checkpoint_rows_compile_the_graph_of_a_checkpointed_model(name: str, kind: str) -> None:
    (model, args), real = made(name), captured_model(*made(name, kind), {})
    with checkpointed(model, real.units, CHECKPOINTS[kind]):
        wrapped = captured_model(model, args, {})
    plain = captured_model(model, args, {})
    assert [signature(graph.gm) for graph in wrapped.graphs] == [signature(graph.gm) for graph in real.graphs]
    assert (
        (wrapped.units, wrapped.mlps) == (real.units, real.mlps) and real.has_checkpoints and not plain.has_checkpoints
    )
    assert real.policy_at("fp8+attention") == FusionPolicy(memory="fp8", attention="input", checkpoints="replace")
    assert real.policy_at("off") == plain.policy_at("off") == FusionPolicy(memory="off")
    (first, second), levels = real.mlps.values(), dict.fromkeys(real.units[:1], "input")
    memory = {first[0]: "input", second[0]: "free"}  # the second has a level of its own, which replaces its checkpoint
    assert real.policy_of(levels) == FusionPolicy(memory=memory, checkpoints="replace")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), CHECKPOINTED)
def test_checkpoint_rows_equal_plans_of_checkpointed_models(name: str, kind: str) -> None:
    settings: dict[str, Any] = {"capacity": "1GiB", "gpu": "H100", "levels": ["input"]}
    models_and_args = (made(name), made(name, kind))
    plain, real = (tfo.plan(model, *args, **settings) for model, args in models_and_args)
    row = next(row for row in plain.levels if row.level == kind)
    checkpoint, seconds = real.levels[-1], pytest.approx(row.seconds)  # sums in another order differ in the last digit
    assert replace(row, seconds=seconds) == replace(checkpoint, level=kind) and checkpoint.level == "checkpoint"
    assert real.off_seconds == seconds and any('checkpoints="replace"' in line for line in real.help)
    (at_input,) = (row for row in plain.levels if row.level == "input")
    assert abs(real.levels[0].peak - at_input.peak) <= 0.01 * at_input.peak and real.levels[0].level == "input"


class Masked(nn.Module):
    """Attention with a mask that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_checkpoints_do_not_copy_masks_for_each_head() -> None:
    x, mask = torch.empty(1, 1024, 64, device="meta"), torch.empty(1, 1, 1024, 1024, device="meta", dtype=torch.bool)
    model = Net(lambda s, x, mask: s.layer(x, mask).mean(), layer=checkpoint_wrapper(Masked())).to("meta")
    timeline = segmented_step(captured_model(model, (x, mask), {}), H100, FusionPolicy(memory="off")).timeline
    assert timeline.peak < 2.5 * 4 * 1024 * 1024  # the mask as bool and as float32; four heads take 16 MiB


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_choice_is_within_2_percent_of_the_best(seed: int, equal: bool) -> None:
    step = random_step(7, seed, equal)
    candidates = search.candidates(step, LEVELS)
    greedy = [search.Candidate(levels, step.summary_at(levels)) for levels in search.greedy(step, LEVELS)]
    greedy.sort(key=lambda candidate: candidate.summary.seconds)
    summaries = [
        step.summary_at(dict(zip(step.mlps, chosen, strict=True))) for chosen in itertools.product(LEVELS, repeat=7)
    ]
    low, high = min(summary.peak for summary in summaries), max(summary.peak for summary in summaries)
    for limit in range(low, high, max(1, (high - low) // 12)):
        fastest = min(summary.seconds for summary in summaries if summary.peak <= limit)
        choice = search.best(candidates, limit)
        assert choice is not None and choice.summary.seconds <= 1.02 * fastest, limit
        greedy_choice = search.best(greedy, limit)
        assert limit == low or (greedy_choice is not None and greedy_choice.summary.seconds <= 1.02 * fastest), limit


@pytest.mark.parametrize("short", [0, 3, 10, 1000])
def test_chosen_mixed_levels_were_compiled(short: int) -> None:
    """Compiled peaks of mixed levels exceed the estimates by ``short`` bytes. At most two mixtures are compiled."""
    candidates = search.candidates(random_step(7, 1, equal=True), LEVELS)
    peaks = [candidate.summary.peak for candidate in candidates]
    compiled: list[search.Candidate] = []

    def peak(candidate: search.Candidate) -> int:
        compiled.extend([candidate] * candidate.is_mixed)
        return candidate.summary.peak + short * candidate.is_mixed

    for limit in range(min(peaks), max(peaks), 7):
        compiled.clear()
        choice = search.best(candidates, limit, peak)
        compiled_peaks = [peak + short * candidate.is_mixed for peak, candidate in zip(peaks, candidates, strict=True)]
        fits = (candidate for peak, candidate in zip(compiled_peaks, candidates, strict=True) if peak <= limit)
        expected = next(fits, None)
        assert choice is expected and len(compiled) <= 1 + (short > 0)


def test_mixed_levels_are_skipped_after_several_misses() -> None:
    candidates = search.candidates(random_step(7, 1, equal=True), LEVELS)
    limit, compiled = sorted(candidate.summary.peak for candidate in candidates)[len(candidates) // 2], []

    def peak(candidate: search.Candidate) -> int:
        compiled.extend([candidate] * candidate.is_mixed)
        return limit + 1 if candidate.is_mixed else candidate.summary.peak

    choice = search.best(candidates, limit, peak)
    assert choice is not None and not choice.is_mixed and 0 < len(compiled) <= search.MISSES


@pytest.mark.parametrize(
    ("keeps", "slower", "offered"),
    [
        (0.2, 1.2, False),  # as "input"
        (0.2, 1.2 * (1 - search.ALIKE / 2), False),
        (0.2, 1.2 * (1 - 2 * search.ALIKE), True),
        (0.1, 1.3, True),
        (0.2, 1.3, False),
    ],
)
def test_levels_without_an_advantage_are_not_mixed(keeps: float, slower: float, offered: bool) -> None:
    step = random_step(4, 0, equal=False, tiled=(keeps, slower))
    assert search.useful(step, (*LEVELS, "tiled")) == [*LEVELS, *["tiled"] * offered]
    candidates = search.candidates(step, (*LEVELS, "tiled"))
    tiled_candidates = [candidate for candidate in candidates if "tiled" in candidate.levels.values()]
    # If "tiled" is not offered, it is listed, but never chosen.
    assert offered or (candidates[-1:] == tiled_candidates and not tiled_candidates[0].is_mixed)
    best = search.best(candidates, min(candidate.summary.peak for candidate in candidates))
    assert best is not None and ("tiled" in best.levels.values()) == offered


def test_levels_become_a_policy() -> None:
    mlps = {"a.0": ("a.0.mlp",), "a.1": ("a.1.mlp", "a.1.other")}
    model = CapturedModel((), {}, tuple(mlps), mlps, {}, {}, 0)
    assert model.policy_of({"a.0": "off", "a.1": "off"}) == FusionPolicy(memory="off")
    assert model.policy_of({"a.1": "input"}) == FusionPolicy(memory={"a.1.mlp": "input", "a.1.other": "input"})
    uniform = dict.fromkeys(mlps, "fp8+attention")
    assert model.policy_of(uniform) == FusionPolicy(memory="fp8", attention="input")
    mixed = FusionPolicy(memory={"a.0.mlp": "fp8"}, attention={"a.0.*": "input"})
    assert model.policy_of({"a.0": "fp8+attention"}) == mixed


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_shards_are_padded_pieces_of_dimension_0() -> None:
    """Buffers are not sharded."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 10) for _ in range(2))
    model.layers[1].bias.requires_grad_(False)
    model.head = nn.Linear(3, 5, dtype=torch.bfloat16)
    model.register_buffer("table", torch.zeros(7))

    def unit_of(path: str) -> str:
        return path if path.startswith("layers.") else ""

    resident_bytes = Resident.of(resident_tensors(model, unit_of), Setup(dp=4))
    weight, bias, head = 4 * 3 * 4, 4 * 3, 2 * (2 * 3 + 2)
    assert resident_bytes.shards is not None and resident_bytes.shards.groups == {
        "layers.0": Group(weight + bias, weight + bias),
        "layers.1": Group(weight + bias, weight),
        "": Group(head, head),
    }
    assert (resident_bytes.parameters, resident_bytes.gradients) == (
        2 * (weight + bias) + head + 28,
        2 * weight + bias + head,
    )
    assert resident_bytes.state == 2 * resident_bytes.gradients
    assert resident_bytes.shards.gathered("layers.1") == 4 * (weight + bias)
    assert Resident.of(resident_tensors(model, unit_of), Setup()).parameters == 2 * 200 + 2 * 20 + 28


def test_shards_equal_a_hand_calculation() -> None:
    """Count FSDP2's live bytes on two GPUs. The two layers have 8 and 6 bytes, the root has 4."""
    forward = {"a": Segment((5, 9), 3), "b": Segment((7,), 2)}
    backward = {"b": Segment((11,), 4, 0.0, 6), "a": Segment((1,), 5, 0.0, 8)}
    ends = Segment((1,), 1), (Segment((0,), 0), Segment((2,), 4)), Segment((3,), 2, 0.0, 4)
    parts = SegmentedStep(10, pieces_in_order(forward, dict(reversed(backward.items())), ends[0], *ends[1], ends[2]))
    groups = {"a": Group(4, 4), "b": Group(3, 3), "": Group(2, 2)}
    step = Step({}, {"free": parts}, FullyShard(2, groups))
    root, a, b = 4, 8, 6
    points = step.points(parts)
    assert points == [
        10,
        *(10 + root + root, 11 + root + root, 11 + root + root),  # the root's copy; its flat buffer
        *(11 + root + root + a + a, 16 + root + a + a, 20 + root + a + a, 14 + root + a + a),
        *(14 + root + a + b + b, 21 + root + b + b, 16 + root + b + b),
        *(16 + root + b, 16 + root + b, 16 + root + b),  # the last layer's flat buffer, to the end of forward
        *(16 + root + b, 18 + root + b, 20 + root + b),  # prefetched
        *(20 + root + b + b, 31 + root + b + a, 24 + root + a + b),  # a is prefetched; b's gradients, and their copy
        *(21 + root + a + a + b, 22 + root + a + b, 26 + root + a),  # 3 = 24 - 6 + 3: shards of b's gradients
        *(22 + root + a, 25 + root + a, 24 + root),  # the same for a; after backward for the root
        22,
    ]
    summary = step.summary_at({})
    assert (summary.saved, summary.peak, summary.end) == (16 + root, max(points), 22)


def test_gradients_count_for_the_layer_that_allocates_them() -> None:
    """The compiler may allocate a gradient in a later layer. The root's gradients count at the end of the step."""
    calls = [*(("forward", unit) for unit in "ab"), *(("backward", unit) for unit in ("", "b", "a", ""))]
    events = tuple(Event(graph, "", 0, 0, 0, 0, 0.0, (unit,)) for graph, unit in calls)
    names = ["a.weight", "b.weight", "b.bias", "head"]
    gradients = {(0, 0): (4, 1), (0, 1): (0, 10), (0, 2): (4, 100), (0, 3): (2, 1000)}
    parts = cut(Timeline(events, 0, 0, 0, gradients), fake_captured_model("a", "b", names=names), lambda call: 0.0)
    gradients_by_unit = {
        unit: segment.gradients for graph, unit, segment in parts.pieces if graph == "backward" and unit
    }
    assert gradients_by_unit == {"b": 10, "a": 101} and parts.pieces[-1][2].gradients == 1000
    assert not any(segment.gradients for _, unit, segment in parts.pieces[:-1] if not unit)


# ---- pieces, losses and pools ----------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Counts the live bytes of the storages that real operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.most = 0

    def add(self, tensor: Tensor, counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known[storage._cdata] = storage.nbytes() * counted
            weakref.finalize(storage, self.known.pop, storage._cdata)
            self.most = max(self.most, sum(self.known.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result


class Classifier(nn.Module):
    """Layers and a head; forward returns logits."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(32, 128) for _ in range(layers))
        self.head = nn.Linear(32, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def divided_timeline(model: nn.Module, x: Tensor, compiled: str, memory: str = "free", **settings: Any) -> Timeline:
    captured = captured_model(model, (x,), {}, cross_entropy)
    return segmented_step(divided(captured, H100, compiled, **settings), H100, FusionPolicy(memory=memory)).timeline


@pytest.mark.covering(1)
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_eager_timeline_equals_live_bytes(keep_logits: bool, checkpoints: bool) -> None:
    """Both agree to the byte, whether logits are deleted before backward or referenced until the step ends."""
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    if checkpoints:
        model.layers[1].forward = functools.partial(checkpoint, model.layers[1].forward, use_reentrant=False)
    timeline = divided_timeline(model, x, "none", keep_logits=keep_logits)
    counted = Counted()
    for tensor in (x, *model.parameters()):
        counted.add(tensor, counted=tensor is x)
    with counted:
        logits = model(x)
        loss = cross_entropy(logits)
        if not keep_logits:
            del logits
        between = sum(counted.known.values())
        loss.backward()
    assert (timeline.entry, timeline.between, timeline.peak) == (x.nbytes, between, counted.most)
    assert timeline.end == sum(counted.known.values())


def test_equal_layers_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    original = step_module.on_paper
    monkeypatch.setattr(step_module, "on_paper", lambda *args: compiled.append(args) or original(*args))
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    captured = divided(captured_model(model, (x,), {}, cross_entropy), H100, "layers")
    assert captured.pieces == ("layers.0", "", "layers.1", "", "layers.2", "", "(loss)")
    assert captured.eager == {1, 3, 5, 6}
    parts, layers = segmented_step(captured, H100, FusionPolicy()), [f"layers.{i}" for i in range(3)]
    assert len(compiled) == 2 and len(parts.timeline.gradients) == 13  # the first layer's input needs no gradient
    assert [unit for graph, unit, _ in parts.pieces if graph == "forward"] == ["", *layers, "", "(loss)"]
    assert [unit for graph, unit, _ in parts.pieces if graph == "backward"] == ["(loss)", "", *layers[::-1], ""]
    assert sum(segment.gradients for *_, segment in parts.pieces) == sum(p.nbytes for p in model.parameters())
    assert parts.trained == {name for name, _ in model.named_parameters()}


def test_weights_of_pieces_are_parameters() -> None:
    """At "input" backward multiplies by the weights themselves. It would need copies of weights that are arguments."""
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    free, low = (divided_timeline(model, x, "layers", memory).between for memory in ("free", "input"))
    hidden, bias = 256 * 128 * 2, 128 * 2
    assert free - low == 3 * (hidden - bias)


@pytest.mark.slow
def test_compiled_loss_does_not_copy_the_logits() -> None:
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    eager, compiled = (divided_timeline(model, x, "layers", loss=loss) for loss in ("eager", "compiled"))
    logits = 256 * 1000 * 2
    assert compiled.peak < 3 * logits and 6 * logits < eager.peak < 7 * logits
    assert loss_of(torch.compile(cross_entropy)) == (cross_entropy, "compiled")
    assert loss_of(cross_entropy) == (cross_entropy, "eager") and loss_of(None) == (None, "")
    raises(ValueError, "loss='lazy' is not known; accepted: eager, compiled", loss_of, "lazy")


def test_deleted_logits_leave_a_hole() -> None:
    """The unit is the bf16 logits' size. At most 6 units are alive, float32 copies included, but the pool holds 7."""
    pool = Pool()
    for key, units in ((1, 1), (2, 2), (3, 2), (2, 0), (1, 0), (4, 2), (5, 2)):
        if units:
            pool.allocate(key, units)
        else:
            pool.free(key)
    assert (pool.most, pool.held) == (6, 7)
    pool.free(4)
    assert pool.pieces[0] == (3, None)
    log = ((0, 1, 1), (5, 2, 2), (5, 3, 2), (6, 2, -2), (6, 1, -1), (7, 4, 2), (8, 5, 2), (9, 3, -2), (9, 6, 100))
    assert Timeline((), 0, 0, 0, {}, log).hole(5, 8) == 1


def test_weights_are_restored() -> None:
    model = nn.Linear(4, 4)
    model.tied = model.weight
    before = dict(model.named_parameters(remove_duplicate=False))
    with weights_as(model, torch.bfloat16):
        assert model.tied is model.weight and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def test_mixed_precision_has_three_sizes_per_parameter() -> None:
    """A shard has 4 bytes per element, a gathered copy 2, a reduced gradient 4. AdamW's state is float32."""
    model = nn.Linear(6, 8, bias=False).bfloat16()
    sharded = Resident.of(resident_tensors(model, lambda path: ""), Setup(dp=2, mixed_precision=True))
    assert sharded.shards is not None and sharded.shards.groups == {"": Group(48, 96)}
    assert (sharded.parameters, sharded.gradients, sharded.state) == (96, 96, 192)
    one_gpu = Resident.of(resident_tensors(model, lambda path: ""), Setup(master_weights="float32"))
    assert (one_gpu.parameters, one_gpu.gradients, one_gpu.state, one_gpu.shards) == (192, 192, 384, None)


def test_ddp_buckets_and_accumulated_gradients_are_resident() -> None:
    tensors = resident_tensors(nn.Linear(6, 8, bias=False), lambda path: "")
    plain, ddp, twice = (Resident.of(tensors, s) for s in (Setup(), Setup(dp=2, parallel="ddp"), Setup(accumulate=2)))
    assert (ddp.buckets, ddp.shards) == (192, None) and ddp.nbytes == plain.nbytes + 192
    assert twice.nbytes == plain.nbytes + 192 and twice.optimizer_peak == plain.optimizer_peak
    fused = Resident.of(tensors, Setup("adamw-fused"))
    assert fused.state == plain.state and fused.transient == 0 < plain.transient


def test_accumulated_gradients_are_freed_when_added() -> None:
    ends = Segment((1,), 1), (Segment((0,), 0), Segment((2,), 4)), Segment((3,), 2, 0.0, 4)
    forward, backward = {"a": Segment((5,), 3)}, {"a": Segment((1,), 5, 0.0, 8)}
    parts = SegmentedStep(10, pieces_in_order(forward, backward, ends[0], *ends[1], ends[2]))
    never, at_layer_end, at_step_end = (Step({}, {}, accumulates=how).points(parts) for how in ("", "layer", "step"))
    assert [b - a for a, b in zip(at_layer_end, at_step_end, strict=True)] == [0] * 6 + [8, 0]
    assert never[-1] - at_step_end[-1] == 12


def test_settings_that_are_unknown_or_contradict_others_are_rejected() -> None:
    """``test_cli.py`` has each setting's message."""
    unknown = "gpu='RTX9' is not known; accepted: A100, H100, H200, B200, "
    raises(ValueError, unknown, tfo.plan, nn.Linear(2, 2), torch.empty(1, 2), capacity="1GiB", gpu="RTX9")
    raises(ValueError, "dp=True is not accepted: it must be a number of GPUs, 1 or more", Setup, dp=True)
    for setting in ({"mixed_precision": True}, {"root": "apart", "dp": 2, "parallel": "ddp"}, {"reshard": "never"}):
        raises(ValueError, "is not accepted: it is a setting of FSDP2, for more than one GPU", Setup, **setting)
    contradiction = {"mixed_precision": True, "dp": 2, "master_weights": "float32"}
    raises(ValueError, "master_weights='float32' is not accepted with mixed precision", Setup, **contradiction)


@pytest.mark.slow
def test_loss_outside_the_compiled_model_is_planned() -> None:
    model, x = Classifier().bfloat16().to("meta"), torch.empty(256, 32, dtype=torch.bfloat16, device="meta")
    settings: dict[str, Any] = {"capacity": "1GiB", "gpu": "H100", "levels": ["free"], "compiled": "layers"}
    eager = tfo.plan(model, x, loss="eager", **settings)
    whole = tfo.plan(model, x, loss="eager", **settings | {"compiled": "model"})
    assert all({row.level for row in plan.levels} == {"off", "free", "checkpoint"} for plan in (eager, whole))
    assert eager.reserved_bytes == math.ceil(1.2 * eager.held_bytes) and eager.held_bytes > eager.peak_bytes
    assert "reserved by PyTorch, about" in str(eager) and "Not modeled: tensor" in str(eager)
    limit = math.ceil(1.1 * eager.held_bytes)
    tight = eager.within(limit)
    assert not tight.fits and any("expandable_segments:True it fits" in line for line in tight.help)
    spread = tfo.plan(model, x, loss="eager", expandable_segments=True, dp=2, mixed_precision=True, **settings)
    assert spread.within(limit).setup.sharded and spread.parameters == 2 * eager.parameters // 2
    under = tfo.plan(model, x, loss="eager", master_weights="float32", **settings)
    assert under.parameters == 2 * eager.parameters and under.optimizer_state == 2 * eager.optimizer_state
    assert under.saved > eager.saved  # the residual stream is float32


class Causal(nn.Module):
    """Mimics transformers' causal language models: forward returns the loss and the logits."""

    def __init__(self, results: str) -> None:
        super().__init__()
        self.results, self.classifier = results, Classifier(layers=1)

    def forward(self, x: Tensor) -> Any:
        logits = self.classifier(x)
        results = {"both": (logits,), "detached": (logits.detach(),), "loss": ()}
        return cross_entropy(logits), *results[self.results]


def test_logits_beside_the_loss_are_noted() -> None:
    notes = tfo.explain(Causal("both").bfloat16(), torch.randn(64, 32, dtype=torch.bfloat16)).notes
    assert notes == ("125.0 KiB are returned beside the loss, and backward allocates gradients of zeros as large: "
                     "return only the loss, or detach the other results",)  # fmt: skip


@pytest.mark.slow
def test_loss_in_chunks_is_planned_by_pytorchs_setting() -> None:
    x = torch.empty(8192, 32, dtype=torch.bfloat16, device="meta")
    settings: dict[str, Any] = {"capacity": "1GiB", "gpu": "H100", "levels": ["free"]}
    whole, beside = (tfo.plan(Causal(kind).bfloat16().to("meta"), x, **settings) for kind in ("loss", "both"))
    with inductor_config.patch({"auto_chunker.enable": True, "auto_chunker.amplify_ratio_threshold": 4}):
        chunked = tfo.plan(Causal("loss").bfloat16().to("meta"), x, **settings)
    assert chunked.step_peak < 0.8 * whole.step_peak
    assert [
        line for line in beside.help if "are returned beside the loss" in line
    ] and beside.step_peak > whole.step_peak


@pytest.mark.slow
def test_attention_is_a_level_of_its_own() -> None:
    with torch.device("meta"):
        model, tokens = models.Llama(SMALL).bfloat16(), torch.zeros(16, 128, dtype=torch.long)
    levels = ["input", "input+attention"]
    plan = tfo.plan(model, tokens, tokens, capacity="10GiB", gpu="H100", optimizer="none", levels=levels)
    rows = {row.level: row for row in plan.levels}
    assert rows["input+attention"].peak < rows["input"].peak < rows["off"].peak
    strict = plan.within(rows["input+attention"].reserved)
    assert strict.policy == FusionPolicy(memory="input", attention="input") and strict.fits


# ---- the largest size ------------------------------------------------------------------------------------------------


def sampler(
    points: Callable[[int], Sequence[int]], bound: int = 2**40
) -> tuple[Callable[[int], int | None], list[int]]:
    """Return a function that computes the peak of a step with ``points`` bytes at each call, and its sampled sizes."""
    sizes: list[int] = []

    def peak(size: int) -> int | None:
        sizes.append(size)
        return max(points(size)) if size <= bound else None

    return peak, sizes


def test_the_largest_of_all_levels_is_in_the_headline() -> None:
    def most(**sizes: int) -> str:
        rows = tuple(max_batch.LargestRow(level, size, 0, 0.0) for level, size in sizes.items())
        return report.most(max_batch.Largest("batch", 1, 1, rows))

    assert most(off=180, free=247, input=318, tiled=318) == 'batch: at most 318, every MLP at "input", 180 at "off"'
    assert most(off=8, free=8) == 'batch: at most 8, every MLP at "off"'
    assert most(off=0, free=2) == 'batch: at most 2, every MLP at "free", 0 at "off"'
    assert most(off=0, free=0) == "batch: none fits"


@pytest.mark.parametrize("first", [1, 7, 100, 5000])
@pytest.mark.parametrize(
    ("points", "limit"),
    [
        (lambda n: (10 + 7 * n, 400 + 3 * n), 1000),  # affine; the first call has the peak from n = 98 on
        (lambda n: (10 + 7 * n, 400 + 3 * n), 500),
        (lambda n: (7 * n,), 6),  # a size of 1 does not fit
        (lambda n: (10 + 7 * (-(-n // 8) * 8),), 1000),  # rounded up
        (lambda n: (3 * n,) if n < 50 else (4 * n, 2), 350),  # different calls from n = 50 on
        (lambda n: (n * n,), 10_000),
    ],
)
def test_the_largest_size_fits_and_the_next_does_not(points: Any, limit: int, first: int) -> None:
    peak, sizes = sampler(points)
    expected = max((n for n in range(1, 1000) if max(points(n)) <= limit), default=0)
    assert max_batch.bisected(peak, limit, first, 1) == expected
    assert {expected, expected + 1} - {0} <= set(sizes) and len(sizes) == len(set(sizes)) <= 20


def test_an_affine_peak_needs_four_samples() -> None:
    peak, sizes = sampler(lambda n: (10**9 + 7 * n, 10**8 + 2 * 10**6 * n, 3))
    assert max_batch.bisected(peak, 10**10, 1000, 1) == 4950 and len(sizes) == 4


def test_sizes_are_multiples_of_the_step() -> None:
    peak, sizes = sampler(lambda n: (n,))
    assert max_batch.bisected(peak, 1000, 384, 128) == 896
    assert all(size % 128 == 0 for size in sizes)
    assert [max_batch.step_of(n, "tokens") for n in (4096, 96, 7)] == [128, 32, 1]
    assert max_batch.step_of(32, "batch") == 1


@pytest.mark.parametrize("limit", [10**6, 1500])
def test_largest_size_ends_where_the_model_fails(limit: int) -> None:
    peak, sizes = sampler(lambda n: (n,), bound=1024)
    assert max_batch.bisected(peak, limit, 128, 128) == 1024 and len(sizes) <= 16


def test_arguments_are_resized() -> None:
    x, mask, token = torch.randn(2, 8, 4, requires_grad=True), torch.zeros(8, 8), torch.tensor([[3], [4]])
    (a, b, c), named = max_batch.resized(((x, mask, token), {"n": 2}), "batch", 5)
    assert a.shape == (5, 8, 4) and a.requires_grad and torch.equal(a[2:4], x) and b is mask
    assert torch.equal(c, torch.tensor([[3], [4], [3], [4], [3]])) and named == {"n": 2}
    (a, b, c), _ = max_batch.resized(((x, mask, token), {}), "tokens", 3)
    assert a.shape == (2, 3, 4) and b.shape == (8, 3) and c is token
    with pytest.raises(ValueError, match=r"maximum='tokens' is not accepted: none of .* has a dimension 1"):
        max_batch.size_of((torch.zeros(3), 4), "tokens")


# ---- real models -----------------------------------------------------------------------------------------------------


def loss(x: Tensor) -> Tensor:
    return x.float().square().mean()


def on_meta(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    x = torch.empty(8192, 256, device="meta", dtype=torch.bfloat16)
    return Stack(layers, residual=True, end=loss).bfloat16().to("meta"), x


@functools.cache
def two_mlps() -> tfo.Plan:
    model, x = on_meta(MLP(256, 1024), MLP(256, 1024))
    return tfo.plan(model, x, capacity="1GiB", gpu="H100", levels=["free", "input", "tiled"])


def test_a_planned_snapshot_has_the_planned_peak_and_tensors(inductor: Any, tmp_path: Path) -> None:
    plan, path = two_mlps(), tmp_path / "plan.pickle"
    plan.to_snapshot(path)
    data, read = pickle.loads(path.read_bytes()), snapshot.read_snapshot(path)
    kinds = read.kinds()
    assert read.live == plan.step_peak == max(plan.curve)
    assert (kinds["parameters"], kinds["optimizer state"]) == (plan.parameters, plan.optimizer_state)
    allocated = [event for event in data["device_traces"][0] if event["action"] == "alloc"]
    assert sum(event["size"] for event in allocated if event["category"] == "gradient") == plan.gradients
    assert {"layers.0.up", "layers.1.down"} <= {frame["name"] for event in allocated for frame in event["frames"]}
    # PyTorch's viewer agrees on the totals, and accepts the file.
    device = snapshot.Device(0, data["device_traces"][0], data["segments"])
    assert f"total_allocated: {_memory_viz.Bytes(device.live_bytes()[-1])}" in _memory_viz.segsum(data)
    assert max(device.live_bytes()) == max(plan.step_peak, plan.optimizer_peak)
    assert all(draw(data) for draw in (_memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot))
    # A plan compared with its own snapshot differs in the pools' sizes only.
    (tmp_path / "plan.json").write_text(plan.to_json())
    compared = snapshot.read_snapshot(path, plan=tmp_path / "plan.json").compared
    assert [name for name, measured, planned in compared if measured != planned] == ["reserved"]
    assert not [row for row in snapshot.read_snapshot(path, plan=path).compared if row[1] != row[2]]
    with pytest.raises(ValueError, match=r"accumulate=2: a planned snapshot"):
        replace(plan, setup=replace(plan.setup, accumulate=2)).to_snapshot(path)


def test_plan_chooses_the_cheapest_level_that_fits(inductor: Any) -> None:
    rich = two_mlps()
    rows = {row.level: row for row in rich.levels}
    assert rich.fits and rich.policy == FusionPolicy(memory="off") and rich.help == ()
    assert rich.within("200GiB").help == ("200.0 GiB are more than an NVIDIA H100 80GB HBM3 has: 80.0 GiB.",)
    assert rich.choices == {"layers.0": "off", "layers.1": "off"}
    assert rows["input"].peak < rows["free"].peak < rows["off"].peak == rich.peak_bytes
    assert rows["off"].seconds < rows["free"].seconds < rows["input"].seconds
    assert {"fp8"}.isdisjoint(rows)
    weights = 2 * 2 * (2 * 256 * 1024 + 256 + 1024)
    assert (rich.parameters, rich.gradients, rich.optimizer_state) == (weights, weights, 2 * weights)
    free = rich.within(rows["free"].reserved)
    assert free.fits and free.policy == FusionPolicy(memory="free") and free.seconds > rich.seconds
    assert free.step_peak == rows["free"].peak


def test_missing_bytes_and_advice_are_printed() -> None:
    rich = two_mlps()
    lowest = rich.within("1MiB").reserved_bytes
    poor = rich.within(lowest - MiB)
    assert not poor.fits and poor.missing == MiB and poor.reserved_bytes == lowest
    assert poor.missing == min(row.missing for row in poor.levels if row.level != "checkpoint")
    (row,) = [row for row in poor.levels if row.level == "checkpoint"]
    assert row.seconds > rich.seconds and row.peak < rich.step_peak
    columns = ("every layer at", "peak, forward and backward", "reserved, about", "least time", "MiB for each ms")
    assert "  ".join((*columns, f"in {size(poor.limit)}")) in re.sub("  +", "  ", str(poor))
    assert poor.help[-1] == "Otherwise use fewer tokens, or FSDP2 over more GPUs (dp=, --dp)."
    planner, lowest_levels = rich._planner, dict.fromkeys(rich._planner.step.mlps, "input")
    summary, lower = planner.step.summary_at(lowest_levels), replace(row, peak=MiB, seconds=1.0, missing=2 * MiB)
    (said,) = [line for line in planner.help(summary, [row, lower], MiB) if "torch.utils.checkpoint" in line]
    assert said.startswith("torch.utils.checkpoint around each layer (checkpoint): a peak of 1.00 MiB, and ")
    assert said.endswith("; 2.00 MiB are missing then, too.") and row.peak >= summary.peak + planner.resident.nbytes
    assert "does not fit: 1.00 MiB are missing" in str(poor)
    assert lowest <= min(row.reserved for row in poor.levels if row.level != "checkpoint")
    least = rich.within("1MiB")
    assert [row.missing for row in least.levels] == [row.reserved - MiB for row in least.levels]
    alone = f"The optimizer's step takes {size(least.optimizer_peak)} by itself, however few tokens there are"
    assert any(line.startswith(alone) for line in least.help) and not any("by itself" in line for line in poor.help)


def test_rows_miss_at_least_the_bytes_of_the_optimizer_step() -> None:
    rich = two_mlps()
    rows = (LevelRow("off", 9 * MiB, 1.0, 9 * MiB, 8 * MiB), LevelRow("free", 3 * MiB, 1.0, 6 * MiB, 4 * MiB))
    poor = replace(rich, limit=MiB, optimizer_peak=5 * MiB, levels=rows)
    assert [row[-1] for row in report.level_rows(poor)] == [
        "in 1.00 MiB", "8.00 MiB missing", "4.00 MiB missing for the optimizer's step"
    ]  # fmt: skip
    lacking = rich.within(rich.setup.reserved(rich.optimizer_peak) - 1)
    assert lacking.missing == min(row.missing for row in lacking.levels if row.level != "checkpoint")


def test_plan_is_written_as_json_and_html(tmp_path: Path) -> None:
    written = json.loads(two_mlps().to_json())
    assert written["memory"] == "off" and written["peak_bytes"] == two_mlps().peak_bytes and written["fits"] is True
    two_mlps().to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<polyline") == 2 and "Stack in 1.00 GiB of an NVIDIA H100" in page
    assert 'class="limit"' not in page and "above the chart" in page and ">32.0 MiB</text>" in page
    near = two_mlps().within(2 * two_mlps().peak_bytes - MiB)
    assert 'class="limit"' in report.page(near) and "above the chart" not in report.page(near)


def test_models_without_mlps_are_planned() -> None:
    model, x = on_meta(nn.Linear(256, 256))
    plan = tfo.plan(model, x, capacity="1GiB", gpu="H100", optimizer="none")
    assert plan.fits and plan.choices == {} and plan.policy == FusionPolicy() and plan.optimizer_state == 0
    assert plan.help == ("No MLP is fused, so there is no level to choose.",)
    assert [row.level for row in plan.levels] == ["free"]
    eager = tfo.plan(nn.Linear(256, 256).to(x), x, capacity="1GiB", gpu="H100", optimizer="none", compiled="none")
    assert [row.level for row in eager.levels] == ["eager mode"] and "FusionPolicy" not in str(eager)
    assert eager.help[0].startswith("The model returns no scalar")


def test_an_mlp_in_the_model_itself_is_not_a_layer() -> None:
    """Its pieces would separate the head from the loss, and miss the gradient of returned logits."""
    up, down, head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 16)

    def forward(s: Any, x: Tensor) -> Any:
        logits = s.head(x + s.down(F.gelu(s.up(x))))
        return cross_entropy(logits), logits

    captured = captured_model(Net(forward, up=up, down=down, head=head), (torch.randn(4, 8),), {})
    assert list(captured.mlps) == [OTHER] and divided(captured, H100, "layers", "").pieces == ("",)


def test_models_that_cannot_run_say_why() -> None:
    linear = nn.Linear(8, 8)

    def branches(s: Any, x: Tensor) -> Tensor:
        y = s.linear(x)
        return y.mean() if y.sum().item() > 0 else y.sum()

    model = Net(branches, linear=linear).to("meta")
    message = "the graph breaks at: .*item.*; the code after it cannot run on meta tensors: .*. Pass real tensors"
    raises(ValueError, message, captured_model, model, (torch.empty(4, 8, device="meta"),), {})
    table = Net(lambda s, x: (x + s.table(torch.arange(x.shape[0]).unsqueeze(0))).mean(), table=nn.Embedding(4, 8))
    raises(ValueError, "table.weight has 4 rows, and the model reads positions up to 6", captured_model, table,
           (torch.randn(7, 8),), {})  # fmt: skip
    assert len(captured_model(table, (torch.randn(4, 8),), {}).graphs) == 1


def positions() -> nn.Module:
    """Return a model with a linear layer over at most 2048 positions."""
    table, linear = nn.Parameter(torch.zeros(2048, 256)), nn.Linear(256, 256)
    model = Net(lambda s, x: loss(s.linear(x + s.table[: x.shape[1]])), table=table, linear=linear)
    return model.bfloat16().to("meta")


@pytest.mark.slow
def test_largest_batch_fits_and_the_next_does_not(inductor: Any) -> None:
    model, x = positions(), torch.empty(4, 512, 256, device="meta", dtype=torch.bfloat16)
    settings: dict[str, Any] = {"gpu": "H100", "optimizer": "none"}
    plan = tfo.plan(model, x, capacity="64MiB", maximum="batch", **settings)
    assert plan.largest is not None and (plan.largest.dimension, plan.largest.given) == ("batch", 4)
    (row,) = plan.largest.rows
    available = plan.setup.available(64 * MiB)
    assert row.level == "free" and row.size > 4 and row.peak <= available
    one_more = tfo.plan(model, x.new_empty(row.size + 1, 512, 256), capacity="64MiB", **settings)
    assert not one_more.fits and one_more.peak_bytes > available
    assert plan.within("1GiB").largest is None


@pytest.mark.slow
def test_longest_sequence_ends_where_the_model_fails(tmp_path: Path, inductor: Any) -> None:
    model, x = positions(), torch.empty(1, 512, 256, device="meta", dtype=torch.bfloat16)
    plan = tfo.plan(model, x, capacity="1GiB", gpu="H100", optimizer="none", maximum="tokens")
    assert plan.largest is not None
    (row,) = plan.largest.rows
    assert (row.size, plan.largest.step) == (2048, 128)
    assert str(plan).splitlines()[0].endswith(': fits; tokens: at most 2048, every MLP at "free"')
    assert "the model does not run with tokens 2176: RuntimeError: Attempting to broadcast" in str(plan)
    assert json.loads(plan.to_json())["largest"]["rows"][0]["size"] == 2048
    plan.to_html(tmp_path / "plan.html")
    assert "<h2>Tokens, at most</h2>" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    small = tfo.plan(model, x, capacity="1MiB", gpu="H100", maximum="tokens").largest  # parameters alone exceed 1 MiB
    assert small is not None and small.rows[0].size == 0


def recompiled_peak(plan: tfo.Plan) -> int:
    """Compile the captured model again with the plan's policy, and return its peak."""
    planner = plan._planner
    parts = step_module.segmented_step(planner.captured, H100, plan.policy)
    return planner.resident.nbytes + planner.step.summary_of(parts).peak


@pytest.mark.slow
def test_recompiled_plan_meets_the_limit() -> None:
    with torch.device("meta"):
        model, tokens = models.GPT(SMALL).bfloat16(), torch.zeros(16, 128, dtype=torch.long)
    plan = tfo.plan(model, tokens, tokens, capacity="10GiB", gpu="H100", optimizer="none")
    rows = {row.level: row.reserved for row in plan.levels}
    limit = int(rows["input"] + 0.4 * (rows["free"] - rows["input"]))
    tight = plan.within(limit)
    assert tight.fits and tight.reserved_bytes <= limit and len(set(tight.choices.values())) > 1
    assert recompiled_peak(tight) == tight.step_peak == max(tight.curve)


# ---- kinds of models -------------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """Parameters that backward does not reach: unused, under no_grad, detached. One parameter has two names.

    Backward reaches parameters that are added in place, assigned to a slice, or read under ``vmap``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.silent, self.detached, self.mapped = (
            nn.Linear(8, 8, bias=False) for _ in range(5)
        )
        self.tied = self.used
        self.added, self.assigned = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.silent(x)
        x = torch.vmap(self.mapped)(x)
        x[1:].add_(self.added)
        x[0] = self.assigned
        return (self.tied(x) + self.detached(x).detach()).sum()


def trained(captured: CapturedModel) -> frozenset[str]:
    """Return the parameters that get a gradient in the step, compiled or in eager mode."""
    return segmented_step(captured, H100, FusionPolicy()).trained


def test_parameters_that_get_no_gradient_are_not_trained() -> None:
    model = Partly()
    captured = captured_model(model, (torch.randn(4, 8),), {})
    tensors = resident_tensors(model, captured.unit_of, trained(captured).__contains__)
    model(torch.randn(4, 8)).backward()
    assert {tensor.name: tensor.trained for tensor in tensors} == {
        name: p.grad is not None for name, p in model.named_parameters()
    }


class Student(nn.Module):
    """Registers the teacher if ``register``, otherwise puts it in a list. ``forward`` ignores the batch's labels."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8, bias=False)
        teacher = nn.Linear(8, 8).requires_grad_(False)
        self.teacher: Any = teacher if register else [teacher]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        teacher = self.teacher if isinstance(self.teacher, nn.Module) else self.teacher[0]
        return (self.net(batch["x"]) - teacher(batch["x"])).square().mean()


def resident(model: Callable[..., Any], *args: Any) -> tuple[Resident, int]:
    """Return the resident bytes of a step in eager mode, and the bytes alive before its first call."""
    captured = divided(captured_model(model, args, {}), H100, "none", loss="")
    parts = segmented_step(captured, H100, FusionPolicy())
    tensors = resident_tensors(model, captured.unit_of, parts.trained.__contains__, captured.unregistered)
    return Resident.of(tensors, Setup()), parts.entry


def test_every_parameter_that_a_graph_reads_is_counted() -> None:
    """Test a function, a bound method, a closure, an unregistered module, and two modules with the same path."""
    model, x = Student(register=True), torch.randn(4, 8)
    batch = {"x": x}
    expected = resident(model, batch)
    assert (expected[0].parameters, expected[0].gradients, expected[0].state) == (4 * 136, 256, 512)
    for call in (lambda batch: model(batch), model.forward, Student(register=False)):
        actual, entry = resident(call, batch)
        sizes = tuple((path.replace("teacher.0.", "teacher."), nbytes) for path, nbytes in actual.sizes)
        assert (replace(actual, sizes=sizes), entry) == expected  # an unregistered teacher is in a list
    other = nn.Linear(8, 8, bias=False)
    assert resident(lambda x: other(model.net(x)).sum(), x)[0].parameters == 512


def test_unregistered_trained_parameters_are_rejected_with_shards() -> None:
    model = Student(register=False)
    captured = captured_model(model, ({"x": torch.randn(4, 8)},), {})
    check_shards(model, 2, captured.unregistered)
    model.teacher[0].requires_grad_()
    words = "dp=2 is not accepted: the model does not register teacher.0.weight, so FSDP2 does not shard it"
    raises(ValueError, words, check_shards, model, 2, captured.unregistered)
    raises(ValueError, r"dp=8 is not accepted: model=.* is a function", check_shards, torch.relu, 8)
    model.net.weight.device_mesh = None  # as a DTensor has
    raises(ValueError, "the model is sharded already; plan the unsharded model", check_shards, model, 2)


def test_optimizer_peak_includes_the_batch() -> None:
    resident = Resident.of(resident_tensors(nn.Linear(8, 8), lambda path: ""), Setup())
    assert replace(resident, batch=100).optimizer_peak == resident.optimizer_peak + 100


def test_a_graph_break_inside_a_loop_is_named() -> None:
    def broken(s: Any, x: Tensor) -> Tensor:
        for layer in s.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x.sum()

    model = Net(broken, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)))
    words = r"captures no graph of it, as with a graph break inside a loop: \w+"
    raises(ValueError, words, captured_model, model, (torch.randn(4, 8),), {})


def halved(x: Tensor) -> Tensor:
    return x / 2


class Between(nn.Module):
    """A model with graph breaks. A computation runs between or after the graphs, or one graph runs twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mask = kind, torch.ones(8)
        self.layers = nn.ModuleList(MLP(8, 32) for _ in range(2))

    @torch.compiler.disable
    def outside(self, x: Tensor, kind: str) -> Tensor:
        return x.exp() if self.kind == kind else x

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("loop", "again"):
            for layer in self.layers:
                x = layer(x) if self.kind == "loop" else halved(x)
                torch._dynamo.graph_break()
            return x
        x = self.outside(self.layers[0](x), "between")
        return self.outside(self.layers[1](x * self.mask), "after")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("between", "graph 2 reads a tensor computed outside graphs: Unsupported: "),
        ("after", "it returns a tensor computed outside graphs: Unsupported: "),
        ("again", "graph 1 runs several times: Unsupported: "),
    ],
)
def test_models_that_are_not_captured_whole_are_rejected(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"torch.compile does not capture all of it: {message}"):
        captured_model(Between(kind), (torch.randn(4, 8),), {})


@pytest.mark.parametrize("kind", ["nothing", "loop"])
def test_parameter_paths_begin_at_the_model_in_every_graph(kind: str) -> None:
    """After a graph break Dynamo captures a layer's own forward, in which parameter paths begin at the layer."""
    model = Between(kind)
    captured = captured_model(model, (torch.randn(4, 8),), {})
    assert len(captured.graphs) == 2
    in_eager_mode = divided(captured, H100, "none", loss="")
    assert trained(in_eager_mode) == {name for name, _ in model.named_parameters()}


def test_list_index_on_meta_is_captured() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(8, 8), torch.empty(4, 6, 8)
    captured = captured_model(lambda x: layer(x[:, [0, -1]]).sum(), (x,), {})
    assert len(captured.graphs) == 1


def test_arguments_that_no_graph_reads_are_alive_too() -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.zeros(100)}
    (_, without), (_, entry) = resident(Student(True), {"x": batch["x"]}), resident(Student(True), batch)
    assert entry == without + 400
    batch["labels"] = batch["x"][1:]  # shares x's storage
    assert resident(Student(True), batch)[1] == without
