"""Estimate a training step of six blocks on an H200, compiled without a device.

    python -m torch_fused_ops.benchmarks.laboratory.on_paper

*plain* and *budget* are torch.compile, without and with PyTorch's memory budget. *ours-LEVEL* are our memory levels.
*ours-LEVEL+attention* adds ``attention="input"``.
Figures of each block and phase: kernels, library calls, bytes moved, FLOP and the roofline's time.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_fused_ops.benchmarks import harness, models
from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.policy import MEMORY, FusionPolicy
from torch_fused_ops.virtual_gpu import H200, PaperCompilation, compile_on_paper, roofline

RESULTS = harness.RESULTS / "on_paper.json"
BF16 = torch.bfloat16
RATES = roofline.H200_RATES


def settings(way: str) -> dict[str, Any]:
    """Return ``compile_on_paper``'s settings for a variant: plain, budget, ours-LEVEL or ours-LEVEL+attention."""
    from torch_fused_ops.lowerings.passes import compile_options

    if not way.startswith("ours-"):
        return {"plain": {}, "budget": {"memory_budget": 0.99}}[way]
    memory, _, attention = way.removeprefix("ours-").partition("+")
    policy = FusionPolicy(memory=memory, attention="input" if attention else "off", strict=True)  # type: ignore[arg-type]
    return {"config": compile_options(policy)}


# With so few tokens, "tiled" is the same as "input".
BLOCK_WAYS = ("plain", "budget", *(f"ours-{memory}" for memory in MEMORY if memory != "tiled"), "ours-input+attention")


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


def graph_costs(paper: PaperCompilation) -> dict[str, Any]:
    """Return figures for each graph: for its generated kernels, and for the whole graph."""
    costs, events = {}, paper.timeline().events
    for phase, graph in paper.graphs.items():
        calls = [event for event in events if event.graph == phase]
        costs[phase] = {
            "kernels": sum(kernel.launches for kernel in graph.kernels),
            "library_calls": len(graph.extern),
            "bytes": graph.bytes_moved,
            "flops": sum(call.flop for call in calls),
            "floor_us": round(1e6 * RATES.seconds(roofline.Work(call.flop, call.nbytes) for call in calls), 2),
        }
    return costs


# ---- blocks ----------------------------------------------------------------------------------------------------------


class FirstOutput(nn.Module):
    """Call a transformers layer with the keywords it needs, and return its first result."""

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


def _mlp(kind: str) -> Made:
    make = {"gelu": models.GELUMLP, "swiglu": models.SwiGLUMLP}[kind]
    return make(4096, 16384), (tensor(8192, 4096),)


BLOCKS: dict[str, Callable[[], Made]] = {
    "GELU MLP 8192 4096→16384": lambda: _mlp("gelu"),
    "SwiGLU MLP 8192 4096→16384": lambda: _mlp("swiglu"),
    "GPT-2 block 16×1024, width 768": _gpt2,
    "Llama-3-8B block 2×4096": _llama,
    "T5 v1.1 XL block 16×512": _t5,
    "Mixtral-8x7B block 2×4096": _mixtral,
}


def block_figures(name: str, ways: Sequence[str] = BLOCK_WAYS) -> dict[str, Any]:
    """Return a block's figures for each way. All blocks except the MLPs need transformers."""
    by_way = {}
    for way in ways:
        with torch.device("meta"):
            module, inputs = BLOCKS[name]()
        paper = compile_on_paper(module.to(BF16).train(), *inputs, **settings(way))
        by_way[way] = {**graph_costs(paper), "saved_bytes": paper.saved_bytes()}
        print(f"{name}, {way}: {by_way[way]}", flush=True)
    return {"name": name, "ways": by_way}


# ---- the command -----------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions that the figures depend on."""
    import triton

    return {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}


def main(arguments: Namespace) -> int:
    """Count the blocks, print them, and write the JSON."""
    result: dict[str, Any] = {"benchmark": "on-paper", "schema": harness.SCHEMA, "gpu": H200.name, "arch": H200.arch}
    result |= {"versions": versions()}
    result |= {"constants": {"copy_bytes_per_s": RATES.nbytes, "matmul_flop_per_s": RATES.flop}}
    result |= {"blocks": [block_figures(name) for name in BLOCKS]}
    harness.write(RESULTS, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main, __doc__))
