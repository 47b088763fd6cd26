"""What rounding to float8 does to training: loss curves of small GPTs over several seeds.

    python -m torch_fused_ops.benchmarks.laboratory.fp8_training [--study memory|gemm|rowwise] [--steps N] [--seeds N]
        [--out FILE]

``memory``: ``eager`` (PyTorch), ``free`` (``backend="fused"``) and ``fp8`` (the same with ``memory="fp8"``). Eager
against free shows how far two runs drift apart that differ in nothing but rounding. ``gemm``: ``plain``
(``backend="fused"``, its products in bf16) against ``gemm="fp8"`` and ``gemm="fp8-wgrad-bf16"``, of a GELU and of a
SwiGLU model; ``rowwise``: against ``gemm="fp8-rowwise"``. All under bf16 autocast, weights and optimizer in float32.
Each seed has weights and batches of its own, the same for all ways, so differences are paired: their mean has a 95 %
interval (Student's t), to be read beside the spread between seeds.

The text is the Python standard library on this machine, as in ``examples/quickstart.py``. Results are written as JSON
after every run, and a run that is there is not run again: to start over, remove the file. ``--picture`` draws them.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
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

TAIL = 40  # the steps, at the end, whose mean is called the final loss
COLORS = ("#9aa3ad", "#2563eb", "#d97706")
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # Student's t at 97.5 %
SEEDS = range(2, 2 + max(T))

Curves = Mapping[str, Sequence[Sequence[float]]]  # by way: for each seed the loss of every step


@dataclass(frozen=True)
class Study:
    """What is compared.

    Attributes:
        ways: by name, the policy; None for eager.
        pairs: which way is compared with which.
        models: by name, the class and its sizes.
        batch: sequences in a batch.
        out: the name of the results, and of their picture.
    """

    ways: Mapping[str, FusionPolicy | None]
    pairs: tuple[tuple[str, str], ...]
    models: Mapping[str, tuple[Callable[[models.Config], nn.Module], models.Config]]
    batch: int
    out: str


STUDIES = {
    "memory": Study(
        {"eager": None, "free": FusionPolicy(strict=True), "fp8": FusionPolicy(memory="fp8", strict=True)},
        (("free", "eager"), ("fp8", "free")),
        {"GELU": (models.GPT, models.SMALL)},
        batch=8,
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
        batch=8,
        out="fp8_gemm_training",
    ),
    "rowwise": Study(
        {"plain": FusionPolicy(strict=True), "fp8-rowwise": FusionPolicy(gemm="fp8-rowwise", strict=True)},
        (("fp8-rowwise", "plain"),),
        {"GELU": (models.GPT, models.TINY), "SwiGLU": (models.Llama, models.TINY_LLAMA)},
        batch=8,
        out="fp8_rowwise_training",
    ),
}


def text() -> Tensor:
    """The standard library's top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)[:4_000_000]), dtype=torch.uint8)


def compiled(model: nn.Module, policy: FusionPolicy | None) -> Callable[..., Tensor]:
    """The model under bf16 autocast, with the policy; eager for None.

    Raises:
        RuntimeError: at the first call: an MLP's linear layers do not multiply in what the policy says.
    """
    forward: Callable[..., Tensor] = model
    checked = policy is None
    if policy is not None:
        options: dict[str, Any] = {"policy": policy}
        forward = torch.compile(model, backend="fused", fullgraph=True, dynamic=False, options=options)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal checked
        with torch.autocast(tokens.device.type, torch.bfloat16):
            if checked:
                return forward(tokens, targets)
            with tfo.record() as report:
                loss = forward(tokens, targets)
        check_sites(model, report, policy)
        checked = True
        return loss

    return run


def check_sites(model: nn.Module, report: tfo.Report, policy: FusionPolicy | None) -> None:
    """RuntimeError where the linear layers of a model's MLPs do not all multiply in what the policy says."""
    expected = policy.gemm if policy and policy.gemm != "bf16" else ""
    mlps = sum(isinstance(m, (models.GELUMLP, models.SwiGLUMLP)) for m in model.modules())
    found = [(site.gemm, site.gemm_reason) for site in report.sites if site.is_mlp]
    if found != [(expected, "")] * mlps:
        raise RuntimeError(f"{mlps} MLPs were to multiply in {expected or 'bf16'}, but what was compiled is {found}")


