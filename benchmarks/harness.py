"""Time variants, check their results, and write times and errors.

All variants of a case run in one process. A *round* runs each once, in random order, so that drift affects all of them.
Results are minimum, median and quartiles of each variant's time, and of its ratio to other variants within a round.

On a GPU, events before and after a run time it. Before the run, a write of four times the L2 cache flushes the cache.
A pause lets the CPU enqueue the run, so Python's time does not count. Every variant is first compared with float64.
``triton.testing.do_bench`` and ``torch.utils.benchmark.Timer`` time one function at a time, without untimed
preparation: they cannot time a backward alone, nor pair two variants within a round.

After an illegal address, CUDA refuses all calls until the process ends. The results then name the running case, and
``--resume`` in another process continues without this case.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fused_ops as tfo

RESULTS = Path(__file__).with_name("results")  # in a clone
SCHEMA = 1  # version of the JSON
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LIMIT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # largest 2-norm error relative to float64


class UsageError(Exception):
    """The arguments cannot be measured. The message has the reason."""


class Unavailable(Exception):
    """A variant cannot run on this machine. The message has the reason."""


# ---- devices ---------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return the processor, threads, load and versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_fused_ops": tfo.__version__,
    }


Run = tuple[Callable[[], Any], Callable[[Any], Any]]  # an untimed preparation, and the run, which receives its result


class Device:
    """A device to measure on: the CPU."""

    type = "cpu"
    cache_bytes = 0  # rotating inputs must exceed it; the CPU always uses the same set

    def __init__(self, where: torch.device | None = None) -> None:
        self.where = where or torch.device("cpu")

    def about(self) -> dict[str, Any]:
        """Return the entry of the results' JSON."""
        return {"type": self.type, "name": machine()["cpu"]}

    def synchronize(self) -> None:
        """Wait for all enqueued work."""

    def round(self, runs: Sequence[Run]) -> list[float]:
        """Time each run once, in this order, in milliseconds. With one thread, processor time counts."""
        clock, times = time.process_time if torch.get_num_threads() == 1 else time.perf_counter, []
        for prepare, run in runs:
            state = prepare()
            start = clock()
            result = run(state)
            times.append(1e3 * (clock() - start))
            del result  # freed outside the timing
        return times

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """Return the most bytes that a run allocates; None on a CPU, where allocations are not counted."""
        return None

    def free(self) -> None:
        """Release cached memory."""
        gc.collect()


