"""Two streams: a step's calls, and its copies to and from the host."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton")

from torch_fused_ops import FusionPolicy
from torch_fused_ops.planner.fsdp import Segment
from torch_fused_ops.planner.model import captured_model
from torch_fused_ops.planner.offload import LATENCY, Link, Schedule, host_bytes, in_order, moved, patterns
from torch_fused_ops.planner.pieces import divided
from torch_fused_ops.planner.step import Step, segmented_step
from torch_fused_ops.policy import enclosing_modules
from torch_fused_ops.virtual_gpu import H100
from torch_fused_ops.virtual_gpu.results import SavedTensor
from torch_fused_ops.virtual_gpu.timeline import Copy, Stored

MiB = 1 << 20


def stored(module: str, nbytes: int, ready: int, read: int, ends: int, shape: tuple[int, ...] = (1,)) -> Stored:
    saved = SavedTensor(module, shape, torch.bfloat16, nbytes, False, False, module)
    return Stored(nbytes, saved, ready, ends, ends, read)


def finished(seconds: Sequence[float], copies: Sequence[Copy], bandwidth: float) -> float:
    """Return when the last call ends: the longest path through the calls and the copies, each of which has a stream."""

    @functools.cache
    def call_ends(i: int) -> float:
        if i < 0:
            return 0.0
        arrivals = [copy_ends(j) for j, copy in enumerate(copies) if copy.awaited == i]
        return max([call_ends(i - 1), *arrivals]) + seconds[i]

    @functools.cache
    def copy_ends(j: int) -> float:
        if j < 0:
            return 0.0
        return max(copy_ends(j - 1), call_ends(copies[j].queued - 1)) + LATENCY + copies[j].nbytes / bandwidth

    return call_ends(len(seconds) - 1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[float], list[Copy]]:
    count = draw(st.integers(1, 12))
    seconds = draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    spans = st.lists(st.integers(0, count - 1), min_size=2, max_size=2).map(sorted)
    copies = [Copy(draw(st.integers(0, 1000)), *span) for span in draw(st.lists(spans, max_size=8))]
    return seconds, sorted(copies, key=lambda copy: copy.queued)


@settings(deadline=None, max_examples=200)
@given(steps(), st.sampled_from([100.0, 1000.0, 1e9]))
def test_waits_are_those_of_two_streams(step: tuple[list[float], list[Copy]], bandwidth: float) -> None:
    seconds, copies = step
    waiting = Schedule(tuple(seconds)).waiting(copies, bandwidth)
    assert sum(seconds) + waiting == pytest.approx(finished(seconds, copies, bandwidth))
    assert waiting >= Schedule(tuple(seconds)).waiting(copies, 2 * bandwidth) - 1e-9


def layered(layers: int, seconds: float = 1.0) -> Schedule:
    """Return a step with 4 GEMMs and a pointwise call for each layer in forward, 8 in backward, and a loss.

    Each layer saves 60 bytes in "attention", read by its second GEMM, and 40 in "mlp", which no GEMM reads.
    """
    calls = [i % 5 < 4 for i in range(5 * layers)] + [True, True] + [i % 10 < 8 for i in range(10 * layers)]
    gemms = tuple(i for i, is_gemm in enumerate(calls) if is_gemm)
    ends, tensors = 5 * layers + 1, []
    for layer in range(layers):
        last = len(calls) - 10 * layer  # the call after the layer's backward
        tensors.append(stored(f"layers.{layer}.attention", 60 * MiB, 5 * layer + 1, last - 5, ends))
        tensors.append(stored(f"layers.{layer}.mlp", 40 * MiB, 5 * layer + 5, last - 10, ends))
    schedule = Schedule(tuple(seconds for _ in calls), gemms, stored=tuple(tensors))
    return Schedule(schedule.seconds, gemms, stored=tuple(s for s in tensors if schedule.can_hide(s)))


def test_a_copy_has_one_layers_gemms() -> None:
    """Every 4 GEMMs in forward are 5 calls, and every 8 in backward are 10."""
    schedule = layered(4)
    assert len(schedule.stored) == 8
    out = [(copy.queued, copy.awaited) for copy, _ in schedule.moves(schedule.stored)]
    assert out == [(1, 6), (5, 10), (6, 11), (10, 15), (11, 16), (15, 20), (16, 21), (20, 21)]
    back = [(copy.queued, copy.awaited) for _, copy in schedule.moves(schedule.stored)]
    assert back == [(47, 57), (42, 52), (37, 47), (32, 42), (27, 37), (22, 32), (21, 27), (21, 22)]
    alternate = [s for s in schedule.stored if s.saved.module in ("layers.0.mlp", "layers.2.mlp")]
    assert [(copy.queued, copy.awaited) for copy, _ in schedule.moves(alternate)] == [(5, 15), (15, 21)]
    assert [copy.awaited for copy, _ in schedule.moves(schedule.stored[:1])] == [21]  # no other layer


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), unique=True), st.data())
def test_bytes_on_the_host_are_not_alive(chosen: list[int], data: st.DataObject) -> None:
    schedule = layered(5)
    count = len(schedule.seconds)
    live = data.draw(st.lists(st.integers(1000 * MiB, 2000 * MiB), min_size=count, max_size=count))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    pieces, start = [], 0
    for first, last in itertools.pairwise([0, *cuts, count]):
        end = live[last - 1] if last > first else start
        pieces.append(("forward", "", Segment(tuple(x - start for x in live[first:last]), end - start)))
        start = end
    moves = schedule.moves(schedule.stored[i] for i in sorted(chosen))
    points, start = [], 0
    for _, _, segment in moved(pieces, moves):
        points += [start + point for point in segment.points]
        start += segment.net
    away = [sum(out.nbytes for out, back in moves if out.awaited <= i < back.queued) for i in range(count)]
    assert points == [x - gone for x, gone in zip(live, away, strict=True)] and start == live[-1]


@pytest.mark.parametrize("bandwidth", [10 * MiB, 15 * MiB, 19 * MiB, 40 * MiB])
def test_choices_keep_within_their_wait_and_the_hosts_memory(bandwidth: float) -> None:
    """A layer's forward takes 5 s, and its tensors have 100 MiB. The last tensor is read at once."""
    schedule = layered(4)
    total = sum(schedule.seconds)

    def wait(chosen: Iterable[Stored]) -> float:
        return schedule.waiting(in_order(schedule.moves(chosen)), bandwidth)

    quarter, half, _, most, few, tenth, every = schedule.choices(Link(bandwidth))
    assert wait(most) == 0 and wait(few) <= 0.02 * total and wait(tenth) <= 0.1 * total
    assert set(quarter) < set(half) < set(most) and set(every) == set(schedule.stored)
    subsets = itertools.product([False, True], repeat=len(every))
    without_wait = (chosen for keep in subsets if not wait(chosen := [*itertools.compress(every, keep)]))
    assert sum(s.nbytes for s in most) >= 0.75 * max(sum(s.nbytes for s in chosen) for chosen in without_wait)
    for chosen in schedule.choices(Link(bandwidth, 200 * MiB)):
        assert host_bytes(s.nbytes for s in chosen) <= 200 * MiB


