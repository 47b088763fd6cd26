"""How every benchmark is timed, checked and written down.

Times on a machine that does other things, or changes its clock, say little; compared with their neighbors in time
they say much. So all ways of a case run in one process, and a *round* is one run of each in random order. What is
reported is the median of each, its quartiles and its 95 % interval (order statistics: no assumption on the noise), and,
for what is ours, the same of the *ratio* to each other way within a round.

On a GPU a run is timed by events around it, everything before it enqueued: a write of four times the L2 cache, so that
nothing is served from it, and a pause as long as the CPU takes to enqueue the run, so that what is timed is the GPU's
work and not its waiting for Python. Inputs rotate among sets that together are larger than four L2 caches. The CPU's
share of a run is timed too (``host_ms``).

Before it is timed, every way is compared with float64 on random inputs, after the memory that its results will lie in
was filled with NaN. A way that cannot run, is wrong, or found no time is listed with its reason.

An error that takes the device along (an illegal address: CUDA then refuses everything until the process ends) is
``lost``: the run stops there, and going on with its results (``--resume``) in another process leaves that way out.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops.virtual_gpu.roofline import Rates, Work

SCHEMA = 1  # of the JSON
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LIMIT = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # relative error in the 2-norm to float64


class UsageError(Exception):
    """What the user asked for cannot be measured; the message says why."""


class Unavailable(Exception):
    """A way cannot run here; the message says why."""


# ---- statistics ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """A median, the quartiles around it, and a 95 % interval of the median itself."""

    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        """Of one value or more; the interval of fewer than six is their range."""
        ordered, n = sorted(values), len(values)
        low, median, high = statistics.quantiles(ordered * 2 if n == 1 else ordered, n=4, method="inclusive")
        reach = 0.98 * math.sqrt(n)  # 1.96 standard deviations of a binomial(n, 1/2)
        first, last = max(0, math.floor(n / 2 - reach) - 1), min(n - 1, math.ceil(n / 2 + reach))
        return Summary(median, (low, high), (ordered[first], ordered[last]))


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What is measured on: processor, threads, load, versions."""
    model = platform.processor()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    return {
        "cpu": model or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_fused_ops": tfo.__version__,
    }


class Device:
    """The CPU: where tensors lie, and how a run is timed there."""

    type = "cpu"
    cache_bytes = 0  # what rotating inputs must exceed; on the CPU one set is used again and again

    def __init__(self) -> None:
        self.where = torch.device("cpu")

    @property
    def name(self) -> str:
        """As the vendor calls it."""
        return str(machine()["cpu"])

    def about(self) -> dict[str, Any]:
        """For the results' JSON."""
        return {"type": self.type, "name": self.name}

    def synchronize(self) -> None:
        """Wait until what was enqueued is done."""

    def round(self, runs: Sequence[Run]) -> list[Times]:
        """Time each run once, in this order.

        Of one thread the processor's time counts: what else runs on the machine adds nothing to it.
        """
        clock, times = time.process_time if torch.get_num_threads() == 1 else time.perf_counter, []
        for prepare, run in runs:
            state = prepare()
            start = clock()
            result = run(state)
            seconds = clock() - start
            del result  # freed outside the timing
            times.append(Times(1e3 * seconds, 1e3 * seconds))
        return times

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        """The most memory that a run allocates on top of what was there; None where nobody counts."""
        return None

    def free(self) -> None:
        """Give memory back that nothing holds any more."""
        gc.collect()

    def lost(self) -> bool:
        """Whether nothing runs any more on the device in this process."""
        try:
            self.synchronize()
        except Exception:
            return True
        return False


Run = tuple[Callable[[], Any], Callable[[Any], Any]]  # what comes before a run, untimed; the run, of its result


@dataclass(frozen=True)
class Times:
    """Milliseconds of one run: of the device, and of the CPU until everything is enqueued."""

    device: float
    host: float