class Cuda(Device):
    """A CUDA GPU. ``api``: ``torch.cuda``, or a substitute in tests."""

    type = "cuda"
    _PAUSE = 4_000_000  # clock cycles, 2 ms: enough to enqueue an MLP's step

    def __init__(self, where: torch.device, api: Any = torch.cuda) -> None:
        super().__init__(where)
        self.api = api
        if where.index is not None:
            api.set_device(where.index)
        self.properties = api.get_device_properties(where)
        self.cache_bytes = 4 * int(getattr(self.properties, "L2_cache_size", 0) or 50 * 2**20)
        self._flush = torch.empty(self.cache_bytes // 4, dtype=torch.int32, device=where)

    def about(self) -> dict[str, Any]:
        capability = ".".join(map(str, self.api.get_device_capability(self.where)))
        versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
        return {"type": self.type, "name": str(self.properties.name), "capability": capability, **versions}

    def synchronize(self) -> None:
        self.api.synchronize(self.where)

    def round(self, runs: Sequence[Run]) -> list[float]:
        events = []
        for prepare, run in runs:
            state = prepare()
            start, end = (self.api.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            self.api._sleep(self._PAUSE)
            start.record()
            result = run(state)
            end.record()
            del result, state  # the allocator reuses this memory only after the enqueued work
            events.append((start, end))
        self.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        self.free()
        self.synchronize()
        self.api.reset_peak_memory_stats(self.where)
        before = self.api.memory_allocated(self.where)
        run()
        self.synchronize()
        return int(self.api.max_memory_allocated(self.where) - before)

    def free(self) -> None:
        super().free()
        self.api.empty_cache()


def device_of(name: str) -> Device:
    """Return the device ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: the device is missing or cannot be timed.
    """
    try:
        where = torch.device(name)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"--device {name} cannot be used: {str(e).splitlines()[0]}") from None
    if where.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name} cannot be timed; accepted: cpu, cuda, cuda:N")
    return Device() if where.type == "cpu" else Cuda(where)


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A variant of a case, ready to run.

    Attributes:
        run: called with the result of ``prepare``; returns tensors, which are compared with float64.
        prepare: called with the number of an input set; untimed.
        saved: returns the bytes saved for backward; None if there is no backward.
    """

    run: Callable[[Any], Sequence[Tensor]]
    prepare: Callable[[int], Any]
    saved: Callable[[], int] | None = None


@dataclass(frozen=True)
class Case:
    """A program and its variants.

    Attributes:
        name: unique in its benchmark.
        facts: sizes, for the results.
        ways: by name, a function that compiles the variant; it may raise ``Unavailable``. *eager* comes first, because
            its error bounds the others' errors; then the most important variants.
        truth: the results in float64 of input set 0.
        sets: number of input sets to rotate among.
        dtype: dtype of the arithmetic, which decides the accepted error.
        ours: this library's variants, which get ratios to all others. The first that runs leads the table.
        unchecked: variants that compute something else (a copy, GEMMs alone), so they are not compared.
        loose: variants with a larger accepted error.
        named_only: variants that run only if ``--ways`` names them.
        calls: number of calls in a run; the reported time is one call's.
    """

    name: str
    facts: dict[str, Any]
    ways: dict[str, Callable[[], Trial]]
    truth: Callable[[], Sequence[Tensor]]
    sets: int
    dtype: torch.dtype
    ours: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    loose: dict[str, float] = field(default_factory=dict)
    named_only: tuple[str, ...] = ()
    calls: int = 1


@dataclass
class Plan:
    """Seconds of timing a case, seconds of all cases together, the most rounds of a case, and the seed."""

    seconds: float
    limit: float = math.inf
    rounds: int = 1000
    quick: bool = False
    seed: int = 0
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Return the seconds until the limit."""
        return self.limit - (time.perf_counter() - self.began)


