"""What ``memory="fp8"`` does to training: loss curves of a small GPT over several seeds, against bf16 as it is.

    python -m torch_fused_ops.benchmarks.fp8_training [--steps N] [--seeds N] [--mlp gelu|swiglu] [--out FILE]

Three ways, each seed with its own weights and batches, the same for all three: ``eager`` (PyTorch, bf16 autocast,
weights and optimizer in float32), ``free`` (``backend="fused"``) and ``fp8`` (the same with ``memory="fp8"``). Eager
against free shows how far two runs drift apart that differ in nothing but rounding; fp8 against free is read against
that, and against the spread between seeds. The text is the Python standard library on this machine, as in
``examples/quickstart.py``. Writes the curves as JSON after every seed, and draws them (``--picture``).
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import harness, models

WAYS = ("eager", "free", "fp8")
TAIL = 0.1  # the share of steps, at the end, whose mean is called the final loss


def text() -> Tensor:
    """The standard library's top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:4_000_000]), dtype=torch.uint8)


def compiled(model: nn.Module, way: str) -> Callable[..., Tensor]:
    """The model under bf16 autocast, one of the ways."""
    forward: Callable[..., Tensor] = model
    if way != "eager":
        options: dict[str, Any] = {"policy": tfo.FusionPolicy(memory=way, strict=True)}
        forward = torch.compile(model, backend="fused", fullgraph=True, dynamic=False, options=options)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return forward(tokens, targets)

    return run


def train(
    way: str,
    make: Callable[[], nn.Module],
    steps: int,
    batch: int,
    context: int,
    seed: int,
    prepare: Callable[[nn.Module, str], Callable[..., Tensor]] = compiled,
) -> list[float]:
    """The loss of every step. ``prepare`` makes of a model and a way what is called."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = make().to(device)
    models.initialise(model, seed)
    forward, data = prepare(model, way), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - context - 1, (batch,), generator=draw).tolist()
        rows = torch.stack([data[s : s + context + 1] for s in starts]).long().to(device)
        loss = forward(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def final(losses: list[float]) -> float:
    """The mean over the last tenth of the steps."""
    return statistics.fmean(losses[-max(1, round(TAIL * len(losses))) :])


def differences(curves: dict[str, list[list[float]]], way: str, other: str) -> dict[str, Any]:
    """The final losses of a way minus another's, seed by seed."""
    each = [final(a) - final(b) for a, b in zip(curves[way], curves[other], strict=True)]
    mean = statistics.fmean(each)
    error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else float("nan")
    return {"each": each, "mean": mean, "standard_error": error}


def summary(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    finals = {way: [final(c) for c in curves[way]] for way in WAYS}
    return {
        "final_loss": {way: {"each": f, "mean": statistics.fmean(f)} for way, f in finals.items()},
        "fp8_minus_free": differences(curves, "fp8", "free"),
        "free_minus_eager": differences(curves, "free", "eager"),
        "between_seeds": statistics.stdev(finals["free"]) if len(finals["free"]) > 1 else None,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Mean curves on the left, the two differences on the right, seed by seed and in the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, every = result["curves"], max(1, result["steps"] // 60)

    def smooth(losses: list[float]) -> list[float]:
        return [statistics.fmean(losses[i : i + every]) for i in range(0, len(losses) - every + 1, every)]

    at = [i * every + every / 2 for i in range(result["steps"] // every)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for way, colour in zip(WAYS, ("#9aa3ad", "#2563eb", "#d97706"), strict=True):
        rows = [smooth(c) for c in curves[way]]
        left.plot(at, [statistics.fmean(column) for column in zip(*rows, strict=True)], color=colour, label=way)
    left.set(xlabel="step", ylabel="training loss, mean of the seeds", title="Loss")
    left.legend(frameon=False)
    for (a, b), colour in ((("free", "eager"), "#9aa3ad"), (("fp8", "free"), "#d97706")):
        rows = [
            [p - q for p, q in zip(smooth(x), smooth(y), strict=True)]
            for x, y in zip(curves[a], curves[b], strict=True)
        ]
        for row in rows:
            right.plot(at, row, color=colour, alpha=0.25, linewidth=0.8)
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        right.plot(at, means, color=colour, label=f"{a} − {b}")
    right.axhline(0, color="#1f2937", linewidth=0.6)
    right.set(xlabel="step", ylabel="difference in loss", title="Differences: each seed (thin), mean")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 bytes in a batch (default: 8)")
    parser.add_argument("--out", type=Path, default=harness.results_folder() / "fp8_training.json")
    parser.add_argument(
        "--picture", type=Path, help="draw the curves, from --out, which is measured if it is not there"
    )
    args = parser.parse_args()
    config = models.SMALL
    if args.picture is None or not args.out.exists():
        result = {
            "benchmark": "fp8_training", "schema": harness.SCHEMA, "machine": harness.machine(),
            "model": vars(config), "steps": args.steps, "batch": args.batch, "ways": WAYS,
        }  # fmt: skip
        curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        for seed in range(args.seeds):
            for way in WAYS:
                start = time.perf_counter()
                curves[way].append(train(way, lambda: models.GPT(config), args.steps, args.batch, config.context, seed))
                last, took = final(curves[way][-1]), time.perf_counter() - start
                print(f"seed {seed}  {way:<6} final loss {last:.4f}  {took:.0f} s", flush=True)
            result |= {"curves": curves, "summary": summary(curves)}
            harness.write(args.out, result)
    result = harness.read(args.out, "fp8_training")
    found = result["summary"]
    for name in ("fp8_minus_free", "free_minus_eager"):
        mean, error = found[name]["mean"], found[name]["standard_error"]
        print(f"{name.replace('_', ' ')}: {mean:+.4f} ± {error:.4f} (standard error)")
    if found["between_seeds"] is not None:
        print(f"between seeds: {found['between_seeds']:.4f} (standard deviation of the final loss)")
    if args.picture:
        draw(result, args.picture)


if __name__ == "__main__":
    main()
