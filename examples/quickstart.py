"""A small GPT learns to write Python, four ways, and each way shows what it costs.

    pip install -e . && python examples/quickstart.py

The text is the Python standard library on this machine; torch is all it needs. The four ways start from the same
weights and see the same batches:

    eager           no compiler
    torch.compile   Inductor as it comes
    budget 0.99     Inductor with upstream's activation memory budget set by hand
    fused           torch.compile(model, backend="fused"): this library

They take turns step by step, in shuffled order, so that whatever else this machine is doing hits them alike. At the
end: what each keeps for backward, how long a step takes, whether the losses agree, and a picture, ``quickstart.svg``.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

import argparse
import copy
import math
import os
import random
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A compile cache of our own, thrown away at the end: the compile times shown are those of a first run.
cache = tempfile.TemporaryDirectory(prefix="quickstart-", ignore_cleanup_errors=True)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache.name)

import torch  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import torch_fused_ops as tfo  # noqa: E402

# ---- the model: a plain GPT that has never heard of this library -----------------------------------------------------


@dataclass
class Config:
    layers: int = 3
    width: int = 256
    heads: int = 4
    context: int = 128
    vocabulary: int = 256  # bytes
    mlp: str = "gelu"


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = nn.Linear(c.width, 3 * c.width)
        self.out = nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, w))


class GELUMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up = nn.Linear(c.width, 4 * c.width)
        self.down = nn.Linear(4 * c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLUMLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden = 64 * math.ceil(8 * c.width / 3 / 64)
        self.gate = nn.Linear(c.width, hidden, bias=False)
        self.up = nn.Linear(c.width, hidden, bias=False)
        self.down = nn.Linear(hidden, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width), Attention(c)
        self.norm2, self.mlp = nn.LayerNorm(c.width), {"gelu": GELUMLP, "swiglu": SwiGLUMLP}[c.mlp](c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.LayerNorm(c.width), nn.Linear(c.width, c.vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


# ---- the text: the standard library's own sources --------------------------------------------------------------------


def standard_library(limit: int = 4_000_000) -> Tensor:
    """Its top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(f.read_bytes() for f in files)[:limit]
    print(f"text      {len(text) / 1e6:.1f} MB of Python from {len(files)} files of the standard library")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- four ways to train it -------------------------------------------------------------------------------------------


def budget(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Inductor with upstream's memory budget: a backend, so that the setting holds for this compilation alone."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.99):
        compiled: Any = compile_fx(gm, inputs)
    return compiled


WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model),
    "budget 0.99": lambda model: torch.compile(model, backend=budget),
    "fused": lambda model: torch.compile(model, backend="fused"),
}