def start(model: nn.Module, fresh: nn.Module, seed: int) -> None:
    """Give a model, which may have been trained, the weights that ``fresh`` of its class starts from with this seed."""
    models.initialize(fresh, seed)
    model.load_state_dict(fresh.state_dict())


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
    return {"each": each, "mean": mean, "interval_95": [mean - reach, mean + reach]}


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
            forward = compiled(model, policy)  # once for all seeds
            for seed in range(len(done), seeds):
                began = time.perf_counter()
                torch.manual_seed(seed)
                start(model, make(config).to(device), seed)
                losses = train(forward, model, steps, study.batch, config.context, seed)
                done.append([round(loss, 6) for loss in losses])
                if seeds > 1 and all(len(each) == seeds for rows in curves.values() for each in rows.values()):
                    result["summary"] = {name: summary(study, rows) for name, rows in curves.items()}
                took = time.perf_counter() - began
                tell(f"{name:<6} {way:<14} seed {seed}  final loss {final(losses):.4f}  {took:.0f} s")


def draw(study: Study, result: dict[str, Any], path: Path) -> None:
    """A row for each model: mean curves on the left, differences on the right, seed by seed and in the mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    every = max(1, result["steps"] // 60)

    def smooth(losses: Sequence[float]) -> list[float]:
        return [statistics.fmean(losses[i : i + every]) for i in range(0, len(losses) - every + 1, every)]

    at = [i * every + every / 2 for i in range(result["steps"] // every)]
    colors = dict(zip(study.ways, COLORS, strict=True))
    size = (10, 3.6 * len(study.models))
    figure, panels = plt.subplots(len(study.models), 2, figsize=size, layout="constrained", squeeze=False)
    for (left, right), (model, curves) in zip(panels, result["curves"].items(), strict=True):
        for way in study.ways:
            rows = [smooth(c) for c in curves[way]]
            means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
            left.plot(at, means, color=colors[way], label=way)
        left.set(xlabel="step", ylabel="training loss, mean of the seeds", title=f"{model}: loss")
        left.legend(frameon=False)
        for way, other in study.pairs:
            rows = [
                [p - q for p, q in zip(smooth(x), smooth(y), strict=True)]
                for x, y in zip(curves[way], curves[other], strict=True)
            ]
            for row in rows:
                right.plot(at, row, color=colors[way], alpha=0.25, linewidth=0.8)
            means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
            right.plot(at, means, color=colors[way], label=f"{way} − {other}")
        right.axhline(0, color="#1f2937", linewidth=0.6)
        right.set(xlabel="step", ylabel="difference in loss", title=f"{model}: differences, each seed (thin) and mean")
        right.legend(frameon=False)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=tuple(STUDIES), default="memory", help="what is compared (default: memory)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=5, help=f"{SEEDS.start} to {SEEDS.stop - 1} (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1, so small are the models)")
    parser.add_argument("--out", type=Path, help="the results, gone on with if they are there")
    parser.add_argument("--picture", type=Path, help="draw what is in --out once all is there")
    args = parser.parse_args()
    if args.seeds not in SEEDS:
        parser.error(f"--seeds {args.seeds} is not accepted: it must be from {SEEDS.start} to {SEEDS.stop - 1}")
    study, name = STUDIES[args.study], STUDIES[args.study].out
    out = args.out or harness.results_folder() / f"{name}.json"
    torch.set_num_threads(args.threads)
    about = {
        "benchmark": name, "schema": harness.SCHEMA, "machine": harness.machine(), "steps": args.steps,
        "models": {model: vars(config) for model, (_, config) in study.models.items()}, "batch": study.batch,
    }  # fmt: skip
    result = harness.read(out, name) if out.exists() else about
    if any(result[key] != about[key] for key in ("steps", "models", "batch")):
        parser.error(f"--out {out} is of another run, of other steps, models or batches: remove it, or name another")

    def tell(line: str) -> None:
        print(line, flush=True)
        harness.write(out, result)

    measure(study, args.steps, args.seeds, result, tell)
    print(table(result))
    if args.picture:
        draw(study, result, args.picture)


if __name__ == "__main__":
    main()
