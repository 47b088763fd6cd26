"""Losses after training small GPTs: our compiled code, memory levels and float8 recipes beside plain training.

    python -m torch_fused_ops.benchmarks.laboratory.training --study {rounding,memory,gemm,rowwise} [--steps N]
        [--seeds N] [--out FILE]

Weights and optimizer are in float32, under bf16 autocast except in ``rounding``. Each seed has its own weights and
batches, the same for every variant, so differences are paired: their mean has a 95 % interval (Student's t).

``rounding``: eager, torch.compile and backend="fused" beside *nudged*, which is eager from weights that are each one
float32 number further. Training is chaotic: nudged shows how far two correct runs drift apart. A variant agrees with
eager if the mean square of its differences is at most F times nudged's (the 99 % quantile of the F distribution).

The text is Python's standard library. The JSON is written after every run, and a run that it has is not repeated.
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

TAIL = 40  # the final loss is the mean of so many last steps
# By degrees of freedom: the 99 % quantile of F(n, n).
F = {1: 4052.2, 2: 99.0, 3: 29.457, 4: 15.977, 5: 10.967, 6: 8.466, 7: 6.993, 8: 6.029, 9: 5.351, 10: 4.849}
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t at 97.5 %
SEEDS = range(2, 2 + max(T))

Curves = Mapping[str, Sequence[Sequence[float]]]  # by way: for each seed the loss of every step


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        ways: by name, the policy; None for eager, "compile" for plain torch.compile.
        pairs: (variant, the variant it is compared with).
        models: by name, the class and its sizes.
        out: the name of the results.
        autocast: whether forward runs under bf16 autocast.
    """

    ways: Mapping[str, FusionPolicy | str | None]
    pairs: tuple[tuple[str, str], ...]
    models: Mapping[str, tuple[Callable[[models.Config], nn.Module], models.Config]]
    out: str
    autocast: bool = True


BATCH = 8
STUDIES = {
    "rounding": Study(
        {"eager": None, "nudged": None, "compile": "compile", "fused": FusionPolicy(strict=True)},
        (("nudged", "eager"), ("compile", "eager"), ("fused", "eager")),
        {"GELU": (models.GPT, models.TINY)},
        out="long_training",
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
    ),
}


def text() -> Tensor:
    """The standard library's top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:4_000_000]), dtype=torch.uint8)


def compiled(model: nn.Module, policy: FusionPolicy | str | None, autocast: bool = True) -> Callable[..., Tensor]:
    """Return the model with a study's policy.

    Raises:
        RuntimeError: at the first call, if an MLP's linear layers do not multiply in what the policy says.
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
    """RuntimeError where the linear layers of a model's MLPs do not all multiply in what the policy says."""
    expected = policy.gemm if policy and policy.gemm != "bf16" else ""
    mlps = sum(isinstance(m, (models.GELUMLP, models.SwiGLUMLP)) for m in model.modules())
    found = [(site.gemm, site.gemm_reason) for site in report.sites if site.is_mlp]
    if found != [(expected, "")] * mlps:
        raise RuntimeError(f"{mlps} MLPs were to multiply in {expected or 'bf16'}, but what was compiled is {found}")


def start(model: nn.Module, fresh: nn.Module, seed: int, nudged: bool = False) -> None:
    """Give a model the weights that ``fresh`` of its class starts from with this seed; ``nudged``: the next numbers."""
    models.initialize(fresh, seed)
    model.load_state_dict(fresh.state_dict())
    if nudged:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.nextafter(p, torch.full_like(p, math.inf)))


def train(
    forward: Callable[..., Tensor], model: nn.Module, steps: int, batch: int, context: int, seed: int
) -> list[float]:
    """The loss of every step. ``forward`` is what is called of the model, whose weights are where it starts."""
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
    """The mean of the last steps."""
    return statistics.fmean(losses[-tail:])


def differences(finals: Mapping[str, Sequence[float]], way: str, other: str) -> dict[str, Any]:
    """The final losses of a way minus another's, seed by seed; their mean and its 95 % interval."""
    each = [a - b for a, b in zip(finals[way], finals[other], strict=True)]
    mean, reach = statistics.fmean(each), T[len(each) - 1] * statistics.stdev(each) / len(each) ** 0.5
    square = statistics.fmean(d * d for d in each)
    return {"each": each, "mean": mean, "interval_95": [mean - reach, mean + reach], "root_mean_square": square**0.5}


