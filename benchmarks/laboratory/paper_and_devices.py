"""Compare published times and peaks of GPU kernels with the virtual GPU's predictions.

The measurements are linkedin/Liger-Kernel's own (benchmarks/results/public_measurements.csv). Each program runs on meta
tensors as in Liger's benchmark scripts. Every operator counts as a kernel, with its FLOP or bytes, and live storages
are tracked. Each of Liger's kernels is one operator, with the bytes of its arguments.
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
from torch_fused_ops.virtual_gpu.roofline import Rates, Work
from torch_fused_ops.virtual_gpu.timeline import Storages
from torch_fused_ops.virtual_gpu.work import flop_of, is_view

RESULTS = Path(__file__).parent.parent / "results"
WORKSPACE = int(16.25 * 2**20)  # twice the default of cuBLAS, 8.125 MiB
LARGE = 0.05  # ms; longer rows take more than a few launches
FITTED = 0.02  # ms; memory traffic dominates longer forward rows


class _Counted(Storages):
    """Record each operator's kernel as (FLOP, bytes, True if a tensor is strided), and the live storages."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[float, float, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax_backward_data.default:
            args = (args[0] * args[1], *args[1:])  # CUDA runs an additional kernel with an additional tensor
            self.kernel([args[0]], [args[1:2], args[0]])
            self.add(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if not is_view(func) and not func._schema.name.startswith(("aten::empty", "aten::detach", "aten::new_empty")):
            flop = flop_of(func.overloadpacket, args, kwargs or {}, result)
            self.kernel([args, kwargs], [result], flop)
        return result

    def forget(self) -> None:
        """Restart the counts from the current live bytes."""
        self.kernels.clear()
        self.most = self.live

    def kernel(self, reads: Any, writes: Any, flop: float = 0.0, vectorized: bool = False) -> None:
        """Count a kernel. PyTorch's kernels move strided tensors element by element."""
        tensors = [t for t in tree_leaves((reads, writes)) if isinstance(t, Tensor)]
        nbytes = 0 if flop else sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tensors)
        self.kernels.append((flop, nbytes, not (vectorized or all(t.is_contiguous() for t in tensors))))


def _one_kernel(counted: _Counted, in_place: bool) -> Callable[..., Tensor]:
    """Return an operator with one forward and one backward kernel. Backward may write gradients over the inputs."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            ctx.save_for_backward(*inputs)
            *leading, width = inputs[0].shape
            width //= 2 if getattr(inputs[0], "packed", False) else 1
            result = torch.empty(*leading, width, dtype=inputs[0].dtype, device="meta")
            counted.kernel(inputs, [result], vectorized=True)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            inputs, incoming = ctx.saved_tensors, [gradient.contiguous() for gradient in gradients]
            results = [x.detach() if in_place else torch.empty_like(x) for x in inputs]
            counted.kernel([incoming, inputs], results, vectorized=True)
            return tuple(results)

    return Kernel.apply


class _MLP(nn.Module):
    def __init__(
        self, width: int, hidden: int, activation: Callable[[Tensor], Tensor], kernel: Any, tiles: int
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.activation, self.kernel, self.tiles = activation, kernel, tiles

    def forward(self, x: Tensor) -> Tensor:
        return _Tiled.apply(x, self) if self.tiles > 1 else self.part(x)  # type: ignore[no-untyped-call]

    def part(self, x: Tensor) -> Tensor:
        if self.kernel is None:
            result: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        elif self.tiles == 1:
            result = self.down(self.kernel(self.gate(x), self.up(x)))
        else:
            gate, up = self.gate(x), self.up(x)  # both are alive during the last GEMM
            result = self.down(self.kernel(gate, up))
        return result


class _Tiled(torch.autograd.Function):
    """Run an MLP tile by tile, without saving a graph. Backward repeats forward and adds to slices of one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: _MLP) -> Tensor:
        ctx.save_for_backward(x)
        ctx.model = model
        parts = x.chunk(model.tiles, -2)
        return torch.cat([model.part(part) for part in parts], -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), model = ctx.saved_tensors, ctx.model
        rows, grad_input = (t.flatten(0, 1).detach() for t in (x, torch.zeros_like(x)))
        tiles = (t.chunk(model.tiles) for t in (rows, grad_input, gradient.flatten(0, 1)))
        for part, grad_part, grad_output in zip(*tiles, strict=True):
            part.requires_grad_().grad = grad_part
            with torch.enable_grad():
                result = model.part(part)
            result.backward(grad_output)
        return grad_input.view_as(x), None