class Cuda(Device):
    """A CUDA GPU.

    Args:
        where: the device.
        api: ``torch.cuda``, or what stands in for it in tests.
    """

    type = "cuda"
    _CYCLES = 2000  # of a pause, a microsecond: clocks are just under 2 GHz, and longer does no harm
    _LONGEST_PAUSE = 5000.0  # microseconds: a run that takes longer to enqueue keeps the GPU busy meanwhile

    def __init__(self, where: torch.device, api: Any = torch.cuda) -> None:
        super().__init__()
        self.api = api
        self.where = where
        if where.index is not None:
            api.set_device(where.index)
        properties = api.get_device_properties(where)
        self._name = str(properties.name)
        self.total_memory = int(properties.total_memory)
        self.cache_bytes = 4 * int(getattr(properties, "L2_cache_size", 0) or 50 * 2**20)
        self._flush = torch.empty(self.cache_bytes // 4, dtype=torch.int32, device=where)
        self._host_ms: dict[int, float] = {}  # by a run's id, the last time: how long to pause

    @property
    def name(self) -> str:
        return self._name

    def about(self) -> dict[str, Any]:
        major, minor = self.api.get_device_capability(self.where)
        more = {
            "capability": f"{major}.{minor}",
            "memory_bytes": self.total_memory,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
        with contextlib.suppress(ImportError):
            import triton

            more["triton"] = triton.__version__
        return {**super().about(), **more}

    def synchronize(self) -> None:
        self.api.synchronize(self.where)

    def round(self, runs: Sequence[Run]) -> list[Times]:
        events, hosts = [], []
        for prepare, run in runs:
            state = prepare()
            start, end = (self.api.Event(enable_timing=True) for _ in range(2))
            # Writing, not reading: a run then starts with a cache full of what must be written back, and leaves one.
            self._flush.zero_()
            pause = min(1.2e3 * self._host_ms.get(id(run), 1.0), self._LONGEST_PAUSE)
            self.api._sleep(int(pause * self._CYCLES))
            start.record()
            began = time.perf_counter()
            result = run(state)
            hosts.append(1e3 * (time.perf_counter() - began))
            end.record()
            del result, state  # the allocator hands memory on only behind what is enqueued
            self._host_ms[id(run)] = hosts[-1]
            events.append((start, end))
        self.synchronize()
        return [Times(start.elapsed_time(end), host) for (start, end), host in zip(events, hosts, strict=True)]

    def peak_bytes(self, run: Callable[[], object]) -> int | None:
        self.free()
        self.synchronize()
        self.api.reset_peak_memory_stats(self.where)
        before = self.api.memory_allocated(self.where)
        result = run()
        self.synchronize()
        del result
        return int(self.api.max_memory_allocated(self.where) - before)

    def free(self) -> None:
        super().free()
        self.api.empty_cache()


def device_of(name: str) -> Device:
    """``cpu``, ``cuda`` or ``cuda:N``; UsageError for what is not there or cannot be timed."""
    try:
        where = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name} is not known; accepted: cpu, cuda, cuda:N") from None
    if where.type == "cpu":
        return Device()
    if where.type != "cuda":
        raise UsageError(f"--device {name} cannot be timed; accepted: cpu, cuda, cuda:N")
    try:
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"--device {name} cannot be used: {str(e).splitlines()[0]}") from None
    return Cuda(where)


