"""Recipes of float8 products on paper, ours beside torchao's: what a training step of an MLP launches, moves and keeps.

    python -m torch_fused_ops.benchmarks.laboratory.fp8_recipes [--widths 4096 …] [--out FILE]

*plain* and our recipes' names are the model in bfloat16 under ``torch.compile`` and our ``gemm=``; *torchao …* are
torchao's recipes by its own ``convert_to_float8_training``, under plain ``torch.compile``. All are compiled for an H200
that is not there (``docs/virtual-gpu.md``), and ours for the devices that they are for besides. torchao's linear layers
do not ask which device they run on, so what is captured is what a GPU would be given.

Kernels and bytes are of everything but the matrix products. The step's time is a roofline: the products by the rate of
what they multiply, and all those bytes by the rate of a copy. All products in float8 count at one rate, whatever their
scales: it says what is around them, not which recipe's products are quickest.

The JSON is written after every case; what it has already, by the same versions, is not counted again.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import harness, models, variants, ways
from torch_fused_ops.benchmarks.laboratory import on_paper
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.recipes import MX_BLOCK, RECIPES
from torch_fused_ops.virtual_gpu.work import FLOAT8_FLOP

if TYPE_CHECKING:
    from torch_fused_ops.virtual_gpu import GPU, GeneratedGraph, PaperCompilation

TOKENS = 8192
WIDTHS = (4096, 1024, 2048, 8192, 16384)
# torch's products and ours.
PRODUCTS = ("mm", "addmm", "_scaled_mm", "scaled_mm", "scaled_mm_tiled", "_grouped_mm", "scaled_grouped_mm")


class GELUMLP(models.GELUMLP):
    """With GELU itself, not its approximation by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


MLPS: dict[str, tuple[type[nn.Module], float]] = {  # hidden ÷ width
    "SwiGLU": (models.SwiGLUMLP, 3.5),
    "GELU": (GELUMLP, 4),
}