def relative_error(got: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """Return the largest relative error in the 2-norm over all results; infinity if a result is not finite."""
    worst = 0.0
    for a, b in zip(got, truth, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"a result has shape {tuple(a.shape)}, float64's has {tuple(b.shape)}")
        error = float((a.double() - b).norm()) / (float(b.norm()) or 1.0)
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def poison(truth: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Fill memory of the results' sizes with NaN and free it, to expose a variant that leaves results unwritten."""
    [torch.full(t.shape, math.nan, dtype=dtype, device=t.device) for t in truth]


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Return the bytes that autograd saves for backward: each storage once, without parameters."""
    live = {p.untyped_storage().data_ptr() for p in parameters}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in live:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()  # keeps the graph and its storages alive, so no address is used twice
        total = sum(saved.values())
    del out
    return total


def sets_of(device: Device, nbytes: float, most: int = 32) -> int:
    """Return how many input sets of ``nbytes`` exceed the cache."""
    return max(1, min(most, math.ceil(device.cache_bytes / max(nbytes, 1)) + (device.cache_bytes > 0)))


def measure(case: Case, device: Device, plan: Plan) -> dict[str, Any]:
    """Compile, check and time a case's variants. Return the case's JSON."""
    torch.compiler.reset()
    device.free()
    entries: dict[str, dict[str, Any]] = {}
    trials: dict[str, Trial] = {}
    truth = [t.detach() for t in case.truth()]
    eager_error = 0.0
    for name, make in case.ways.items():
        entry: dict[str, Any] = {"status": "measured"}
        try:
            trial = make()
            if name not in case.unchecked:
                poison(truth, case.dtype)
            result = trial.run(trial.prepare(0))
            device.synchronize()
            if name not in case.unchecked:
                entry["error"] = error = relative_error([t.detach() for t in result], truth)
                eager_error = error if name == "eager" and math.isfinite(error) else eager_error
                allowed = max(LIMIT[case.dtype], 2 * eager_error, case.loose.get(name, 0.0))
                if not error <= allowed:
                    entry.update(status="wrong", reason=f"relative error {error:.1e} to float64, {allowed:.1e} allowed")
            del result
            if entry["status"] == "measured":
                entry["saved_bytes"] = trial.saved() if trial.saved else None
                entry["peak_bytes"] = device.peak_bytes(lambda t=trial: t.run(t.prepare(0)))  # type: ignore[misc]
                trials[name] = trial
        except Unavailable as reason:
            entry = {"status": "unavailable", "reason": str(reason)}
        except Exception as error:  # a variant's failure is a result
            entry = {"status": "failed", "reason": _reason(error)}
        entries[name] = entry
        device.free()
    del truth
    rounds = _time(case, trials, device, plan, entries) if trials else 0
    trials.clear()
    torch.compiler.reset()  # compiled code holds tensors
    about: dict[str, Any] = {"name": case.name, "dtype": str(case.dtype).removeprefix("torch."), "facts": case.facts}
    return {**about, "sets": case.sets, "rounds": rounds, "ours": list(case.ours), "ways": entries}


def _reason(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return f"{type(inner).__name__}: {next(iter(str(inner).strip().splitlines()), '')[:300]}"


def _time(case: Case, trials: dict[str, Trial], device: Device, plan: Plan, entries: dict[str, dict[str, Any]]) -> int:
    """Add the times of the variants that run to ``entries``. Return the number of rounds."""
    order, shuffle, turn = list(trials), random.Random(plan.seed), 0
    times: dict[str, list[float]] = {name: [] for name in trials}

    def one_round() -> list[float]:
        nonlocal turn
        runs: list[Run] = []
        for name in order:
            turn += 1
            runs.append((lambda t=trials[name], i=turn % case.sets: t.prepare(i), trials[name].run))  # type: ignore[misc]
        return device.round(runs)

    for _ in range(1 if plan.quick else 3):  # caches, thread pools and the allocator warm up
        one_round()
    deadline, done = time.perf_counter() + min(plan.seconds, max(plan.left(), 0.0)), 0
    gc.collect()
    gc.freeze()  # the collector skips the objects that exist already
    try:
        while done < plan.rounds and (time.perf_counter() < deadline or done < (2 if plan.quick else 7)):
            shuffle.shuffle(order)
            for name, milliseconds in zip(order, one_round(), strict=True):
                times[name].append(milliseconds / case.calls)
            done += 1
    finally:
        gc.unfreeze()
    for name, samples in times.items():
        entries[name]["ms"] = summary(samples)
        if name in case.ours:
            ratios = {o: [a / b for a, b in zip(samples, ts, strict=True)] for o, ts in times.items() if o != name}
            entries[name]["ratio_to"] = {other: summary(values) for other, values in ratios.items()}
    return done


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Return the minimum, the median and the quartiles."""
    low, median, high = statistics.quantiles([*values] * (1 + (len(values) == 1)), n=4, method="inclusive")
    return {"minimum": min(values), "median": median, "quartiles": (low, high)}


# ---- results ---------------------------------------------------------------------------------------------------------


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write JSON in one step: an interrupted run leaves the last whole file."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        part.replace(path)


def read(path: Path, benchmark: str) -> dict[str, Any]:
    """Read the results of a benchmark.

    Raises:
        UsageError: the file does not have results of this benchmark.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read: {e}") from None
    if not isinstance(result, dict) or (result.get("benchmark"), result.get("schema")) != (benchmark, SCHEMA):
        raise UsageError(f"{path} holds no results of {benchmark!r}, schema {SCHEMA}")
    return result


def table(case: dict[str, Any]) -> str:
    """Return a case as a table, a row for each variant."""
    ways = case["ways"]
    lead = next((name for name in case["ours"] if "ms" in ways.get(name, {})), None)
    wide = max(map(len, ways)) + 1
    lines = [f"{case['name']}  ({case['rounds']} rounds)"]
    lines += [f"  {'':<{wide}}{'ms':>10}{'saved MiB':>11}{'peak MiB':>10}  error    {lead} / this"]
    for name, way in ways.items():
        if "ms" not in way:
            lines.append(f"  {name:<{wide}}{way['status']}: {way['reason']}")
            continue
        ratio = ways[lead]["ratio_to"].get(name) if lead else None
        cell = "{median:.3f} ({quartiles[0]:.3f} … {quartiles[1]:.3f})".format(**ratio) if ratio else ""
        memory = (way.get(key) for key in ("saved_bytes", "peak_bytes"))
        saved, peak = ("-" if nbytes is None else f"{nbytes / 2**20:.4g}" for nbytes in memory)
        error = f"{way['error']:.1e}" if "error" in way else ""
        lines.append(f"  {name:<{wide}}{way['ms']['median']:>10.4g}{saved:>11}{peak:>10}  {error:<8} {cell}")
    return "\n".join(lines)


def run(
    benchmark: str,
    cases: Sequence[Callable[[], Case]],
    names: Sequence[str],
    device: Device,
    plan: Plan,
    out: Path | None,
    before: dict[str, Any] | None = None,
    ways: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure the cases, and write the results after each. Return them.

    Args:
        benchmark: its name.
        cases, names: functions that make the cases, and the cases' names.
        device, plan: the device to measure on, and how long to measure.
        out: the JSON to write; None for no file.
        before: earlier results, whose complete cases are reused. The case in which their process ended does not run.
        ways: the variants to run; by default, all that are not ``named_only``.
    """
    about = machine()
    result: dict[str, Any] = {"benchmark": benchmark, "schema": SCHEMA, "machine": about, "device": device.about()}
    print(", ".join(f"{key} {value}" for key, value in {**about, **result["device"]}.items()), flush=True)
    earlier = {c["name"]: c for c in (before or {}).get("cases", [])}
    if before and (before["device"], before["machine"]["torch"]) != (result["device"], about["torch"]):
        raise UsageError("--resume: the results belong to another device or torch; give another --out")
    if before and before["running"]:
        earlier[before["running"]] = _without_times(before["running"], "lost", "the process ended in this case")
    result |= {"quick": plan.quick, "cases": [], "not_run": [], "running": None}
    longest = plan.seconds
    for i, (name, make) in enumerate(zip(names, cases, strict=True), 1):
        if name in earlier and all(way["status"] != "failed" for way in earlier[name]["ways"].values()):
            result["cases"].append(earlier[name])
            continue
        if plan.left() < longest:
            result["not_run"].append(name)
            continue
        print(f"\n[{i}/{len(cases)}, {time.perf_counter() - plan.began:.0f} s] {name}", flush=True)
        began = time.perf_counter()
        result["running"] = name
        write(out, result)  # an error that ends the process leaves the case's name
        try:
            case = make()
            chosen = ways or [way for way in case.ways if way not in case.named_only]
            case = replace(case, ways={way: compiled for way, compiled in case.ways.items() if way in chosen})
            if not case.ways:
                continue
            entry = measure(case, device, plan)
        except Exception as error:  # a failed case must not end the others
            entry = _without_times(name, "failed", _reason(error))
        device.synchronize()
        case = None  # type: ignore[assignment]  # frees its inputs
        longest = max(longest, time.perf_counter() - began)
        result["cases"].append(entry)
        print(table(entry), flush=True)
        write(out, result)
    result |= {"running": None, "seconds": round(time.perf_counter() - plan.began, 1)}
    write(out, result)
    if plan.quick:
        print("\na quick run shows that the benchmark runs; its figures mean nothing")
    if result["not_run"]:
        print(f"\nnot run within {plan.limit:.0f} s (--resume measures them): {'; '.join(result['not_run'])}")
    print(f"{out or 'nothing written'}, {result['seconds']:.0f} s", flush=True)
    return result


def _without_times(name: str, status: str, reason: str) -> dict[str, Any]:
    """Return the JSON of a case that was not timed."""
    entry = {"status": status, "reason": reason}
    return {"name": name, "dtype": "", "facts": {}, "rounds": 0, "ours": [], "ways": {"(all)": entry}}


def numbers(text: str, count: tuple[int, ...], description: str) -> tuple[int, ...]:
    """Read "8192x4096" as numbers; UsageError if there are not ``count`` of them."""
    try:
        sizes = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) not in count or min(sizes) < 1:
        raise UsageError(f"--sizes {text} is not accepted: it must be {description}")
    return sizes
