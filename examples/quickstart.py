"""Train a small GPT on Python code in five variants, and compare their memory and time.

    pip install -e . && python examples/quickstart.py

The text is this machine's Python standard library. The example needs only torch. All variants start from the same
weights and train on the same batches:

    eager           no compiler
    torch.compile   PyTorch's compiler
    fused           torch.compile(model, backend="fused"): this library
    fused, fp8      with options={"memory": "fp8"}: saves the activation's inputs in 8 bits
    fused, input    with options={"memory": "input"}: saves only an MLP's input

``--budget`` adds ``budget 0.99``: PyTorch's activation memory budget. Each step runs all variants in random order, so
that other load on the machine affects all of them. The script prints the activations saved for backward, the time of a
step and the difference of the losses, and draws ``quickstart.svg``.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

import argparse
import copy
import math
import os
import random
import shutil
import statistics
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A new compile cache, deleted at the end, so that the printed compile times are times of a first run.
cache = tempfile.TemporaryDirectory(prefix="quickstart-", ignore_cleanup_errors=True)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache.name)

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch warns; the example does not need NumPy

import torch  # noqa: E402
import torch._functorch.config as functorch_config  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import torch_fused_ops as tfo  # noqa: E402

# ---- the model: a GPT in plain PyTorch -------------------------------------------------------------------------------


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
    """Return its top-level modules in alphabetical order, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(f.read_bytes() for f in files)[:limit]
    print(f"text      {len(text) / 1e6:.1f} MB of Python from {len(files)} files of the standard library")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- variants --------------------------------------------------------------------------------------------------------


def budget(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile with PyTorch's memory budget. As a backend, the setting affects only this compilation."""
    from torch._inductor.compile_fx import compile_fx

    with functorch_config.patch(activation_memory_budget=0.99):
        compiled: Any = compile_fx(gm, inputs)
    return compiled


WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model),
    "budget 0.99": lambda model: torch.compile(model, backend=budget),
    "fused": lambda model: torch.compile(model, backend="fused"),
    "fused, fp8": lambda model: torch.compile(model, backend="fused", options={"memory": "fp8"}),
    "fused, input": lambda model: torch.compile(model, backend="fused", options={"memory": "input"}),
}


@dataclass
class Run:
    """A variant: its copy of the model, and its measurements."""

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
    """Return the bytes that autograd saves for backward: each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = run.forward(tokens, targets)  # holds the graph, hence the storages: no address is used twice
        total = sum(saved.values())
    del loss
    return total


# ---- results ---------------------------------------------------------------------------------------------------------


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def paired(run: Run, other: Run) -> tuple[float, float, float]:
    """Return the median ratio of step times within a round, and its 95 % interval."""
    ratios = sorted(a / b for a, b in zip(run.seconds, other.seconds, strict=True))
    n, reach = len(ratios), 0.98 * math.sqrt(len(ratios))  # order statistics: no assumption on the noise
    low, high = max(0, math.floor(n / 2 - reach) - 1), min(n - 1, math.ceil(n / 2 + reach))
    return statistics.median(ratios), ratios[low], ratios[high]


def pace(run: Run, other: Run) -> str:
    """Describe the difference in time between two variants' steps."""
    ratio, low, high = paired(run, other)
    if len(run.seconds) < 8:
        return "too few steps to compare times"
    if low <= 1 <= high:
        return "no measurable difference in time"
    return f"{abs(ratio - 1):.1%} {'faster' if ratio < 1 else 'SLOWER'}"


def verdict(name: str, run: Run, other: Run) -> str:
    memory, (_, low, high) = run.saved / other.saved - 1, paired(run, other)
    change = "as much" if abs(memory) < 0.0005 else f"{abs(memory):.1%} {'less' if memory < 0 else 'MORE'}"
    interval = f" (95 % interval {low - 1:+.1%} … {high - 1:+.1%})" if len(run.seconds) >= 8 else ""
    return f"  {name:<13}  {change} activation memory saved for backward, {pace(run, other)}{interval}"