def ceilings(device: Device, dtypes: Iterable[torch.dtype], small: bool = False) -> dict[str, Any]:
    """What the device reaches: bytes a second of a large copy, read and written; FLOP a second of a matrix product.

    Args:
        device: the device.
        dtypes: of the matrix products.
        small: sizes for a test that it runs.
    """
    gpu = device.type == "cuda"
    size, side = (1 << 20, 256) if small else (1 << 30, 8192) if gpu else (1 << 27, 1024)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device.where) for _ in range(2))
    runs = {"copy": (lambda: None, lambda _: target.copy_(source))}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device.where).to(dtype) for _ in range(2))
        runs[str(dtype).removeprefix("torch.")] = (lambda: None, lambda _, a=a, b=b: a @ b)  # type: ignore[misc]
    times = [device.round(list(runs.values())) for _ in range(2 if small else 10)][1:]
    ms = {name: statistics.median(t[i].device for t in times) for i, name in enumerate(runs)}
    rates = {name: 2 * side**3 / (1e-3 * t) for name, t in ms.items() if name != "copy"}
    return {"copy_bytes_per_s": 2 * size / (1e-3 * ms["copy"]), "matmul_flop_per_s": rates, "matmul_side": side}


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One way of a case, ready to run.

    Attributes:
        run: of what ``prepare`` returned; returns tensors, which are compared with float64.
        prepare: of the number of an input set; untimed.
        saved: bytes kept between forward and backward; None where there is no backward.
    """

    run: Callable[[Any], Sequence[Tensor]]
    prepare: Callable[[int], Any]
    saved: Callable[[], int] | None = None


@dataclass(frozen=True)
class Case:
    """Something to do, and the ways to do it.

    Attributes:
        name: unique in its benchmark.
        facts: sizes and dtype, for the results and the pictures.
        ways: by name, how each is made ready (compiled). Called in this order: *eager* first, whose error says what is
            to be expected, then what matters most. Raises ``Unavailable`` where it cannot run here.
        truth: results in float64 of input set 0.
        sets: input sets to rotate among.
        dtype: of the arithmetic, which says how large errors may be.
        ours: which ways are this library's: ratios are of these to all others. The first that runs leads the table.
        unchecked: ways that do something else (a copy, bare matrix products): not compared with float64.
        loose: ways that keep less exact numbers, with their own limit on the error.
        named_only: ways that run only where ``--ways`` names them.
        flops: of one run, as a roofline counts them: matrix products alone. 0 where there are none.
        bytes: the least that one run reads and writes.
        calls: how many calls a run makes: times are of one.
        works: by way, what its kernels do one after the other: its roofline, at the rates that the device reaches in
            the same run, stands in the results as ``floor_ms``.
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
    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 1
    works: dict[str, Sequence[Work]] = field(default_factory=dict)


@dataclass
class Plan:
    """How long to measure.

    Attributes:
        seconds: of timing a case, compiling not counted.
        limit: seconds of everything: what is left then is listed as not run.
        rounds: at most so many a case.
        quick: the least that shows that it runs.
        seed: of inputs and of the order of runs.
    """

    seconds: float
    limit: float = math.inf
    rounds: int = 1000
    quick: bool = False
    seed: int = 0
    began: float = field(default_factory=time.perf_counter)

    @property
    def fewest(self) -> int:
        """Rounds a case has at least."""
        return 2 if self.quick else 7

    def left(self) -> float:
        """Seconds until the limit."""
        return self.limit - (time.perf_counter() - self.began)


