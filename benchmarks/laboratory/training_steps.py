"""Compare published GPU peaks of training steps with ``plan``'s predictions.

The measurements (benchmarks/results/training_steps.csv) come from torchtitan, torchao, torchtune, lightning-thunder
and transformers' Trainer; each row has its source and its set-up. Each model is defined here as in its program, on
the meta device, and planned with the row's set-up. Nothing is fitted. A whole model of many layers is planned layer by
layer: equal layers are compiled once.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call, return-value"

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torch_fused_ops as tfo
from torch_fused_ops.benchmarks import models
from torch_fused_ops.benchmarks.harness import RESULTS
from torch_fused_ops.benchmarks.laboratory import run_script
from torch_fused_ops.benchmarks.laboratory.fp8_recipes import GELUMLP

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_size: int = 128
    tied: bool = False
    qk_norm: bool = False
    parallel: bool = False  # GPT-NeoX: layer norms, biases, a GELU MLP beside the attention


SIZES = {
    "Llama-3.1-8B": Sizes(4096, 14336, 32, 8, 128256),
    "Llama-3.2-3B": Sizes(3072, 8192, 24, 8, 128256, tied=True),
    "Llama-2-7B": Sizes(4096, 11008, 32, 32, 32000),
    "Llama-2-7b-hf": Sizes(4096, 11008, 32, 32, 32000),
    "Llama-2-13b-hf": Sizes(5120, 13824, 40, 40, 32000),
    "Mistral-7B-v0.1": Sizes(4096, 14336, 32, 8, 32000),
    "Qwen3-1.7B": Sizes(2048, 6144, 16, 8, 151936, tied=True, qk_norm=True),
    "Qwen3-32B": Sizes(5120, 25600, 64, 8, 151936, qk_norm=True),
    "stablecode-completion-alpha-3b": Sizes(2560, 10240, 32, 32, 49152, head_size=80, parallel=True),
    "gpt2": Sizes(768, 3072, 12, 12, 50257, head_size=64, tied=True, parallel=True),
}


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Apply a rotary embedding by complex numbers, as torchtitan's Llama does: x (batch, length, heads, size)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)


def rotated_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding by halves: x (batch, length, heads, size)."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class Attention(nn.Module):
    def __init__(self, s: Sizes, is_complex: bool) -> None:
        super().__init__()
        self.size, self.is_complex = s.head_size, is_complex
        self.groups = s.heads // s.kv_heads
        self.q = nn.Linear(s.width, s.heads * s.head_size, bias=s.parallel)
        self.k, self.v = (nn.Linear(s.width, s.kv_heads * s.head_size, bias=s.parallel) for _ in range(2))
        self.o = nn.Linear(s.heads * s.head_size, s.width, bias=s.parallel)
        self.q_norm, self.k_norm = (models.RMSNorm(s.head_size) if s.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)) for f in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        rotate = rotated if self.is_complex else rotated_halves
        q, k = rotate(q, *angles), rotate(k, *angles)
        if self.groups > 1:
            k, v = (t[:, :, :, None].expand(-1, -1, -1, self.groups, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class FusedAttention(nn.Module):
    """litgpt's attention: queries, keys and values are views of one result, so saving one of them saves all three."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.qkv = nn.Linear(s.width, (s.heads + 2 * s.kv_heads) * s.head_size, bias=s.parallel)
        self.o = nn.Linear(s.heads * s.head_size, s.width, bias=s.parallel)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.sizes
        queries_per_key = s.heads // s.kv_heads
        qkv = self.qkv(x).unflatten(-1, (s.kv_heads, queries_per_key + 2, s.head_size)).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((queries_per_key, 1, 1), 2)
        if queries_per_key > 1:
            k, v = (t.expand(-1, -1, queries_per_key, -1, -1) for t in (k, v))
        q, k, v = (t.reshape(t.shape[0], -1, t.shape[-2], s.head_size) for t in (q, k, v))
        rotary = s.head_size // 4 if s.parallel else s.head_size  # GPT-NeoX rotates a quarter
        q, k = (
            torch.cat((halves(t[..., :rotary], cos[:, :rotary], sin[:, :rotary]), t[..., rotary:]), -1) for t in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding by halves: x (batch, heads, length, size)."""
    a, b = x.chunk(2, -1)
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


class Block(nn.Module):
    def __init__(self, s: Sizes, kind: str) -> None:
        super().__init__()
        self.parallel = s.parallel
        self.norm1, self.norm2 = (nn.LayerNorm(s.width) if s.parallel else models.RMSNorm(s.width) for _ in range(2))
        self.attention = FusedAttention(s) if kind == "litgpt" else Attention(s, kind == "torchtitan")
        self.mlp = GELUMLP(s.width, s.hidden) if s.parallel else models.SwiGLUMLP(s.width, s.hidden)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        if self.parallel:
            return x + self.attention(self.norm1(x), *angles) + self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x), *angles)
        return x + self.mlp(self.norm2(x))


SAVED = (
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
)


def every_second_mm() -> Any:
    """Return contexts of torchtitan's selective checkpoints, which save attention and every second GEMM."""
    counts: Counter[bool] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[ctx.is_recompute] += op is SAVED[0]
        saved = op in SAVED and not (op is SAVED[0] and counts[ctx.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Decoder(nn.Module):
    """A decoder. forward(tokens) returns logits."""

    def __init__(self, s: Sizes, layers: int, checkpoints: str, kind: str, float_logits: bool) -> None:
        super().__init__()
        self.sizes, self.checkpoints, self.is_complex = s, checkpoints, kind == "torchtitan"
        self.float_logits = float_logits
        self.token = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s, kind) for _ in range(layers))
        self.norm = nn.LayerNorm(s.width) if s.parallel else models.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)
        if s.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for i, block in enumerate(self.blocks):
            if self.checkpoints == "full" or (self.checkpoints == "every second layer" and i % 2 == 0):
                x = checkpoint(block, x, *self.angles(tokens), use_reentrant=False)
            elif self.checkpoints.startswith("selective"):
                x = checkpoint(block, x, *self.angles(tokens), use_reentrant=False, context_fn=every_second_mm)
            else:
                x = block(x, *self.angles(tokens))
        logits = self.head(self.norm(x))
        return logits.float() if self.float_logits else logits

    def angles(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the rotary embedding's tables, which live as long as the model."""
        if self.is_complex:
            return (self.table,)
        return self.cos, self.sin

    def prepare(self, length: int) -> None:
        """Allocate the rotary embedding's tables."""
        half = self.sizes.head_size // 2
        if self.is_complex:
            self.register_buffer("table", torch.empty(length, half, dtype=torch.complex64))
        else:
            for name in ("cos", "sin"):
                self.register_buffer(name, torch.empty(length, 2 * half, dtype=self.token.weight.dtype))


def deberta() -> tfo.Plan:
    """Return the plan of transformers' DeBERTa v3 base in Trainer."""
    from transformers import DebertaV2Config, DebertaV2ForTokenClassification

    config = DebertaV2Config(
        vocab_size=128100, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        type_vocab_size=0, position_buckets=256, relative_attention=True, pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = DebertaV2ForTokenClassification(config), torch.zeros(2, 16, dtype=torch.long)
    return tfo.plan(model, input_ids=ids, labels=ids, capacity="1TiB", gpu="H100", compiled="none")


def cross_entropy(logits: Tensor, as_float: bool) -> Tensor:
    """Compute the mean cross entropy of the logits or of their float32 copy."""
    rows = logits.flatten(0, 1)
    return F.cross_entropy(
        rows.float() if as_float else rows, torch.zeros(rows.shape[0], dtype=torch.long, device=rows.device)
    )


def planned(row: dict[str, str]) -> tfo.Plan:
    """Return the plan for a row's set-up."""
    if row["model"] not in SIZES:
        return deberta()
    is_titan = row["weights"].startswith("float32 shards")
    dtype = torch.bfloat16 if row["weights"] == "bf16" else torch.float32
    with torch.device("meta"):
        programs = {"torchtitan": "torchtitan", "/ao ": "torchtitan", "thunder": "litgpt"}
        kind = next((program for text, program in programs.items() if text in row["source"]), "")
        float_logits = "float32 logits" in row["loss"] or "alive and float32" in row["loss"]
        model = Decoder(SIZES[row["model"]], int(row["layers"]), row["checkpoint"], kind, float_logits)
        model.prepare(int(row["seq"]))
        model = model.to(dtype) if dtype != torch.float32 else model
        tokens = torch.zeros(int(row["batch_per_gpu"]), int(row["seq"]), dtype=torch.long)
    loss: Callable[[Tensor], Tensor] = functools.partial(cross_entropy, as_float="bf16" not in row["loss"])
    settings: dict[str, Any] = {}
    if row["parallelism"].startswith("FSDP"):
        stays, late = "stay whole" in row["parallelism"], row["root_sharding"] == "apart"
        settings |= {"dp": int(row["gpus"]), "mixed_precision": is_titan, "root": "apart" if late else "with"}
        settings["reshard"] = "never" if stays else "not-last" if is_titan else "always"
    elif row["parallelism"] == "DDP":
        settings |= {"dp": int(row["gpus"]), "parallel": "ddp"}
    elif "autocast" in row["weights"]:
        settings["master_weights"] = "float32"
    compiled = {"no": "none", "per block": "layers", "whole model": "model"}[row["compile"]]
    if compiled == "model" and (is_titan or int(row["layers"]) > 10):  # FSDP2's hooks divide the model
        compiled = "layers"
    settings["compiled"] = compiled
    return tfo.plan(
        model, tokens, capacity="1TiB", gpu="H100", levels=["free"],
        optimizer="adamw-fused" if "fused" in row["optimizer"] else "adamw",
        loss=torch.compile(loss) if row["loss"].startswith("compiled") else loss, keep_logits="alive" in row["loss"],
        expandable_segments=row["expandable_segments"] == "yes", **settings,
    )  # fmt: skip


def prediction(row: dict[str, str]) -> dict[str, Any]:
    """Return a row's predicted and measured GiB."""
    plan = planned(row)
    off = next((level for level in plan.levels if level.level == "off"), None)
    nbytes = {"max reserved": plan.held_bytes}.get(row["what"], plan.peak_bytes)
    if off is not None:  # the published programs ran without fused levels
        nbytes = max(off.peak, plan.optimizer_peak)
        if row["what"] == "max reserved":
            nbytes = round(off.reserved * plan.held_bytes / plan.reserved_bytes)
    return {"id": row["id"], "what": row["what"], "expandable_segments": row["expandable_segments"],
            "predicted": nbytes / 2**30, "measured": float(row["measured_GiB"])}  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Print each row's prediction, and write benchmarks/results/training_steps.json."""
    results = []
    with open(RESULTS / "training_steps.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        result = prediction(row)
        results.append(result)
        ratio = result["predicted"] / result["measured"]
        figures = f"{result['predicted']:7.2f} {result['measured']:7.2f} {ratio:5.3f}"
        print(f"{result['id']:28} {result['what']:14} {figures}", flush=True)
    (RESULTS / "training_steps.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(main, __doc__))