def _packed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _program(row: dict[str, str], counted: _Counted) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """Return a row's program and its input; None if the row's program is not modeled."""
    config, size = json.loads(row["config"]), int(float(row["size"]))
    dtype = torch.float32 if "float32" in config.get("dtype", "") else torch.bfloat16
    kernel, provider = row["kernel"], row["provider"]
    shape: tuple[Any, ...] = ()
    is_mlp = kernel.removeprefix("tiled_") in ("swiglu", "geglu")
    fn: Callable[[Tensor], Tensor] = _one_kernel(counted, provider == "liger_in_place" or is_mlp)
    if kernel in ("relu_squared", "softmax"):
        # Peaks were measured with one row; the allocator's unit is 512 bytes.
        shape = (config["M"], size) if row["metric"] == "speed" else (1, max(size, 512 // dtype.itemsize))
        if provider == "torch":
            fn = (lambda x: F.relu(x).square()) if kernel == "relu_squared" else (lambda x: torch.softmax(x, -1))
    elif kernel == "megatron_swiglu" and provider in ("torch", "liger", "liger_in_place"):
        shape = (config["S"], config["B"], 2 * size)
        fn = _packed if provider == "torch" else fn
    elif is_mlp:
        activation = F.silu if config["hidden_act"] == "silu" else lambda x: F.gelu(x, approximate="tanh")
        shape = (config.get("B", config.get("bsz")), size, config["hidden_size"])
        tiles = config["num_shards"] if "tiled" in provider else 1
        fused = fn if provider in ("liger", "liger_tiled") else None
        fn = _MLP(shape[-1], config["intermediate_size"], activation, fused, tiles).to(dtype)
    else:
        return None
    x = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    x.packed = kernel == "megatron_swiglu"  # type: ignore[attr-defined]
    return fn, x


def counts(row: dict[str, str]) -> dict[str, Any] | None:
    """Return the kernels of a row's program in its second run, and its peak in bytes."""
    counted = _Counted()
    with torch.device("meta"):
        program = _program(row, counted)
        if program is None:
            return None
        fn, x = program
        with counted:
            for tensor in (x, *(fn.parameters() if isinstance(fn, nn.Module) else ())):
                counted.add(tensor)
            for _ in range(2):  # the second run has the gradients of the first
                _step(fn, x, row, counted)
    has_gemms = any(flop for flop, *_ in counted.kernels)
    return {"kernels": list(counted.kernels), "peak": counted.most + (WORKSPACE if has_gemms else 0)}


def _step(fn: Callable[[Tensor], Tensor], x: Tensor, row: dict[str, str], counted: _Counted) -> None:
    """Run the measured part: forward, backward of a retained graph, or both."""
    part, is_sum = row["pass"], row["kernel"] == "megatron_swiglu"
    if row["metric"] == "speed" or is_sum:
        x.grad = None
    if part == "forward":
        counted.forget()
        fn(x)
    elif is_sum:  # this kernel's backward measurements include forward
        counted.forget()
        y = fn(x)
        y.sum().backward()
    elif part == "backward":
        y = fn(x)
        gradient = torch.empty_like(y)
        counted.forget()
        y.backward(gradient, retain_graph=True)
    else:
        counted.forget()
        y = fn(x)
        y.backward(torch.empty_like(y), retain_graph=True)


# Bytes/s, and FLOP/s of dense bfloat16 GEMMs, from the makers' data sheets.
SHEETS = {
    "NVIDIA H100 80GB HBM3": (3.35e12, 989.5e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165.2e12),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71e12),
}


def _columns(row: dict[str, Any]) -> list[float]:
    """Return a row's FLOP, bytes, bytes of strided tensors, and number of kernels."""
    flop, contiguous, strided = (sum(k[0] for k in row["kernels"]), *(
        sum(nbytes for _, nbytes, is_strided in row["kernels"] if is_strided is selected) for selected in (False, True)
    ))  # fmt: skip
    return [flop, contiguous, strided, float(len(row["kernels"]))]


def _costs(rows: Sequence[dict[str, Any]], columns: Sequence[int]) -> list[float]:
    """Fit the seconds per unit of each column, with the smallest sum of relative errors."""
    seconds = torch.tensor([[row["measured"] * 1e-3] for row in rows], dtype=torch.float64)
    work = torch.tensor([[_columns(row)[i] for i in columns] for row in rows], dtype=torch.float64) / seconds
    scale, weights = work.amax(0), torch.ones_like(seconds)
    for _ in range(100):
        costs = torch.linalg.lstsq(work / scale * weights, weights).solution.flatten() / scale
        weights = (work @ costs - 1).abs().clamp(min=0.005).rsqrt()[:, None]
    return list(map(float, costs))


def _fitted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Fit a GPU's rates: to all large rows if there are GEMMs, otherwise to forward rows, so backward is predicted."""
    if any(_columns(row)[0] for row in rows):
        flop, nbytes = _costs([row for row in rows if row["measured"] > LARGE], (0, 1))
        return {"flop": 1 / flop, "nbytes": 1 / nbytes}
    forward = [row for row in rows if row["pass"] == "forward" and row["measured"] > FITTED]
    if not any(_columns(row)[2] for row in forward):
        nbytes, launch = _costs(forward, (1, 3))
        return {"nbytes": 1 / nbytes, "launch": launch}
    nbytes, strided, launch = _costs(forward, (1, 2, 3))
    return {"nbytes": 1 / nbytes, "strided": 1 / strided, "launch": launch}


def _seconds(row: dict[str, Any], rate: dict[str, Any]) -> float:
    """Return the seconds of a row's kernels, by the planner's own function."""
    rates = Rates(rate.get("flop", 1.0), rate["nbytes"], launch=rate.get("launch", 0.0))
    slower = rate["nbytes"] / rate.get("strided", rate["nbytes"])
    return rates.seconds(Work(flop, nbytes * (slower if strided else 1)) for flop, nbytes, strided in row["kernels"])


def _python(row: dict[str, Any]) -> tuple[str, bool]:
    """Return a key of rows with equal Python overhead: the pass, and True if backward is a Python function."""
    return row["pass"], row["provider"] != "torch"


def predictions() -> dict[str, Any]:
    """Return all predicted rows, and the rates of each GPU."""
    rows: dict[str, list[dict[str, Any]]] = {"speed": [], "memory": []}
    with open(RESULTS / "public_measurements.csv", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    for row in table:
        if counted := counts(row):
            rows[row["metric"]].append({**row, **counted, "measured": float(row["median"])})
    rates = {}
    for gpu in SHEETS:
        speed = [row for row in rows["speed"] if row["gpu"] == gpu]
        rate = rates[gpu] = _fitted(speed)
        waits = defaultdict(list)  # rows in which the GPU waits for Python
        for row in speed:
            row["predicted"] = _seconds(row, rate) * 1e3
            if row["predicted"] < row["measured"] / 1.5:
                waits[_python(row)].append(row["measured"])
        least = {python: statistics.median(times) for python, times in waits.items() if len(times) >= 3}
        for row in speed:
            row["predicted"] = max(row["predicted"], least.get(_python(row), 0.0))
    for row in rows["memory"]:
        row["predicted"] = row["peak"] / 2**20
    return {"rates": rates, **rows}


def main(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    print(tables(predictions()))
    return 0


def tables(result: dict[str, Any]) -> str:
    """Format the tables of docs/paper-and-devices.md."""
    columns = ["GPU", "GEMMs, TFLOP/s", "memory, TB/s", "strided, TB/s", "a launch, µs"]
    columns += ["predicted ÷ measured, middle 80 %", "rows over 50 µs", "median error", "within 10 %"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for gpu, rate in result["rates"].items():
        ratios = [r["predicted"] / r["measured"] for r in result["speed"] if r["gpu"] == gpu and r["measured"] > LARGE]
        errors = [abs(ratio - 1) for ratio in ratios]
        tenths = statistics.quantiles(ratios, n=10)
        nbytes, flop = SHEETS[gpu]
        gemms = f"{rate['flop'] / 1e12:.0f} ({rate['flop'] / flop:.0%})" if "flop" in rate else "–"
        memory = f"{rate['nbytes'] / 1e12:.2f} ({rate['nbytes'] / nbytes:.0%})" if rate["nbytes"] < nbytes else "–"
        strided = f"{rate['strided'] / 1e12:.2f}" if "strided" in rate else "–"
        launch = f"{rate['launch'] * 1e6:.1f}" if "launch" in rate else "–"
        lines.append(
            f"| {gpu} | {gemms} | {memory} | {strided} | {launch} "
            f"| {tenths[0]:.2f} to {tenths[-1]:.2f} | {len(ratios)} | {statistics.median(errors):.1%} "
            f"| {sum(e <= 0.1 for e in errors) / len(errors):.0%} |"
        )
    lines += ["", "| peaks | rows | within 1 % | median error |", "|---|---|---|---|"]
    for part in ("forward", "backward", "full"):
        errors = [abs(r["predicted"] / r["measured"] - 1) for r in result["memory"] if r["pass"] == part]
        exact = sum(error <= 0.01 for error in errors)
        lines.append(f"| {part} | {len(errors)} | {exact / len(errors):.0%} | {statistics.median(errors):.1%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(run_script(main, __doc__))
