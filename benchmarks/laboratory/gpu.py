"""Run all measurements on a GPU that is available for half an hour, in three commands.

    python -m torch_fused_ops.benchmarks.laboratory.gpu --part {correctness,kernels,steps} --out DIR

A part is a list of steps, the most important first. Each step is a process with a share of the remaining time. DIR gets
PART.json, written after each step, and PART.log with the output of all steps.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.harness import UsageError
from torch_fused_ops.benchmarks.laboratory import run_script

ROOT = Path(__file__).resolve().parents[2]  # the root of a clone, which has the tests
LIMIT = 540.0  # seconds for a part
FEWEST = 10.0  # a step does not start with fewer seconds left
PARTS = ("correctness", "kernels", "steps")


class Step(NamedTuple):
    """A process of a part.

    Attributes:
        name: unique in its part.
        kind: "command", a command of ``torch_fused_ops``; "bench", a benchmark with results; "tests", pytest.
        arguments: its arguments except device, limit and files, which are added.
        share: its share of the remaining time, relative to the later steps' shares.
    """

    name: str
    kind: str
    arguments: tuple[str, ...]
    share: float


def steps(part: str, device: str, quick: bool) -> list[Step]:
    """Return a part's steps. ``quick``: few cases per step, also for a machine without a GPU."""
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
        variants = ("operators", "compile", "fused", "megatron", "copy")
        return [
            Step("operators", "bench", ("pointwise", *main, "--ways", "operators", "copy"), 4.0),
            Step("compared", "bench", ("pointwise", *compared, "--ways", *variants), 1.0),
        ]
    several = ("compile", "fused-off", "fused-free", "fused-fp8", "gemms")
    return [
        Step("mlp", "bench", ("mlp", "--skip", "max-autotune", "--ways", *several), 6.0),
        Step("model", "bench", ("model", "--only", "gpt", "--ways", "compile", "fused-free"), 1.5),
    ]


