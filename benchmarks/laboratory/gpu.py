"""Run all measurements on a GPU that is available for half an hour, in three commands.

    python -m torch_fused_ops.benchmarks.laboratory.gpu --part {correctness,kernels,steps} --out DIR

A part is a list of steps, the most important first. Each step is a process with a share of the remaining time. DIR gets
PART.json, written after each step, and PART.log with the output of all steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.harness import UsageError
from torch_fused_ops.benchmarks.laboratory import run_script

ROOT = Path(__file__).resolve().parents[2]  # the root of a clone, which has the tests
FEWEST = 10.0  # a step does not start with fewer seconds left
PARTS = ("correctness", "kernels", "steps")


class Step(NamedTuple):
    """A process of a part.

    Attributes:
        name: unique in its part.
        command: arguments of ``python -m``. Device, limit and files of ``bench`` are added.
        share: its share of the remaining time, relative to the later steps' shares.
    """

    name: str
    command: tuple[str, ...]
    share: float


OURS = "torch_fused_ops"


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
    workers = "1" if quick else str(min(12, os.cpu_count() or 1))
    tests = (
        "pytest", "-v", "--tb=short", "-p", "torch_fused_ops.benchmarks.laboratory.gpu_tests",
        "-n", workers, "--dist", "worksteal", "--max-worker-restart", "100", "-p", "no:cacheprovider",
    )  # fmt: skip
    if part == "correctness":
        return [
            Step("info", (OURS, "info"), 1.0),
            Step("compiled", (OURS, "bench", *compiled), 1.5),
            Step("models", (*tests, "tests/anywhere/test_on_gpu.py", "-k", models), 3.0),
            Step("kernels", (*tests, "tests/kernels", "-k", kernels), 6.0),
            Step("graphs", (*tests, "tests/anywhere/test_cuda_graphs.py", "-k", graphs), 2.0),
            Step("operators", (OURS, "check", "--device", device, "--quick"), 1.5),
        ]
    if part == "kernels":
        variants = ("operators", "compile", "fused", "megatron", "copy")
        return [
            Step("operators", (OURS, "bench", "pointwise", *main, "--ways", "operators", "copy"), 4.0),
            Step("compared", (OURS, "bench", "pointwise", *compared, "--ways", *variants), 1.0),
        ]
    several = ("compile", "fused-off", "fused-free", "fused-fp8", "gemms")
    return [
        Step("mlp", (OURS, "bench", "mlp", "--ways", *several), 6.0),
        Step("model", (OURS, "bench", "model", "--only", "gpt", "--ways", "compile", "fused-free"), 1.5),
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
            run = self._bench if step.command[1] == "bench" else self._command
            began = time.monotonic()
            try:
                entry.update(run(step, seconds))
            except Exception as error:  # a failed step must not end the others
                entry.update(status="failed", reason=f"{type(error).__name__}: {error}")
            entry["seconds"] = round(time.monotonic() - began, 1)
            result["device"] = entry.get("result", {}).get("device", result["device"])
            harness.write(self.json, result)
            print(*entry.get("output", ()), sep="\n")
        self.log_line(f"\n{self.json}, {self.log.name}: " + ", ".join(f"{e['name']} {e['status']}" for e in entries))
        return result

    def process(self, command: Sequence[str], seconds: float) -> tuple[str, list[str]]:
        """Run ``python -m``. Return "passed", "failed" or "cut", and the last lines of the output, which is logged."""
        began, start = time.monotonic(), self.log.stat().st_size
        with self.log.open("ab") as sink:
            # Its own process group, so that its children end with it.
            self.child = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip
            try:
                status = "failed" if self.child.wait(max(1.0, seconds)) else "passed"
            except subprocess.TimeoutExpired:
                status = "cut"
            self.end()
        output = self.log.read_bytes()[start:].decode(errors="replace")
        self.log_line(f"$ {' '.join(command)}: {status}, {time.monotonic() - began:.0f} s")
        return status, output.splitlines()[-40:]

    def end(self) -> None:
        """End the running process and its children."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def _command(self, step: Step, seconds: float) -> dict[str, Any]:
        status, output = self.process(step.command, seconds)
        return {"status": status, "output": output}

    def _bench(self, step: Step, seconds: float) -> dict[str, Any]:
        """Run a benchmark, and resume it without the case in which its process ended."""
        until, out = time.monotonic() + seconds, self.out / f"{self.name}.{step.name}.part.json"
        quick = ["--quick"] if self.quick and "--quick" not in step.command else []
        lost: list[str] = []
        while True:
            left = max(1.0, until - time.monotonic())
            options = ["--device", self.device, "--out", str(out), "--limit", f"{left - min(25.0, 0.2 * left):.0f}"]
            resume = ["--resume"] if lost else []
            status, output = self.process([*step.command, *quick, *options, *resume], left)
            try:
                result = harness.read(out, step.command[2])
            except UsageError:
                return {"status": status, "output": output}
            if status != "failed" or not result["running"] or until - time.monotonic() < FEWEST:
                break
            lost.append(result["running"])
        out.unlink()
        return {"status": status, "output": output, "ended_the_process": lost, "result": result}


def main(arguments: Namespace) -> int:
    """Run a part. Return exit code 1 if a step failed, was cut, or did not start for lack of time."""
    device = arguments.device
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device} was not found; --device cpu --quick checks that everything runs")
    part = Part(arguments.part, arguments.out.resolve(), device, arguments.quick, arguments.limit)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = part.run()
    finally:
        part.end()
    return int(any(entry["status"] != "passed" for entry in result["steps"]))


if __name__ == "__main__":
    options = {
        "part": {"choices": PARTS, "required": True},
        "out": {"type": Path, "metavar": "DIR", "required": True, "help": "the folder for PART.json and PART.log"},
        "device": {"default": "cuda", "help": "(default: cuda)"},
        "quick": {"action": "store_true", "help": "few cases of each step, on any machine"},
        "limit": {"type": float, "default": 540.0, "help": "seconds for a part (default: 540)"},
    }
    sys.exit(run_script(main, __doc__, **options))
