"""A first look at a GPU that is there for minutes.

    python -m torch_fused_ops.benchmarks.laboratory.gpu --part {correctness,kernels,steps} --out DIR

A part is a list of steps in order of importance, each a process of its own with a share of the time that is left: what
one does not use, the next ones have. An error that takes the device along takes its process, which is then started
again without what did it. Nothing runs beyond the limit; what is cut, or found no time, is recorded as that. DIR gets
two files: PART.json, written anew after each step, and PART.log, all that the steps printed. What the figures decide
is printed last (``docs/gpu.md``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.harness import UsageError
from torch_fused_ops.benchmarks.laboratory import decisions, run_script

ROOT = Path(__file__).resolve().parents[2]  # of a clone, where tests are
LIMIT = 540.0  # seconds of a part
FEWEST = 10.0  # seconds below which a step is not begun
LAST = 5.0  # seconds that are kept for the end
MOST_RESTARTS = 20
LOG_BYTES = 1 << 20  # of a step's output, its beginning and as much of its end


@dataclass(frozen=True)
class Step:
    """A process of a part.

    Attributes:
        name: unique in its part.
        kind: "command": of ``python -m torch_fused_ops``; "bench": a benchmark with results, or the probe; "tests":
            pytest.
        arguments: without device, limit and files, which are added.
        share: of the time that is left, relative to the shares of the steps behind it.
    """

    name: str
    kind: str
    arguments: tuple[str, ...]
    share: float


def steps(part: str, device: str, quick: bool) -> list[Step]:
    """A part's steps, the most telling first. ``quick``: a little of each, for a machine without a GPU too."""
    kind = device.partition(":")[0]
    models, kernels, graphs = kind, kind, "captured or reduce_overhead"
    compiled: tuple[str, ...] = ("mlp", "--quick")
    main: tuple[str, ...] = ("--only", "8192×8192 bfloat16")
    compared: tuple[str, ...] = ("--only", "gelu_tanh bias ", "8192×8192 bfloat16")
    if quick:
        models, kernels, graphs = f"{kind} and gelu and free", f"{kind} and masks_are_read", "no_launch and bias_glu"
        compiled += ("--only", "swiglu", "--ways", "eager", "fused-free")
        main, compared = (), ("--only", "glu silu forward")
    if part == "correctness":
        return [
            Step("info", "command", ("info",), 1.0),
            Step("compiled", "bench", compiled, 1.5),
            Step("models", "tests", ("tests/anywhere/test_on_gpu.py", "-k", models), 3.0),
            Step("kernels", "tests", ("tests/kernels", "-k", kernels), 6.0),
            Step("graphs", "tests", ("tests/anywhere/test_cuda_graphs.py", "-k", graphs), 2.0),
            Step("operators", "command", ("check", "--device", device, "--quick"), 1.5),
        ]
    if part == "kernels":
        some = ("operators", "compile", "fused", "megatron", "copy")
        return [
            Step("operators", "bench", ("pointwise", *main, "--ways", "operators", "copy"), 4.0),
            Step("probe", "bench", ("probe",), 4.5),
            Step("compared", "bench", ("pointwise", *compared, "--ways", *some), 1.0),
        ]
    several = ("compile", "fused-off", "fused-free", "fused-fp8", "gemms")
    return [
        Step("mlp", "bench", ("mlp", "--skip", "max-autotune", "--ways", *several), 6.0),
        Step("model", "bench", ("model", "--only", "gpt", "--ways", "compile", "fused-free"), 1.5),
    ]


PARTS = ("correctness", "kernels", "steps")