def relative_error(got: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error, in the 2-norm, over all results; infinite where one is not finite."""
    worst = 0.0
    for a, b in zip(got, truth, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"a result has shape {tuple(a.shape)}, float64's has {tuple(b.shape)}")
        size = float(b.norm())
        error = float((a.double() - b).norm()) / (size or 1.0)
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def poison(truth: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Fill memory of the results' sizes with NaN and free it: an allocator hands it to who asks for these sizes."""
    held = [torch.full(t.shape, math.nan, dtype=dtype, device=t.device) for t in truth]
    del held


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward: each storage once, the parameters not counted."""
    live = {p.untyped_storage().data_ptr() for p in parameters}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in live:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()  # holds the graph, hence the storages: no address is used twice
        total = sum(kept.values())
    del out
    return total


def sets_of(device: Device, nbytes: float, most: int = 32) -> int:
    """How many input sets of ``nbytes`` exceed the cache."""
    return max(1, min(most, math.ceil(device.cache_bytes / max(nbytes, 1)) + (device.cache_bytes > 0)))


def _reason(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None) or error
    lines = str(inner).strip().splitlines()
    return f"{type(inner).__name__}: {lines[0][:300]}" if lines else type(inner).__name__


def measure(case: Case, device: Device, plan: Plan, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """One case: compile, check, then time the ways in turns until the time or the rounds are used up.

    Args:
        case: what to measure.
        device: where.
        plan: for how long.
        before: the case's earlier JSON: a way that lost the device then is not tried again.

    Returns:
        The case's JSON.
    """
    torch.compiler.reset()
    device.free()
    found: dict[str, dict[str, Any]] = {}
    trials: dict[str, Trial] = {}
    earlier = (before or {}).get("ways", {})
    truth = [t.detach() for t in case.truth()]
    eager_error, slowest = 0.0, 0.0
    for name, make in case.ways.items():
        if earlier.get(name, {}).get("status") == "lost":
            found[name] = earlier[name]
            continue
        if plan.left() < slowest + 2 * plan.seconds:
            found[name] = {"status": "not run", "reason": f"the limit of {plan.limit:.0f} s is near"}
            continue
        began = time.perf_counter()
        try:
            trial = make()
            if name not in case.unchecked:
                poison(truth, case.dtype)
            result = trial.run(trial.prepare(0))
            device.synchronize()
            seconds = time.perf_counter() - began
            entry: dict[str, Any] = {"status": "measured", "first_run_s": seconds}
            if name not in case.unchecked:
                entry["error"] = error = relative_error([t.detach() for t in result], truth)
                if name == "eager" and math.isfinite(error):
                    eager_error = error
                allowed = max(LIMIT[case.dtype], 2 * eager_error, case.loose.get(name, 0.0))
                if not error <= allowed:
                    entry.update(status="wrong", reason=f"relative error {error:.1e} to float64, {allowed:.1e} allowed")
            del result
            if entry["status"] == "measured":
                entry["saved_bytes"] = trial.saved() if trial.saved else None
                entry["peak_bytes"] = device.peak_bytes(lambda t=trial: t.run(t.prepare(0)))  # type: ignore[misc]
                trials[name] = trial
            slowest = max(slowest, seconds)
        except Unavailable as reason:
            entry = {"status": "unavailable", "reason": str(reason)}
        except Exception as error:  # a way that fails is a result
            entry = {"status": "failed", "reason": _reason(error)}
            if device.lost():
                found[name] = {**entry, "status": "lost"}
                left = {o: {"status": "not run", "reason": f"the device was lost in {name}"} for o in case.ways}
                found = {**left, **{n: e for n, e in found.items() if e["status"] != "measured"}}
                return _entry(case, 0, found)
        found[name] = entry
        device.free()
    del truth
    rounds = _time(case, trials, device, plan, found)
    trials.clear()
    torch.compiler.reset()  # compiled code holds tensors
    device.free()
    return _entry(case, rounds, found)


def _entry(case: Case, rounds: int, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    work = {"flops": case.flops, "bytes": case.bytes}
    dtype = str(case.dtype).removeprefix("torch.")
    about = {"name": case.name, "dtype": dtype, "facts": case.facts, "work": work, "sets": case.sets}
    return {**about, "rounds": rounds, "ours": list(case.ours), "ways": ways}


def _time(case: Case, trials: dict[str, Trial], device: Device, plan: Plan, found: dict[str, dict[str, Any]]) -> int:
    """Fill in the times of the ways that run; returns how many rounds there were."""
    if not trials:
        return 0
    turn = 0

    def runs(order: Sequence[str]) -> list[Run]:
        nonlocal turn
        made: list[Run] = []
        for name in order:
            turn += 1
            made.append((lambda t=trials[name], i=turn % case.sets: t.prepare(i), trials[name].run))  # type: ignore[misc]
        return made

    order, shuffle = list(trials), random.Random(plan.seed)
    times: dict[str, list[Times]] = {name: [] for name in trials}
    for _ in range(1 if plan.quick else 3):  # caches, thread pools and the allocator warm up
        device.round(runs(order))
    deadline = time.perf_counter() + min(plan.seconds, max(plan.left(), 0.0))
    done = 0
    gc.collect()
    gc.freeze()  # what is here already need not be gone through again and again
    try:
        while done < plan.rounds and (time.perf_counter() < deadline or done < plan.fewest):
            shuffle.shuffle(order)
            for name, t in zip(order, device.round(runs(order)), strict=True):
                times[name].append(t)
            done += 1
    finally:
        gc.unfreeze()
    for name, each in times.items():
        found[name]["ms"] = asdict(Summary.of([t.device / case.calls for t in each]))
        found[name]["host_ms"] = asdict(Summary.of([t.host / case.calls for t in each]))
    for name in (n for n in case.ours if n in times):
        pairs = {o: list(zip(times[name], ts, strict=True)) for o, ts in times.items() if o != name}
        found[name]["ratio_to"] = {o: asdict(Summary.of([a.device / b.device for a, b in p])) for o, p in pairs.items()}
        if case.calls > 1:
            found[name]["more_us_than"] = {
                o: asdict(Summary.of([1e3 * (a.device - b.device) / case.calls for a, b in p]))
                for o, p in pairs.items()
            }
    return done


# ---- targets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """One figure that a target is about: where it comes from, and its 95 % interval where it was measured."""

    case: str
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Target:
    """What a benchmark is there to show.

    Attributes:
        name: in words.
        limit: the bound.
        values: the figures it is about, of the cases' JSON.
        device: "cuda" or "cpu": where it holds.
        mean: it is about the geometric mean of the figures; by default about the worst of them.
        least: the bound is a lower one.
    """

    name: str
    limit: float
    values: Callable[[list[dict[str, Any]]], list[Value]]
    device: str = "cuda"
    mean: bool = False
    least: bool = False

    def judge(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        """For the results' JSON. ``met`` is None where nothing was measured that says so."""
        values = self.values(cases)
        bound = "at least" if self.least else "at most"
        verdict: dict[str, Any] = {"name": self.name, "limit": self.limit, "bound": bound, "mean": self.mean}
        if not values:
            return {**verdict, "met": None, "value": None, "cases": 0}
        ordered = sorted(values, key=lambda v: v.value, reverse=self.least)
        best, worst = ordered[0], ordered[-1]
        value = geometric_mean([v.value for v in values]) if self.mean else worst.value
        met = value >= self.limit if self.least else value <= self.limit
        noise = not self.mean and worst.interval is not None and worst.interval[0] <= self.limit <= worst.interval[1]
        within = {"interval_holds_limit": noise}
        extremes = {"best": asdict(best), "worst": asdict(worst)}
        return {**verdict, "met": met, "value": value, **within, "cases": len(values), **extremes}


def ratios(
    ours: str, other: str, where: Callable[[dict[str, Any]], bool] = lambda case: True
) -> Callable[[list[dict[str, Any]]], list[Value]]:
    """Time of a way of ours to another's, of all cases that have both and of which ``where`` is true."""

    def values(cases: list[dict[str, Any]]) -> list[Value]:
        found = [(c["name"], c["ways"].get(ours, {}).get("ratio_to", {}).get(other)) for c in cases if where(c)]
        return [Value(name, r["median"], tuple(r["interval"])) for name, r in found if r]

    return values


def beyond_roofline(
    ours: str, other: str, where: Callable[[dict[str, Any]], bool] = lambda case: True
) -> Callable[[list[dict[str, Any]]], list[Value]]:
    """As ``ratios``, over the ratio of the two rooflines: 1 where ours gains and loses what its bytes and FLOP say."""

    def values(cases: list[dict[str, Any]]) -> list[Value]:
        found = []
        for c in filter(where, cases):
            ratio = c["ways"].get(ours, {}).get("ratio_to", {}).get(other)
            floors = [c["ways"].get(way, {}).get("floor_ms") for way in (ours, other)]
            if ratio and all(floors):
                allowed = floors[0] / floors[1]
                text = f"{c['name']}: {ratio['median']:.3f} where the roofline allows {allowed:.3f};"
                low, high = ratio["interval"]
                found.append(Value(text, ratio["median"] / allowed, (low / allowed, high / allowed)))
        return found

    return values


def verdict_line(verdict: dict[str, Any]) -> str:
    """A judged target in one line."""
    met = {True: "met", False: "MISSED", None: "not measured"}[verdict["met"]]
    bound = "≥" if verdict["bound"] == "at least" else "≤"
    line = f"{met:<13}{verdict['name']}: {bound} {verdict['limit']:g}"
    if verdict["value"] is None:
        return line
    kind = "geometric mean" if verdict["mean"] else "worst"
    noise = ", the interval holds the limit" if verdict["met"] is False and verdict["interval_holds_limit"] else ""
    worst = verdict["worst"]
    return f"{line}; {kind} of {verdict['cases']} {verdict['value']:.3f}{noise} ({worst['case']} {worst['value']:.3f})"


# ---- results ---------------------------------------------------------------------------------------------------------


def results_folder() -> Path:
    """Where results lie in a clone; the current folder where the package was installed without them."""
    folder = Path(__file__).with_name("results")
    return folder if folder.is_dir() else Path.cwd()


def write(path: Path | None, result: dict[str, Any]) -> None:
    """JSON, in one step: an interrupted run leaves the last whole one."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def read(path: Path, benchmark: str) -> dict[str, Any]:
    """Results of a benchmark; UsageError if the file holds none."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} cannot be read: {e}") from None
    if not isinstance(result, dict) or (result.get("benchmark"), result.get("schema")) != (benchmark, SCHEMA):
        raise UsageError(f"{path} holds no results of {benchmark!r}, schema {SCHEMA}")
    return result


