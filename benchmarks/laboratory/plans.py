"""What ``plan`` says of four models' training steps, from which docs/plan.md has its tables: on paper, minutes.

python -m torch_fused_ops.benchmarks.laboratory.plans [NAME …]   writes benchmarks/results/plans.json, draws
python -m torch_fused_ops.benchmarks.laboratory.plans --draw     draws the README's picture of what is there
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import models

RESULTS = Path(__file__).parents[1] / "results" / "plans.json"
CAPACITIES = {"NVIDIA H200": 139 << 30}  # as CUDA reports them; its data sheet says 141 GB
THEIRS, OURS = "#9aa3ad", "#2563eb"
PICTURE, DRAWN = Path(__file__).resolve().parents[2] / "docs" / "images" / "levels.png", "Llama-3-8B"


@dataclass(frozen=True)
class Case:
    """A model, its tokens, and the limits that it is planned for."""

    make: Callable[[], nn.Module]
    tokens: tuple[int, int]
    gpu: str
    limits: tuple[str, ...]
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    maximum: tuple[str, str] | None = None  # what is to be as large as fits, and into how many bytes


class MixtralMLP(nn.Module):
    """Eight experts, each token's two of them run as one group of rows each, as many rows for every expert."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.gate, self.up = (nn.Parameter(torch.empty(experts, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.router(rows).float().softmax(-1).topk(self.chosen)
        order = experts.flatten().argsort()
        token = order // self.chosen
        grouped = rows[token].unflatten(0, (self.gate.shape[0], -1))
        y = nn.functional.silu(grouped @ self.gate) * (grouped @ self.up)
        y = (y @ self.down).flatten(0, 1) * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(rows).index_add(0, token, y).view_as(x)


def mixtral() -> nn.Module:
    """Llama's attention and Mixtral 8x7B's experts: two layers."""
    c = models.Config(layers=2, width=4096, hidden=14336, heads=32, context=4096, vocabulary=32000, kv_heads=8)
    model = models.Llama(c)
    for block in model.blocks:
        block.mlp = MixtralMLP(c.width, c.hidden, experts=8, chosen=2)
    return model


CASES = {
    "quickstart": Case(
        lambda: models.GPT(models.SMALL), (16, 128), "H200", ("150MiB", "115MiB", "100MiB"), dtype=torch.float32
    ),
    "GPT-2": Case(
        lambda: models.GPT(models.GPT2), (32, 1024), "A100", ("14GiB", "11GiB", "9GiB"), maximum=("batch", "72GiB")
    ),
    "Llama-3-8B": Case(
        lambda: models.Llama(replace(models.LLAMA, layers=32)),
        (1, 32768),
        "H200",
        ("80GB", "120GiB", "135GiB"),
    ),
    "Mixtral, two layers": Case(mixtral, (4, 4096), "H200", ("60GiB",)),
}


def enlarged(case: Case) -> dict[str, Any] | None:
    """The largest batch or sequence at each level."""
    if case.maximum is None:
        return None
    dimension, memory = case.maximum
    with torch.device("meta"):
        model = case.make().to(case.dtype)
        tokens = torch.zeros(case.tokens, dtype=torch.long)
    plan = tfo.plan(model, tokens, tokens, memory=memory, gpu=case.gpu, optimizer=case.optimizer, maximum=dimension)
    print(plan, flush=True)
    return {"memory": memory, **plan.as_dict()["largest"]}


def planned(case: Case) -> tuple[list[dict[str, Any]], float]:
    """A plan for each limit, and the seconds that the first took."""
    with torch.device("meta"):
        model = case.make().to(case.dtype)
        tokens = torch.zeros(case.tokens, dtype=torch.long)
    start = time.perf_counter()
    first = tfo.plan(model, tokens, tokens, memory=case.limits[0], gpu=case.gpu, optimizer=case.optimizer)
    took = time.perf_counter() - start
    plans = [first, *(first.within(limit) for limit in case.limits[1:])]
    for plan in plans:
        print(plan, flush=True)
    return [plan.as_dict() for plan in plans], took


def main() -> None:
    """Plan the cases that are named, or all, write them beside what is there, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    arguments = parser.parse_args()
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in () if arguments.draw else arguments.names or CASES:
        plans, took = planned(CASES[name])
        print(f"{name}: {took:.0f} s, {time.process_time():.0f} s of processor time so far\n", flush=True)
        tokens = CASES[name].tokens
        found[name] = {"tokens": tokens, "limits": CASES[name].limits, "torch": torch.__version__, "plans": plans}
        found[name]["largest"] = enlarged(CASES[name])
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    picture(DRAWN, found[DRAWN]).savefig(PICTURE, dpi=110, metadata={"Software": None})


def picture(name: str, case: dict[str, Any]) -> Any:
    """A step's peak at each memory level, its time beside plain, and the GPU's capacity. Equal rows share a bar."""
    from matplotlib.figure import Figure

    plan, (batch, length) = case["plans"][0], case["tokens"]
    bars: dict[tuple[int, float], list[str]] = {}
    for row in plan["levels"]:
        peak = max(row["peak"], plan["optimizer_peak"])
        figures = round(peak / 2**30), round(row["seconds"] / plan["off_seconds"] - 1, 3)
        bars.setdefault(figures, []).append(row["level"])
    rows = sorted(bars, reverse=True)
    theirs = {"off": "plain torch.compile", "checkpoint": "checkpoint each layer"}
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.4), layout="constrained")
    ax = figure.subplots()
    names = [theirs.get(bars[bar][0], " or ".join(f'"{level}"' for level in sorted(bars[bar]))) for bar in rows]
    ax.barh(names, [peak for peak, _ in rows], color=[THEIRS if bars[bar][0] in theirs else OURS for bar in rows])
    for label, (peak, cost) in zip(names, rows, strict=True):
        text = f"{peak:.0f} GiB" + f", step {100 * cost:+.1f} %".replace("-", "−") * bool(cost)
        ax.annotate(text, (peak, label), (5, 0), textcoords="offset points", va="center", fontsize=13,
                    bbox={"fc": "white", "ec": "none", "pad": 1}, zorder=5)  # fmt: skip
    if plan["gpu"] in CAPACITIES:
        limit = CAPACITIES[plan["gpu"]]
        ax.axvline(limit / 2**30, color="#b91c1c", linewidth=1.5, linestyle="--", zorder=2)
        ax.text(
            limit / 2**30, -0.6, f"{plan['gpu'].split()[-1]}: {limit / 2**30:.0f} GiB", color="#b91c1c", fontsize=12
        )
    ax.set_xlim(0, 1.35 * max(peak for peak, _ in rows))
    ax.invert_yaxis()
    ax.tick_params(labelsize=13)
    ax.set_xlabel("peak, GiB, with weights, gradients and AdamW's state", fontsize=12)
    figure.suptitle(f"Training step of {name}, {batch} × {length:,} tokens, bf16, estimated", fontsize=13)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
