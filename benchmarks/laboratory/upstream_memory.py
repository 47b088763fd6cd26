"""PyTorch's own ways to keep less for backward, beside our memory levels: on paper, and how far gradients are off.

    python -m torch_fused_ops.benchmarks.laboratory.upstream_memory [--probe] [--out FILE]

*Paper*: a training step of each block, compiled for an H200 that is not there (``docs/virtual-gpu.md``): bytes kept, on
the GPU and on the host, kernels, matrix products, and bytes that all of them move. *Gradients*: an MLP in bfloat16 on
the CPU, compiled, beside float64; the largest distance of a gradient, relative, in the 2-norm. ``--probe`` notes only
which of these the torch at hand has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.fx import Graph

from torch_fused_ops import FusionPolicy
from torch_fused_ops.benchmarks import models
from torch_fused_ops.benchmarks.laboratory import on_paper

if TYPE_CHECKING:
    from torch_fused_ops.virtual_gpu import PaperCompilation

RESULTS = Path(__file__).parents[1] / "results" / "upstream_memory.json"
QUANTIZES = "activation_quantization_aten_pass"


@dataclass(frozen=True)
class Way:
    """How a step is compiled.

    Attributes:
        level: of ``FusionPolicy(memory=…)``; None without this library.
        budget: ``torch._functorch.config.activation_memory_budget``.
        region: the budget of ``torch.autograd.graph.region_activation_memory_budget`` around the block.
        quantized: the dtype in which torch keeps what is large.
        offloaded: whether torch's offloading is on, and everything marked for it.
    """

    level: str | None = None
    budget: float | None = None
    region: float | None = None
    quantized: str | None = None
    offloaded: bool = False


WAYS: dict[str, Way] = {
    "torch.compile": Way(),
    "budget 0.99": Way(budget=0.99),
    "region's budget 0": Way(region=0.0),
    "torch's fp8 store": Way(quantized="torch.float8_e5m2"),
    "the same, e4m3": Way(quantized="torch.float8_e4m3fn"),
    "budget 0.99 + torch's fp8 store": Way(budget=0.99, quantized="torch.float8_e5m2"),
    "torch's offloading": Way(offloaded=True),
    "budget 0.99 + torch's offloading": Way(budget=0.99, offloaded=True),
    '`"free"`': Way("free"),
    '`"free"` + torch\'s fp8 store': Way("free", quantized="torch.float8_e5m2"),
    '`"free"` + torch\'s offloading': Way("free", offloaded=True),
    '`"fp8"`': Way("fp8"),
    '`"fp8"` + torch\'s fp8 store': Way("fp8", quantized="torch.float8_e5m2"),
    '`"fp8"` + torch\'s offloading': Way("fp8", offloaded=True),
    '`"input"`': Way("input"),
    '`"input"` + torch\'s fp8 store': Way("input", quantized="torch.float8_e5m2"),
}
BLOCKS = {
    "GELU MLP": "GELU MLP 8192 4096→16384",
    "Llama-3-8B block": "Llama-3-8B block 2×4096",
    "T5 block": "T5 v1.1 XL block 16×512",
    "Mixtral block": "Mixtral-8x7B block 2×4096",
}
KNOBS = ("torch.compile", "budget 0.99", '`"free"`')  # of the last two blocks


def features() -> dict[str, bool]:
    """Which of PyTorch's own ways this torch has."""
    from torch._inductor import utils

    known = set(getattr(utils, "POST_GRAD_FUSIONS", ())) | _names_of(utils)
    return {
        "fp8 store": QUANTIZES in known,
        "offloading": hasattr(functorch_config, "enable_activation_offloading"),
        "region's budget": hasattr(torch.autograd.graph, "region_activation_memory_budget"),
    }


def _names_of(module: Any) -> set[str]:
    """The names in a module's lists and sets of names."""
    held = (value for value in vars(module).values() if isinstance(value, (list, tuple, set, frozenset)))
    return {name for value in held for name in value if isinstance(name, str)}


class Region(nn.Module):
    """A module inside a region with a budget of its own."""

    def __init__(self, module: nn.Module, budget: float) -> None:
        super().__init__()
        self.module, self.budget = module, budget

    def forward(self, *args: Any) -> Any:
        with torch.autograd.graph.region_activation_memory_budget(self.budget):
            return self.module(*args)


def options_of(way: Way, smallest: int | None = None) -> dict[str, Any]:
    """Inductor's settings; ``smallest``: the MiB from which torch's store takes a tensor, 100 by default."""
    from torch_fused_ops.lowerings.passes import compile_options

    options = dict(compile_options(FusionPolicy(memory=way.level))) if way.level else {}  # type: ignore[arg-type]
    if way.quantized:
        store: dict[str, Any] = {"quant_type": way.quantized, "use_scaling": True}  # see docs/upstream/fp8-store.md
        options["post_grad_fusion_options"] = {
            QUANTIZES: store | ({} if smallest is None else {"size_in_mb": smallest})
        }
    return options