def block(case: dict[str, Any]) -> str:
    """A case as a table, a row for each way."""
    ways = case["ways"]
    wide = max(15, *(len(name) + 1 for name in ways))
    lead = next((name for name in case["ours"] if "ms" in ways.get(name, {})), None)
    against = ways[lead]["ratio_to"] if lead else {}
    head = f"  {'':<{wide}}{'ms':>10} {'roofline':>9}  {'quartiles':<22}{f'{lead} / this':<26}"
    head += f"{'kept MiB':>9} {'peak MiB':>9}  error"
    lines = [f"{case['name']}  ({case['rounds']} rounds)", head]
    for name, way in ways.items():
        if "ms" not in way:
            lines.append(f"  {name:<{wide}}{way['status']}: {way['reason']}")
            continue
        low, high = way["ms"]["quartiles"]
        ratio = against.get(name)
        cell = f"{ratio['median']:.3f} ({ratio['interval'][0]:.3f} … {ratio['interval'][1]:.3f})" if ratio else ""
        saved, peak = (
            f"{way[k] / 2**20:.4g}" if way.get(k) is not None else "-" for k in ("saved_bytes", "peak_bytes")
        )
        error = f"{way['error']:.1e}" if "error" in way else ""
        spread = f"{low:.4g} … {high:.4g}"
        floor = f"{way['floor_ms']:.4g}" if "floor_ms" in way else ""
        times = f"{way['ms']['median']:>10.4g} {floor:>9}  {spread:<22}"
        lines.append(f"  {name:<{wide}}{times}{cell:<26}{saved:>9} {peak:>9}  {error}")
    return "\n".join(lines)


