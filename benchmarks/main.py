"""``python -m torch_fused_ops bench``: from arguments to a benchmark's run."""

from __future__ import annotations

import functools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_fused_ops.benchmarks import variants

from . import harness, mlp, model, pictures, pointwise, ways
from .harness import Case, Device, Plan, Target, UsageError


@dataclass(frozen=True)
class Benchmark:
    """What the commands differ in.

    Attributes:
        grid: what to measure: of the device, ``--quick``, sizes and dtypes.
        name: of one combination.
        case: makes it.
        targets: judged at the end.
        shape, counts: what ``--sizes`` takes, and how many numbers that is.
        size: makes a size of its numbers.
        seconds: of timing a case, by kind of device.
    """

    grid: Callable[[Device, bool, Any, Sequence[str]], Sequence[tuple[Any, ...]]]
    name: Callable[..., str]
    case: Callable[..., Case]
    targets: Sequence[Target]
    shape: str
    counts: tuple[int, ...]
    seconds: dict[str, float]
    size: Callable[[tuple[int, ...]], Any] = tuple


BENCHMARKS = {
    "pointwise": Benchmark(
        pointwise.grid,
        pointwise.name_of,
        pointwise.case,
        pointwise.TARGETS,
        pointwise.SHAPE,
        (2,),
        {"cuda": 0.5, "cpu": 4.0},
    ),
    "mlp": Benchmark(
        mlp.grid, mlp.name_of, mlp.case, mlp.TARGETS, mlp.SHAPE, (2, 3), {"cuda": 2.0, "cpu": 30.0}, mlp.Size.of
    ),
    "inference": Benchmark(
        mlp.inference_grid,
        mlp.name_of,
        mlp.inference_case,
        mlp.INFERENCE_TARGETS,
        mlp.SHAPE,
        (2, 3),
        {"cuda": 0.5, "cpu": 5.0},
        mlp.Size.of,
    ),
    "model": Benchmark(
        model.grid, model.name_of, model.case, model.TARGETS, model.SHAPE, (2,), {"cuda": 10.0, "cpu": 60.0}
    ),
}
LIMIT = {"cuda": 540.0, "cpu": math.inf}  # seconds of a whole command
QUICK_SECONDS = 0.1


def bench(arguments: Namespace, benchmark: Benchmark | None = None) -> int:
    """Run a benchmark, by default the one that the arguments name; returns the exit code.

    Raises:
        UsageError: arguments that make no sense.
    """
    benchmark = benchmark or BENCHMARKS[arguments.benchmark]
    if arguments.draw:
        _draw(harness.read(arguments.draw, arguments.benchmark), arguments.draw)
        return 0
    if arguments.threads < 0 or arguments.rounds < 1:
        raise UsageError(
            f"--threads {arguments.threads} --rounds {arguments.rounds} are not accepted: they must be above 0"
        )
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = harness.device_of(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run(benchmark, arguments, device)
    return 0


def run(benchmark: Benchmark, arguments: Namespace, device: Device) -> dict[str, Any]:
    """Measure on a device; returns the results."""
    quick = arguments.quick
    seconds = QUICK_SECONDS if quick else benchmark.seconds[device.type]
    plan = Plan(
        seconds if arguments.seconds is None else arguments.seconds,
        LIMIT[device.type] if arguments.limit is None else arguments.limit,
        rounds=3 if quick else arguments.rounds,
        quick=quick,
        seed=arguments.seed,
    )
    if plan.seconds <= 0 or plan.limit <= 0:
        raise UsageError(f"--seconds {plan.seconds:g} --limit {plan.limit:g} are not accepted: they must be above 0")
    known = [way for meaning in variants.MEANINGS if arguments.benchmark in meaning.benchmarks for way in meaning.ways]
    if known and (unknown := [way for way in arguments.ways if way not in known]):
        raise UsageError(f"--ways {' '.join(unknown)} not known; accepted: {', '.join(known)}")
    sizes = [benchmark.size(harness.numbers(s, benchmark.counts, benchmark.shape)) for s in arguments.sizes]
    chosen = benchmark.grid(device, quick, sizes, arguments.dtypes)
    if arguments.ways and not set(arguments.ways) & set(ways.TUNED):  # a case of its own, for them alone
        chosen = [each for each in chosen if "max-autotune" not in benchmark.name(*each)]
    names = [benchmark.name(*each) for each in chosen]
    kept = [(n, each) for n, each in zip(names, chosen, strict=True) if all(t in n for t in arguments.only)]
    kept = [(n, each) for n, each in kept if not any(t in n for t in arguments.skip)]
    if not kept and arguments.skip:
        raise UsageError(f"--skip {' '.join(arguments.skip)} leaves no case; there are: {'; '.join(names)}")
    if not kept:
        raise UsageError(f"--only {' '.join(arguments.only)} leaves no case; there are: {'; '.join(names)}")
    slug = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_") if device.type == "cuda" else device.type
    out = arguments.out
    if out is None and not quick:  # a quick run's figures mean nothing
        out = Path(f"{arguments.benchmark}_{slug}.json")
        if out.exists() and not arguments.resume:
            raise UsageError(f"{out} exists: --resume continues it, --out {out} replaces it")
    before = None
    if arguments.resume:
        if out is None:
            raise UsageError("--resume needs the file to go on with: --out FILE")
        before = harness.read(out, arguments.benchmark) if out.exists() else None
    extra = None
    if arguments.benchmark == "model" and arguments.largest:
        if device.type != "cuda":
            raise UsageError("--largest needs a GPU: the CPU's memory is everybody's")
        extra = functools.partial(_largest, device, plan, [each for _, each in kept], arguments.ways)
    makers = [functools.partial(benchmark.case, *each, device, plan) for _, each in kept]
    return harness.run(
        arguments.benchmark,
        makers,
        [n for n, _ in kept],
        benchmark.targets,
        device,
        plan,
        out,
        before,
        extra,
        arguments.ways,
    )


def _largest(device: Device, plan: Plan, chosen: Any, names: Sequence[str]) -> dict[str, Any]:
    return {"largest_batches": model.largest_batches(device, plan, chosen, names or ways.TRAINING)}


def _draw(result: dict[str, Any], out: Path) -> None:
    try:
        for path in pictures.draw(result, out):
            print(path)
    except ImportError as e:
        raise UsageError(f"pictures need matplotlib: pip install matplotlib numpy ({e})") from None
