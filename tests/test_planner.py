"""``plan``: sizes, the curve of a step put together from its layers, the choice of levels, and what it says."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import MLP, Net, Stack, SwiGLU, raises
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import torch_fused_ops as tfo
import torch_fused_ops.planner.step as step_module
from torch_fused_ops.benchmarks import models
from torch_fused_ops.planner import max_batch, report, search
from torch_fused_ops.planner.fsdp import FullyShard, Group
from torch_fused_ops.planner.model import CapturedModel, captured_model, cross_entropy, loss_of, weights_as
from torch_fused_ops.planner.pieces import divided
from torch_fused_ops.planner.plan import LevelRow
from torch_fused_ops.planner.setup import ACCEPTED, GPUS, Setup, bytes_of
from torch_fused_ops.planner.static_memory import OPTIMIZERS, Resident, check_shards, optimizer_memory, resident_tensors
from torch_fused_ops.planner.step import Parts, Piece, Segment, Step, compiled_timeline, cut, policy_of
from torch_fused_ops.policy import FusionPolicy
from torch_fused_ops.reports.text import size
from torch_fused_ops.virtual_gpu import H100, gpus
from torch_fused_ops.virtual_gpu.timeline import Event, Pool, Timeline

MiB = 2**20
LEVELS = ("free", "fp8", "input")


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [
        ("72GiB", 72 * 2**30),
        ("800MiB", 800 * MiB),
        ("1.5 GiB", 3 * 2**29),
        ("80GB", 80 * 10**9),
        ("1048576", 2**20),
        (12345, 12345),
    ],
)
def test_sizes(memory: str | int, nbytes: int) -> None:
    assert bytes_of(memory) == nbytes


@pytest.mark.parametrize("memory", ["", "72", "72 gigs", "GiB", "-1GiB", "0MiB", "1e9", 0, -1, True, 1.5, None])
def test_what_is_no_size(memory: Any) -> None:
    raises(ValueError, r"memory=.* is not accepted: it must be a size", bytes_of, memory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "lots"}, "memory='lots' is not accepted"),
        ({"memory": "fp8"}, r"memory='fp8' is not accepted: .*; plan chooses the levels itself"),
        ({"gpu": "RTX9"}, "gpu='RTX9' is not known; accepted: A100, H100, H200, B200, MI300X"),
        ({"optimizer": "lion"}, "optimizer='lion' is not known; accepted: adamw, adamw-fused, sgd, none"),
        ({"maximum": "width"}, "maximum='width' is not known; accepted: batch, tokens"),
        ({"dp": 0}, "dp=0 is not accepted: it must be a number of GPUs, 1 or more"),
        ({"dp": 2.0}, "dp=2.0 is not accepted: it must be a number of GPUs"),
        ({"dp": True}, "dp=True is not accepted: it must be a number of GPUs"),
    ],
)
def test_what_is_not_known(arguments: dict[str, Any], message: str) -> None:
    raises(ValueError, message, tfo.plan, nn.Linear(2, 2), torch.empty(1, 2), **{"memory": "1GiB", **arguments})


def test_the_described_gpus_are_accepted() -> None:
    assert tuple(gpus.GPUS) == GPUS and set(OPTIMIZERS) == set(ACCEPTED["optimizer"])


def test_a_plan_is_static_whatever_sizes_were_seen() -> None:
    """Dynamo would take the tokens' number for dynamic the second time, and shapes for symbols."""
    with torch.device("meta"):
        model = models.Llama(models.Config(layers=1, width=64, hidden=128, heads=4, context=64, vocabulary=64))
    for length in (16, 24):
        tokens = torch.zeros(2, length, dtype=torch.long, device="meta")
        torch.compile(model, backend="eager")(tokens, tokens)
        (captured,) = captured_model(model, (tokens, tokens), {}).graphs
        values = [node.meta.get("example_value") for node in captured.graph.gm.graph.nodes]
        assert all(type(size) is int for value in values if isinstance(value, torch.Tensor) for size in value.shape)


def test_what_cannot_be_planned() -> None:
    raises(TypeError, "model=3 is not callable", tfo.plan, 3, memory="1GiB")
    raises(ValueError, "nothing in it needs a gradient", tfo.plan, torch.relu, torch.empty(4, 4), memory="1GiB")