@dataclass
class Part:
    """A part while it runs: what is known, and where it is written."""

    name: str
    out: Path
    device: str
    quick: bool
    limit: float
    began: float = field(default_factory=time.monotonic)
    result: dict[str, Any] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    @property
    def json(self) -> Path:
        return self.out / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.out / f"{self.name}.log"

    def left(self) -> float:
        return self.limit - LAST - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        """To the terminal and the log."""
        print(text, flush=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text + "\n")

    def write(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self.began, 1)
        harness.write(self.json, self.result)

    def run(self) -> dict[str, Any]:
        """All steps; returns what is written."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        todo = steps(self.name, self.device, self.quick)
        self.result = {
            "benchmark": "gpu", "schema": harness.SCHEMA, "part": self.name, "quick": self.quick, "limit": self.limit,
            "machine": harness.machine(), "device": {"type": self.device.partition(":")[0]},
            "steps": [
                {"name": s.name, "kind": s.kind, "arguments": list(s.arguments), "status": "not run"} for s in todo
            ],
            "decisions": [],
        }  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="torch_fused_ops_gpu_") as work:
            for i, (step, entry) in enumerate(zip(todo, self.result["steps"], strict=True)):
                seconds = self.left() * step.share / sum(s.share for s in todo[i:])
                if seconds < FEWEST:
                    entry["reason"] = f"the limit of {self.limit:.0f} s is near"
                    continue
                gone = harness.clock(time.monotonic() - self.began)
                self.say(f"\n==== {self.name}, {step.name}: at most {seconds:.0f} s; {gone} gone")
                began = time.monotonic()
                try:
                    entry.update(
                        {"command": _command, "bench": _bench, "tests": _tests}[step.kind](
                            self, step, seconds, Path(work)
                        )
                    )
                except Exception as error:  # one step must not take the others along
                    entry.update(status="failed", reason=f"{type(error).__name__}: {error}")
                entry["seconds"] = round(time.monotonic() - began, 1)
                self.result["device"] = entry.get("result", {}).get("device", self.result["device"])
                self.result["decisions"] = decisions.of(self.result)
                self.write()
                self.say(outcome(entry))
        self.say("\n" + report(self.result))
        self.write()
        self.say(f"\n{self.json}, {self.log.name}; {self.result['seconds']:.0f} s")
        return self.result

    def process(self, command: Sequence[str], seconds: float, output: Path, **variables: str) -> int | None:
        """Run a command, its output to a file and to the log; its exit status, None where it was cut."""
        with output.open("wb") as sink:
            began = time.monotonic()
            # A group of its own, so that its children end with it.
            self.child = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=_folder(),
                env={**os.environ, **variables},
                preexec_fn=os.setpgrp,
            )
            try:
                status: int | None = self.child.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                status = None
            self.end()
        data = output.read_bytes()
        if len(data) > 2 * LOG_BYTES:
            data = data[:LOG_BYTES] + b"\n[...]\n" + data[-LOG_BYTES:]
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(map(str, command))}\n".encode() + data)
            log.write(f"exit status {status}, {time.monotonic() - began:.0f} s\n".encode())
        return status

    def end(self) -> None:
        """End the process that runs, and its children."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None


def _folder() -> Path:
    return ROOT if (ROOT / "tests").is_dir() else Path.cwd()


def _module(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch_fused_ops", *arguments]


def _benchmark(name: str, *arguments: str) -> list[str]:
    if name == "probe":
        return [sys.executable, "-m", "torch_fused_ops.benchmarks.laboratory.probe", *arguments]
    return _module("bench", name, *arguments)


def _status(status: int | None) -> str:
    return "cut" if status is None else "passed" if status == 0 else "failed"


def _command(part: Part, step: Step, seconds: float, work: Path) -> dict[str, Any]:
    output = work / f"{step.name}.txt"
    status = part.process(_module(*step.arguments), seconds, output)
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return {"status": _status(status), "exit_status": status, "output": lines[-40:]}


def _bench(part: Part, step: Step, seconds: float, work: Path) -> dict[str, Any]:
    """A benchmark, which keeps to its limit by itself; again without what ended it or took the device along."""
    out, until = work / f"{step.name}.json", time.monotonic() + seconds
    quick = ("--quick",) if part.quick and "--quick" not in step.arguments else ()
    fatal: list[str] = []  # cases that ended the process
    status: int | None = None
    for restart in range(MOST_RESTARTS):
        left = until - time.monotonic()
        if restart and left < FEWEST:
            break
        added = [
            *quick,
            "--device",
            part.device,
            "--out",
            str(out),
            "--limit",
            f"{max(1.0, left - min(25.0, 0.2 * left)):.0f}",
        ]
        skipped = [*step.arguments, *(("--skip",) if fatal and "--skip" not in step.arguments else ())]
        if fatal:
            at = skipped.index("--skip") + 1
            skipped[at:at] = fatal
        command = _benchmark(*skipped, *added, *(["--resume"] if restart else []))
        status = part.process(command, left, work / f"{step.name}.txt")
        result = _read(out, step.arguments[0])
        if result is not None and result.get("lost"):
            continue
        if result is not None and status not in (0, 2, None) and result.get("running"):
            fatal.append(result["running"])
            continue
        break
    found = {"status": _status(status), "exit_status": status, "ended_the_process": fatal}
    result = _read(out, step.arguments[0])
    if result is None:
        lines = (work / f"{step.name}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {
            **found,
            "status": "cut" if status is None else "failed",
            "reason": lines[-1] if lines else "nothing said",
        }
    return {**found, "result": result}


def _read(out: Path, benchmark: str) -> dict[str, Any] | None:
    with contextlib.suppress(UsageError):
        return harness.read(out, benchmark)
    return None


def _tests(part: Part, step: Step, seconds: float, work: Path) -> dict[str, Any]:
    if not (ROOT / "tests").is_dir():
        return {"status": "not run", "reason": "the tests lie in a clone of the repository, and this is not in one"}
    file = work / f"{step.name}.jsonl"
    workers = "1" if part.quick else str(min(12, os.cpu_count() or 1))
    command = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "torch_fused_ops.benchmarks.laboratory.gpu_tests",
        "--gpu-report", str(file),
        "-n", workers, "--dist", "worksteal", "--max-worker-restart", "100", "-p", "no:cacheprovider", *step.arguments,
    ]  # fmt: skip
    # Each of the processes would start as many to compile, and as many threads, as there are cores.
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    status = part.process(command, seconds, work / f"{step.name}.txt", **alone)
    from torch_fused_ops.benchmarks.laboratory import gpu_tests  # which needs pytest, as this part does alone

    found = gpu_tests.read(file)
    if status is not None and not found["collected"]:
        lines = (work / f"{step.name}.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {
            "status": "failed",
            "exit_status": status,
            "reason": lines[-1] if lines else "nothing said",
            "tests": found,
        }
    if status == 0 and found["failed"]:
        status = 1
    return {"status": _status(status), "exit_status": status, "tests": found}


