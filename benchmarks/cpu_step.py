"""A training step of the compiled GELU and SwiGLU MLPs on this CPU: ours against Inductor's own.

    python benchmarks/cpu_step.py [--quick] [--out FILE]

Four ways, in one process: ``eager``; ``compile`` (plain torch.compile); ``budget`` (torch.compile under upstream's
activation memory budget, 0.99); ``fused`` (``backend="fused"``). A step is forward and backward, gradients of input and
weights included. Three sizes, float32 and bfloat16.

On a shared machine a time says little; compared with its neighbour in time it says much. So a round takes one step of
each way in random order, and what counts is the median over rounds of the *ratio* fused/other within a round, with a
95 % interval (the order statistics of a median: no assumption on the noise). Before timing, each way's output and
gradients are compared with float64. Writes JSON after every case: an interrupted run keeps what it has measured.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor

import torch_fused_ops as tfo

SIZES = {"small": (256, 256, 1024), "medium": (1024, 512, 2048), "large": (2048, 1024, 4096)}  # tokens, width, hidden
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SECONDS = {"small": 12.0, "medium": 30.0, "large": 60.0}  # of timing a case
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative error (in the 2-norm) against float64


def gelu(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


MLPS: dict[str, Callable[..., Tensor]] = {"gelu": gelu, "swiglu": swiglu}


def tensors(mlp: str, size: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Input and weights, and the gradient that comes in: activations of order 1 everywhere."""
    tokens, width, hidden = SIZES[size]
    shapes: dict[str, list[tuple[int, ...]]] = {
        "gelu": [(hidden, width), (hidden,), (width, hidden), (width,)],
        "swiglu": [(hidden, width), (hidden, width), (width, hidden)],
    }
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weights = [normal(*s) / math.sqrt(s[-1]) if len(s) == 2 else normal(*s) for s in shapes[mlp]]
    return [t.requires_grad_() for t in (normal(tokens, width), *weights)], normal(tokens, width)


def budgeted(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Inductor under upstream's memory budget: a backend, so that the setting holds for this compilation alone."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.99):
        compiled: Any = compile_fx(gm, inputs)
    return compiled


def ways(mlp: Callable[..., Tensor]) -> dict[str, Callable[..., Tensor]]:
    return {
        "eager": mlp,
        "compile": torch.compile(mlp, fullgraph=True, dynamic=False),
        "budget": torch.compile(mlp, fullgraph=True, dynamic=False, backend=budgeted),
        "fused": torch.compile(mlp, fullgraph=True, dynamic=False, backend="fused"),
    }


def step(way: Callable[..., Tensor], inputs: Sequence[Tensor], tangent: Tensor) -> list[Tensor]:
    out = way(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, tangent)]


