"""Exact figures for an H200 that is not there: ``python -m torch_fused_ops.benchmarks.laboratory.on_paper``.

For every operator, in front of a linear layer: the kernels that forward and backward generate, what they move, what is
kept in between, and their machine code: instructions, registers, spills, how many warps fit. *plain* and *budget* are
torch.compile's, without and with upstream's memory budget; *ours-off* and *ours-free* are ours. Plain's and ours-off's
backward computes gradients; the budget's and ours-free's also computes the activation again. *eager* are the
hand-written kernels. Blocks of whole models likewise, at every memory level, matrix products included.

The floors in time are what bytes, instructions and FLOP imply together, each at the rate below: no prediction, but
nothing runs faster.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import importlib.util
import math
import sys
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fused_ops.benchmarks import harness, models, pointwise
from torch_fused_ops.benchmarks.harness import UsageError
from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.benchmarks.pictures import OURS, THEIRS
from torch_fused_ops.benchmarks.pointwise import Operator
from torch_fused_ops.policy import MEMORY, FusionPolicy

if TYPE_CHECKING:
    from torch_fused_ops.virtual_gpu import GeneratedGraph, MachineCode, PaperCompilation
    from torch_fused_ops.virtual_gpu.roofline import KernelRuns, Rates

# A multiprocessor's registers are handed to warps in units of 256, and hold 64 warps at most.
REGISTERS, REGISTER_UNIT, WARPS = 65536, 256, 64

TOKENS, WIDTH, OUTPUT = 8192, 16384, 4096  # of the operators: rows, the result's columns, the linear layer's results
BF16 = torch.bfloat16
INSTRUCTION_TOLERANCE = 1.02  # compilers of one version differ by no more between machines

Compile = dict[str, Any]


def _virtual_gpu() -> Any:
    if importlib.util.find_spec("triton") is None:
        raise UsageError("on_paper needs Triton: pip install triton numpy")
    from torch_fused_ops import virtual_gpu

    return virtual_gpu


def _roofline() -> Any:
    _virtual_gpu()
    from torch_fused_ops.virtual_gpu import roofline

    return roofline


def _rates() -> Rates:
    return _roofline().rates_of(_virtual_gpu().H200)


def settings(way: str) -> Compile:
    """What ``compile_on_paper`` takes for a way: plain, budget, or ours-<memory level>."""
    from torch_fused_ops.lowerings.passes import compile_options

    if not way.startswith("ours-"):
        return {"plain": {}, "budget": {"memory_budget": 0.99}}[way]
    return {"config": compile_options(FusionPolicy(memory=way.removeprefix("ours-"), strict=True))}  # type: ignore[arg-type]


OPERATOR_WAYS = ("plain", "budget", "ours-off", "ours-free")
# At so few tokens "tiled" is "input".
BLOCK_WAYS = ("plain", "budget", *(f"ours-{memory}" for memory in MEMORY if memory != "tiled"))


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


# ---- what kernels cost -----------------------------------------------------------------------------------------------


def occupancy(registers: int, warps: int) -> float:
    """The part of a multiprocessor's warps that its registers let be resident, for blocks of so many warps."""
    each = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(WARPS, REGISTERS // max(each, 1)) // warps * warps / WARPS


def cost(parts: Sequence[KernelRuns], elements: int) -> dict[str, Any]:
    """Kernels together; instructions for each of ``elements``, of the operator's result."""
    codes = [part.code for part in parts]
    lanes = sum(part.lane_instructions * part.launches for part in parts)
    return {
        "kernels": sum(part.launches for part in parts),
        "bytes": sum(part.nbytes for part in parts),
        "instructions": round(lanes / elements, 2),
        "estimated": any(map(_roofline().loops, codes)),
        "registers": max((code.registers for code in codes), default=0),
        "spills": sum(code.spills for code in codes),
        "occupancy": min((occupancy(code.registers, code.threads // 32) for code in codes), default=1.0),
        "floor_us": round(1e6 * _rates().seconds(work for part in parts for work in part.works), 2),
    }


def graph_cost(graph: GeneratedGraph) -> dict[str, Any]:
    """A whole graph: generated kernels and library calls."""
    parts = _roofline().kernel_runs(graph)
    found = cost(parts, elements=1)
    return {
        "kernels": found["kernels"],
        "library_calls": len(graph.extern),
        "bytes": graph.bytes_moved,
        "registers": found["registers"],
        "spills": found["spills"],
        "occupancy": found["occupancy"],
        "flops": _roofline().flops(graph),
        "floor_us": round(1e6 * _rates().seconds(_roofline().works_of(graph)), 2),
        "pointwise_floor_us": found["floor_us"],
    }


# ---- operators -------------------------------------------------------------------------------------------------------


def operator_figures(operator: Operator, ways: Sequence[str] = OPERATOR_WAYS, eager: bool = True) -> dict[str, Any]:
    """All figures of an operator: of each way forward, backward and saved bytes, and of the hand-written kernels."""
    found = {}
    for way in ways:
        fn = operator.ours if way.startswith("ours") else operator.plain
        shapes = [s for s in operator.shapes(TOKENS, WIDTH) if s is not None]
        inputs = [tensor(OUTPUT, WIDTH), *(tensor(*s) for s in shapes)]

        def linear_of(weight: Tensor, *tensors: Tensor, fn: Callable[..., Tensor] = fn) -> Tensor:
            return F.linear(fn(*tensors), weight)

        paper = _virtual_gpu().compile_on_paper(linear_of, *inputs, **settings(way))
        # The weight is an input here, and kept by all ways alike.
        weight = OUTPUT * WIDTH * BF16.itemsize
        found[way] = {
            "forward": cost(_roofline().kernel_runs(paper.forward), TOKENS * WIDTH),
            "backward": cost(_roofline().kernel_runs(paper.backward), TOKENS * WIDTH),
            "saved_bytes": paper.saved_bytes() - weight,
        }
    row: dict[str, Any] = {"name": str(operator), "ways": found}
    if eager:
        row["eager"] = {"forward": _hand_written(operator, False), "backward": _hand_written(operator, True)}
    return row


def _hand_written(operator: Operator, backward: bool) -> dict[str, Any]:
    """The figures of the eager kernels, from the launches that a call on shapes makes."""
    from torch_fused_ops.kernels import launching
    from torch_fused_ops.kernels.activation import launch_of

    given = [None if s is None else tensor(*s, grad=False) for s in operator.shapes(TOKENS, WIDTH)]
    scalars: list[Any] = [operator.activation, *([operator.layout] if operator.layout else [])]
    if backward:
        given.insert(0, tensor(TOKENS, WIDTH, grad=False))
        scalars += [] if operator.op == "bias_act" else [0.0, None]
        scalars.append([t is not None for t in given[1:]])
    with launching.recorded() as launches:
        launch_of(f"{operator.op}{'_backward' if backward else ''}")(*given, *scalars)
    parts = []
    for launch in launches:
        code = _hand_written_code(launch)
        programs = math.prod(launch.grid) * launch.arguments.get("steps", 1)
        if launch.kernel.__name__ == "_add_rows":
            programs *= -(-launch.arguments["rows"] // launch.constants["BLOCK_M"])
        nbytes = sum(t.numel() * t.element_size() for t in launch.tensors if t is not None)
        parts.append(_roofline().KernelRuns(code, math.prod(launch.grid), float(programs * code.elements), nbytes))
    return cost(parts, TOKENS * WIDTH)


def _hand_written_code(launch: Any) -> MachineCode:
    from torch_fused_ops.virtual_gpu.machine_code import specialization

    options = specialization(launch.kernel, (*launch.tensors, *launch.integers), launch.constants)
    options["block"] = {name: options["constants"].pop(name) for name in ("BLOCK_M", "BLOCK_N")}
    return _virtual_gpu().assemble(launch.kernel, **options)


# ---- blocks ----------------------------------------------------------------------------------------------------------


class T5MLP(nn.Module):
    """T5 v1.1's: a gate with tanh's GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class T5Block(nn.Module):
    """An encoder block of T5 v1.1: RMS norm, attention with a bias of relative positions, gated GELU."""

    def __init__(self, width: int, hidden: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = models.RMSNorm(width), models.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, heads * size, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * size, width, bias=False)
        self.mlp = T5MLP(width, hidden)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Experts(nn.Module):
    """Mixtral's experts with as many tokens for each: routing depends on data, which paper has none of."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(experts, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class FirstOutput(nn.Module):
    """A layer of transformers, whose first result counts, with the keywords it needs."""

    def __init__(self, layer: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.layer, self.keywords = layer, keywords

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x, **self.keywords)
        return out[0] if isinstance(out, tuple) else out


Made = tuple[nn.Module, tuple[Tensor, ...]]


def _gpt2() -> Made:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, attn_implementation="sdpa")
    return FirstOutput(GPT2Block(config, layer_idx=0)), (tensor(16, 1024, 768),)


def _llama() -> Made:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        attn_implementation="sdpa",
    )  # fmt: skip
    positions = (tensor(1, 4096, 128, grad=False), tensor(1, 4096, 128, grad=False))
    return FirstOutput(LlamaDecoderLayer(config, layer_idx=0), position_embeddings=positions), (tensor(2, 4096, 4096),)


def _t5() -> Made:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block as Block

    config = T5Config(
        d_model=2048, d_ff=5120, d_kv=64, num_heads=32, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        is_decoder=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return FirstOutput(Block(config, has_relative_attention_bias=True)), (tensor(16, 512, 2048),)


def _mixtral() -> Made:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    config = MixtralConfig(attn_implementation="sdpa", experts_implementation="grouped_mm")
    positions = (tensor(1, 4096, 128, grad=False), tensor(1, 4096, 128, grad=False))
    layer = MixtralDecoderLayer(config, layer_idx=0)
    return FirstOutput(layer, position_embeddings=positions), (tensor(2, 4096, 4096),)


def _plain_gpt2() -> Made:
    return models.GPTBlock(models.GPT2), (tensor(16, 1024, 768),)


def _plain_llama() -> Made:
    cos, sin = (tensor(4096, 64, grad=False) for _ in range(2))
    return models.LlamaBlock(models.LLAMA), (tensor(2, 4096, 4096), cos, sin)


def _plain_t5() -> Made:
    return T5Block(2048, 5120, 32, 64), (tensor(16, 512, 2048), tensor(1, 32, 512, 512, grad=False))


def _plain_mixtral() -> Made:
    return Experts(8, 4096, 14336), (tensor(8, 2048, 4096),)  # 8192 tokens, two experts each


def _mlp(kind: str) -> Made:
    made = {"gelu": models.GELUMLP, "swiglu": models.SwiGLUMLP}[kind]
    return made(4096, 16384), (tensor(8192, 4096),)


BLOCKS: dict[str, tuple[Callable[[], Made], Callable[[], Made] | None]] = {  # a block, and its plain form
    "GELU MLP 8192 4096→16384": (lambda: _mlp("gelu"), None),
    "SwiGLU MLP 8192 4096→16384": (lambda: _mlp("swiglu"), None),
    "GPT-2 block 16×1024, width 768": (_gpt2, _plain_gpt2),
    "Llama-3-8B block 2×4096": (_llama, _plain_llama),
    "T5 v1.1 XL block 16×512": (_t5, _plain_t5),
    "Mixtral-8x7B block 2×4096": (_mixtral, _plain_mixtral),
}


def block_figures(name: str, ways: Sequence[str] = BLOCK_WAYS) -> dict[str, Any]:
    """All figures of a block, from transformers; of its plain form, with the reason, where that cannot be had."""
    first, plain = BLOCKS[name]
    try:
        return {"name": name, "form": "transformers" if plain else "plain", "ways": _ways_of(first, ways)}
    except Exception as error:
        if plain is None:
            raise
        inner = getattr(error, "inner_exception", None) or error
        lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()]
        reason = f"{type(inner).__name__}: {' '.join(lines[:3])[:300]}"
        return {"name": name, "form": f"plain ({reason})", "ways": _ways_of(plain, ways)}


def _ways_of(make: Callable[[], Made], ways: Sequence[str]) -> dict[str, Any]:
    found = {}
    for way in ways:
        with torch.device("meta"):
            module, inputs = make()
        paper = _virtual_gpu().compile_on_paper(module.to(BF16).train(), *inputs, **settings(way))
        found[way] = _totals(paper)
    return found


def _totals(paper: PaperCompilation) -> dict[str, Any]:
    return {
        "forward": graph_cost(paper.forward),  # type: ignore[arg-type]
        "backward": graph_cost(paper.backward),  # type: ignore[arg-type]
        "saved_bytes": paper.saved_bytes(),
    }


# ---- the command -----------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """What the figures depend on."""
    import triton

    return {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}


def default_out() -> Path:
    return harness.results_folder() / "on_paper.json"


def main(arguments: Namespace) -> int:
    """Count everything, print, write the JSON and the picture."""
    if arguments.draw:
        _draw(harness.read(arguments.draw, "on-paper"), arguments.draw)
        return 0
    virtual_gpu = _virtual_gpu()
    out = arguments.out or (None if arguments.quick else default_out())
    operators = [o for o in pointwise.OPERATORS if all(t in str(o) for t in arguments.only)]
    blocks = [b for b in BLOCKS if all(t in b for t in arguments.only)]
    if arguments.quick:
        operators, blocks = operators[:1], blocks[:1]
    if not operators and not blocks:
        raise UsageError(f"--only {' '.join(arguments.only)} leaves nothing to count")
    began = time.perf_counter()
    gpu = virtual_gpu.H200
    result: dict[str, Any] = {
        "benchmark": "on-paper",
        "schema": harness.SCHEMA,
        "gpu": gpu.name,
        "arch": gpu.arch,
        "versions": versions(),
        "constants": {
            "copy_bytes_per_s": _rates().nbytes,
            "matmul_flop_per_s": _rates().flop,
            "lane_instructions_per_s": _rates().lane_instructions,
        },
        "sizes": {"tokens": TOKENS, "width": WIDTH, "linear": OUTPUT, "dtype": "bfloat16"},
        "operators": [],
        "blocks": [],
    }
    print(f"on paper: {gpu.name} ({gpu.arch}), torch {torch.__version__}, triton {result['versions']['triton']}")
    print(
        f"bfloat16, {TOKENS}×{WIDTH} results; instructions for each element of the result (~: estimated)\n{HEAD}",
        flush=True,
    )
    for operator in operators:
        result["operators"].append(operator_figures(operator))
        print(operator_row(result["operators"][-1]), flush=True)
    print(f"\n{BLOCK_HEAD}", flush=True)
    for name in blocks:
        result["blocks"].append(block_figures(name))
        print(block_rows(result["blocks"][-1]), flush=True)
    if arguments.only and out == default_out() and arguments.out is None:
        out = None  # a part does not replace the whole
    harness.write(out, result)
    print(f"\n{out or 'nothing written'}, {time.perf_counter() - began:.0f} s")
    if out is not None:
        _draw(result, out)
    return 0


def _instructions(figures: dict[str, Any]) -> str:
    return f"{'~' * figures['estimated']}{figures['instructions']:g}"


def _arrow(row: dict[str, Any], phase: str, ways: Sequence[str]) -> str:
    return " → ".join(_instructions(row["ways"][way][phase]) for way in ways)


HEAD = (
    f"{'':<34}{'forward':<22}{'backward':<20}{'and the value again':<22}{'kept':<16}"
    f"{'registers':<13}{'floor µs, there and back':<26}{'eager kernels'}\n"
    f"{'':<34}{'plain → ours':<22}{'plain → ours-off':<20}{'budget → ours-free':<22}{'MiB':<16}"
    f"{'ours':<13}{'plain → budget → ours':<26}instructions (registers), floor µs"
)


def operator_row(row: dict[str, Any]) -> str:
    ways = row["ways"]

    def floor(way: str) -> str:
        return f"{sum(ways[way][p]['floor_us'] for p in ('forward', 'backward')):.0f}"

    mib = [f"{ways[w]['saved_bytes'] / 2**20:.0f}" for w in ("plain", "budget", "ours-free")]
    registers = "/".join(str(ways["ours-free"][p]["registers"]) for p in ("forward", "backward"))
    spills = sum(ways[w][p]["spills"] for w in ways if w.startswith("ours") for p in ("forward", "backward"))
    eager = row.get("eager", {})
    hand = "; ".join(f"{_instructions(c)} ({c['registers']}), {c['floor_us']:.0f}" for c in eager.values())
    cells = (
        f"{row['name']:<34}",
        f"{_arrow(row, 'forward', ('plain', 'ours-off')):<22}",
        f"{_arrow(row, 'backward', ('plain', 'ours-off')):<20}",
        f"{_arrow(row, 'backward', ('budget', 'ours-free')):<22}",
        f"{'→'.join(mib):<16}",
        f"{registers + (f' +{spills} B' if spills else ''):<13}",
        f"{' → '.join(map(floor, ('plain', 'budget', 'ours-free'))):<26}",
        hand,
    )
    return "".join(cells)


BLOCK_HEAD = (
    f"{'':<36}{'kept MiB':>10}{'moved MiB':>11}{'kernels':>9}{'library':>9}{'TFLOP':>8}{'spills':>8}"
    f"{'floor ms':>10}{'of it pointwise':>17}"
)


def block_rows(row: dict[str, Any]) -> str:
    lines = [f"{row['name']}: {row['form']}"]
    for way, figures in row["ways"].items():
        both = [figures["forward"], figures["backward"]]
        total = {key: sum(side[key] for side in both) for key in both[0]}
        lines.append(
            f"  {way:<34}{figures['saved_bytes'] / 2**20:>10.1f}{total['bytes'] / 2**20:>11.1f}{total['kernels']:>9}"
            f"{total['library_calls']:>9}{total['flops'] / 1e12:>8.2f}{total['spills']:>8}"
            f"{total['floor_us'] / 1e3:>10.3f}{total['pointwise_floor_us'] / 1e3:>17.3f}"
        )
    return "\n".join(lines)


COMPARED = (("plain", "ours-off"), ("budget", "ours-free"))  # what keeps alike for backward
LOSSES_FROM = {"kernels": 1.0, "bytes": 1.001, "instructions": INSTRUCTION_TOLERANCE}  # less than that is noise


class Loss(NamedTuple):
    """Where ours needs more than torch.compile: of what, and how much; an operator's bytes are of an element."""

    name: str
    phase: str
    theirs: str
    ours: str
    figure: str
    values: str


def losses(result: dict[str, Any]) -> list[Loss]:
    """All of a result's: a kernel more, or bytes and instructions beyond ``LOSSES_FROM``."""
    found = []
    for row, elements in (*((r, TOKENS * WIDTH) for r in result["operators"]), *((r, 0) for r in result["blocks"])):
        for theirs, ours in COMPARED:
            for phase in ("forward", "backward"):
                sides = [row["ways"][way][phase] for way in (theirs, ours)]
                for key, factor in LOSSES_FROM.items():
                    if key in sides[0] and sides[1][key] > factor * sides[0][key]:
                        values = " → ".join(_figure(side, key, elements) for side in sides)
                        found.append(Loss(row["name"], phase, theirs, ours, key, values))
    return found


def _figure(side: dict[str, Any], key: str, elements: int) -> str:
    if key == "instructions":
        return _instructions(side)
    if key == "bytes":
        return f"{side[key] / elements:.3g}" if elements else f"{side[key] / 2**20:.1f} MiB"
    return str(side[key])


def regressions(now: dict[str, Any], committed: dict[str, Any], same: bool) -> Iterator[str]:
    """How figures of a row are worse than they should be; nothing where they are not.

    Args:
        now: a row of operators or blocks, measured now.
        committed: the same row as committed.
        same: whether both are of the same versions of torch and Triton: ours may then be no worse than committed:
            bytes, kernels and saved bytes exactly, instructions within a tolerance. Otherwise ours, where it keeps
            nothing in fewer bits and computes nothing again that is not pointwise, may be no worse than plain is now.
    """
    ways = [way for way in now["ways"] if way in (committed["ways"] if same else ("ours-off", "ours-free"))]
    for way in (way for way in ways if way.startswith("ours")):
        mine, theirs = now["ways"][way], (committed["ways"][way] if same else now["ways"]["plain"])
        if mine["saved_bytes"] > theirs["saved_bytes"]:
            yield f"{now['name']} {way}: {mine['saved_bytes']} bytes kept, {theirs['saved_bytes']} before"
        for phase in ("forward", "backward"):
            rebuilds = not same and phase == "backward" and way != "ours-off"  # what plain's backward does not
            for key, factor in (("kernels", 1.0), ("bytes", 1.0), ("instructions", INSTRUCTION_TOLERANCE)):
                counted = key in mine[phase] and (key == "kernels" or not rebuilds)
                if counted and mine[phase][key] > factor * theirs[phase][key]:
                    yield f"{now['name']} {way} {phase}: {key} {mine[phase][key]}, {theirs[phase][key]} before"


def _draw(result: dict[str, Any], out: Path) -> None:
    """The picture in docs/images where the results are a clone's own, else beside them."""
    images = Path(__file__).resolve().parents[2] / "docs" / "images"
    path = images / "on_paper.png" if out.resolve() == default_out() and images.is_dir() else out.with_suffix(".png")
    try:
        figure = picture(result)
    except ImportError as e:
        print(f"no picture: {e}; pip install matplotlib numpy", file=sys.stderr)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Software": None})
    print(path)


# The picture's operators; the others are in the JSON, and all losses in a table.
DRAWN = ("bias_act gelu", "bias_act gelu_tanh", "bias_act silu", "glu silu", "glu gelu_tanh", "bias_glu silu halves")


def picture(result: dict[str, Any]) -> Any:
    """Instructions an element of six operators, and what blocks save for backward."""
    from matplotlib.figure import Figure

    panels = (("forward", "plain", "ours-off"), ("backward", "budget", "ours-free"))
    titles = ("forward", "backward with recomputing")
    operators = [row for name in DRAWN for row in result["operators"] if row["name"] == name]
    figure = Figure(figsize=(11, 8), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.1))  # type: ignore[misc]
    names = [row["name"] for row in operators]
    for i, (ax, (phase, theirs, ours), title) in enumerate(zip(upper.subplots(1, 2), panels, titles, strict=True)):
        for way, color, shift, label in ((theirs, THEIRS, -0.2, "torch.compile"), (ours, OURS, 0.2, "this library")):
            values = [row["ways"][way][phase]["instructions"] for row in operators]
            ax.barh([y + shift for y in range(len(names))], values, height=0.4, color=color, label=label)
        ax.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), fontsize=12)
        ax.set_title(f"instructions an element, {title}", fontsize=12)
        ax.invert_yaxis()
        ax.spines[["top", "right"]].set_visible(False)
    upper.axes[0].legend(fontsize=11, frameon=False)
    ways = {"plain": (THEIRS, "plain"), "budget": ("#8b95a1", "budget 0.99"), "ours-free": (OURS, '"free"')}
    ways |= {"ours-fp8": ("#7dd3fc", '"fp8"'), "ours-input": ("#99f6e4", '"input"')}
    ax = lower.subplots()
    for i, (way, (color, label)) in enumerate(ways.items()):
        share = [row["ways"][way]["saved_bytes"] / row["ways"]["plain"]["saved_bytes"] for row in result["blocks"]]
        ax.bar([x + 0.16 * (i - 2) for x in range(len(share))], share, width=0.15, color=color, label=label)
    names = [textwrap.fill(row["name"], 14) for row in result["blocks"]]
    ax.set_xticks(range(len(names)), names, fontsize=11)
    ax.set_title("saved for backward, plain torch.compile = 1", fontsize=12)
    ax.legend(fontsize=11, frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Estimated for an {result['gpu']}", fontsize=13)
    return figure


if __name__ == "__main__":
    sys.exit(run_script(main, __doc__, ("only", "quick", "out", "draw")))
