"""Times and peaks that others measured on GPUs, beside those that the virtual GPU predicts.

The measurements are linkedin/Liger-Kernel's own (benchmarks/results/public_measurements.csv). Each program runs on meta
tensors: every operator is a kernel, with its FLOP and bytes, and its storages are counted while they live. Liger's
kernels are one operator each, with the bytes of their arguments. Rates are each GPU's own, from its largest rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.virtual_gpu.timeline import Storages
from torch_fused_ops.virtual_gpu.work import flop_of

RESULTS = Path(__file__).parent.parent / "results"
WORKSPACE = int(16.25 * 2**20)  # twice the default of cuBLAS, 8.125 MiB
LARGE = 0.05  # ms: rows that take longer than some launches


class _Counted(Storages):
    """FLOP, bytes and kernels of the operators that run, and the peak of live storages."""

    def __init__(self) -> None:
        super().__init__()
        self.flop = self.nbytes = 0.0
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        returns = func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and not func._schema.name.startswith(("aten::empty", "aten::detach", "aten::new_empty")):
            flop = flop_of(func.overloadpacket, args, kwargs or {}, result)
            self.kernel([args, kwargs], [result], flop)
        return result

    @property
    def work(self) -> dict[str, float]:
        """FLOP, bytes and kernels so far."""
        return {"flop": self.flop, "nbytes": self.nbytes, "kernels": self.kernels}

    def kernel(self, reads: Any, writes: Any, flop: float = 0.0) -> None:
        """Count a kernel: its FLOP, or else its bytes."""
        tensors = [t for t in tree_leaves((reads, writes)) if isinstance(t, Tensor)]
        self.kernels += 1
        self.flop += flop
        self.nbytes += 0.0 if flop else sum(t.nbytes for t in tensors)


def _one_kernel(counted: _Counted, in_place: bool) -> Any:
    """An operator that is one kernel forward and one backward, which may write gradients over the inputs."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            *leading, width = inputs[0].shape
            width //= 2 if getattr(inputs[0], "packed", False) else 1
            result = torch.empty(*leading, width, dtype=inputs[0].dtype, device="meta")
            counted.kernel(inputs, [result])
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            inputs = ctx.saved_tensors
            results = [x.detach() if in_place else torch.empty_like(x) for x in inputs]
            counted.kernel([gradients, inputs], results)
            return tuple(results)

    return Kernel.apply


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int, gated: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.gated = nn.Linear(hidden, width, bias=False), gated

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.gated(self.gate(x), self.up(x)))
        return result


def _packed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _program(row: dict[str, str], counted: _Counted) -> tuple[Callable[[Tensor], Tensor], Tensor, int] | None:
    """A row's program, its input, and its tiles; None where it is not one of these."""
    config, size = json.loads(row["config"]), int(float(row["size"]))
    dtype = torch.float32 if "float32" in config.get("dtype", "") else torch.bfloat16
    kernel, provider = row["kernel"], row["provider"]
    one = _one_kernel(counted, provider == "liger_in_place" or kernel.removeprefix("tiled_") in ("swiglu", "geglu"))
    if kernel in ("relu_squared", "softmax"):
        x = torch.empty(config["M"], size, dtype=dtype, device="meta", requires_grad=True)
        eager = (lambda x: F.relu(x).square()) if kernel == "relu_squared" else (lambda x: torch.softmax(x, -1))
        return eager if provider == "torch" else one, x, 1
    if kernel == "megatron_swiglu" and provider in ("torch", "liger", "liger_in_place"):
        x = torch.empty(config["S"], config["B"], 2 * size, dtype=dtype, device="meta", requires_grad=True)
        x.packed = True  # type: ignore[attr-defined]
        return _packed if provider == "torch" else one, x, 1
    if kernel.removeprefix("tiled_") in ("swiglu", "geglu"):
        activation = F.silu if config["hidden_act"] == "silu" else lambda x: F.gelu(x, approximate="tanh")
        fused = provider in ("liger", "liger_tiled")
        gated = one if fused else lambda gate, up: activation(gate) * up
        model = _MLP(config["hidden_size"], config["intermediate_size"], gated).to(dtype)
        batch = config.get("B", config.get("bsz"))
        x = torch.empty(batch, size, config["hidden_size"], dtype=dtype, device="meta", requires_grad=True)
        return model, x, config["num_shards"] if "tiled" in provider else 1
    return None


