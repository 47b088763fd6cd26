"""Run all measurements on a GPU that is available for half an hour, in four commands.

    python -m torch_fused_ops.benchmarks.laboratory.gpu --part {correctness,kernels,steps,offload} --out DIR

A part is a list of steps, the most important first. Each step is a process with a share of the remaining time. DIR gets
PART.json, written after each step, and PART.log with the output of all steps.
"""

from __future__ import annotations

import os
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
PARTS = ("correctness", "kernels", "steps", "offload")


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
        models, kernels, graphs = f"{kind} and gelu and free", "results and mask", "no_launch and bias_glu"
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
        variants = ("operators", "compile", "fused", "copy")
        return [
            Step("operators", (OURS, "bench", "pointwise", *main, "--ways", "operators", "copy"), 4.0),
            Step("compared", (OURS, "bench", "pointwise", *compared, "--ways", *variants), 1.0),
        ]
    if part == "offload":
        script = (f"{OURS}.benchmarks.laboratory.offload", "--device", device, *(["--quick"] if quick else []))
        return [Step(name, (*script, "--part", name), 1.0) for name in ("link", "layers", "step")]
    several = ("compile", "fused-off", "fused-free", "fused-fp8", "gemms")
    return [
        Step("mlp", (OURS, "bench", "mlp", "--ways", *several), 6.0),
        Step("model", (OURS, "bench", "model", "--only", "gpt", "--ways", "compile", "fused-free"), 1.5),
    ]


def process(command: Sequence[str], seconds: float, log: Path) -> tuple[str, list[str]]:
    """Run ``python -m``. Return "passed", "failed" or "cut", and the last lines of the output, which is logged."""
    began, start = time.monotonic(), log.stat().st_size
    limited = ["timeout", "--signal=KILL", f"{max(1.0, seconds):.1f}"]  # ends the process with its children
    with log.open("ab") as sink:
        code = subprocess.run(
            [*limited, sys.executable, "-m", *command], stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, check=False
        ).returncode
    output = log.read_bytes()[start:].decode(errors="replace")
    status = "passed" if code == 0 else "cut" if time.monotonic() - began >= seconds else "failed"
    print(f"$ {' '.join(command)}: {status}, {time.monotonic() - began:.0f} s", flush=True)
    return status, output.splitlines()[-40:]


def bench(command: Sequence[str], seconds: float, log: Path, out: Path) -> dict[str, Any]:
    """Run a benchmark, and resume it without the case in which its process ended."""
    until = time.monotonic() + seconds
    lost: list[str] = []
    while True:
        left = max(1.0, until - time.monotonic())
        options = ["--out", str(out), "--limit", f"{left - min(25.0, 0.2 * left):.0f}", *["--resume"] * bool(lost)]
        status, output = process([*command, *options], left, log)
        try:
            result = harness.read(out, command[2])
        except UsageError:
            return {"status": status, "output": output}
        if status != "failed" or not result["running"] or until - time.monotonic() < FEWEST:
            break
        lost.append(result["running"])
    out.unlink()
    return {"status": status, "output": output, "ended_the_process": lost, "result": result}


def main(arguments: Namespace) -> int:
    """Run a part. Return exit code 1 if a step failed, was cut, or did not start for lack of time."""
    name, device, out = arguments.part, arguments.device, arguments.out.resolve()
    if device.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device} was not found; --device cpu --quick checks that everything runs")
    until = time.monotonic() + arguments.limit - 5
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    log.write_text("", encoding="utf-8")
    todo = steps(name, device, arguments.quick)
    entries: list[dict[str, Any]] = [{**s._asdict(), "status": "not run"} for s in todo]
    result = {"benchmark": "gpu", "schema": harness.SCHEMA, "part": name, "quick": arguments.quick}
    result |= {"machine": harness.machine(), "device": {"type": device}, "steps": entries}
    for i, (step, entry) in enumerate(zip(todo, entries, strict=True)):
        seconds = (until - time.monotonic()) * step.share / sum(s.share for s in todo[i:])
        if seconds < FEWEST:
            continue
        began = time.monotonic()
        if step.command[1] == "bench":
            quick = ["--quick"] if arguments.quick else []
            entry |= bench([*step.command, "--device", device, *quick], seconds, log, out / f"{name}.{step.name}.json")
        else:
            entry["status"], entry["output"] = process(step.command, seconds, log)
        entry["seconds"] = round(time.monotonic() - began, 1)
        result["device"] = entry.get("result", {}).get("device", result["device"])
        harness.write(out / f"{name}.json", result)
        print(*entry["output"], sep="\n", flush=True)
    print(f"\n{out / name}.json, {log.name}: " + ", ".join(f"{e['name']} {e['status']}" for e in entries))
    return int(any(entry["status"] != "passed" for entry in entries))


if __name__ == "__main__":
    options: dict[str, Any] = {
        "part": {"choices": PARTS, "required": True},
        "out": {"type": Path, "metavar": "DIR", "required": True, "help": "the folder for PART.json and PART.log"},
        "device": {"default": "cuda", "help": "(default: cuda)"},
        "quick": {"action": "store_true", "help": "few cases of each step, on any machine"},
        "limit": {"type": float, "default": 540.0, "help": "seconds for a part (default: 540)"},
    }
    sys.exit(run_script(main, __doc__, **options))