def _marked(graph: Graph) -> None:
    """Mark everything for offloading: torch offloads what a pass has marked, and none of its own marks any."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["should_offload"] = True


def compiled(block: str, way: Way) -> PaperCompilation:
    """A training step of a block, on paper.

    Args:
        block: of ``BLOCKS``.
        way: how.
    """
    virtual_gpu = on_paper._virtual_gpu()
    torch._dynamo.reset()
    own, plain = on_paper.BLOCKS[BLOCKS[block]]
    with torch.device("meta"):
        try:
            module, args = own()
        except ImportError:
            assert plain is not None
            module, args = plain()
        module = module.bfloat16()
    args = tuple(t.detach().to("meta", torch.bfloat16).requires_grad_(t.requires_grad) for t in args)
    if way.region is not None:
        module = Region(module, way.region)
    passes: list[Callable[[Graph], None]] = [_marked] if way.offloaded else []
    with functorch_config.patch(enable_activation_offloading=way.offloaded):
        paper: PaperCompilation = virtual_gpu.compile_on_paper(
            module, *args, config=options_of(way), memory_budget=way.budget, joint_passes=passes
        )
    return paper


def paper_figures(block: str, way: Way) -> dict[str, Any]:
    """What a step keeps, launches and moves; ``{"failed": …}`` where it does not compile."""
    try:
        paper = compiled(block, way)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    assert paper.forward is not None and paper.backward is not None
    host = sum(n.meta["val"].nbytes for n in paper.forward.graph.graph.nodes if n.name.startswith("cpu_offload_"))
    graphs = (paper.forward, paper.backward)
    return {
        "kept": paper.saved_bytes(),
        "host": host,
        "kernels": sum(kernel.launches for graph in graphs for kernel in graph.kernels),
        "calls": sum(len(graph.extern) for graph in graphs),
        "moved": sum(graph.bytes_moved for graph in graphs),
    }


# ---- gradients -------------------------------------------------------------------------------------------------------


def distances(ways: dict[str, Way], tokens: int = 512, width: int = 128, hidden: int = 512) -> dict[str, float]:
    """How far each way's gradients are from float64's: the farthest gradient, relative, in the 2-norm.

    Tensors of any size are stored in float8 here. Values are random, of deviation 1 where the activation reads them.
    """
    torch.manual_seed(0)
    module, x = models.GELUMLP(width, hidden).bfloat16(), torch.randn(tokens, width).bfloat16()
    with torch.no_grad():
        module.up.weight.copy_(torch.randn(hidden, width) / width**0.5)
    tangent = torch.randn(tokens, width).bfloat16()

    def gradients(fn: Callable[..., Tensor], model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        loss = fn(leaf)
        return [g.double() for g in torch.autograd.grad(loss, [leaf, *model.parameters()], tangent.to(dtype))]

    exact = models.GELUMLP(width, hidden).double()
    exact.load_state_dict({name: t.double() for name, t in module.state_dict().items()})
    expected = gradients(exact, exact, torch.float64)
    found = {}
    for name, way in ways.items():
        torch._dynamo.reset()
        patched: dict[str, Any] = {} if way.budget is None else {"activation_memory_budget": way.budget}
        with functorch_config.patch(patched), inductor_config.patch(force_disable_caches=True):
            step = torch.compile(module, options=options_of(way, smallest=0))
            got = gradients(step, module, torch.bfloat16)
        found[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
    return found


MEASURED = [name for name, way in WAYS.items() if not way.offloaded and way.region is None]


# ---- docs/memory.md --------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> list[str]:
    """The lines of docs/memory.md."""
    lines = ["| | GELU MLP saves | kernels | bytes moved | Llama-3-8B block saves | bytes moved | gradients off by |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, by_block in result["paper"].items():
        if "Llama-3-8B block" not in by_block:
            continue
        cells = []
        for block, with_kernels in (("GELU MLP", True), ("Llama-3-8B block", False)):
            row = by_block[block]
            if "failed" in row:
                cells += ["does not compile", *[""] * (1 + with_kernels)]
                continue
            host = f" + {row['host'] / 2**20:.0f} on the host" if row["host"] else ""
            kernels = [f"{row['kernels']} + {row['calls']}"] if with_kernels else []
            cells += [f"{row['kept'] / 2**20:.0f} MiB{host}", *kernels, f"{row['moved'] / 2**20:.0f} MiB"]
        off = result["gradients"].get(name)
        cells.append("" if off is None else f"{100 * off:.2f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| saves, moves | T5 block | Mixtral block |", "|---|---|---|"]
    for name in KNOBS:
        cells = [
            f"{row['kept'] / 2**20:.0f}, {row['moved'] / 2**20:.0f} MiB"
            for row in (result["paper"][name][block] for block in ("T5 block", "Mixtral block"))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    versions = result["versions"]
    lines += ["", f"| torch | {' | '.join(next(iter(versions.values())))} |", "|---|---|---|---|"]
    lines += [
        f"| {v} | {' | '.join('yes' if there else 'no' for there in has.values())} |" for v, has in versions.items()
    ]
    return [*lines, ""]


def main() -> None:
    """Measure, and write what is found beside what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probe", action="store_true", help="note only which ways this torch has")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    result = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {"versions": {}}
    result["versions"][torch.__version__.partition("+")[0]] = features()
    result["versions"] = dict(sorted(result["versions"].items(), key=lambda one: [int(n) for n in one[0].split(".")]))
    if not arguments.probe:
        result |= {
            "torch": torch.__version__,
            "gpu": "NVIDIA H200",
            "gradients": distances({n: WAYS[n] for n in MEASURED}),
        }
        result["paper"] = {}
        for name, way in WAYS.items():
            blocks = BLOCKS if name in KNOBS else list(BLOCKS)[:2]
            result["paper"][name] = {block: paper_figures(block, way) for block in blocks}
            print(name, result["gradients"].get(name), result["paper"][name], flush=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