def counts(row: dict[str, str]) -> dict[str, float] | None:
    """FLOP, bytes and kernels of a row's program, and its peak in bytes."""
    counted = _Counted()
    with torch.device("meta"):
        program = _program(row, counted)
        if program is None:
            return None
        fn, x, tiles = program
        parameters = list(fn.parameters()) if isinstance(fn, nn.Module) else []
        with counted:
            for tensor in (x, *parameters):
                counted.add(tensor)
            _step(fn, x, tiles, row["pass"], counted)
            work = counted.work
            if row["kernel"] == "megatron_swiglu":
                peak = counted.most  # of the first run, where they time backward onto a gradient that is there
                if row["pass"] != "forward":
                    _step(fn, x, tiles, "backward", counted)
                    work = counted.work
            else:
                counted.most = counted.live
                _step(fn, x, tiles, row["pass"], counted)  # the gradients of the run before are there
                peak = counted.most
    return {**work, "peak": peak + (WORKSPACE if work["flop"] else 0)}


def _step(fn: Callable[[Tensor], Tensor], x: Tensor, tiles: int, part: str, counted: _Counted) -> None:
    """Run forward, backward or both; a program in tiles keeps nothing, and runs forward again in backward."""
    if tiles == 1:
        y = fn(x)
    else:
        with torch.no_grad():
            y = torch.cat([fn(piece) for piece in x.chunk(tiles, 1)], 1)
    if part == "forward":
        return
    gradient = torch.empty_like(y)
    if part == "backward":
        counted.flop = counted.nbytes = counted.kernels = 0
    if tiles == 1:
        y.backward(gradient, retain_graph=True)  # as they do
        return
    whole = torch.zeros_like(x, requires_grad=False)
    for piece, place, above in zip(*(t.chunk(tiles, 1) for t in (x.detach(), whole, gradient)), strict=True):
        again = piece.requires_grad_()
        fn(again).backward(above)
        assert again.grad is not None
        place.copy_(again.grad)
    x.grad = whole if x.grad is None else x.grad.add_(whole)


# Bytes/s by the makers' data sheets, and the FLOP/s of dense bfloat16 products.
SHEETS = {
    "NVIDIA H100 80GB HBM3": (3.35e12, 989.5e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165.2e12),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71e12),
}


