"""Compare float8 recipes of this library and torchao: kernels, bytes and saved tensors of an MLP's step on an H200.

    python -m torch_fused_ops.benchmarks.laboratory.fp8_recipes

All variants are compiled without a device. *plain* is torch.compile in bfloat16. torchao's recipes are applied by
``convert_to_float8_training``, under plain torch.compile.

GEMMs are not counted among kernels and bytes. The time is a roofline, which assumes the same rate for all float8 GEMMs.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import importlib.metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import harness, models, variants, ways
from torch_fused_ops.benchmarks.laboratory import on_paper, run_script
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.virtual_gpu import H200, GeneratedGraph, PaperCompilation, compile_on_paper
from torch_fused_ops.virtual_gpu.work import BF16_FLOP, FLOAT8_FLOP

RESULTS = harness.RESULTS / "fp8_recipes.json"
TOKENS, WIDTH = 8192, 4096
# GEMMs of torch and of this library.
GEMMS = ("mm", "addmm", "_scaled_mm", "scaled_mm", "scaled_mm_tiled", "_grouped_mm", "scaled_grouped_mm")


class GELUMLP(models.GELUMLP):
    """The MLP with exact GELU instead of tanh's approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


MLPS: dict[str, tuple[type[nn.Module], float]] = {  # by name: the class, and hidden ÷ width
    "SwiGLU": (models.SwiGLUMLP, 3.5),
    "GELU": (GELUMLP, 4),
}


class Experts(nn.Module):
    """Experts as in transformers: rows sorted by expert, gate and up packed."""

    ends: Tensor

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.register_buffer("ends", torch.empty(experts, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.transpose(-2, -1), offs=self.ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=self.ends)


EXPERTS = (8, 4096, 14336)  # as in Mixtral 8x7B, which sends each of 8192 tokens to two experts
OURS = tuple(name for name, (scaling, _) in RECIPES.items() if (9, 0) in scaling.sm)  # runs on an H200
WAYS = ("plain", *OURS, *(f"torchao {recipe}" for recipe in variants.TORCHAO))


def kernels_without_gemms(graph: GeneratedGraph) -> int:
    """Count launches of generated kernels, and calls of our kernels, each of which is one launch."""
    calls = [name.rpartition(".")[2] for name in graph.extern]
    return sum(kernel.launches for kernel in graph.kernels) + sum(name not in GEMMS for name in calls)


def compiled(mlp: str, way: str) -> PaperCompilation:
    """Compile a training step without a device. ``mlp`` is a name of ``MLPS``, and ``way`` of ``WAYS``.

    Raises:
        harness.Unavailable: torchao cannot be imported.
    """
    torch._dynamo.reset()
    make, factor = MLPS[mlp]
    with torch.device("meta"):
        module = make(WIDTH, int(factor * WIDTH)).bfloat16()
        x = torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    if way.startswith("torchao "):
        module, way = ways.by_torchao(module, way.removeprefix("torchao ")), "plain"
    return _on_paper(module, x, way)


def _on_paper(module: nn.Module, x: Tensor, way: str) -> PaperCompilation:
    if way == "plain":
        return compile_on_paper(module, x)
    with tfo.enabled(tfo.FusionPolicy(gemm=way, strict=True)):  # type: ignore[arg-type]
        return compile_on_paper(module, x)


def compiled_experts(way: str) -> PaperCompilation:
    """Compile a training step of ``EXPERTS`` without a device. ``way`` is "plain", "bf16" or "fp8-rowwise"."""
    torch._dynamo.reset()
    with torch.device("meta"):
        module = Experts(*EXPERTS).bfloat16()
        x = torch.empty(2 * TOKENS, EXPERTS[1], dtype=torch.bfloat16, requires_grad=True)
    return _on_paper(module, x, way)


def figures(paper: PaperCompilation) -> dict[str, Any]:
    """Count a step's kernels, bytes and saved bytes, and estimate its time by the roofline."""
    rates = on_paper.RATES
    result: dict[str, Any] = {"saved_bytes": paper.saved_bytes()}
    total = {"bf16": 0, "fp8": 0}
    calls = paper.timeline().events
    for name, graph in paper.graphs.items():
        gemms = [call for call in calls if call.graph == name and call.flop]
        result[name] = {
            "kernels": kernels_without_gemms(graph),
            "products": len(gemms),
            "bytes": graph.bytes_moved - sum(gemm.nbytes for gemm in gemms),
        }
        for gemm in gemms:
            if "scaled" in gemm.call:
                total["fp8"] += round(gemm.flop * FLOAT8_FLOP / BF16_FLOP)
            else:
                total["bf16"] += round(gemm.flop)
    nbytes = sum(result[name]["bytes"] for name in paper.graphs)
    result["flop"] = total
    result["seconds"] = total["bf16"] / rates.flop + total["fp8"] / FLOAT8_FLOP + nbytes / rates.nbytes
    return result


def case(mlp: str) -> dict[str, Any]:
    """Return all variants of an MLP, or the reason why a variant is unavailable."""
    result: dict[str, Any] = {"mlp": mlp, "width": WIDTH, "hidden": int(MLPS[mlp][1] * WIDTH), "ways": {}}
    for way in WAYS:
        try:
            result["ways"][way] = figures(compiled(mlp, way))
        except harness.Unavailable as reason:
            result["ways"][way] = {"unavailable": str(reason)}
        print(f"{mlp} {way}: {result['ways'][way]}", flush=True)
    return result


def versions() -> dict[str, str]:
    """Return the versions that the figures depend on."""
    try:
        torchao = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        torchao = "not installed"
    return {**on_paper.versions(), "torchao": torchao}


def main(arguments: argparse.Namespace) -> int:
    """Count every case and write the JSON after each."""
    rates = on_paper.RATES
    constants = {"copy_bytes_per_s": rates.nbytes, "bf16_flop_per_s": rates.flop, "fp8_flop_per_s": FLOAT8_FLOP}
    result: dict[str, Any] = {"benchmark": "fp8-recipes", "schema": harness.SCHEMA, "versions": versions()}
    result |= {"gpu": H200.name, "constants": constants, "tokens": TOKENS, "cases": []}
    for mlp in MLPS:
        result["cases"].append(case(mlp))
        harness.write(RESULTS, result)
    ways = {way: figures(compiled_experts(way)) for way in ("plain", "bf16", "fp8-rowwise")}
    result["experts"] = {"sizes": EXPERTS, "rows": 2 * TOKENS, "ways": ways}
    harness.write(RESULTS, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(main, __doc__))
