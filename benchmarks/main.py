"""Run a benchmark by its command-line arguments: ``python -m torch_fused_ops bench``."""

from __future__ import annotations

import functools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_fused_ops.benchmarks import variants

from . import harness, mlp, model, pointwise
from .harness import Case, Device, Plan, UsageError


class Benchmark(NamedTuple):
    """The parts in which the benchmarks differ.

    Attributes:
        grid: called with the device, ``--quick``, sizes and dtypes; returns the combinations to measure.
        name, case: called with a combination; return its name, and its case.
        shape, counts: a description of ``--sizes`` values, and how many numbers a value may have.
        seconds: seconds of timing a case, by kind of device.
        size: makes a size from its numbers.
    """

    grid: Callable[[Device, bool, Any, Sequence[str]], Sequence[tuple[Any, ...]]]
    name: Callable[..., str]
    case: Callable[..., Case]
    shape: str
    counts: tuple[int, ...]
    seconds: dict[str, float]
    size: Callable[[tuple[int, ...]], Any] = tuple


BENCHMARKS = {
    "pointwise": Benchmark(
        pointwise.grid, pointwise.name_of, pointwise.case, pointwise.SHAPE, (2,), {"cuda": 0.5, "cpu": 0.4}
    ),
    "mlp": Benchmark(mlp.grid, mlp.name_of, mlp.case, mlp.SHAPE, (2, 3), {"cuda": 2.0, "cpu": 30.0}, mlp.Size.of),
    "model": Benchmark(model.grid, model.name_of, model.case, model.SHAPE, (2,), {"cuda": 10.0, "cpu": 60.0}),
}
LIMIT = {"cuda": 540.0, "cpu": math.inf}  # seconds of a whole command
QUICK_SECONDS = 0.1


def bench(arguments: Namespace) -> int:
    """Run the benchmark that the arguments name. Return the exit code.

    Raises:
        UsageError: an argument is not accepted.
    """
    for name in ("threads", "rounds", "seconds", "limit"):
        value = getattr(arguments, name)
        if value is not None and value <= 0 and not (name == "threads" and value == 0):
            raise UsageError(f"--{name} {value:g} is not accepted: it must be above 0")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = harness.device_of(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run(BENCHMARKS[arguments.benchmark], arguments, device)
    return 0


def run(benchmark: Benchmark, arguments: Namespace, device: Device) -> dict[str, Any]:
    """Measure on a device. Return the results."""
    quick = arguments.quick
    seconds = QUICK_SECONDS if quick else benchmark.seconds[device.type]
    plan = Plan(
        seconds if arguments.seconds is None else arguments.seconds,
        LIMIT[device.type] if arguments.limit is None else arguments.limit,
        rounds=3 if quick else arguments.rounds,
        quick=quick,
        seed=arguments.seed,
    )
    known = [way for meaning in variants.MEANINGS if arguments.benchmark in meaning.benchmarks for way in meaning.ways]
    if unknown := [way for way in arguments.ways if way not in known]:
        raise UsageError(f"--ways {' '.join(unknown)} not known; accepted: {', '.join(known)}")
    sizes = [benchmark.size(harness.numbers(s, benchmark.counts, benchmark.shape)) for s in arguments.sizes]
    cases = {benchmark.name(*case): case for case in benchmark.grid(device, quick, sizes, arguments.dtypes)}
    chosen = [n for n in cases if all(t in n for t in arguments.only) and not any(t in n for t in arguments.skip)]
    if not chosen:
        option, texts = ("skip", arguments.skip) if arguments.skip else ("only", arguments.only)
        raise UsageError(f"--{option} {' '.join(texts)} leaves no case; there are: {'; '.join(cases)}")
    makers = [functools.partial(benchmark.case, *cases[name], device, plan) for name in chosen]
    out, before = _files(arguments, device)
    return harness.run(arguments.benchmark, makers, chosen, device, plan, out, before, arguments.ways)


def _files(arguments: Namespace, device: Device) -> tuple[Path | None, dict[str, Any] | None]:
    """Return the file to write, and the results that ``--resume`` continues; None if there is none."""
    out: Path | None = arguments.out
    if out is None and not arguments.quick:  # a quick run's figures mean nothing
        name = device.about()["name"] if device.type == "cuda" else "cpu"
        out = Path(f"{arguments.benchmark}_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json")
        if out.exists() and not arguments.resume:
            raise UsageError(f"{out} exists: --resume continues it, --out {out} replaces it")
    if not arguments.resume:
        return out, None
    if out is None:
        raise UsageError("--resume needs the file to go on with: --out FILE")
    return out, harness.read(out, arguments.benchmark) if out.exists() else None
