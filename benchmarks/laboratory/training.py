"""Compare small GPTs' losses after training: our code, memory levels and float8 recipes against plain training.

    python -m torch_fused_ops.benchmarks.laboratory.training --study {rounding,memory,gemm,rowwise}

Weights and optimizer are in float32, under bf16 autocast except in ``rounding``. All variants of a seed have the
same weights and batches, so differences are paired. Their mean has a 95 % interval (Student's t).

``rounding`` compares eager, torch.compile, backend="fused" and *nudged*. Nudged is eager mode, starting from weights
that are each increased to the next float32 number. Training is chaotic: nudged shows how far two correct runs drift
apart. A variant agrees with eager if the mean square of its differences is at most F times nudged's (the 99 % quantile
of the F distribution).

The text is Python's standard library. The JSON is written after every run, and completed runs are not repeated.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.benchmarks import harness, models
from torch_fused_ops.benchmarks.laboratory import run_script

TAIL = 40  # the final loss is the mean of the last 40 steps
# By the number of seeds n: the 99 % quantile of F(n, n), and the 97.5 % quantile of Student's t with n − 1.
F = {3: 29.457, 5: 10.967}
T = {3: 4.303, 5: 2.776}

Curves = Mapping[str, Sequence[Sequence[float]]]  # by variant: the loss of every step, for each seed


@dataclass(frozen=True)
class Study:
    """Variants of training, and the pairs to compare.

    Attributes:
        ways: the policy of each variant, by name; None for eager, "compile" for plain torch.compile.
        pairs: (variant, the variant it is compared with).
        models: class and sizes of each model, by name.
        out: the name of the result file.
        steps: number of steps in each run.
        seeds: number of runs of each variant.
        autocast: True if forward runs under bf16 autocast.
    """

    ways: Mapping[str, FusionPolicy | str | None]
    pairs: tuple[tuple[str, str], ...]
    models: Mapping[str, tuple[Callable[[models.Config], nn.Module], models.Config]]
    out: str
    steps: int = 300
    seeds: int = 5
    autocast: bool = True


BATCH = 8
STUDIES = {
    "rounding": Study(
        {"eager": None, "nudged": None, "compile": "compile", "fused": FusionPolicy(strict=True)},
        (("nudged", "eager"), ("compile", "eager"), ("fused", "eager")),
        {"GELU": (models.GPT, models.TINY)},
        out="long_training",
        steps=500,
        autocast=False,
    ),
    "memory": Study(
        {"eager": None, "free": FusionPolicy(strict=True), "fp8": FusionPolicy(memory="fp8", strict=True)},
        (("free", "eager"), ("fp8", "free")),
        {"GELU": (models.GPT, models.SMALL)},
        out="fp8_training",
    ),
    "gemm": Study(
        {
            "plain": FusionPolicy(strict=True),
            "fp8": FusionPolicy(gemm="fp8", strict=True),
            "fp8-wgrad-bf16": FusionPolicy(gemm="fp8-wgrad-bf16", strict=True),
        },
        (("fp8", "plain"), ("fp8-wgrad-bf16", "plain")),
        {"GELU": (models.GPT, models.TINY), "SwiGLU": (models.Llama, models.TINY_LLAMA)},
        out="fp8_gemm_training",
    ),
    "rowwise": Study(
        {"plain": FusionPolicy(strict=True), "fp8-rowwise": FusionPolicy(gemm="fp8-rowwise", strict=True)},
        (("fp8-rowwise", "plain"),),
        {"GELU": (models.GPT, models.TINY), "SwiGLU": (models.Llama, models.TINY_LLAMA)},
        out="fp8_rowwise_training",
        steps=120,
        seeds=3,
    ),
}


def text() -> Tensor:
    """Return the standard library's top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:4_000_000]), dtype=torch.uint8)


def compiled(model: nn.Module, policy: FusionPolicy | str | None, autocast: bool = True) -> Callable[..., Tensor]:
    """Return the model with a study's policy.

    Raises:
        RuntimeError: at the first call, if an MLP's linear layers do not use the policy's recipe.
    """
    forward: Callable[..., Tensor] = model
    if policy is not None:
        options: dict[str, Any] = (
            {"backend": "fused", "options": {"policy": policy}} if isinstance(policy, FusionPolicy) else {}
        )
        forward = torch.compile(model, fullgraph=True, dynamic=False, **options)
    checked = not isinstance(policy, FusionPolicy)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal checked
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
            if checked:
                return forward(tokens, targets)
            with tfo.record() as report:
                loss = forward(tokens, targets)
        check_sites(model, report, policy)
        checked = True
        return loss

    return run


def check_sites(model: nn.Module, report: tfo.Report, policy: Any) -> None:
    """Raise a RuntimeError if any linear layer of the model's MLPs does not use the policy's recipe."""
    expected = policy.gemm if policy and policy.gemm != "bf16" else ""
    mlps = sum(isinstance(m, (models.GELUMLP, models.SwiGLUMLP)) for m in model.modules())
    gemms = [(site.gemm, site.gemm_reason) for site in report.sites if site.is_mlp]
    if gemms != [(expected, "")] * mlps:
        raise RuntimeError(f"{mlps} MLPs should use the recipe {expected or 'bf16'}; the compiled ones use {gemms}")