def agrees(found: Mapping[str, Any], way: str) -> bool:
    """Return True if a variant's final losses differ from eager's by rounding only, in a summary of ``rounding``."""
    rows, n = found["differences"], len(found["final_loss"]["eager"]["each"])
    ours, nudged = (rows[f"{name} − eager"]["root_mean_square"] for name in (way, "nudged"))
    return bool(ours**2 <= F[n] * nudged**2)


def summary(study: Study, curves: Curves) -> dict[str, Any]:
    """Of one model: final losses, the differences of the study's pairs, the spread between seeds.

    The spread is the standard deviation of the final losses of the way that others are compared with.
    """
    finals = {way: [final(c) for c in curves[way]] for way in study.ways}
    return {
        "final_loss": {way: {"each": f, "mean": statistics.fmean(f)} for way, f in finals.items()},
        "differences": {f"{way} − {other}": differences(finals, way, other) for way, other in study.pairs},
        "between_seeds": statistics.stdev(finals[study.pairs[-1][1]]),
    }


def table(result: dict[str, Any]) -> str:
    """The summaries as rows of Markdown, one for each model and pair."""
    rows = []
    for model, found in result["summary"].items():
        for pair, row in found["differences"].items():
            low, high = row["interval_95"]
            way, _, other = pair.partition(" − ")
            losses = [f"{found['final_loss'][name]['mean']:.4f}" for name in (way, other)]
            apart = f"{row['mean']:+.4f} ({low:+.4f} to {high:+.4f})".replace("-", "−")
            rows.append(f"| {model} | {pair} | {losses[0]} | {losses[1]} | {apart} | {found['between_seeds']:.4f} |")
    return "\n".join(rows)


def measure(study: Study, steps: int, seeds: int, result: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Train what ``result`` does not have yet: it is filled run by run, and told of after each.

    Args:
        study, steps, seeds: what, how long, how often.
        result: empty, or what an earlier call has filled.
        tell: called after each run with a line for people.
    """
    curves = result.setdefault("curves", {model: {way: [] for way in study.ways} for model in study.models})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (make, config) in study.models.items():
        for way, policy in study.ways.items():
            done = curves[name][way]
            if len(done) >= seeds:
                continue
            torch._dynamo.reset()
            model = make(config).to(device)
            forward = compiled(model, policy, study.autocast)  # once for all seeds
            for seed in range(len(done), seeds):
                began = time.perf_counter()
                torch.manual_seed(seed)
                start(model, make(config).to(device), seed, way == "nudged")
                losses = train(forward, model, steps, BATCH, config.context, seed)
                done.append([round(loss, 6) for loss in losses])
                if seeds > 1 and all(len(each) == seeds for rows in curves.values() for each in rows.values()):
                    result["summary"] = {name: summary(study, rows) for name, rows in curves.items()}
                took = time.perf_counter() - began
                tell(f"{name:<6} {way:<14} seed {seed}  final loss {final(losses):.4f}  {took:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=tuple(STUDIES), default="memory", help="what is compared (default: memory)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5, choices=SEEDS, help="(default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, the models are small)")
    parser.add_argument("--out", type=Path, help="the results, continued if they are there")
    args = parser.parse_args()
    study, name = STUDIES[args.study], STUDIES[args.study].out
    out = args.out or harness.results_folder() / f"{name}.json"
    torch.set_num_threads(args.threads)
    about = {
        "benchmark": name, "schema": harness.SCHEMA, "machine": harness.machine(), "steps": args.steps,
        "models": {model: vars(config) for model, (_, config) in study.models.items()}, "batch": BATCH,
    }  # fmt: skip
    result = harness.read(out, name) if out.exists() else about
    if any(result[key] != about[key] for key in ("steps", "models", "batch")):
        parser.error(f"--out {out} has other steps, models or batches: remove it, or name another")

    def tell(line: str) -> None:
        print(line, flush=True)
        harness.write(out, result)

    measure(study, args.steps, args.seeds, result, tell)
    print(table(result))


if __name__ == "__main__":
    main()