@dataclass
class Run:
    """One way: its own copy of the model, and what was seen of it."""

    model: nn.Module
    forward: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved: int = 0

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        synchronize(tokens.device)
        start = time.perf_counter()
        loss = self.forward(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(tokens.device)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def saved_for_backward(run: Run, tokens: Tensor, targets: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward: each storage once, the parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run.forward(tokens, targets)  # holds the graph, hence the storages: no address is used twice
        total = sum(kept.values())
    del loss
    return total


# ---- what came of it -------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def paired(ours: Run, other: Run) -> tuple[float, float, float]:
    """Time per step against another way: the median of the ratios within a round, and its 95 % interval."""
    ratios = sorted(a / b for a, b in zip(ours.seconds, other.seconds, strict=True))
    n, reach = len(ratios), 0.98 * math.sqrt(len(ratios))  # order statistics: no assumption on the noise
    low, high = max(0, math.floor(n / 2 - reach) - 1), min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(ratios), ratios[low], ratios[high]


def verdict(name: str, ours: Run, other: Run) -> str:
    memory, (ratio, low, high) = ours.saved / other.saved - 1, paired(ours, other)
    kept = "the same memory" if abs(memory) < 0.0005 else f"{abs(memory):.1%} {'less' if memory < 0 else 'MORE'} memory"
    pace = f"{abs(ratio - 1):.1%} {'faster' if ratio < 1 else 'SLOWER'}"
    if low <= 1 <= high or len(ours.seconds) < 8:  # fewer steps prove nothing
        pace = f"no measurable difference in time: {ratio - 1:+.1%}"
    return f"  against {name:<13}  {kept} kept for backward, {pace} (95 % interval {low - 1:+.1%} … {high - 1:+.1%})"


def picture(runs: dict[str, Run], subtitle: str) -> str:
    """Two panels of bars side by side, as SVG: no plotting library is needed."""
    plain = runs["torch.compile"]
    panels: dict[str, list[tuple[tuple[float, float, float], float]]] = {  # quartiles, ratio to torch.compile
        "Kept for backward, MiB": [((r.saved / 2**20,) * 3, r.saved / plain.saved) for r in runs.values()],
        "One training step, ms": [
            (quartiles([1e3 * s for s in r.seconds]), paired(r, plain)[0]) for r in runs.values()
        ],
    }
    grey, blue, ink, faint = "#c3c9d1", "#2563eb", "#1f2937", "#6b7280"
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 288" width="880" height="288" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14">',
        '<rect width="880" height="288" fill="#ffffff"/>',
        f'<text x="28" y="38" font-size="18" font-weight="600" fill="{ink}">A small GPT trained four ways</text>',
        f'<text x="28" y="60" font-size="13" fill="{faint}">{subtitle}</text>',
    ]
    for left, (title, rows) in zip((28, 466), panels.items(), strict=True):
        start, scale = left + 108, 160 / max(high for (_, _, high), _ in rows)
        out.append(f'<text x="{left}" y="98" font-weight="600" fill="{ink}">{title}</text>')
        for row, (name, ((low, middle, high), ratio)) in enumerate(zip(runs, rows, strict=True)):
            y, text = 112 + 34 * row, 129 + 34 * row
            x1, x2, end = start + scale * low, start + scale * high, start + scale * high + 8
            fill, weight = (blue, 600) if name == "fused" else (grey, 400)
            bold = f'font-weight="{weight}" fill="{ink}"'
            out += [
                f'<text x="{start - 8}" y="{text}" text-anchor="end" {bold}>{name}</text>',
                f'<rect x="{start}" y="{y}" width="{scale * middle:.1f}" height="24" rx="2" fill="{fill}"/>',
                f'<text x="{end:.1f}" y="{text}" {bold}>{middle:.1f}</text>',
            ]
            if name != "torch.compile":
                change = f"{ratio - 1:+.1%}".replace("-", "−")
                out.append(f'<text x="{end + 58:.1f}" y="{text}" font-size="13" fill="{faint}">{change}</text>')
            if low < high:
                whisker = f"M{x1:.1f} {y + 12}H{x2:.1f}M{x1:.1f} {y + 8}v8M{x2:.1f} {y + 8}v8"
                out.append(f'<path d="{whisker}" stroke="{ink}" stroke-width="1.2" fill="none"/>')
    note = "Lower is better. Percentages: against torch.compile, step by step. Whiskers: quartiles."
    out.append(f'<text x="28" y="270" font-size="12" fill="{faint}">{note}</text>')
    return "\n".join([*out, "</svg>\n"])


# ---- go --------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed training steps of each way (default: 30)")
    parser.add_argument("--seconds", type=float, default=30, help="or train only so long, five steps at least (30)")
    parser.add_argument("--layers", type=int, default=3, help="blocks of the model (default: 3)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch (default: 8)")
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu", help="the model's MLPs (default: gelu)")
    parser.add_argument("--out", type=Path, default="quickstart.svg", help="the picture (default: quickstart.svg)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: at least 2 are needed")
    began = time.perf_counter()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    config = Config(layers=args.layers, mlp=args.mlp)
    model = GPT(config).to(device)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"machine   {where}; torch {torch.__version__}, torch_fused_ops {tfo.__version__}")
    text = standard_library()
    print(
        f"model     {config.layers} layers of width {config.width}, {args.mlp} MLPs, {size:.1f} M parameters; "
        f"a step sees {args.batch} × {config.context} bytes\n"
    )

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - config.context - 1, (args.batch,)).tolist()
        rows = torch.stack([text[s : s + config.context + 1] for s in starts]).long().to(device)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    first = batch()
    print("What backend='fused' does with this model:\n")
    print(tfo.explain(model, *first), end="\n\n")

    runs = {}
    for name, way in WAYS.items():
        copied = copy.deepcopy(model)
        runs[name] = Run(copied, way(copied), torch.optim.AdamW(copied.parameters(), lr=1e-3, fused=True))

    print("Compiling, with the first step (not compared: a later way may reuse kernels that an earlier one built)")
    for name, run in runs.items():
        run.step(*first)
        print(f"  {name:<13}  {run.seconds.pop():5.1f} s   loss {run.losses[-1]:.4f}", flush=True)

    print(f"\nTraining, {args.steps} steps each, taking turns\n  step   " + "".join(f"{name:>15}" for name in runs))
    order, shuffle, start = list(runs.values()), random.Random(args.seed), time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens, targets = batch()
        shuffle.shuffle(order)
        for run in order:
            run.step(tokens, targets)
        late = step >= 5 and time.perf_counter() - start > args.seconds
        if step % max(1, args.steps // 6) == 0 or step == args.steps or late:
            print(f"  {step:<6} " + "".join(f"{f'loss {r.losses[-1]:.4f}':>15}" for r in runs.values()), flush=True)
        if late:
            print(f"  stopped after {args.seconds:.0f} s: this machine is slow, or busy")
            break
    for run in runs.values():
        run.saved = saved_for_backward(run, *first)

    print(f"\n  {'':<13}  {'kept for backward':>18} {'ms per step':>12} {'quartiles':>18} {'loss ≠ eager by':>16}")
    for name, run in runs.items():
        low, middle, high = (1e3 * q for q in quartiles(run.seconds))
        apart = max(abs(a - b) for a, b in zip(run.losses, runs["eager"].losses, strict=True))
        kept, spread = f"{run.saved / 2**20:.2f} MiB", f"{low:.1f} … {high:.1f}"
        print(f"  {name:<13}  {kept:>18} {middle:>12.1f} {spread:>18} {apart:>16.1e}")
    print("\nbackend='fused'")
    for name in ("eager", "torch.compile", "budget 0.99"):
        print(verdict(name, runs["fused"], runs[name]))

    about = f"{config.layers} layers of width {config.width}, {args.mlp} MLPs; {where}"
    args.out.write_text(picture(runs, about), encoding="utf-8")
    print(f"\npicture   {args.out}\ntook      {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