# ---- what is printed -------------------------------------------------------------------------------------------------


def outcome(entry: dict[str, Any]) -> str:
    """A step in a line or a few: what became of it, and what failed in it."""
    lines = [f"{entry['name']}: {entry['status']}{', ' + entry['reason'] if entry.get('reason') else ''}"]
    if "seconds" in entry:
        lines[0] += f", {entry['seconds']:.0f} s"
    if tests := entry.get("tests"):
        counts = ", ".join(
            f"{tests[kind]} {kind.replace('_', ' ')}" for kind in ("passed", "failed", "skipped", "not_run")
        )
        lines.append(f"  {counts} of {tests['collected']}")
        lines += [f"  FAILED {f['test']}: {f['reason']}" for f in tests["failures"][:12]]
        if len(tests["failures"]) > 12:
            lines.append(f"  … and {len(tests['failures']) - 12} more; all are in the JSON")
    if result := entry.get("result"):
        ways = [(c["name"], n, w) for c in result["cases"] for n, w in c["ways"].items()]
        measured = sum(w["status"] == "measured" for *_, w in ways)
        cases = f"  {len(result['cases'])} cases, {len(result['not_run'])} not run"
        lines.append(f"{cases}; {measured} of {len(ways)} ways measured")
        bad = [(c, n, w) for c, n, w in ways if w["status"] in ("failed", "wrong", "lost")]
        lines += [f"  {w['status'].upper()} {c}, {n}: {w['reason'][:160]}" for c, n, w in bad[:12]]
        if len(bad) > 12:
            lines.append(f"  … and {len(bad) - 12} more; all are in the JSON")
    lines += [f"  ENDED THE PROCESS: {name}" for name in entry.get("ended_the_process", ())]
    if entry["kind"] == "command" and entry["status"] != "not run":
        lines += [f"  {line[:150]}" for line in (entry.get("output") or [])[-3:]]
    return "\n".join(lines)


def report(result: dict[str, Any]) -> str:
    """All of a part: a line for each step, then what the figures decide."""
    device = result["device"].get("name", result["device"]["type"])
    lines = [f"==== {result['part']}: {device}, torch {result['machine']['torch']}"]
    for entry in result["steps"]:
        lines.append(outcome(entry).splitlines()[0])
    if result["quick"]:
        lines.append("a quick run: that it runs is all that this shows, the figures mean nothing")
    for decision in result["decisions"]:
        lines.append(f"\n{decision['question']}\n  → {decision['answer']}")
        lines += [f"    {row}" for row in decision["rows"]]
    return "\n".join(lines)


def main(arguments: Namespace) -> int:
    """Run a part; exit code 1 if a step failed, was cut or found no time."""
    if arguments.part not in PARTS:
        raise UsageError(f"--part {arguments.part} is not accepted: it must be {', '.join(PARTS)}")
    if arguments.out is None:
        raise UsageError("--out DIR is needed: PART.json and PART.log are written there")
    if arguments.out.is_file():
        raise UsageError(f"--out {arguments.out} is a file; it must be a folder")
    device = arguments.device or "cuda"
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device} is not there; --device cpu --quick shows that everything runs")
    if device == "cpu" and not arguments.quick:
        raise UsageError("--device cpu is for --quick alone: what this measures is a GPU's")
    limit = LIMIT if arguments.limit is None else arguments.limit
    if limit <= 0:
        raise UsageError(f"--limit {limit:g} is not accepted: it must be above 0")
    part = Part(arguments.part, arguments.out.resolve(), device, arguments.quick, limit)

    def stop(number: int, frame: Any) -> None:
        part.end()
        raise SystemExit(128 + number)

    ends: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, stop)
    try:
        result = part.run()
    finally:
        part.end()
        signal.signal(signal.SIGTERM, ends)
    return int(any(entry["status"] != "passed" for entry in result["steps"]))


if __name__ == "__main__":
    sys.exit(run_script(main, __doc__, ("out", "device", "quick", "limit"), part={"help": ", ".join(PARTS)}))