def _fitted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A GPU's rates: from all large rows where there are GEMMs, else what programs reach at their largest size.

    "least" is the median time of small rows, by pass: a launch, and autograd's own time.
    """
    large = [row for row in rows if row["measured"] > LARGE]
    if any(row["flop"] for row in large):  # least squares of relative errors
        seconds = torch.tensor([row["measured"] * 1e-3 for row in large], dtype=torch.float64)
        work = torch.tensor([[row["flop"], row["nbytes"]] for row in large], dtype=torch.float64) / seconds[:, None]
        scale = work.amax(0)
        costs = torch.linalg.lstsq(work / scale, torch.ones(len(large), 1, dtype=torch.float64)).solution.flatten()
        flop, nbytes = (scale / costs).tolist()
        return {"flop": flop, "nbytes": nbytes, "least": {}}
    largest = {(row["kernel"], row["provider"], row["pass"], row["config"]): row for row in rows}  # sizes ascend
    reached = [row["nbytes"] / row["measured"] * 1e3 for row in largest.values() if row["measured"] > LARGE]
    rate: dict[str, Any] = {"nbytes": statistics.median(reached)}
    small = defaultdict(list)
    for row in rows:
        if row["nbytes"] / rate["nbytes"] < 5e-6:
            small[row["pass"]].append(row["measured"] * 1e-3)
    rate["least"] = {part: statistics.median(times) for part, times in small.items()}
    return rate


def predictions() -> dict[str, Any]:
    """Every row that is predicted, the rates of each GPU, and the rows that are not."""
    with open(RESULTS / "public_measurements.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    left_out: dict[str, int] = defaultdict(int)
    known: dict[tuple[str, ...], dict[str, float] | None] = {}
    for row in table:
        key = tuple(row[name] for name in ("kernel", "provider", "pass", "size", "config"))
        if key not in known:
            known[key] = counts(row)
        found = known[key]
        unclear = row["metric"] == "memory" and row["kernel"] in ("relu_squared", "softmax")
        if found is None or unclear:
            left_out[f"{row['metric']}: {row['kernel']}, {row['provider']}"] += 1
            continue
        names = ("gpu", "kernel", "provider", "pass", "metric", "size", "config", "unit")
        rows[row["metric"]].append({**{n: row[n] for n in names}, **found, "measured": float(row["median"])})
    of_gpu = {gpu: [row for row in rows["speed"] if row["gpu"] == gpu] for gpu in SHEETS}
    rates = {gpu: _fitted(of_gpu[gpu]) for gpu in SHEETS}
    for row in rows["speed"]:
        rate = rates[row["gpu"]]
        least = sum(row[name] / rate[name] for name in ("flop", "nbytes") if name in rate)
        row["predicted"] = max(least, rate["least"].get(row["pass"], 0.0)) * 1e3
    for row in rows["memory"]:
        row["predicted"] = row["peak"] / 2**20
    return {"rates": rates, "speed": rows["speed"], "memory": rows["memory"], "left_out": left_out}


def main(arguments: argparse.Namespace) -> int:
    """Write benchmarks/results/paper_and_devices.json, and print its tables."""
    result = predictions()
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(tables(result))
    return 0


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def tables(result: dict[str, Any]) -> str:
    """The tables of docs/paper-and-devices.md."""
    columns = ["GPU", "GEMMs, TFLOP/s", "memory, TB/s", "predicted ÷ measured, middle 80 %"]
    columns += ["rows over 50 µs", "median error", "within 10 %"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for gpu, rate in result["rates"].items():
        ratios = [r["predicted"] / r["measured"] for r in result["speed"] if r["gpu"] == gpu and r["measured"] > LARGE]
        errors = [abs(ratio - 1) for ratio in ratios]
        tenths = statistics.quantiles(ratios, n=10)
        nbytes, flop = SHEETS[gpu]
        products = f"{rate['flop'] / 1e12:.0f} ({rate['flop'] / flop:.0%})" if "flop" in rate else "–"
        moved = f"{rate['nbytes'] / 1e12:.2f} ({rate['nbytes'] / nbytes:.0%})" if rate["nbytes"] < nbytes else "–"
        lines.append(
            f"| {gpu} | {products} | {moved} "
            f"| {tenths[0]:.2f} to {tenths[-1]:.2f} | {len(ratios)} | {statistics.median(errors):.1%} "
            f"| {sum(e <= 0.1 for e in errors) / len(errors):.0%} |"
        )
    lines += ["", "| peaks | rows | within 1 % | median error |", "|---|---|---|---|"]
    for part in ("forward", "backward", "full"):
        errors = [abs(r["predicted"] / r["measured"] - 1) for r in result["memory"] if r["pass"] == part]
        near = sum(error <= 0.01 for error in errors)
        lines.append(f"| {part} | {len(errors)} | {near / len(errors):.0%} | {statistics.median(errors):.1%} |")
    for metric in ("speed", "memory"):
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        for row in result[metric]:
            groups[row["gpu"], row["kernel"], row["provider"], row["pass"]].append(row)
        unit = "ms" if metric == "speed" else "MiB"
        lines += ["", f"| GPU | program | pass | predicted / measured, {unit}, by size |", "|---|---|---|---|"]
        for (gpu, kernel, provider, part), rows in groups.items():
            shown = "; ".join(
                f"{float(r['size']):.0f}: {_figure(r['predicted'])} / {_figure(r['measured'])}" for r in rows
            )
            lines.append(f"| {gpu.removeprefix('NVIDIA ')} | {kernel}, {provider} | {part} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(run_script(main, __doc__ or "", ["out"]))
