"""Plan five training steps for the tables of docs/plan.md and README.md. This takes an hour of a CPU core.

python -m torch_fused_ops.benchmarks.laboratory.plans [NAME …]   writes benchmarks/results/plans.json, draws
python -m torch_fused_ops.benchmarks.laboratory.plans --draw     draws the README's picture from the file
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import models
from torch_fused_ops.benchmarks.laboratory.training_steps import SIZES, Decoder

RESULTS = Path(__file__).parents[1] / "results" / "plans.json"
CAPACITIES = {"NVIDIA H100 80GB HBM3": 80 << 30}
NAMES = {
    "off": "plain torch.compile",
    "checkpoint": "checkpoint each layer",
    "checkpoint, attention saved": "checkpoint, attention saved",
}
THEIRS, OURS = "#9aa3ad", "#2563eb"
PICTURE, DRAWN = Path(__file__).resolve().parents[2] / "docs" / "images" / "levels.png", "Llama-3-8B, 8 GPUs"


@dataclass(frozen=True)
class Case:
    """A model, its tokens, and the limits to plan it for."""

    make: Callable[[], nn.Module]
    tokens: tuple[int, int]
    gpu: str
    limits: tuple[str, ...]
    optimizer: str = "adamw"
    dtype: torch.dtype = torch.bfloat16
    maximum: tuple[str, str] | None = None  # ("batch", capacity): find the largest batch within it
    settings: dict[str, Any] = field(default_factory=dict)  # further arguments of ``plan``


class MixtralMLP(nn.Module):
    """Mixtral's eight experts as groups of rows: each token goes to two, and every expert gets equally many rows."""

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
    """Return two layers with Llama's attention and Mixtral 8x7B's experts."""
    c = models.Config(layers=2, width=4096, hidden=14336, heads=32, context=4096, vocabulary=32000, kv_heads=8)
    model = models.Llama(c)
    for block in model.blocks:
        block.mlp = MixtralMLP(c.width, c.hidden, experts=8, chosen=2)
    return model


def decoder() -> nn.Module:
    """Return Llama-3-8B as torchtitan trains it, with logits as its result."""
    model = Decoder(SIZES["Llama-3.1-8B"], 32, "none", "", float_logits=False)
    model.prepare(4096)
    return model


LLAMA = Case(
    lambda: models.Llama(replace(models.LLAMA, layers=32)), (1, 32768), "H200", ("80GB", "105GiB", "120GiB", "135GiB")
)
FSDP2 = {"dp": 8, "mixed_precision": True, "root": "apart", "reshard": "not-last", "compiled": "layers"}
CASES = {
    "GPT-2": Case(
        lambda: models.GPT(models.GPT2), (32, 1024), "A100", ("15GiB", "12GiB", "8GiB"),
        settings={"levels": ["free", "input", "input+attention", "tiled"]}, maximum=("batch", "72GiB"),
    ),
    "Llama-3-8B": LLAMA,
    "Llama-3-8B, 50 GB/s to the host": replace(
        LLAMA, limits=("82GiB",), settings={"offload_bandwidth": 50, "levels": ["fp8"]}
    ),
    "Llama-3-8B, float32 weights": replace(LLAMA, settings={"master_weights": "float32"}),
    "Llama-3-8B, 8 GPUs": Case(
        decoder, (3, 4096), "H100", ("78GiB", "50GiB"), settings={**FSDP2, "loss": "compiled"}, optimizer="adamw-fused"
    ),
    "Mixtral, two layers": Case(mixtral, (4, 4096), "H200", ("60GiB",)),
}  # fmt: skip


def planned(case: Case) -> tuple[list[tfo.Plan], float]:
    """Return a plan for each limit, the first with the largest size if requested, and the seconds of planning."""
    with torch.device("meta"):
        model = case.make().to(case.dtype)
        tokens = torch.zeros(case.tokens, dtype=torch.long)
    dimension, capacity = case.maximum or (None, case.limits[0])
    arguments = (tokens,) if "loss" in case.settings else (tokens, tokens)
    settings: dict[str, Any] = {"capacity": capacity, "gpu": case.gpu, "optimizer": case.optimizer}
    start = time.perf_counter()
    first = tfo.plan(model, *arguments, maximum=dimension, expandable_segments=True, **settings, **case.settings)
    took = time.perf_counter() - start
    plans = [first, *(first.within(limit) for limit in case.limits)]
    for plan in plans:
        print(plan, flush=True)
    return plans, took


def main() -> None:
    """Plan the named cases, or all, add them to the file, and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--draw", action="store_true", help="only draw the picture")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in () if arguments.draw else arguments.names or CASES:
        plans, took = planned(CASES[name])
        print(f"{name}: {took:.0f} s, {time.process_time():.0f} s of processor time so far\n", flush=True)
        tokens = CASES[name].tokens
        results[name] = {"tokens": tokens, "limits": CASES[name].limits, "torch": torch.__version__}
        results[name]["plans"] = [plan.as_dict() for plan in plans]
        if (largest := results[name]["plans"].pop(0)["largest"]) is not None:
            results[name]["largest"] = {"capacity": (CASES[name].maximum or ("", ""))[1], **largest}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    picture(DRAWN, results[DRAWN]).savefig(PICTURE, dpi=110, metadata={"Software": None})


def picture(name: str, case: dict[str, Any]) -> Any:
    """Draw the bytes that a step reserves at each level, its time relative to plain, and the GPU's capacity."""
    from matplotlib.figure import Figure

    plan, (batch, length) = case["plans"][0], case["tokens"]
    rows = [row for row in plan["levels"] if row["level"] not in ("tiled", "fp8+attention")]
    names = [NAMES.get(row["level"], f'"{row["level"]}"') for row in rows]
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1.4), layout="constrained")
    ax = figure.subplots()
    colors = [THEIRS if row["level"] in NAMES else OURS for row in rows]
    ax.barh(names, [row["reserved"] / 2**30 for row in rows], color=colors)
    limit = CAPACITIES[plan["gpu"]] / 2**30
    right = max(limit, *(row["reserved"] / 2**30 for row in rows))
    for label, row in zip(names, rows, strict=True):
        cost = row["seconds"] / plan["off_seconds"] - 1
        text = f"{row['reserved'] / 2**30:.0f} GiB" + f", step {100 * cost:+.1f} %".replace("-", "−") * bool(cost)
        ax.annotate(text, (right, label), (10, 0), textcoords="offset points", va="center", fontsize=13)
    ax.axvline(limit, color="#b91c1c", linewidth=1.5, linestyle="--", zorder=2)
    ax.text(limit + 1, -0.6, f"{plan['gpu'].split()[1]}: {limit:.0f} GiB", color="#b91c1c", fontsize=12)
    ax.set_xlim(0, 1.7 * right)
    ax.invert_yaxis()
    ax.tick_params(labelsize=13)
    ax.set_xlabel("reserved on each GPU, GiB, with expandable segments", fontsize=10)
    figure.suptitle(f"{name} (FSDP2), {batch} × {length:,} tokens on each, estimated", fontsize=13)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
