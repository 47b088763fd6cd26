"""Whether ``backend="fused"`` trains to the same loss: 500 steps, several seeds, judged by rounding's own noise.

    python -m torch_fused_ops.benchmarks.laboratory.long_training [--steps N] [--seeds N] [--out FILE] [--picture FILE]

Four ways, each seed with its own weights and batches, the same for all four: ``eager``, ``compile`` (plain
``torch.compile``), ``fused`` (``backend="fused"``, strict), and ``nudged``: eager again, from weights that are each one
float32 number further. Training is chaotic: the nudged run shows how far two correct runs drift apart.

The statistic is of the paired differences d of the final losses (means over the last tenth of the steps), way − eager
with the same seed. A way agrees if both hold:

* *Like rounding*: mean d² is at most F times the nudged runs' mean d²; F is the 99 % quantile of the F distribution
  with as many degrees of freedom as seeds, above and below.
* *No offset that matters*: the 95 % interval of the mean d (Student's t) lies within ± the standard deviation of
  eager's final losses between seeds.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import harness, models
from torch_fused_ops.benchmarks.laboratory.fp8_training import T, start, train
from torch_fused_ops.benchmarks.laboratory.fp8_training import final as mean_of_last

WAYS = ("eager", "nudged", "compile", "fused")
CONFIG = models.TINY
# By degrees of freedom: F(n, n) at 99 %.
F = {1: 4052.2, 2: 99.0, 3: 29.457, 4: 15.977, 5: 10.967, 6: 8.466, 7: 6.993, 8: 6.029, 9: 5.351, 10: 4.849}
SEEDS = range(2, 1 + max(F))
TAIL = 0.1  # the share of steps, at the end, whose mean is called the final loss


def final(losses: Sequence[float]) -> float:
    """The mean over the last tenth of the steps."""
    return mean_of_last(losses, max(1, round(TAIL * len(losses))))


def prepared(model: nn.Module, way: str) -> Callable[..., Tensor]:
    """The model, one of the ways."""
    if way == "nudged":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))
    if way == "compile":
        return torch.compile(model, fullgraph=True, dynamic=False)
    if way == "fused":
        options: dict[str, Any] = {"policy": tfo.FusionPolicy(strict=True)}
        return torch.compile(model, backend="fused", fullgraph=True, dynamic=False, options=options)
    return model


def compare(
    steps: int,
    seeds: int,
    config: models.Config = CONFIG,
    batch: int = 8,
    prepare: Callable[[nn.Module, str], Callable[..., Tensor]] = prepared,
    tell: Callable[[dict[str, Any], str], None] = lambda *_: None,
) -> dict[str, Any]:
    """Train every way with every seed.

    Args:
        steps, seeds, config, batch: how long, how often, what, on how many sequences at a time.
        prepare: makes of a model and a way what is called.
        tell: called after each run with what there is so far, and a line for people.

    Returns:
        ``curves`` (way → for each seed the loss of every step) and ``summary``.
    """
    if seeds not in SEEDS:
        raise harness.UsageError(f"--seeds {seeds} is not accepted: it must be from {SEEDS.start} to {SEEDS.stop - 1}")
    result: dict[str, Any] = {"steps": steps, "batch": batch, "model": vars(config), "ways": WAYS}
    curves: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        for way in WAYS:
            began = time.perf_counter()
            torch._dynamo.reset()
            torch.manual_seed(seed)
            model = models.GPT(config).to("cuda" if torch.cuda.is_available() else "cpu")
            start(model, model, seed)
            losses = train(prepare(model, way), model, steps, batch, config.context, seed)
            curves[way].append([round(loss, 6) for loss in losses])
            took = time.perf_counter() - began
            if seed and way == WAYS[-1]:
                result |= {"curves": curves, "summary": summary(curves)}
            tell(result, f"seed {seed}  {way:<8} final loss {final(curves[way][-1]):.5f}  {took:.0f} s")
    return result


def summary(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The statistic, for each way against eager."""
    finals = {way: [final(c) for c in rows] for way, rows in curves.items()}
    eager = finals["eager"]
    n, spread = len(eager), statistics.stdev(eager)
    apart = {w: [a - b for a, b in zip(finals[w], eager, strict=True)] for w in finals if w != "eager"}
    squares = {way: statistics.fmean(d * d for d in each) for way, each in apart.items()}
    found = {}
    for way, each in apart.items():
        mean, error = statistics.fmean(each), statistics.stdev(each) / n**0.5
        low, high = mean - T[n - 1] * error, mean + T[n - 1] * error
        like = way == "nudged" or squares[way] <= F[n] * squares["nudged"]
        found[way] = {
            "each": each,
            "mean": mean,
            "interval_95": [low, high],
            "root_mean_square": squares[way] ** 0.5,
            "like_rounding": like,
            "within_seeds": -spread <= low and high <= spread,
        }
    means = {way: {"each": each, "mean": statistics.fmean(each)} for way, each in finals.items()}
    return {"final_loss": means, "between_seeds": spread, "minus_eager": found}


def agrees(found: dict[str, Any], way: str) -> bool:
    """Whether a way's final losses are eager's, by the statistic."""
    row = found["minus_eager"][way]
    return bool(row["like_rounding"] and row["within_seeds"])


def table(found: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [
        f"final loss of eager {found['final_loss']['eager']['mean']:.5f}, between seeds {found['between_seeds']:.5f}"
    ]
    for way, row in found["minus_eager"].items():
        low, high = row["interval_95"]
        verdict = "the noise of rounding" if way == "nudged" else "agrees" if agrees(found, way) else "DIFFERS"
        lines.append(
            f"{way:<8} − eager  mean {row['mean']:+.5f} (95 % interval {low:+.5f} to {high:+.5f}), "
            f"root mean square {row['root_mean_square']:.5f}: {verdict}"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the mean loss curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves, every = result["curves"], max(1, result["steps"] // 60)
    colors = dict(zip(WAYS, ("#9aa3ad", "#6b7280", "#d97706", "#2563eb"), strict=True))
    at = [i * every + every / 2 for i in range(result["steps"] // every)]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for way in WAYS:
        means = [statistics.fmean(column) for column in zip(*curves[way], strict=True)]
        smooth = [statistics.fmean(means[i * every : (i + 1) * every]) for i in range(len(at))]
        style = ":" if way == "nudged" else "-"
        axes.plot(at, smooth, color=colors[way], linestyle=style, label=way, linewidth=3 if way == "eager" else 1.2)
    axes.set_xlabel("step", fontsize=12)
    axes.set_ylabel("training loss, mean of five seeds" if len(curves["eager"]) == 5 else "training loss", fontsize=12)
    axes.legend(frameon=False, fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5, help=f"{SEEDS.start} to {SEEDS.stop - 1} (default: 5)")
    parser.add_argument("--out", type=Path, default=harness.results_folder() / "long_training.json")
    parser.add_argument("--picture", type=Path, help="draw --out, which is measured if it is not there")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, so small is the model)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.picture is None or not args.out.exists():
        about = {"benchmark": "long_training", "schema": harness.SCHEMA, "machine": harness.machine()}

        def tell(result: dict[str, Any], line: str) -> None:
            print(line, flush=True)
            if "summary" in result:
                harness.write(args.out, about | result)

        compare(args.steps, args.seeds, tell=tell)
    result = harness.read(args.out, "long_training")
    print(table(result["summary"]))
    if args.picture:
        draw(result, args.picture)


if __name__ == "__main__":
    main()