def overview(cases: Sequence[dict[str, Any]]) -> str:
    """All cases: medians, a column for each way."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for case in cases:  # those that have the same ways share a table
        groups.setdefault(tuple(case["ways"]), []).append(case)
    width = max((len(case["name"]) for case in cases), default=4)
    return "\n\n".join(_table(names, some, width) for names, some in groups.items())


def _table(names: Sequence[str], cases: Sequence[dict[str, Any]], width: int) -> str:
    lines = [f"{'milliseconds':<{width}} " + " ".join(f"{name:>{max(9, len(name))}}" for name in names)]
    marks = {"unavailable": "n/a", "not run": "not run", "failed": "FAILED", "wrong": "WRONG", "lost": "LOST"}
    for case in cases:
        cells = []
        for name in names:
            way = case["ways"].get(name)
            text = "" if way is None else f"{way['ms']['median']:.4g}" if "ms" in way else marks[way["status"]]
            cells.append(f"{text:>{max(9, len(name))}}")
        lines.append(f"{case['name']:<{width}} " + " ".join(cells))
    return "\n".join(lines)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def run(
    benchmark: str,
    cases: Sequence[Callable[[], Case]],
    names: Sequence[str],
    targets: Sequence[Target],
    device: Device,
    plan: Plan,
    out: Path | None,
    before: dict[str, Any] | None = None,
    extra: Callable[[], dict[str, Any]] | None = None,
    ways: Sequence[str] = (),
) -> dict[str, Any]:
    """Measure cases one after the other, writing after each; what finds no time is listed.

    Args:
        benchmark: its name.
        cases: makes each case (its inputs), when its turn comes.
        names: of the cases.
        targets: judged at the end, those of this kind of device.
        device, plan: where and for how long.
        out: the JSON to write; None for none.
        before: earlier results of the same benchmark, whose complete cases are kept and not measured again.
        extra: more to measure once all cases are done; put into the results.
        ways: of each case, only these; all by default but those that run only where they are named.

    Returns:
        The results, as written.
    """
    about = machine()
    result: dict[str, Any] = {"benchmark": benchmark, "schema": SCHEMA, "machine": about, "device": device.about()}
    print(", ".join(f"{key} {value}" for key, value in {**about, **result["device"]}.items()), flush=True)
    earlier = {c["name"]: c for c in (before or {}).get("cases", [])}
    kept = {name: c for name, c in earlier.items() if _complete(c)}
    if before and (before["device"], before["machine"]["torch"]) != (result["device"], about["torch"]):
        raise UsageError("--resume: the results are of another device or of another torch; give another --out")
    dtypes = [torch.float32] if device.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]
    result["ceilings"] = ceilings(device, dtypes, small=plan.quick)
    copied, rates = result["ceilings"]["copy_bytes_per_s"], result["ceilings"]["matmul_flop_per_s"]
    print(f"a large copy {copied / 1e9:.4g} GB/s; matrix products "
          + ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items()), flush=True)  # fmt: skip
    result.update(
        quick=plan.quick, seconds_a_case=plan.seconds, cases=[], not_run=[], running=None, lost=None, targets=[]
    )
    device.free()

    measured: list[float] = []

    def finish() -> None:
        judged = () if plan.quick else targets  # a quick run's figures mean nothing
        result["targets"] = [t.judge(result["cases"]) for t in judged if t.device == device.type]
        result["seconds"] = round(time.perf_counter() - plan.began, 1)
        write(out, result)

    for i, (name, make) in enumerate(zip(names, cases, strict=True), 1):
        if name in kept:
            result["cases"].append(kept[name])
            continue
        expected = statistics.median(measured) if measured else plan.seconds
        if result["lost"] or plan.left() < max(expected, plan.seconds):
            result["not_run"].append(name)
            continue
        gone, rest = time.perf_counter() - plan.began, min((len(cases) - i + 1) * expected, plan.left())
        about_left = f"about {clock(rest)} left" if measured else "no estimate yet"
        print(f"\n[{i}/{len(cases)}, {clock(gone)} gone, {about_left}] {name}", flush=True)
        began = time.perf_counter()
        result["running"] = name
        write(out, result)  # what ends the process leaves its name
        try:
            case = make()
            wanted = ways or [name for name in case.ways if name not in case.named_only]
            case = replace(case, ways={name: way for name, way in case.ways.items() if name in wanted})
            if not case.ways:
                continue
            entry = measure(case, device, plan, earlier.get(name))
            if entry["dtype"] in rates:
                reached = Rates(rates[entry["dtype"]], copied)
                for way, works in case.works.items():
                    if way in entry["ways"]:
                        entry["ways"][way]["floor_ms"] = 1e3 * reached.seconds(works)
        except Exception as error:  # one case must not take the others along
            reason = {"status": "lost" if device.lost() else "failed", "reason": _reason(error)}
            entry = {"name": name, "dtype": "", "facts": {}, "work": {"flops": 0, "bytes": 0}, "sets": 0}
            entry.update(rounds=0, ours=[], ways={"(all)": reason})
        case = None  # type: ignore[assignment]  # frees its inputs
        measured.append(time.perf_counter() - began)
        result["cases"].append(entry)
        result["running"] = None
        if any(
            w["status"] == "lost" and w is not earlier.get(name, {}).get("ways", {}).get(n)
            for n, w in entry["ways"].items()
        ):
            result["lost"] = name
        print(block(entry), flush=True)
        finish()
    if extra is not None and not result["lost"]:
        result.update(extra())
    finish()
    print(f"\n{overview(result['cases'])}\n")
    if plan.quick:
        print("a quick run: that it runs is all that this shows, the figures mean nothing")
    for verdict in result["targets"]:
        print(verdict_line(verdict))
    if result["not_run"]:
        why = (
            f"as the device was lost in {result['lost']}" if result["lost"] else f"for the limit of {plan.limit:.0f} s"
        )
        print(f"not run, {why} (--resume measures them): {'; '.join(result['not_run'])}")
    print(f"{out or 'nothing written'}, {result['seconds']:.0f} s", flush=True)
    return result


def _complete(case: dict[str, Any]) -> bool:
    return all(way["status"] in ("measured", "unavailable", "wrong", "lost") for way in case["ways"].values())


def numbers(text: str, count: tuple[int, ...], what: str) -> tuple[int, ...]:
    """ "8192x4096" as numbers; UsageError where there are not ``count`` of them."""
    try:
        found = tuple(int(part) for part in text.lower().replace("×", "x").split("x"))
    except ValueError:
        found = ()
    if len(found) not in count or min(found) < 1:
        raise UsageError(f"--sizes {text} is not accepted: it must be {what}")
    return found