def lost_tail() -> str:
    """Describe the error of bfloat16 GELU for inputs in [−10, −3], in units in the last place."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[(x >= -10) & (x <= -3)]
    exact = 0.5 * x.double() * torch.erfc(-x.double() / math.sqrt(2))
    ulp = torch.nextafter(exact.bfloat16().abs(), torch.tensor(math.inf).bfloat16()).double() - exact.bfloat16().abs()
    off = [((y.double() - exact).abs() > ulp).double().mean().item() for y in (F.gelu(x), tfo.functional.bias_gelu(x))]
    return f"bfloat16 GELU of −10 … −3: {off[0]:.0%} of PyTorch's are off by more than an ulp, {off[1]:.0%} of ours"


@contextmanager
def dots(text: str) -> Iterator[None]:
    """Print the text, then a dot every three seconds until the context exits."""
    print(text, end=" ", flush=True)
    done = threading.Event()

    def run() -> None:
        while not done.wait(3):
            print(".", end="", flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def picture(runs: dict[str, Run], subtitle: str) -> str:
    """Draw two panels of bars as SVG, without a plotting library."""
    plain = runs["torch.compile"]
    changes = {name: f"{r.saved / plain.saved - 1:+.1%}".replace("-", "−") for name, r in runs.items()}
    paces = {name: pace(r, plain).removesuffix(" in time") for name, r in runs.items()}
    panels: dict[str, list[tuple[tuple[float, float, float], str]]] = {  # quartiles, beside torch.compile
        "Saved for backward, MiB": [((r.saved / 2**20,) * 3, changes[name]) for name, r in runs.items()],
        "One training step, ms": [(quartiles([1e3 * s for s in r.seconds]), paces[name]) for name, r in runs.items()],
    }
    height = 152 + 34 * len(runs)
    gray, blue, ink, faint = "#c3c9d1", "#2563eb", "#1f2937", "#6b7280"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" width="880" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="14">',
        f'<rect width="880" height="{height}" fill="#ffffff"/>',
        f'<text x="28" y="38" font-size="18" font-weight="600" fill="{ink}">A small GPT, {len(runs)} variants</text>',
        f'<text x="28" y="60" font-size="13" fill="{faint}">{subtitle}</text>',
    ]
    for left, (title, rows) in zip((28, 466), panels.items(), strict=True):
        start, scale = left + 108, 150 / max(high for (_, _, high), _ in rows)
        out.append(f'<text x="{left}" y="98" font-weight="600" fill="{ink}">{title}</text>')
        for row, (name, ((low, middle, high), change)) in enumerate(zip(runs, rows, strict=True)):
            y, text = 112 + 34 * row, 129 + 34 * row
            x1, x2, end = start + scale * low, start + scale * high, start + scale * high + 8
            fill, weight = (blue, 600) if name.startswith("fused") else (gray, 400)
            bold = f'font-weight="{weight}" fill="{ink}"'
            out += [
                f'<text x="{start - 8}" y="{text}" text-anchor="end" {bold}>{name}</text>',
                f'<rect x="{start}" y="{y}" width="{scale * middle:.1f}" height="24" rx="2" fill="{fill}"/>',
                f'<text x="{end:.1f}" y="{text}" {bold}>{middle:.1f}</text>',
            ]
            if name != "torch.compile":
                small = f'font-size="{13 if left < 400 else 11}" fill="{faint}"'
                out.append(f'<text x="{end + 58:.1f}" y="{text}" {small}>{change}</text>')
            if low < high:
                whisker = f"M{x1:.1f} {y + 12}H{x2:.1f}M{x1:.1f} {y + 8}v8M{x2:.1f} {y + 8}v8"
                out.append(f'<path d="{whisker}" stroke="{ink}" stroke-width="1.2" fill="none"/>')
    note = "Lower is better. Beside the bars: against torch.compile, step by step. Whiskers: quartiles."
    out.append(f'<text x="28" y="{height - 18}" font-size="12" fill="{faint}">{note}</text>')
    return "\n".join([*out, "</svg>\n"])


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed training steps of each variant (default: 30)")
    parser.add_argument("--seconds", type=float, default=30, help="stop after this time and five steps (default: 30)")
    parser.add_argument("--layers", type=int, default=3, help="blocks of the model (default: 3)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch (default: 8)")
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu", help="the model's MLPs (default: gelu)")
    parser.add_argument("--budget", action="store_true", help="add PyTorch's activation memory budget, 0.99")
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
    if device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise SystemExit("torch.compile on a CPU needs a C++ compiler: install g++, or set CXX")
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
    with dots("Which MLPs backend='fused' fuses"):
        report = tfo.explain(model, *first)
    print(f"\n\n{report}\n")

    runs = {}
    for name, way in WAYS.items():
        if name == "budget 0.99" and not args.budget:
            continue
        copied = copy.deepcopy(model)
        runs[name] = Run(copied, way(copied), torch.optim.AdamW(copied.parameters(), lr=1e-3, fused=True))

    print("Compiling, with the first step (do not compare: a later variant may reuse kernels of an earlier one)")
    for name, run in runs.items():
        with dots(f"  {name:<13}"):
            run.step(*first)
        print(f" {run.seconds.pop():.1f} s, loss {run.losses[-1]:.4f}", flush=True)

    print(f"\nTraining, {args.steps} steps each, taking turns\n  step   " + "".join(f"{name:>15}" for name in runs))
    order, shuffle, start = list(runs.values()), random.Random(args.seed), time.perf_counter()
    for step in range(1, args.steps + 1):
        tokens, targets = batch()
        shuffle.shuffle(order)
        for run in order:
            run.step(tokens, targets)
        late = 5 <= step < args.steps and time.perf_counter() - start > args.seconds
        if step % max(1, args.steps // 6) == 0 or step == args.steps or late:
            print(f"  {step:<6} " + "".join(f"{f'loss {r.losses[-1]:.4f}':>15}" for r in runs.values()), flush=True)
        if late:
            print(f"  stopped after {args.seconds:.0f} s: this machine is slow or busy")
            break
    for run in runs.values():
        run.saved = saved_for_backward(run, *first)

    print(f"\n  {'':<13}  {'saved for backward':>18} {'ms per step':>12} {'quartiles':>18} {'loss ≠ eager by':>16}")
    for name, run in runs.items():
        low, middle, high = (1e3 * q for q in quartiles(run.seconds))
        difference = max(abs(a - b) for a, b in zip(run.losses, runs["eager"].losses, strict=True))
        saved, spread = f"{run.saved / 2**20:.2f} MiB", f"{low:.1f} … {high:.1f}"
        print(f"  {name:<13}  {saved:>18} {middle:>12.1f} {spread:>18} {difference:>16.1e}")
    print("\nagainst torch.compile")
    for name, run in runs.items():
        if name.startswith("fused"):
            print(verdict(name, run, runs["torch.compile"]))
    print(f"""
fused         saves as few of the MLPs' activations as activation_memory_budget=0.99 (add it with --budget)
fp8, input    save less: fp8 rounds gradients, input recomputes GEMMs (lower budgets also recompute attention)
the tail      {lost_tail()}
float8        options={{"gemm": "fp8"}}, on an H100 or H200
will it fit?  python -m torch_fused_ops plan your_module:make_model --gpu H100 --capacity 72GiB""")

    about = f"{config.layers} layers of width {config.width}, {args.mlp} MLPs; {where}"
    args.out.write_text(picture(runs, about), encoding="utf-8")
    print(f"\npicture   {args.out}\ntook      {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