class Part:
    """A part while it runs.

    Args:
        name: one of ``PARTS``.
        out: the folder for PART.json and PART.log.
        device, quick, limit: the command's options.
    """

    def __init__(self, name: str, out: Path, device: str, quick: bool, limit: float) -> None:
        self.name, self.out, self.device, self.quick = name, out, device, quick
        self.until = time.monotonic() + limit - 5
        self.json, self.log = out / f"{name}.json", out / f"{name}.log"
        self.child: subprocess.Popen[bytes] | None = None

    def log_line(self, text: str) -> None:
        """Print to the terminal and the log."""
        print(text, flush=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(text + "\n")

    def run(self) -> dict[str, Any]:
        """Run all steps. Return the JSON's content."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")
        todo = steps(self.name, self.device, self.quick)
        entries: list[dict[str, Any]] = [{**s._asdict(), "status": "not run"} for s in todo]
        result = {"benchmark": "gpu", "schema": harness.SCHEMA, "part": self.name, "quick": self.quick}
        result |= {"machine": harness.machine(), "device": {"type": self.device}, "steps": entries}
        for i, (step, entry) in enumerate(zip(todo, entries, strict=True)):
            seconds = (self.until - time.monotonic()) * step.share / sum(s.share for s in todo[i:])
            if seconds < FEWEST:
                continue
            self.log_line(f"\n==== {self.name}, {step.name}: at most {seconds:.0f} s")
            run = {"command": self._command, "bench": self._bench, "tests": self._tests}[step.kind]
            began = time.monotonic()
            try:
                entry.update(run(step, seconds))
            except Exception as error:  # a failed step must not end the others
                entry.update(status="failed", reason=f"{type(error).__name__}: {error}")
            entry["seconds"] = round(time.monotonic() - began, 1)
            result["device"] = entry.get("result", {}).get("device", result["device"])
            harness.write(self.json, result)
            self.log_line(outcome(entry))
        self.log_line(f"\n{self.json}, {self.log.name}: " + ", ".join(f"{e['name']} {e['status']}" for e in entries))
        return result

    def process(self, command: list[str], seconds: float, **variables: str) -> tuple[str, str]:
        """Run a command. Return "passed", "failed" or "cut", and its output, which is also logged."""
        began, start = time.monotonic(), self.log.stat().st_size
        with self.log.open("ab") as sink:
            # Its own process group, so that its children end with it.
            self.child = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder(),
                env={**os.environ, **variables}, start_new_session=True,
            )  # fmt: skip
            try:
                status = "failed" if self.child.wait(max(1.0, seconds)) else "passed"
            except subprocess.TimeoutExpired:
                status = "cut"
            self.end()
        output = self.log.read_bytes()[start:].decode(errors="replace")
        self.log_line(f"$ {' '.join(command)}: {status}, {time.monotonic() - began:.0f} s")
        return status, output

    def end(self) -> None:
        """End the running process and its children."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def _command(self, step: Step, seconds: float) -> dict[str, Any]:
        status, output = self.process(module(*step.arguments), seconds)
        return {"status": status, "output": output.splitlines()[-40:]}

    def _bench(self, step: Step, seconds: float) -> dict[str, Any]:
        """Run a benchmark, and resume it without the case in which its process ended."""
        until, out = time.monotonic() + seconds, self.out / f"{self.name}.{step.name}.part.json"
        quick = ["--quick"] if self.quick and "--quick" not in step.arguments else []
        lost: list[str] = []
        while True:
            left = max(1.0, until - time.monotonic())
            options = ["--device", self.device, "--out", str(out), "--limit", f"{left - min(25.0, 0.2 * left):.0f}"]
            resume = ["--resume"] if lost else []
            status, output = self.process(module("bench", *step.arguments, *quick, *options, *resume), left)
            try:
                result = harness.read(out, step.arguments[0])
            except UsageError:
                return {"status": status, "reason": (output.strip().splitlines() or ["no output"])[-1]}
            if status != "failed" or not result["running"] or until - time.monotonic() < FEWEST:
                break
            lost.append(result["running"])
        out.unlink()
        return {"status": status, "ended_the_process": lost, "result": result}

    def _tests(self, step: Step, seconds: float) -> dict[str, Any]:
        if not (ROOT / "tests").is_dir():
            return {"status": "not run", "reason": "the tests are in a clone of the repository; this is not a clone"}
        workers = "1" if self.quick else str(min(12, os.cpu_count() or 1))
        command = [
            sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "torch_fused_ops.benchmarks.laboratory.gpu_tests",
            "-n", workers, "--dist", "worksteal", "--max-worker-restart", "100", "-p", "no:cacheprovider",
            *step.arguments,
        ]  # fmt: skip
        # Otherwise each worker would start as many compilers and threads as there are cores.
        alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        status, output = self.process(command, seconds, **alone)
        counts = outcomes(output)
        return {"status": "failed" if counts["failures"] else status, "tests": counts}


def folder() -> Path:
    """Return the clone's root; the current folder if there is no clone."""
    return ROOT if (ROOT / "tests").is_dir() else Path.cwd()


def module(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "torch_fused_ops", *arguments]


def outcomes(output: str) -> dict[str, Any]:
    """Count the outcomes in the output of ``pytest -v -n``, which may have been cut."""
    lines = re.findall(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (\S.*)$", output, re.M)
    failures = [name for outcome, name in lines if outcome in ("FAILED", "ERROR")]
    failures += re.findall(r"^worker '\w+' crashed while running '(.+)'$", output, re.M)
    collected = re.findall(r"^\d+ workers? \[(\d+) items?\]", output, re.M)
    counts = {kind.lower(): sum(outcome == kind for outcome, _ in lines) for kind in ("PASSED", "SKIPPED")}
    return {"collected": int(collected[0]) if collected else 0, **counts, "failures": sorted(set(failures))}


def outcome(entry: dict[str, Any]) -> str:
    """Describe a step's result in a few lines."""
    lines = [f"{entry['name']}: {entry['status']}{', ' + entry['reason'] if entry.get('reason') else ''}"]
    if tests := entry.get("tests"):
        lines.append(f"  {tests['passed']} passed, {tests['skipped']} skipped of {tests['collected']}")
        lines += [f"  FAILED {name}" for name in tests["failures"]]
    if result := entry.get("result"):
        bad = ("failed", "wrong", "lost")
        ways = [(c["name"], n, w) for c in result["cases"] for n, w in c["ways"].items() if w["status"] in bad]
        lines.append(f"  {len(result['cases'])} cases, {len(result['not_run'])} not run")
        lines += [f"  {way['status'].upper()} {case}, {name}: {way['reason'][:160]}" for case, name, way in ways]
    return "\n".join(lines)


def main(arguments: Namespace) -> int:
    """Run a part. Return exit code 1 if a step failed, was cut, or did not start for lack of time."""
    if arguments.part not in PARTS:
        raise UsageError(f"--part {arguments.part} is not accepted: it must be {', '.join(PARTS)}")
    if arguments.out is None or arguments.out.is_file():
        raise UsageError("--out DIR is needed: the folder for PART.json and PART.log")
    device = arguments.device or "cuda"
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device} was not found; --device cpu --quick checks that everything runs")
    if device == "cpu" and not arguments.quick:
        raise UsageError("--device cpu needs --quick: the figures are of a GPU")
    limit = LIMIT if arguments.limit is None else arguments.limit
    part = Part(arguments.part, arguments.out.resolve(), device, arguments.quick, limit)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = part.run()
    finally:
        part.end()
    return int(any(entry["status"] != "passed" for entry in result["steps"]))


if __name__ == "__main__":
    sys.exit(run_script(main, __doc__, ("out", "device", "quick", "limit"), part={"help": ", ".join(PARTS)}))