def test_optimizers() -> None:
    parameters = [torch.empty(1024, 512, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    adamw, sgd, none = (optimizer_memory(name, parameters) for name in ("adamw", "sgd", "none"))
    assert adamw == (2 * 3 * MiB, 3 * MiB)  # two moments; the roots of one, all at once
    assert sgd == none == (0, 0)


# ---- curves and the choice, on made-up segments ----------------------------------------------------------------------


def made_up(units: int, seed: int, equal: bool, tiled: tuple[float, float] = (0.1, 1.3)) -> Step:
    """A step whose units keep and need what chance says; each level keeps less and takes longer than the one before.

    ``tiled``: the part of what "free" keeps that this level keeps, and how much longer it takes.
    """
    rng = random.Random(seed)
    names = [f"layers.{i}" for i in range(units)]
    sizes = {unit: [rng.randint(50, 100), rng.randint(20, 60)] for unit in names}
    if equal:
        sizes = dict.fromkeys(names, sizes[names[0]])
    parts = {}
    for level, (keeps, slower) in {
        "off": (1.5, 0.99),
        "free": (1.0, 1.0),
        "fp8": (0.6, 1.01),
        "input": (0.2, 1.2),
        "tiled": tiled,
    }.items():
        forward, backward = {}, {}
        for unit, (kept, transient) in sizes.items():
            net = 10 + int(keeps * kept)
            forward[unit] = Segment((net + transient, net), net, slower * (kept + 1))
            again = kept - int(keeps * kept) if level in ("input", "tiled") else 0
            backward[unit] = Segment((again + transient,), 3 - net, 2 * slower * (kept + 1))
        ends = Segment((5,), 5, 1.0), Segment((40,), 20, 1.0), Segment((30,), -20, 1.0), Segment((2,), -5, 1.0)
        parts[level] = Parts(100, in_order(forward, backward, *ends))
    return Step(tuple(names), {name: (f"{name}.mlp",) for name in names}, parts)


def in_order(forward: dict[str, Segment], backward: dict[str, Segment], *ends: Segment) -> tuple[Piece, ...]:
    """The segments of a step: what stands before and behind forward's units, and backward's, which come the other way
    round."""
    pieces: list[Piece] = [("forward", "", ends[0]), *(("forward", *each) for each in forward.items())]
    pieces += [("forward", "", ends[1]), ("backward", "", ends[2])]
    pieces += [("backward", unit, backward[unit]) for unit in reversed(backward)]
    return (*pieces, ("backward", "", ends[3]))


def test_what_is_in_no_layer() -> None:
    """Its level: the one that all layers have, else "free"."""
    step = made_up(6, 0, equal=False)
    for level in ("input", "off", "free"):
        assert step.default(dict.fromkeys(step.mlps, level)) == level
    assert step.default({"layers.0": "input"}) == "free"


def moments_of(graph: str, *units: str, live: Sequence[int]) -> tuple[Event, ...]:
    return tuple(Event(graph, "", x + 1, x, 0, 0, 0.0, (unit,)) for unit, x in zip(units, live, strict=True))


def a_model(*units: str, names: Sequence[str] = ()) -> Any:
    return types.SimpleNamespace(
        units=units,
        layers={unit: unit for unit in units},
        unit_of=lambda path: path if path in units else "",
        parameter=lambda graph, number: names[number],
        unread=0,
    )


@pytest.mark.parametrize("backward", ["cba", "acb", "cab"])
def test_layers_in_any_order_are_the_steps_own_curve(backward: str) -> None:
    """Backward of Gemma 3 runs something of its first layer first; the curve is that of the order in which it ran."""
    live = random.Random(0).choices(range(100), k=12)
    moments = moments_of("forward", "", "a", "b", "b", "c", "", live=live[:6])
    moments += moments_of("backward", "", *backward, "a", "", live=live[6:])
    timeline = Timeline(moments, 3, 40, 5)
    step = Step(("a", "b", "c"), {}, {"free": cut(timeline, a_model("a", "b", "c"), lambda call: 1.0)})
    curve = step.at({})
    assert (curve.peak, curve.saved, curve.end, curve.seconds) == (timeline.peak, 40, 5, 12.0)
    assert step.points({})[1:-1] == [moment.live for moment in moments]


def test_what_runs_ahead_of_a_layer_is_not_where_it_begins() -> None:
    """Something of every layer of GPT-J depends on inputs alone, and Inductor runs it first."""
    ahead, layers = moments_of("forward", *"abc", live=[1, 2, 3]), [13, 14, 15, 25, 26, 27, 37, 38, 39]
    moments = ahead + moments_of("forward", *"aaabbbccc", live=layers)
    moments += moments_of("backward", *"cba", live=[30, 20, 10])
    parts = cut(Timeline(moments, 0, 39, 10), a_model("a", "b", "c"), lambda call: 0.0)
    assert [parts.segments["forward", unit].net for unit in "abc"] == [15, 12, 12]


def test_a_curve_by_hand() -> None:
    step = made_up(2, 0, equal=False)
    (k0, t0), (k1, t1) = (
        (s.net - 10, s.points[0] - s.net) for s in (step.segment("forward", unit, "free") for unit in step.units)
    )
    curve = step.at({})
    assert curve.saved == 100 + 5 + (10 + k0) + (10 + k1) + 20
    lives = [
        105 + 10 + k0 + t0,
        115 + k0 + 10 + k1 + t1,
        curve.saved - 20 + 40,
        curve.saved + 30,
        curve.saved - 20 + t1,
    ]
    assert curve.peak == max(lives)
    assert curve.end == 100 + 2 * 3
    assert curve.seconds == pytest.approx(4 + 3 * (k0 + 1) + 3 * (k1 + 1))
    points = step.points({})
    assert max(points) == curve.peak and points[-1] == curve.end and points[0] == 100
    off = step.at({"layers.0": "off", "layers.1": "off"})
    assert off.saved > curve.saved and off.seconds < curve.seconds


def test_a_checkpoint_keeps_the_input_and_runs_again() -> None:
    step = made_up(6, 0, equal=True)
    forward = step.segment("forward", "layers.1", "free")
    kept = forward.net
    found = step.checkpointed(dict.fromkeys(step.units, 7))
    assert found.saved == step.at({}).saved - 6 * (kept - 7)
    assert found.end == step.at({}).end
    assert found.seconds == pytest.approx(step.at({}).seconds + 6 * forward.seconds)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_within_2_percent_of_the_best_of_all(seed: int, equal: bool) -> None:
    step = made_up(7, seed, equal)
    counted = search.candidates(step, LEVELS)
    greedy = [search.Candidate(one, step.at(one)) for one in search.greedy(step, LEVELS)]
    greedy.sort(key=lambda one: one.curve.seconds)
    every = [step.at(dict(zip(step.mlps, chosen, strict=True))) for chosen in itertools.product(LEVELS, repeat=7)]
    low, high = min(curve.peak for curve in every), max(curve.peak for curve in every)
    for limit in range(low, high, max(1, (high - low) // 12)):
        fastest = min(curve.seconds for curve in every if curve.peak <= limit)
        found = search.best(counted, limit)
        assert found is not None and found.curve.seconds <= 1.02 * fastest, limit
        steps = search.best(greedy, limit)
        assert limit == low or (steps is not None and steps.curve.seconds <= 1.02 * fastest), limit


@pytest.mark.covering(1)
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("units", [7, 40])
def test_more_memory_is_never_slower(units: int, equal: bool) -> None:
    every = search.candidates(made_up(units, 1, equal), LEVELS)
    peaks = sorted({one.curve.peak for one in every})
    chosen = [search.best(every, limit) for limit in peaks]
    seconds = [one.curve.seconds for one in chosen if one is not None]
    assert len(seconds) == len(peaks) and seconds == sorted(seconds, reverse=True)
    assert search.best(every, peaks[0] - 1) is None
    assert all(one is not None and one.curve.peak <= limit for one, limit in zip(chosen, peaks, strict=True))


@pytest.mark.parametrize("short", [0, 3, 10, 1000])
def test_what_fits_was_compiled(short: int) -> None:
    """With mixed levels the peak is so much above the curve: few are compiled, and what is chosen fits."""
    every = search.candidates(made_up(7, 1, equal=True), LEVELS)
    compiled: list[search.Candidate] = []

    def peak(one: search.Candidate) -> int:
        compiled.extend([one] * one.is_mixed)
        return one.curve.peak + short * one.is_mixed

    for limit in range(min(one.curve.peak for one in every), max(one.curve.peak for one in every), 7):
        compiled.clear()
        found = search.best(every, limit, peak)
        expected = next((one for one in every if one.curve.peak + short * one.is_mixed <= limit), None)
        assert found is expected and len(compiled) <= 1 + (short > 0)


def test_mixed_levels_are_given_up_after_a_few_that_do_not_fit() -> None:
    every = search.candidates(made_up(7, 1, equal=True), LEVELS)
    limit, compiled = sorted(one.curve.peak for one in every)[len(every) // 2], []

    def peak(one: search.Candidate) -> int:
        compiled.extend([one] * one.is_mixed)
        return limit + 1 if one.is_mixed else one.curve.peak

    found = search.best(every, limit, peak)
    assert found is not None and not found.is_mixed and 0 < len(compiled) <= search.MISSES


@pytest.mark.parametrize(
    ("keeps", "slower", "offered"),
    [
        (0.2, 1.2, False),  # what "input" is
        (0.2, 1.2 * (1 - search.ALIKE / 2), False),
        (0.2, 1.2 * (1 - 2 * search.ALIKE), True),
        (0.1, 1.3, True),
        (0.2, 1.3, False),
    ],
)
def test_a_level_that_saves_nothing_is_not_offered(keeps: float, slower: float, offered: bool) -> None:
    step = made_up(4, 0, equal=False, tiled=(keeps, slower))
    assert search.useful(step, (*LEVELS, "tiled")) == [*LEVELS, *["tiled"] * offered]
    every = search.candidates(step, (*LEVELS, "tiled"))
    with_it = [one for one in every if "tiled" in one.levels.values()]
    assert offered or (every[-1:] == with_it and not with_it[0].is_mixed)  # a row of the table, and never the best
    best = search.best(every, min(one.curve.peak for one in every))
    assert best is not None and ("tiled" in best.levels.values()) == offered


def test_lossless_leaves_fp8_out() -> None:
    assert search.levels_for(False, attention=False) == (*LEVELS, "tiled")
    assert search.levels_for(True, attention=False) == ("free", "input", "tiled")
    assert search.levels_for(False, True) == ("free", "fp8", "fp8+attention", "input", "input+attention", "tiled")
    assert search.levels_for(True, True) == ("free", "free+attention", "input", "input+attention", "tiled")


def test_the_policy_of_levels() -> None:
    mlps = {"a.0": ("a.0.mlp",), "a.1": ("a.1.mlp", "a.1.other")}
    assert policy_of(mlps, {"a.0": "off", "a.1": "off"}) == FusionPolicy(memory="off")
    assert policy_of(mlps, {"a.1": "input"}) == FusionPolicy(memory={"a.1.mlp": "input", "a.1.other": "input"})
    every = dict.fromkeys(mlps, "fp8+attention")
    assert policy_of(mlps, every) == FusionPolicy(memory="fp8", attention="input")
    some = FusionPolicy(memory={"a.0.mlp": "fp8"}, attention={"a.0.*": "input"})
    assert policy_of(mlps, {"a.0": "fp8+attention"}) == some


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_what_one_gpu_holds() -> None:
    """Equal pieces along dimension 0, padded, as ``torch.chunk`` cuts the first; buffers are whole."""
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(4, 10) for _ in range(2))
    model.layers[1].bias.requires_grad_(False)
    model.head = nn.Linear(3, 5, dtype=torch.bfloat16)
    model.register_buffer("table", torch.zeros(7))

    def unit_of(path: str) -> str:
        return path if path.startswith("layers.") else ""

    check_shards(model, unit_of, 4)
    found = Resident.of(resident_tensors(model, unit_of), Setup(dp=4))
    weight, bias, head = 4 * 3 * 4, 4 * 3, 2 * (2 * 3 + 2)
    assert found.shards is not None and found.shards.groups == {
        "layers.0": Group(*(weight + bias,) * 3),
        "layers.1": Group(weight + bias, weight, weight),
        "": Group(*(head,) * 3),
    }
    assert (found.parameters, found.gradients) == (2 * (weight + bias) + head + 28, 2 * weight + bias + head)
    assert (found.state, found.by_unit[""]) == (2 * found.gradients, (head + 28, head))
    assert found.shards.gathered("layers.1") == 4 * (weight + bias) and found.shards.reduced("layers.1") == 4 * weight
    layers = 3 * (weight + bias) + 3 * weight + 2 * bias  # each gathered twice; one frozen bias
    assert found.shards.sent == 3 * (layers + 2 * head)
    assert Resident.of(resident_tensors(model, unit_of), Setup()).parameters == 2 * 200 + 2 * 20 + 28


def test_what_cannot_be_sharded() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def refused(message: str) -> None:
        raises(ValueError, message, check_shards, model, lambda path: path, 8)

    check_shards(model, lambda path: path, 8)
    model.layers[0].bias.data = model.layers[0].bias.data.double()
    refused("dp=8 is not accepted: layers.0.bias is torch.float64, other parameters of layers.0 are torch.float32")
    model.layers[0].bias = model.layers[1].bias
    refused("dp=8 is not accepted: layers.1.bias is layers.0.bias, and FSDP2 does not shard a parameter in two layers")
    model.layers[0].bias = nn.Parameter(torch.tensor(0.0))
    refused("dp=8 is not accepted: layers.0.bias is a scalar")
    raises(ValueError, r"dp=8 is not accepted: model=.* is a function", check_shards, torch.relu, lambda path: path, 8)


def test_shards_by_hand() -> None:
    """Two layers of 8 and 6 bytes, the root's 4, over two GPUs; what is alive at each moment, as FSDP2 has it."""
    forward = {"a": Segment((5, 9), 3), "b": Segment((7,), 2)}
    backward = {"b": Segment((11,), 4, 0.0, 6), "a": Segment((1,), 5, 0.0, 8)}
    ends = Segment((1,), 1), (Segment((0,), 0), Segment((2,), 4)), Segment((3,), 2, 0.0, 4)
    parts = Parts(10, in_order(forward, dict(reversed(backward.items())), ends[0], *ends[1], ends[2]))
    groups = {"a": Group(4, 4, 4), "b": Group(3, 3, 3), "": Group(2, 2, 2)}
    step = Step(("a", "b"), {}, {"free": parts}, FullyShard(2, groups))
    root, a, b = 4, 8, 6
    assert step.points({}) == [
        10,
        *(10 + root + root, 11 + root + root, 11 + root + root),  # the root's copy; its flat buffer
        *(11 + root + root + a + a, 16 + root + a + a, 20 + root + a + a, 14 + root + a + a),
        *(14 + root + a + b + b, 21 + root + b + b, 16 + root + b + b),
        *(16 + root + b, 16 + root + b, 16 + root + b),  # the last layer's flat buffer, to the end of forward
        *(16 + root + b, 18 + root + b, 20 + root + b),  # prefetched
        *(20 + root + b + b, 31 + root + b + a, 24 + root + a + b),  # a is prefetched; b's gradients, and their copy
        *(21 + root + a + a + b, 22 + root + a + b, 26 + root + a),  # 3 = 24 - 6 + 3: shards of b's gradients
        *(22 + root + a, 25 + root + a, 24 + root),  # a's too; behind backward the root's
        22,
    ]
    curve = step.at({})
    assert (curve.saved, curve.peak, curve.end) == (16 + root, max(step.points({})), 22)


def test_gradients_are_whole_where_their_layer_ends_or_later() -> None:
    """What the compiler puts off counts for the layer in which it is allocated; the root's stays whole to the end."""
    calls = [*(("forward", unit) for unit in "ab"), *(("backward", unit) for unit in ("", "b", "a", ""))]
    moments = tuple(Event(graph, "", 0, 0, 0, 0, 0.0, (unit,)) for graph, unit in calls)
    names = ["a.weight", "b.weight", "b.bias", "head"]
    gradients = {(0, 0): (4, 1), (0, 1): (0, 10), (0, 2): (4, 100), (0, 3): (2, 1000)}
    parts = cut(Timeline(moments, 0, 0, 0, gradients), a_model("a", "b", names=names), lambda call: 0.0)
    whole = {unit: segment.gradients for graph, unit, segment in parts.pieces if graph == "backward" and unit}
    assert whole == {"b": 10, "a": 101} and parts.pieces[-1][2].gradients == 1000
    assert not any(segment.gradients for _, unit, segment in parts.pieces[:-1] if not unit)


# ---- pieces, losses and pools ----------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """The bytes of storages that real operators make, while they are alive."""

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
    """Three layers and a head; forward gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP(32, 128) for _ in range(3))
        self.head = nn.Linear(32, 1000, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def divided_timeline(model: nn.Module, x: Tensor, compiled: str, **settings: Any) -> Timeline:
    captured = captured_model(model, (x,), {}, cross_entropy)
    return compiled_timeline(divided(captured, H100, compiled, **settings), H100, FusionPolicy())[0]


@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_eager_step_is_that_of_a_counter(keep_logits: bool, checkpoints: bool) -> None:
    """The loss deletes the logits, or the training loop holds them: to the byte what a real step has alive."""
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    if checkpoints:
        model.layers[1].forward = functools.partial(checkpoint, model.layers[1].forward, use_reentrant=False)
    found = divided_timeline(model, x, "none", keep_logits=keep_logits)
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
    assert (found.entry, found.between, found.peak) == (x.nbytes, between, counted.most)
    assert found.end == sum(counted.known.values())


def test_a_piece_for_each_layer_and_one_compilation_for_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    original = step_module.on_paper
    monkeypatch.setattr(step_module, "on_paper", lambda *args: compiled.append(args) or original(*args))
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    captured = divided(captured_model(model, (x,), {}, cross_entropy), H100, "layers")
    assert captured.pieces == ("layers.0", "", "layers.1", "", "layers.2", "", "(loss)")
    assert captured.eager == {1, 3, 5, 6}
    timeline, _ = compiled_timeline(captured, H100, FusionPolicy())
    assert len(compiled) == 2 and len(timeline.gradients) == 13  # the first layer's input needs no gradient
    parts, layers = cut(timeline, captured, lambda call: 0.0), [f"layers.{i}" for i in range(3)]
    assert [unit for graph, unit, _ in parts.pieces if graph == "forward"] == ["", *layers, "", "(loss)"]
    assert [unit for graph, unit, _ in parts.pieces if graph == "backward"] == ["(loss)", "", *layers[::-1], ""]
    assert sum(segment.gradients for *_, segment in parts.pieces) == sum(p.nbytes for p in model.parameters())
    assert parts.trained == {name for name, _ in model.named_parameters()}


@pytest.mark.slow
def test_a_compiled_loss_makes_no_copy_of_the_logits() -> None:
    model, x = Classifier().bfloat16(), torch.randn(256, 32, dtype=torch.bfloat16)
    eager, compiled = (divided_timeline(model, x, "layers", loss=loss) for loss in ("eager", "compiled"))
    logits = 256 * 1000 * 2
    assert compiled.peak < 3 * logits and 6 * logits < eager.peak < 7 * logits
    assert loss_of(torch.compile(cross_entropy)) == (cross_entropy, "compiled")
    assert loss_of(cross_entropy) == (cross_entropy, "eager") and loss_of(None) == (None, "")
    raises(ValueError, "loss='lazy' is not known; accepted: eager, compiled", loss_of, "lazy")


def test_deleted_logits_leave_a_hole() -> None:
    """2 bytes a logit, float32 copies of 4: 6 live units of the logits at the most, and 7 held."""
    pool = Pool()
    for key, units in ((1, 1), (2, 2), (3, 2), (2, 0), (1, 0), (4, 2), (5, 2)):
        if units:
            pool.allocate(key, units)
        else:
            pool.free(key)
    assert (pool.most, pool.held) == (6, 7)
    pool.free(4)
    assert pool.pieces[0] == [3, None]
    log = ((0, 1, 1), (5, 2, 2), (5, 3, 2), (6, 2, -2), (6, 1, -1), (7, 4, 2), (8, 5, 2), (9, 3, -2), (9, 6, 100))
    assert Timeline((), 0, 0, 0, {}, log).hole(5, 8) == 1


def test_weights_are_replaced_and_put_back() -> None:
    model = nn.Linear(4, 4)
    model.tied = model.weight
    before = dict(model.named_parameters(remove_duplicate=False))
    with weights_as(model, torch.bfloat16):
        assert model.tied is model.weight and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def test_what_one_gpu_holds_in_mixed_precision() -> None:
    """4, 2 and 4 bytes a parameter: shard, gathered, reduced; AdamW's state is float32."""
    model = nn.Linear(6, 8, bias=False).bfloat16()
    found = Resident.of(resident_tensors(model, lambda path: ""), Setup(dp=2, mixed_precision=True))
    assert found.shards is not None and found.shards.groups == {"": Group(48, 96, 96)}
    assert (found.parameters, found.gradients, found.state) == (96, 96, 192)
    alone = Resident.of(resident_tensors(model, lambda path: ""), Setup(master_weights="float32"))
    assert (alone.parameters, alone.gradients, alone.state, alone.shards) == (192, 192, 384, None)


def test_buckets_and_gradients_that_exist() -> None:
    tensors = resident_tensors(nn.Linear(6, 8, bias=False), lambda path: "")
    plain, ddp, twice = (Resident.of(tensors, s) for s in (Setup(), Setup(dp=2, parallel="ddp"), Setup(accumulate=2)))
    assert (ddp.buckets, ddp.shards) == (192, None) and ddp.nbytes == plain.nbytes + 192
    assert twice.nbytes == plain.nbytes + 192 and twice.optimizer_peak == plain.optimizer_peak
    fused = Resident.of(tensors, Setup("adamw-fused"))
    assert fused.state == plain.state and fused.transient == 0 < plain.transient


def test_accumulated_gradients_are_freed_where_they_are_added() -> None:
    ends = Segment((1,), 1), (Segment((0,), 0), Segment((2,), 4)), Segment((3,), 2, 0.0, 4)
    forward, backward = {"a": Segment((5,), 3)}, {"a": Segment((1,), 5, 0.0, 8)}
    step = Step(("a",), {}, {"free": Parts(10, in_order(forward, backward, ends[0], *ends[1], ends[2]))})
    layer, whole = (replace(step, accumulates=how).points({}) for how in ("layer", "step"))
    assert [b - a for a, b in zip(layer, whole, strict=True)] == [0] * 6 + [8, 0]
    assert step.points({})[-1] - whole[-1] == 12


def test_settings_that_contradict_each_other() -> None:
    for one in ({"mixed_precision": True}, {"root": "apart", "dp": 2, "parallel": "ddp"}, {"reshard": "never"}):
        raises(ValueError, "is not accepted: it is a setting of FSDP, so dp must be above 1", Setup, **one)
    both = {"mixed_precision": True, "dp": 2, "master_weights": "float32"}
    raises(ValueError, "master_weights is not accepted with mixed_precision", Setup, **both)


@pytest.mark.slow
def test_plan_of_a_model_that_returns_logits() -> None:
    model, x = Classifier().bfloat16().to("meta"), torch.empty(256, 32, dtype=torch.bfloat16, device="meta")
    settings: dict[str, Any] = {"memory": "1GiB", "gpu": "H100", "levels": ["free"], "compiled": "layers"}
    eager = tfo.plan(model, x, loss="eager", **settings)
    assert {row.level for row in eager.levels} == {"off", "free", "checkpoint"}
    assert eager.reserved_bytes == math.ceil(1.2 * eager.held_bytes) and eager.held_bytes > eager.peak_bytes
    assert "reserved by PyTorch, about" in str(eager) and "Not modeled: tensor" in str(eager)
    limit = math.ceil(1.1 * eager.held_bytes)
    tight = eager.within(limit)
    assert not tight.fits and any("expandable_segments:True it fits" in line for line in tight.help)
    spread = tfo.plan(model, x, loss="eager", expandable_segments=True, dp=2, mixed_precision=True, **settings)
    assert spread.within(limit).setup.sharded and spread.parameters == 2 * eager.parameters // 2
    under = tfo.plan(model, x, loss="eager", master_weights="float32", **settings)
    assert under.parameters == 2 * eager.parameters and under.optimizer_state == 2 * eager.optimizer_state
    assert under.kept > eager.kept  # the residual stream is float32


# ---- the largest size ------------------------------------------------------------------------------------------------


def sampled(points: Callable[[int], Sequence[int]], bound: int = 2**40) -> tuple[Callable[[int], Any], list[int]]:
    """What is sampled of a step with these bytes at its calls, and the sizes that were asked for."""
    asked: list[int] = []

    def sample(size: int) -> max_batch.Sample | int:
        asked.append(size)
        return max_batch.Sample(size, points(size)) if size <= bound else bound

    return sample, asked


def test_the_largest_of_all_levels_is_in_the_headline() -> None:
    def most(**sizes: int) -> str:
        rows = tuple(max_batch.LargestRow(level, size, 0, 0.0, 0) for level, size in sizes.items())
        return report.most(max_batch.Largest("batch", 1, 1, rows))

    assert most(off=180, free=247, input=318, tiled=318) == 'batch: at most 318, every MLP at "input", 180 at "off"'
    assert most(off=8, free=8) == 'batch: at most 8, every MLP at "off"'
    assert most(off=0, free=2) == 'batch: at most 2, every MLP at "free", 0 at "off"'
    assert most(off=0, free=0) == "batch: none fits"


@pytest.mark.parametrize("first", [1, 7, 100, 5000])
@pytest.mark.parametrize(
    ("points", "limit"),
    [
        (lambda n: (10 + 7 * n, 400 + 3 * n), 1000),  # affine: the first call is the highest from 98 on
        (lambda n: (10 + 7 * n, 400 + 3 * n), 500),
        (lambda n: (7 * n,), 6),  # not even one fits
        (lambda n: (10 + 7 * (-(-n // 8) * 8),), 1000),  # rounded up
        (lambda n: (3 * n,) if n < 50 else (4 * n, 2), 350),  # other calls from 50 on
        (lambda n: (n * n,), 10_000),
    ],
)
def test_the_largest_size_fits_and_the_next_does_not(points: Any, limit: int, first: int) -> None:
    sample, asked = sampled(points)
    fits, over = max_batch.bisected(sample, limit, sample(first), 1)
    expected = max((n for n in range(1, 1000) if max(points(n)) <= limit), default=0)
    assert (fits.size if fits else 0) == expected and over is not None and over.size == expected + 1
    assert {expected, expected + 1} - {0} <= set(asked)


def test_affine_bytes_need_four_samples() -> None:
    sample, asked = sampled(lambda n: (10**9 + 7 * n, 10**8 + 2 * 10**6 * n, 3))
    fits, over = max_batch.bisected(sample, 10**10, sample(8), 1)
    assert fits is not None and over is not None and (fits.size, over.size) == (4950, 4951) and len(asked) == 4


def test_sizes_go_in_steps() -> None:
    sample, asked = sampled(lambda n: (n,))
    fits, over = max_batch.bisected(sample, 1000, sample(384), 128)
    assert fits is not None and over is not None and (fits.size, over.size) == (896, 1024)
    assert all(size % 128 == 0 for size in asked)
    assert [max_batch.step_of(n, "tokens") for n in (4096, 96, 7)] == [128, 32, 1]
    assert max_batch.step_of(32, "batch") == 1


def test_a_model_that_does_not_run_with_more() -> None:
    sample, _ = sampled(lambda n: (n,), bound=1024)
    fits, over = max_batch.bisected(sample, 10**6, sample(128), 128)
    assert fits is not None and fits.size == 1024 and over is None


def test_the_calls_that_two_sizes_share_say_where_the_third_is() -> None:
    a, b = (max_batch.Sample(n, (100 + n, 10 * n)) for n in (2, 4))
    assert max_batch.crossing(a, b, room=200) == 20.0
    flat = max_batch.Sample(4, (102, 20))
    assert max_batch.crossing(a, flat, room=200) == float("inf")


def test_arguments_of_another_size() -> None:
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
    return tfo.plan(model, x, memory="1GiB", gpu="H100", lossless=True)


def test_a_plan_takes_what_fits(inductor: Any) -> None:
    rich = two_mlps()
    rows = {row.level: row for row in rich.levels}
    assert rich.fits and rich.policy == FusionPolicy(memory="off") and rich.help == ()
    assert rich.choices == {"layers.0": "off", "layers.1": "off"}
    assert rows["input"].peak < rows["free"].peak < rows["off"].peak == rich.peak_bytes
    assert rows["off"].seconds < rows["free"].seconds < rows["input"].seconds
    assert {"fp8"}.isdisjoint(rows)
    weights = 2 * 2 * (2 * 256 * 1024 + 256 + 1024)
    assert (rich.parameters, rich.gradients, rich.optimizer_state) == (weights, weights, 2 * weights)
    assert sum(row.parameters for row in rich.layers) == weights
    assert sum(row.kept for row in rich.layers) == rich.kept
    assert sum(row.seconds for row in rich.layers) == pytest.approx(rich.seconds)
    free = rich.within(rows["free"].reserved)
    assert free.fits and free.policy == FusionPolicy(memory="free") and free.seconds > rich.seconds
    assert free.step_peak == rows["free"].peak


def test_where_nothing_fits_it_says_what_is_missing() -> None:
    rich = two_mlps()
    lowest = rich.within("1MiB").reserved_bytes
    poor = rich.within(lowest - MiB)
    assert not poor.fits and poor.missing == MiB and poor.reserved_bytes == lowest
    assert poor.missing == min(row.missing for row in poor.levels if row.level != "checkpoint")
    columns = ("every layer at", "peak, forward and backward", "reserved, about", "least time", "MiB for each ms")
    assert "  ".join((*columns, f"in {size(poor.limit)}")) in re.sub("  +", "  ", str(poor))
    assert any("torch.utils.checkpoint" in line or "(dp=" in line for line in poor.help)
    (said,) = [line for line in rich.within("1MiB").help if "torch.utils.checkpoint" in line]
    (row,) = [row for row in rich.within("1MiB").levels if row.level == "checkpoint"]
    assert said.endswith(f"; {size(row.missing)} are missing then, too.")
    assert "does not fit: 1.00 MiB are missing" in str(poor)
    assert lowest <= min(row.reserved for row in poor.levels if row.level != "checkpoint")
    least = rich.within("1MiB")
    assert [row.missing for row in least.levels] == [row.reserved - MiB for row in least.levels]
    alone = f"The optimizer's step takes {size(least.optimizer_peak)} by itself, however few tokens there are"
    assert any(line.startswith(alone) for line in least.help) and not any("by itself" in line for line in poor.help)
    assert least.help[-1].endswith("Besides them: fewer tokens.")


def test_rows_count_as_the_headline_does() -> None:
    """A level lacks what the optimizer's step lacks, where that is more."""
    rich = two_mlps()
    rows = (LevelRow("off", 9 * MiB, 1.0, 9 * MiB, 8 * MiB), LevelRow("free", 3 * MiB, 1.0, 6 * MiB, 4 * MiB))
    poor = replace(rich, limit=MiB, optimizer_peak=5 * MiB, levels=rows)
    assert [row[-1] for row in report.level_rows(poor)] == [
        "in 1.00 MiB", "8.00 MiB missing", "4.00 MiB missing for the optimizer's step"
    ]  # fmt: skip
    lacking = rich.within(rich.setup.reserved(rich.optimizer_peak) - 1)
    assert lacking.missing == min(row.missing for row in lacking.levels if row.level != "checkpoint")


def test_a_plan_over_several_gpus() -> None:
    """What would fit where one GPU does not is computed; and is what the plan over so many then says."""
    rich, dp = two_mlps(), 4
    limit = next(row.reserved for row in rich.within("1GiB", dp=dp).levels if row.level == "input")
    poor = rich.within(limit)
    assert not poor.fits and poor.help[-1].startswith(
        f'FSDP2 over {dp} GPUs (dp={dp}), each with a batch as given: it fits, every MLP at "input", '
    )
    found, less = rich.within(limit, dp=dp), rich.within(limit, dp=dp // 2)
    assert found.fits and not less.fits and (found.dp, less.dp) == (dp, dp // 2)
    assert found.parameters == rich.parameters // dp and found.optimizer_state == rich.optimizer_state // dp
    assert found.within("1GiB").dp == dp and found.within("1GiB", dp=1).step_peak == rich.step_peak
    layer = rich.parameters // 2
    sent = (dp - 1) * 3 * 2 * layer // dp
    assert found.sent == sent and found.link_seconds == sent / 450e9
    assert f"one of {dp}: fits" in str(found) and "each GPU sends" in str(found)
    assert json.loads(found.to_json())["dp"] == dp
    raises(ValueError, "dp=0 is not accepted", rich.within, limit, dp=0)


def test_a_plan_as_json_and_as_a_page(tmp_path: Path) -> None:
    found = json.loads(two_mlps().to_json())
    assert found["memory"] == "off" and found["peak_bytes"] == two_mlps().peak_bytes and found["fits"] is True
    two_mlps().to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("<polyline") == 2 and 'class="limit"' in page and "Stack in 1.00 GiB of an NVIDIA H100" in page


def test_a_model_without_mlps_is_planned_too() -> None:
    model, x = on_meta(nn.Linear(256, 256))
    found = tfo.plan(model, x, memory="1GiB", gpu="H100", optimizer="none")
    assert found.fits and found.choices == {} and found.policy == FusionPolicy() and found.optimizer_state == 0
    assert found.help == ("No MLP is fused, so there is no level to choose.",)


def positions() -> nn.Module:
    """A linear layer over at most 2048 positions."""
    table, linear = nn.Parameter(torch.zeros(2048, 256)), nn.Linear(256, 256)
    model = Net(lambda s, x: loss(s.linear(x + s.table[: x.shape[1]])), table=table, linear=linear)
    return model.bfloat16().to("meta")


@pytest.mark.slow
def test_the_largest_batch_of_a_model(inductor: Any) -> None:
    model, x = positions(), torch.empty(4, 512, 256, device="meta", dtype=torch.bfloat16)
    settings: dict[str, Any] = {"gpu": "H100", "optimizer": "none"}
    found = tfo.plan(model, x, memory="64MiB", maximum="batch", **settings)
    assert found.largest is not None and (found.largest.dimension, found.largest.given) == ("batch", 4)
    (row,) = found.largest.rows
    available = found.setup.available(64 * MiB)
    assert row.level == "free" and row.size > 4 and row.peak <= available and row.over > 0
    again = tfo.plan(model, x.new_empty(row.size + 1, 512, 256), memory="64MiB", **settings)
    assert not again.fits and again.peak_bytes == available + row.over
    assert found.within("1GiB").largest is None


@pytest.mark.slow
def test_the_longest_sequence_that_a_model_runs_with(tmp_path: Path, inductor: Any) -> None:
    model, x = positions(), torch.empty(1, 512, 256, device="meta", dtype=torch.bfloat16)
    found = tfo.plan(model, x, memory="1GiB", gpu="H100", optimizer="none", maximum="tokens")
    assert found.largest is not None
    (row,) = found.largest.rows
    assert (row.size, row.over, found.largest.step) == (2048, 0, 128)
    assert str(found).splitlines()[0].endswith(': fits; tokens: at most 2048, every MLP at "free"')
    assert "the model does not run with tokens 2176: RuntimeError: Attempting to broadcast" in str(found)
    assert json.loads(found.to_json())["largest"]["rows"][0]["size"] == 2048
    found.to_html(tmp_path / "plan.html")
    assert "<h2>Tokens, at most</h2>" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    small = tfo.plan(model, x, memory="1MiB", gpu="H100", maximum="tokens").largest  # parameters alone are more
    assert small is not None and small.rows[0].size == 0


SMALL = models.Config(layers=8, width=256, hidden=1024, heads=4, context=128, vocabulary=256, kv_heads=2)


@pytest.mark.slow
def test_the_chosen_plan_recompiled_meets_the_limit() -> None:
    with torch.device("meta"):
        model, tokens = models.GPT(SMALL).bfloat16(), torch.zeros(16, 128, dtype=torch.long)
    found = tfo.plan(model, tokens, tokens, memory="10GiB", gpu="H100", optimizer="none")
    rows = {row.level: row.reserved for row in found.levels}
    limit = int(rows["input"] + 0.4 * (rows["free"] - rows["input"]))
    tight = found.within(limit)
    assert tight.fits and tight.reserved_bytes <= limit and len(set(tight.choices.values())) > 1
    assert tight.recompiled_peak_bytes() == tight.step_peak == max(tight.curve)


@pytest.mark.slow
def test_a_plan_of_all_layers_is_exact() -> None:
    plan = two_mlps()
    assert plan.recompiled_peak_bytes() == plan.step_peak
    model, x = on_meta(MLP(256, 1024), MLP(256, 1024))
    whole = captured_model(model, (x,), {})
    for row in plan.levels:
        if row.level != "checkpoint":
            found = compiled_timeline(whole, H100, FusionPolicy(memory=row.level))[0]
            assert row.peak == plan.parameters + plan.optimizer_state + found.peak, row.level


@pytest.mark.slow
def test_what_is_missing_is_of_a_plan_that_was_compiled() -> None:
    """What the second layer writes lies where the first's gate and up were: that memory is neither's to keep."""
    model, x = on_meta(*(SwiGLU(256, 1024, nn.Linear) for _ in range(2)))
    rich = tfo.plan(model, x, memory="1GiB", gpu="H100")
    lowest = rich.within("1MiB")
    for limit in (lowest.reserved_bytes - 1, lowest.reserved_bytes - MiB):
        poor = rich.within(limit)
        assert not poor.fits and poor.missing == lowest.reserved_bytes - limit
        assert poor.recompiled_peak_bytes() == poor.step_peak
        assert all(row.kept >= 0 for row in poor.layers) and sum(row.kept for row in poor.layers) == poor.kept


@pytest.mark.slow
def test_unequal_layers_with_mixed_levels_meet_the_limit() -> None:
    model, x = on_meta(MLP(256, 1024), MLP(256, 2048), MLP(256, 512))
    found = tfo.plan(model, x, memory="10GiB", gpu="H100", optimizer="none")
    rows = {row.level: row.reserved for row in found.levels}
    for share in (0.2, 0.5, 0.8):
        limit = int(1.02 * rows["input"] + share * (rows["free"] - rows["input"]))
        tight = found.within(limit)
        assert tight.fits and tight.recompiled_peak_bytes() <= tight.setup.available(limit)


# ---- one odd layer among equal ones ----------------------------------------------------------------------------------


class Spread(nn.Module):
    """A transposed convolution over 64 × 64 tokens, whose result is cut to as many."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(width, width, 2, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        spread = F.gelu(self.conv(x.T.unflatten(1, (64, 64)).unsqueeze(0)))
        return spread[0, :, :64, :64].flatten(1).T


def expensive(x: Tensor) -> Tensor:
    """Keeps a few tensors of its own for backward."""
    return torch.cumsum(torch.sin(torch.cumsum(x, 1)), 1) * torch.cumsum(torch.cos(x), 1)


class Odd(nn.Module):
    """Equal layers but for one: by an attribute of it, or by what the model does with it."""

    def __init__(self, kind: str, layers: int, odd: int, width: int = 128) -> None:
        super().__init__()
        self.kind, self.odd = kind, odd
        acts = [expensive if kind == "function" and i == odd else F.gelu for i in range(layers)]
        self.layers = nn.ModuleList(MLP(width, 4 * width, act) for act in acts)
        if kind == "stride":
            self.layers = nn.ModuleList(Spread(width, 1 + (i == odd)) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for i, layer in enumerate(self.layers):
            if self.kind == "tokens" and i == self.odd:
                x = torch.cat([x, x])
            x = x + layer(x)
            if self.kind == "losses" and i % 2:
                losses.append(torch.logsumexp(x @ x.T, 1).mean())
        return x.float().square().mean() + sum(losses)


KINDS = ("stride", "function", "tokens", "losses")


def odd(kind: str, layers: int, number: int) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Odd(kind, layers, number), torch.empty(4096, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_is_left_out(kind: str) -> None:
    """Layers that differ in a tuple, in a function, or in what is done with them: the graph has all of them."""
    model, x = odd(kind, 8, 6)
    captured = captured_model(model, (x,), {})
    assert captured.units == tuple(f"layers.{i}" for i in range(8))
    graph: Any = captured.graphs[0].graph
    linear = {F.linear, torch._C._nn.linear, torch.conv_transpose2d}
    assert len([n for n in graph.gm.graph.nodes if n.target in linear]) == (8 if kind == "stride" else 16)


def is_never_short(model: nn.Module, x: Tensor) -> None:
    """A row, a plan between two rows and one that does not fit have the peak that the model is compiled to."""
    with pytest.MonkeyPatch.context() as patch:  # each compilation takes up to minutes: two levels, and one miss
        patch.setattr(search, "levels_for", lambda lossless, attention: ("free", "input"))
        patch.setattr(search, "MISSES", 1)
        plan = tfo.plan(model, x, memory="1TiB", gpu="H100", optimizer="none")
        rows = {row.level: row for row in plan.levels if row.level in ("off", "free", "input")}
        assert bool(rows) == bool(plan.choices), "rows are of models with MLPs"
        whole = compiled_timeline(captured_model(model, (x,), {}), H100, FusionPolicy(memory="free"))[0]
        free = rows.get("free")
        assert (free.peak if free else plan.step_peak) >= 0.99 * (plan.parameters + whole.peak)
        high = free.reserved if free else plan.reserved_bytes
        low = min((row.reserved for row in rows.values()), default=high)
        for found in (plan.within((low + high) // 2), plan.within(low // 2)):
            assert found.step_peak >= 0.99 * found.recompiled_peak_bytes()
            assert found.fits == (found.reserved_bytes <= found.limit)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=1, deadline=None)
@given(layers=st.integers(6, 8), number=st.integers(0, 7))
@example(layers=7, number=6)
def test_plans_of_models_with_an_odd_layer(kind: str, layers: int, number: int) -> None:
    is_never_short(*odd(kind, layers, number))


# ---- architectures whose compiled order is not that of their layers --------------------------------------------------

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-J": ("GPTJ", {"n_embd": 128, "n_layer": 12, "n_head": 4, "rotary_dim": 16, "n_positions": 256}),
    "Falcon": ("Falcon", {**SIZES, "ffn_hidden_size": 512}),
    "Gemma 3": ("Gemma3Text", {**SIZES, "head_dim": 32, "num_key_value_heads": 2, "sliding_window": 64}),
    "T5": ("T5", {"d_model": 128, "d_ff": 512, "d_kv": 32, "num_layers": 6, "num_heads": 4}),
}


def architecture(name: str) -> tuple[nn.Module, Tensor]:
    transformers = pytest.importorskip("transformers")
    prefix, config = ARCHITECTURES[name]
    config = getattr(transformers, f"{prefix}Config")(vocab_size=256, use_cache=False, **config)
    kinds = {"Gemma3Text": "Gemma3TextModel", "T5": "T5EncoderModel"}
    base = getattr(transformers, kinds.get(prefix, f"{prefix}Model"))(config)

    model = Net(lambda s, tokens: loss(s.base(input_ids=tokens).last_hidden_state), base=base)
    return model.train(), torch.randint(256, (8, 256))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plans_of_architectures(name: str) -> None:
    is_never_short(*architecture(name))


# ---- what a model may be ---------------------------------------------------------------------------------------------


class Partly(nn.Module):
    """Parameters that backward does not reach: unused, under no_grad, detached; one stands in it under two names.

    Backward reaches others where they are written in place, or read under ``vmap``.
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
    """The parameters that get a gradient in the compiled step."""
    timeline, _ = compiled_timeline(captured, H100, FusionPolicy())
    return cut(timeline, captured, lambda call: 0.0).trained


def test_parameters_that_get_no_gradient_are_not_trained() -> None:
    model = Partly()
    captured = captured_model(model, (torch.randn(4, 8),), {})
    whole = resident_tensors(model, captured.unit_of, trained(captured).__contains__)
    model(torch.randn(4, 8)).backward()
    assert {each.name: each.trained for each in whole} == {
        name: p.grad is not None for name, p in model.named_parameters()
    }


class Student(nn.Module):
    """Its teacher is in a list, which registers nothing; ``forward`` does not read the batch's labels."""

    def __init__(self, register: bool) -> None:
        super().__init__()
        self.net = nn.Linear(8, 8, bias=False)
        teacher = nn.Linear(8, 8).requires_grad_(False)
        self.teacher: Any = teacher if register else [teacher]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        teacher = self.teacher if isinstance(self.teacher, nn.Module) else self.teacher[0]
        return (self.net(batch["x"]) - teacher(batch["x"])).square().mean()


def resident(model: Callable[..., Any], *args: Any) -> tuple[Resident, int]:
    """The resident bytes of a step, and the bytes alive before its first call."""
    captured = captured_model(model, args, {})
    timeline, _ = compiled_timeline(captured, H100, FusionPolicy())
    parts = cut(timeline, captured, lambda call: 0.0)
    tensors = resident_tensors(model, captured.unit_of, parts.trained.__contains__, captured.unregistered)
    return Resident.of(tensors, Setup()), parts.entry


def test_every_parameter_that_a_graph_reads_is_counted() -> None:
    """Of a function, a bound method and a closure; registered or not; two modules whose paths are equal."""
    model, x = Student(register=True), torch.randn(4, 8)
    batch = {"x": x}
    expected = resident(model, batch)
    assert (expected[0].parameters, expected[0].gradients, expected[0].state) == (4 * 136, 256, 512)
    for call in (lambda batch: model(batch), model.forward, Student(register=False)):
        found = resident(call, batch)
        assert found[1] == expected[1] and replace(found[0], by_unit={}) == replace(expected[0], by_unit={})
    other = nn.Linear(8, 8, bias=False)
    assert resident(lambda x: other(model.net(x)).sum(), x)[0].parameters == 512


def test_arguments_that_no_graph_reads_are_alive_too() -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.zeros(100)}
    (_, without), (_, entry) = resident(Student(True), {"x": batch["x"]}), resident(Student(True), batch)
    assert entry == without + 400
    batch["labels"] = batch["x"][1:]  # no storage of its own
    assert resident(Student(True), batch)[1] == without


def test_fsdp_does_not_shard_what_is_not_registered() -> None:
    model = Student(register=False)
    captured = captured_model(model, ({"x": torch.randn(4, 8)},), {})
    check_shards(model, captured.unit_of, 2, captured.unregistered)
    model.teacher[0].requires_grad_()
    words = "dp=2 is not accepted: the model does not register teacher.0.weight, so FSDP2 does not shard it"
    raises(ValueError, words, check_shards, model, captured.unit_of, 2, captured.unregistered)


def test_the_optimizers_step_has_the_batch_beside_it() -> None:
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
    """Graph breaks, and something around them that is in no graph, or in one that runs again."""

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
        return self.outside(self.layers[1](x * self.mask), "behind")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("between", "something in front of graph 2 is in no graph: Unsupported: "),
        ("behind", "something behind the last graph is in no graph: Unsupported: "),
        ("again", "graph 1 runs several times: Unsupported: "),
    ],
)
def test_what_is_in_no_graph_is_not_left_out_in_silence(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"torch.compile does not capture all of it: {message}"):
        captured_model(Between(kind), (torch.randn(4, 8),), {})


@pytest.mark.parametrize("kind", ["nothing", "loop"])
def test_parameters_of_graphs_that_begin_inside_the_model(kind: str) -> None:
    """A graph break leaves graphs of layers' own forwards, whose paths would begin at the layer."""
    model = Between(kind)
    captured = captured_model(model, (torch.randn(4, 8),), {})
    assert len(captured.graphs) == 2
    assert trained(captured) == {name for name, _ in model.named_parameters()}


def test_a_list_as_index_on_meta() -> None:
    with torch.device("meta"):
        layer, x = nn.Linear(8, 8), torch.empty(4, 6, 8)
    captured = captured_model(lambda x: layer(x[:, [0, -1]]).sum(), (x,), {})
    assert len(captured.graphs) == 1