class Experts(nn.Module):
    """A mixture's, as transformers has them: rows sorted by expert, gate and up packed."""

    ends: Tensor

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.register_buffer("ends", torch.empty(experts, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.transpose(-2, -1), offs=self.ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=self.ends)


EXPERTS = (8, 4096, 14336)  # Mixtral 8x7B's; two of them take each of 8192 tokens
OURS = tuple(name for name, (scaling, _) in RECIPES.items() if (9, 0) in scaling.sm)  # an H200's
WAYS = ("plain", *OURS, *(f"torchao {recipe}" for recipe in variants.TORCHAO))
# One of each kind that "fp8-rowwise" is for: sm_89, sm_90, gfx942, which has float8_e4m3fnuz, and sm_100, with "mxfp8".
ROWWISE = ("plain", "fp8-rowwise")
DEVICES = {
    **dict.fromkeys(("NVIDIA L40S", "NVIDIA H100 80GB HBM3", "AMD Instinct MI300X"), ROWWISE),
    "NVIDIA B200": (*ROWWISE, "mxfp8", "mxfp8-wgrad-bf16"),
}


def products(graph: GeneratedGraph) -> Iterator[tuple[fx.Node, bool]]:
    """The matrix products of a graph, and whether each multiplies float8."""
    for node in graph.graph.graph.nodes:
        name = getattr(node.target, "__name__", "").removesuffix(".default")
        if node.op == "call_function" and name in PRODUCTS:
            yield node, "scaled" in name


def bytes_besides_products(graph: GeneratedGraph) -> int:
    """Bytes that everything but matrix products moves."""
    moved = graph.bytes_moved
    for node, _ in products(graph):
        moved -= on_paper._roofline().nbytes_of_node(node)
        moved += _bytes_of_wide_scales(node)
    return moved


def _bytes_of_wide_scales(node: fx.Node) -> int:
    """What a product in blocks of 32 does not read of its graph's scales: it is lowered to one with 8 bits each."""
    if node.target is not torch.ops.fused.scaled_mm.default:
        return 0
    a, *scales = (node.args[i].meta["val"] for i in (0, 1, 3))  # type: ignore[union-attr]
    if float8.columns_of(a, scales[0], 1) != MX_BLOCK:
        return 0
    return sum(t.nbytes - float8.tiled_size(*t.shape) for t in scales)


def kernels_besides_products(graph: GeneratedGraph) -> int:
    """Launches of generated kernels, and calls that are no matrix products: our kernels, one launch each."""
    calls = [name.rpartition(".")[2] for name in graph.extern]
    return sum(kernel.launches for kernel in graph.kernels) + sum(name not in PRODUCTS for name in calls)


def flop(graph: GeneratedGraph) -> dict[str, int]:
    """FLOP of the matrix products, by what they multiply."""
    found = {"bf16": 0, "fp8": 0}
    for node, fp8 in products(graph):
        found["fp8" if fp8 else "bf16"] += int(on_paper._roofline().flops_of_node(node))
    return found


def described(name: str) -> GPU:
    """A GPU of ``DEVICES``, on paper."""
    virtual_gpu = on_paper._virtual_gpu()
    l40s = virtual_gpu.GPU(
        "NVIDIA L40S", "sm_89", (8, 9), 142, 48 << 30, 49152, 101376, 96 << 20, max_threads_per_multi_processor=1536
    )
    return next(gpu for gpu in (l40s, *virtual_gpu.gpus.GPUS.values()) if gpu.name == name)


def compiled(mlp: str, width: int, way: str, tokens: int = TOKENS, device: str = "NVIDIA H200") -> PaperCompilation:
    """A training step of an MLP, compiled on paper.

    Args:
        mlp: of ``MLPS``.
        width: of its input and result.
        way: of ``WAYS``.
        tokens: rows of its input.
        device: the GPU's name.

    Raises:
        harness.Unavailable: where torchao cannot be imported.
    """
    torch._dynamo.reset()
    make, factor = MLPS[mlp]
    with torch.device("meta"):
        module = make(width, int(factor * width)).bfloat16()
        x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
    if way.startswith("torchao "):
        module, way = ways.by_torchao(module, way.removeprefix("torchao ")), "plain"
    return _on_paper(module, x, way, described(device))


def _on_paper(module: nn.Module, x: Tensor, way: str, gpu: GPU) -> PaperCompilation:
    if way == "plain":
        return on_paper._virtual_gpu().compile_on_paper(module, x, gpu=gpu)
    with tfo.enabled(tfo.FusionPolicy(gemm=way, strict=True)):  # type: ignore[arg-type]
        return on_paper._virtual_gpu().compile_on_paper(module, x, gpu=gpu)


def compiled_experts(way: str, rows: int = 2 * TOKENS) -> PaperCompilation:
    """A training step of ``EXPERTS``, compiled on paper; ``way``: "plain", "bf16" or "fp8-rowwise"."""
    torch._dynamo.reset()
    with torch.device("meta"):
        module = Experts(*EXPERTS).bfloat16()
        x = torch.empty(rows, EXPERTS[1], dtype=torch.bfloat16, requires_grad=True)
    return _on_paper(module, x, way, described("NVIDIA H200"))


def figures(paper: PaperCompilation) -> dict[str, Any]:
    """What a step launches, moves and keeps, and the roofline of its time."""
    rates = on_paper._rates()
    found: dict[str, Any] = {"saved_bytes": paper.saved_bytes()}
    total = {"bf16": 0, "fp8": 0}
    for name, graph in paper.graphs.items():
        found[name] = {
            "kernels": kernels_besides_products(graph),
            "products": sum(1 for _ in products(graph)),
            "bytes": bytes_besides_products(graph),
        }
        for kind, each in flop(graph).items():
            total[kind] += each
    moved = sum(found[name]["bytes"] for name in paper.graphs)
    found["flop"] = total
    found["seconds"] = total["bf16"] / rates.flop + total["fp8"] / FLOAT8_FLOP + moved / rates.nbytes
    return found


def case(mlp: str, width: int, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All ways of an MLP; one that is not there says why. ``known``: what was counted already."""
    found: dict[str, Any] = {"mlp": mlp, "width": width, "hidden": int(MLPS[mlp][1] * width), "ways": {}}
    for way in WAYS:
        if known and "unavailable" not in known.get(way, {"unavailable": ""}):
            found["ways"][way] = known[way]
            continue
        try:
            found["ways"][way] = figures(compiled(mlp, width, way))
        except harness.Unavailable as reason:
            found["ways"][way] = {"unavailable": str(reason)}
        print(f"{mlp} {width} {way}: {found['ways'][way]}", flush=True)
    return found


def device_case(mlp: str, device: str) -> dict[str, Any]:
    """Its ways of an MLP of width 4096 on a device: no time, as there are no rates that were measured there."""
    found: dict[str, Any] = {"mlp": mlp, "width": 4096, "device": device, "ways": {}}
    for way in DEVICES[device]:
        found["ways"][way] = figures(compiled(mlp, 4096, way, device=device))
        del found["ways"][way]["seconds"]
        print(f"{mlp} {device} {way}: {found['ways'][way]}", flush=True)
    return found


def versions() -> dict[str, str]:
    """What the figures depend on."""
    there = importlib.util.find_spec("torchao") is not None
    return {**on_paper.versions(), "torchao": importlib.metadata.version("torchao") if there else "not installed"}


def default_out() -> Path:
    return harness.results_folder() / "fp8_recipes.json"


# ---- the page's tables -----------------------------------------------------------------------------------------------

COLUMNS = ("kernels", "forward, MiB", "backward, MiB", "saved, MiB")


def tables(result: dict[str, Any]) -> list[str]:
    """In Markdown what was counted: every recipe at width 4096, other devices, experts. No times: see the page."""
    cases = {(case["mlp"], case["width"]): case["ways"] for case in result["cases"]}
    lines = [*_row("MLP, for an H200", "", *COLUMNS), *_row(*["---"] * (2 + len(COLUMNS)))]
    for mlp in MLPS:
        for way, f in cases[mlp, 4096].items():
            lines += _row(f"{mlp}, {int(4096 * MLPS[mlp][1])}" if way == "plain" else "", _named(way), *_counted(f))
    lines += ["", *_row("MLP", "device", "", *COLUMNS), *_row(*["---"] * (3 + len(COLUMNS)))]
    for case in result["devices"]:
        for name, f in case["ways"].items():
            place = (case["mlp"], case["device"]) if name == "plain" else ("", "")
            lines += _row(*place, _named(name), *_counted(f))
    lines += ["", *_row("experts, 8 × 14336", *COLUMNS), *_row(*["---"] * (1 + len(COLUMNS)))]
    for name, f in result["experts"]["ways"].items():
        lines += _row('`gemm="bf16"`' if name == "bf16" else _named(name), *_counted(f))
    return [*lines, ""]


def _row(*cells: Any) -> list[str]:
    return [f"| {' | '.join(map(str, cells))} |"]


def _named(way: str) -> str:
    return f'`gemm="{way}"`' if way in RECIPES else way


def _counted(f: dict[str, Any]) -> list[str]:
    """The cells of what was counted: all but the time."""
    if "unavailable" in f:
        return ["unavailable"] * len(COLUMNS)
    sides = [f[side] for side in ("forward", "backward")]
    mib = [each / 2**20 for each in (*(side["bytes"] for side in sides), f["saved_bytes"])]
    return [" + ".join(str(side["kernels"]) for side in sides), *(f"{each:.0f}" for each in mib)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Count every case and write the JSON after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--out", type=Path, default=default_out())
    given = parser.parse_args(arguments)
    rates = on_paper._rates()
    result: dict[str, Any] = {
        "benchmark": "fp8-recipes",
        "schema": harness.SCHEMA,
        "versions": versions(),
        "gpu": on_paper._virtual_gpu().H200.name,
        "constants": {
            "copy_bytes_per_s": rates.nbytes,
            "bf16_flop_per_s": rates.flop,
            "fp8_flop_per_s": FLOAT8_FLOP,
        },
        "tokens": TOKENS,
        "cases": [],
    }
    before = harness.read(given.out, result["benchmark"]) if given.out.exists() else {}
    if any(before.get(name) != result[name] for name in ("versions", "constants", "tokens")):
        before = {}
    known = {(one["mlp"], one["width"]): one["ways"] for one in before.get("cases", ())}
    result["devices"] = before.get("devices", [])
    for width in given.widths:
        for mlp in MLPS:
            result["cases"].append(case(mlp, width, known.get((mlp, width))))
            harness.write(given.out, result)
    result["experts"] = before.get("experts") or {
        "sizes": EXPERTS,
        "rows": 2 * TOKENS,
        "ways": {way: figures(compiled_experts(way)) for way in ("plain", "bf16", "fp8-rowwise")},
    }
    harness.write(given.out, result)
    there = {(one["mlp"], one["device"]) for one in result["devices"]}
    for device in DEVICES:
        for mlp in MLPS:
            if (mlp, device) not in there:
                result["devices"].append(device_case(mlp, device))
                harness.write(given.out, result)
    print("\n".join(tables(result)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