def start(model: nn.Module, fresh: nn.Module, seed: int, nudged: bool = False) -> None:
    """Initialize a model by seed, through ``fresh`` of the same class. ``nudged``: use the next larger weights."""
    models.initialize(fresh, seed)
    model.load_state_dict(fresh.state_dict())
    if nudged:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))


def train(
    forward: Callable[..., Tensor], model: nn.Module, steps: int, batch: int, context: int, seed: int
) -> list[float]:
    """Train the model through ``forward`` from its current weights, and return the loss of every step."""
    device, data = next(model.parameters()).device, text()
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


def final(losses: Sequence[float], tail: int = TAIL) -> float:
    """Return the mean loss of the last steps."""
    return statistics.fmean(losses[-tail:])


def differences(finals: Mapping[str, Sequence[float]], way: str, other: str) -> dict[str, Any]:
    """Return two variants' differences in final loss by seed, with their mean and its 95 % interval."""
    each = [a - b for a, b in zip(finals[way], finals[other], strict=True)]
    mean, reach = statistics.fmean(each), T[len(each)] * statistics.stdev(each) / len(each) ** 0.5
    square = statistics.fmean(d * d for d in each)
    return {"each": each, "mean": mean, "interval_95": [mean - reach, mean + reach], "root_mean_square": square**0.5}


def agrees(study: Mapping[str, Any], way: str) -> bool:
    """Return True if a variant's final losses differ from eager's by rounding only, in a summary of ``rounding``."""
    rows, n = study["differences"], len(study["final_loss"]["eager"]["each"])
    compiled, nudged = (rows[f"{name} − eager"]["root_mean_square"] for name in (way, "nudged"))
    return bool(compiled**2 <= F[n] * nudged**2)


def summary(study: Study, curves: Curves) -> dict[str, Any]:
    """Return one model's final losses, the differences of the study's pairs, and the spread between seeds.

    The spread is the standard deviation of the reference variant's final losses.
    """
    finals = {way: [final(c) for c in curves[way]] for way in study.ways}
    return {
        "final_loss": {way: {"each": f, "mean": statistics.fmean(f)} for way, f in finals.items()},
        "differences": {f"{way} − {other}": differences(finals, way, other) for way, other in study.pairs},
        "between_seeds": statistics.stdev(finals[study.pairs[-1][1]]),
    }


def table(result: dict[str, Any]) -> str:
    """Format the summaries as Markdown rows, one for each model and pair."""
    rows = []
    for model, summarized in result["summary"].items():
        for pair, row in summarized["differences"].items():
            low, high = row["interval_95"]
            way, _, other = pair.partition(" − ")
            losses = [f"{summarized['final_loss'][name]['mean']:.4f}" for name in (way, other)]
            spread = f"{summarized['between_seeds']:.4f}"
            difference = f"{row['mean']:+.4f} ({low:+.4f} to {high:+.4f})".replace("-", "−")
            rows.append(f"| {model} | {pair} | {losses[0]} | {losses[1]} | {difference} | {spread} |")
    return "\n".join(rows)


def measure(study: Study, result: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Do the training runs that ``result`` lacks, add each run to ``result``, and call ``tell`` with a line of text."""
    curves = result.setdefault("curves", {model: {way: [] for way in study.ways} for model in study.models})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (make, config) in study.models.items():
        for way, policy in study.ways.items():
            done = curves[name][way]
            if len(done) >= study.seeds:
                continue
            torch._dynamo.reset()
            model = make(config).to(device)
            forward = compiled(model, policy, study.autocast)  # once for all seeds
            for seed in range(len(done), study.seeds):
                began = time.perf_counter()
                torch.manual_seed(seed)
                start(model, make(config).to(device), seed, way == "nudged")
                losses = train(forward, model, study.steps, BATCH, config.context, seed)
                done.append([round(loss, 6) for loss in losses])
                if all(len(each) == study.seeds for rows in curves.values() for each in rows.values()):
                    result["summary"] = {name: summary(study, rows) for name, rows in curves.items()}
                took = time.perf_counter() - began
                tell(f"{name:<6} {way:<14} seed {seed}  final loss {final(losses):.4f}  {took:.0f} s")


def main(arguments: argparse.Namespace) -> int:
    """Do a study's missing runs, write the JSON after each, and print the table."""
    study = STUDIES[arguments.study]
    out = harness.RESULTS / f"{study.out}.json"
    torch.set_num_threads(1)  # the models are small
    about = {
        "benchmark": study.out, "schema": harness.SCHEMA, "machine": harness.machine(), "steps": study.steps,
        "models": {model: vars(config) for model, (_, config) in study.models.items()}, "batch": BATCH,
    }  # fmt: skip
    result = harness.read(out, study.out) if out.exists() else about
    if any(result[key] != about[key] for key in ("steps", "models", "batch")):
        raise harness.UsageError(f"{out} has other steps, models or batches: remove it")

    def tell(line: str) -> None:
        print(line, flush=True)
        harness.write(out, result)

    measure(study, result, tell)
    print(table(result))
    return 0


if __name__ == "__main__":
    study = {"choices": tuple(STUDIES), "required": True}
    raise SystemExit(run_script(main, __doc__, study=study))