def error(got: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error, in the 2-norm, over the output and all gradients."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth, strict=True))


@dataclass(frozen=True)
class Summary:
    """A median, the quartiles around it, and a 95 % interval of the median itself."""

    median: float
    quartiles: tuple[float, float]
    interval: tuple[float, float]

    @staticmethod
    def of(values: Sequence[float]) -> Summary:
        ordered, n = sorted(values), len(values)
        low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
        reach = 0.98 * math.sqrt(n)  # 1.96 standard deviations of a binomial(n, 1/2)
        first, last = max(0, math.floor(n / 2 - reach) - 1), min(n - 1, math.ceil(n / 2 + reach))
        return Summary(median, (low, high), (ordered[first], ordered[last]))


def measure(mlp: str, size: str, dtype: torch.dtype, seconds: float, rounds: int, seed: int) -> dict[str, Any]:
    """One case: compile, check, then time the ways in turns until the time or the rounds are used up."""
    torch.compiler.reset()
    inputs, tangent = tensors(mlp, size, dtype)
    runs = ways(MLPS[mlp])
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    truth = step(MLPS[mlp], doubles, tangent.double())
    errors = {}
    for name, way in runs.items():
        errors[name] = error(step(way, inputs, tangent), truth)
        if not errors[name] <= LIMIT[dtype]:
            raise SystemExit(f"{mlp} {size} {dtype}: {name} is wrong, relative error {errors[name]:.2e}")
    del doubles, truth

    order, shuffle = list(runs), random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for name in order * 3:  # caches, thread pools and the allocator warm up
        step(runs[name], inputs, tangent)
    deadline = time.perf_counter() + seconds
    while len(times["fused"]) < rounds and (time.perf_counter() < deadline or len(times["fused"]) < 5):
        shuffle.shuffle(order)
        for name in order:
            start = time.perf_counter()
            result = step(runs[name], inputs, tangent)
            times[name].append(time.perf_counter() - start)
            del result  # freed outside the timing
    ratios = {
        other: Summary.of([a / b for a, b in zip(times["fused"], times[other], strict=True)])
        for other in ("compile", "budget", "eager")
    }
    return {
        "mlp": mlp,
        "size": size,
        "tokens_width_hidden": SIZES[size],
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": len(times["fused"]),
        "milliseconds": {name: asdict(Summary.of([1e3 * t for t in ts])) for name, ts in times.items()},
        "ratio_fused_to": {other: asdict(summary) for other, summary in ratios.items()},
        "relative_error_to_float64": errors,
    }


def machine() -> dict[str, Any]:
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


HEAD = f"{'mlp':<7} {'size':<7} {'dtype':<9} {'rounds':>6}   {'eager':>8} {'compile':>8} {'budget':>8} {'fused':>8}   "
HEAD += f"{'fused / compile':<24} {'fused / budget':<24} {'fused / eager':<24}"


def row(case: dict[str, Any]) -> str:
    ms = "".join(f" {case['milliseconds'][name]['median']:>8.2f}" for name in ("eager", "compile", "budget", "fused"))
    cells = []
    for other in ("compile", "budget", "eager"):
        ratio = case["ratio_fused_to"][other]
        cells.append(f"{ratio['median']:.3f} ({ratio['interval'][0]:.3f} … {ratio['interval'][1]:.3f})".ljust(24))
    return f"{case['mlp']:<7} {case['size']:<7} {case['dtype']:<9} {case['rounds']:>6}  {ms}   {' '.join(cells)}"


def conclusion(cases: Sequence[dict[str, Any]]) -> str:
    lines = []
    for other in ("compile", "budget", "eager"):
        ratios = sorted((c["ratio_fused_to"][other]["median"], f"{c['mlp']} {c['size']} {c['dtype']}") for c in cases)
        middle = statistics.median(ratio for ratio, _ in ratios)
        best, worst = (f"{ratio:.3f} ({name})" for ratio, name in (ratios[0], ratios[-1]))
        lines.append(f"fused / {other:<8} median of {len(cases)} cases {middle:.3f}, best {best}, worst {worst}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small size alone, a second each: does it run at all?")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--mlps", nargs="+", choices=list(MLPS), default=list(MLPS))
    parser.add_argument("--rounds", type=int, default=1000, help="at most so many rounds a case (default: 1000)")
    parser.add_argument("--scale", type=float, default=1.0, help="times the seconds spent on a case (12, 30, 60)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results") / "cpu_step.json")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.quick:
        args.sizes, args.rounds, args.scale = ["small"], 20, 0.1

    about, began = machine(), time.perf_counter()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print("milliseconds a step (medians); ratios within a round: median (95 % interval of the median)\n")
    print(HEAD, flush=True)
    cases: list[dict[str, Any]] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for size in args.sizes:
        for dtype in args.dtypes:
            for mlp in args.mlps:
                cases.append(measure(mlp, size, DTYPES[dtype], SECONDS[size] * args.scale, args.rounds, args.seed))
                print(row(cases[-1]), flush=True)
                result = {"benchmark": "cpu_step", "machine": about, "quick": args.quick, "cases": cases}
                args.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{conclusion(cases)}\n{args.out}, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