def test_host_memory_is_rounded_to_powers_of_two() -> None:
    assert host_bytes([448 * MiB, 256 * MiB, 256 * MiB + 1, 1]) == (512 + 256 + 512) * MiB + 1


class Layers(nn.Module):
    """Residual MLPs, and the mean square of their result."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


@pytest.mark.parametrize("compiled", [pytest.param("model", marks=pytest.mark.slow), "layers"])
def test_the_compiled_step_is_the_estimated_step(compiled: str) -> None:
    """If each layer is compiled by itself, each copy ends with its layer."""
    pytest.importorskip("torch._functorch._activation_offloading.offload_ops")  # torch 2.13 and later
    with torch.device("meta"):
        x = torch.empty(8192, 2048, dtype=torch.bfloat16, requires_grad=True)  # so that all layers are equal
        model = Layers(4).bfloat16()
    link = Link(200e9)
    captured = divided(captured_model(model, (x,), {}), H100, compiled, loss="")
    plain = segmented_step(captured, H100, captured.policy_at("free"))
    chosen = list(plain.schedule.choices(link))[5 if compiled == "layers" else 3]
    policy = FusionPolicy(offload=patterns(plain.schedule.stored, chosen))
    moving = segmented_step(captured, H100, policy)
    assert chosen and len(moving.schedule.copies) == 2 * len(chosen)
    estimate = Step({}, {"free": plain}, link=link).summary_at({}, chosen)
    exact = Step({}, {"free": moving}, link=link).summary_at({})
    plain_peak = Step({}, {"free": plain}).summary_at({}).peak
    # A kernel of backward writes over a saved tensor, but not over a reloaded one: its result takes 128 MiB more.
    assert 0.99 * estimate.peak <= exact.peak <= estimate.peak + 128 * MiB and exact.peak < plain_peak
    assert exact.seconds == pytest.approx(estimate.seconds, rel=0.01)
    for s in plain.schedule.stored:
        assert policy.offloads(enclosing_modules([s.saved.module])) == (s in chosen)
    ends = {s.saved.module[:8]: s.ends for s in plain.schedule.stored if s.saved.module}
    assert len(ends) == 4 and len(set(ends.values())) == (4 if compiled == "layers" else 1)
