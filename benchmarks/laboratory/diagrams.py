"""Diagrams of docs/images: what each memory level saves, where the passes work, and a step's live bytes over time.

python -m torch_fused_ops.benchmarks.laboratory.diagrams [NAME …]   all by default; needs matplotlib
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import models

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SAVED, EIGHT_BITS, AGAIN, NOTHING, INK = "#9ec5fe", "#a3e4c1", "#ffffff", "#eceff3", "#1f2933"
LIMIT = 10 << 30

# What becomes of an MLP's tensors, from its input to its activation's result, at each level.
LEVELS = {
    "off": ("saved",) * 3,
    "free": ("saved", "saved", "recomputed"),
    "fp8": ("saved", "8 bits", "recomputed"),
    "input": ("saved", "recomputed", "recomputed"),
    "tiled": ("saved", "recomputed\nin tiles", "recomputed\nin tiles"),
}
TENSORS = ("input", "gate, up", "silu(gate)·up")
COLORS = {"saved": SAVED, "8 bits": EIGHT_BITS}


def _box(ax: Any, x: float, y: float, width: float, height: float, text: str, color: str, size: float = 11) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    dashed = "-" if color != AGAIN else (0, (4, 3))
    ax.add_patch(FancyBboxPatch((x, y), width, height, style, fc=color, ec=INK, lw=1.2, ls=dashed))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2})


def saved() -> Any:
    """Five small panels: an MLP's tensors, and what becomes of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for ax, (level, fates) in zip(figure.subplots(1, len(LEVELS)), LEVELS.items(), strict=True):
        ax.set_title(f'"{level}"' + ", default" * (level == "free"), fontsize=14, color=INK)
        for i, (name, fate) in enumerate(zip(TENSORS, fates, strict=True)):
            y = 4.4 - 2 * i
            _box(ax, 0.1, y, 2.8, 1.15, f"{name}\n{fate}", COLORS.get(fate, AGAIN), 12)
            _arrow(ax, (1.5, y), (1.5, y - 0.85))
            if i < 2:
                ax.text(1.65, y - 0.45, ("GEMMs", "pointwise")[i], fontsize=10, va="center", color=INK)
            else:
                ax.text(1.65, y - 0.45, "GEMM", fontsize=10, va="center", color=INK)
        ax.text(1.5, -0.75, "result", ha="center", fontsize=12, color=INK)
        ax.set(xlim=(0, 3), ylim=(-1, 5.7))
        ax.axis("off")
    return figure


STAGES = (
    ("Dynamo", "captures graphs", ""),
    ("pre-grad graph", "", "match MLPs,\ncall fused operators,\nsplit tiles"),
    ("joint graph", "AOTAutograd\ndifferentiates", "decide what is saved:\nmemory levels"),
    ("Inductor", "lowers, fuses\nneighbors", "lower operators,\nsplit reductions,\nepilogues"),
    ("scheduler", "orders kernels", "reuse buffers"),
    ("kernels", "Triton, C++", ""),
)


def pipeline() -> Any:
    """torch.compile's stages, and what this library does at each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    ax = figure.subplots()
    for i, (name, theirs, ours) in enumerate(STAGES):
        x = 2.5 * i
        _box(ax, x, 2, 2, 1.3, f"{name}\n{theirs}".strip(), NOTHING, 11)
        if i + 1 < len(STAGES):
            _arrow(ax, (x + 2, 2.65), (x + 2.5, 2.65))
        if ours:
            _box(ax, x - 0.1, 0, 2.2, 1.3, ours, SAVED, 11)
            _arrow(ax, (x + 1, 1.3), (x + 1, 2))
    ax.text(-0.1, 3.55, "torch.compile", fontsize=12, color=INK)
    ax.text(-0.1, 0.65, "this library", fontsize=12, color=INK, va="center")
    ax.set(xlim=(-0.2, 14.7), ylim=(-0.1, 3.9))
    ax.axis("off")
    return figure


def timeline() -> Any:
    """Live bytes of a training step, plain and at two levels, beside a limit."""
    from matplotlib.figure import Figure

    from torch_fused_ops import virtual_gpu

    with torch.device("meta"):
        model = models.Llama(replace(models.LLAMA, layers=4, vocabulary=4096, context=16384)).bfloat16()
        tokens = torch.zeros(1, 16384, dtype=torch.long)
    weights = sum(p.nbytes for p in model.parameters())
    figure = Figure(figsize=(9, 4), layout="constrained")
    ax = figure.subplots()
    levels: tuple[tuple[Any, str], ...] = ("plain", "#6b7280"), ("free", "#2563eb"), ("input", "#0f766e")
    for level, color in levels:
        with contextlib.nullcontext() if level == "plain" else tfo.enabled(memory=level):
            curve = virtual_gpu.compile_on_paper(model, tokens, tokens).timeline()
        live = [(weights + event.live) / 2**30 for event in curve.events]
        at = [i / (len(live) - 1) for i in range(len(live))]
        name = level if level == "plain" else f'"{level}"'
        ax.plot(at, live, color=color, linewidth=2, label=f"{name}, peak {max(live):.1f} GiB")
    ax.axhline(LIMIT / 2**30, color="#b91c1c", linewidth=1.5, linestyle="--")
    ax.text(0.01, LIMIT / 2**30 + 0.3, "a limit of 10 GiB", color="#b91c1c", fontsize=11)
    ax.set_xlabel("a training step, call by call: forward, then backward", fontsize=11)
    ax.set_ylabel("GiB alive, with weights", fontsize=11)
    ax.set_title("Four layers of Llama-3-8B, 16,384 tokens, bf16, estimated for an H200, no optimizer", fontsize=11)
    ax.set_ylim(0)
    ax.legend(fontsize=11, loc="lower center", frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


PICTURES = {"saved": saved, "pipeline": pipeline, "timeline": timeline}


def main() -> None:
    """Draw the pictures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]().savefig(IMAGES / f"{name}.png", dpi=100, metadata={"Software": None})
        print(IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
