"""Train a transformer block that calls Megatron-LM's functions, imported from this library.

    pip install -e . && python examples/megatron_block.py

The block is written as in Megatron-LM: linear layers that return their bias, the softmax module, two bias-dropout-adds,
activations of shape (sequence, batch, hidden), and a viewless output for the pipeline. Only the imports differ. The
script trains it eager and compiled to one graph (``fullgraph=True``) from the same weights, with and without
dropout. Without dropout the losses must agree. It prints the activations saved for backward.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"
from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Instead of megatron.core.fusions.{fused_bias_gelu, fused_bias_swiglu, fused_bias_dropout, fused_softmax},
# megatron.core.transformer.{enums, utils} and megatron.core.utils:
from torch_fused_ops.megatron import (
    AttnMaskType,
    FusedScaleMaskSoftmax,
    attention_mask_func,
    bias_gelu_impl,
    bias_swiglu_impl,
    get_bias_dropout_add,
    make_viewless_tensor,
)

# ---- the model -------------------------------------------------------------------------------------------------------


class SkipBiasLinear(nn.Linear):
    """Returns (output, bias), as Megatron's layers do with ``skip_bias_add=True``."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return F.linear(x, self.weight), self.bias


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = SkipBiasLinear(width, width)
        self.scale_mask_softmax = FusedScaleMaskSoftmax(
            input_in_fp16=False,
            input_in_bf16=False,
            attn_mask_type=AttnMaskType.causal,
            scaled_masked_softmax_fusion=True,
            mask_func=attention_mask_func,
            softmax_in_fp32=True,
            scale=1.0 / math.sqrt(width // heads),
        )

    def forward(self, x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        s, b, w = x.shape
        q, k, v = self.qkv(x).view(s, b, 3, self.heads, w // self.heads).permute(2, 1, 3, 0, 4)
        probs = self.scale_mask_softmax(q @ k.transpose(-1, -2), attention_mask)
        return self.proj((probs @ v).permute(2, 0, 1, 3).reshape(s, b, w))


class MLP(nn.Module):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.activation = bias_swiglu_impl if gated else bias_gelu_impl
        self.fc1 = SkipBiasLinear(width, 8 * width if gated else 4 * width)
        self.fc2 = SkipBiasLinear(4 * width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc2(self.activation(*self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), MLP(width, gated)
        self.dropout = dropout

    def forward(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        bias_dropout_add = get_bias_dropout_add(self.training, fused=True)
        hidden = bias_dropout_add(self.attention(self.norm1(hidden), attention_mask), hidden, self.dropout)
        return bias_dropout_add(self.mlp(self.norm2(hidden)), hidden, self.dropout)


class Model(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, gated: bool, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, gated, 0.0) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def set_dropout(self, p: float) -> None:
        for block in self.blocks:
            block.dropout = p  # type: ignore[assignment]

    def forward(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        hidden = self.embedding(tokens).transpose(0, 1)  # (sequence, batch, hidden): a view, hence "viewless"
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        return self.head(hidden)


# ---- training --------------------------------------------------------------------------------------------------------


def batch(step: int, size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return sequences of consecutive numbers. The first sequence of a batch ends in masked padding."""
    g = torch.Generator().manual_seed(step)
    tokens = (torch.randint(0, 64, (size, 1), generator=g) + torch.arange(length + 1)) % 64
    mask = torch.zeros(size, 1, 1, length, dtype=torch.bool)
    mask[0, ..., length // 2 :] = True
    return tokens[:, :-1], tokens[:, 1:], mask


def train(model: Model, forward: Callable[..., Tensor], steps: int) -> tuple[list[float], float]:
    """Return the losses, and the MiB saved for backward without the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(steps):
        tokens, targets, mask = batch(step, 8, 32)
        saved: dict[int, int] = {}

        def pack(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            logits = forward(tokens, mask)
        loss = F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(saved.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--backend", default="fused")
    args = parser.parse_args()

    torch.manual_seed(0)
    start = Model(args.layers, args.width, args.heads, args.mlp == "swiglu")
    results: dict[tuple[str, float], tuple[list[float], float]] = {}
    for p in (0.0, 0.1):
        for name in ("eager", "compiled"):
            model = copy.deepcopy(start)
            model.set_dropout(p)
            torch.manual_seed(1)
            forward = model if name == "eager" else torch.compile(model, backend=args.backend, fullgraph=True)
            results[name, p] = train(model, forward, args.steps)

    print(
        f"{args.layers} blocks with {args.mlp}, width {args.width}; compiled: backend={args.backend!r}, fullgraph=True"
    )
    print(f"{'':22}{'first loss':>12}{'last loss':>12}{'saved for backward':>20}")
    for (name, p), (losses, saved) in results.items():
        print(f"{name + ', dropout ' + str(p):22}{losses[0]:12.6f}{losses[-1]:12.6f}{saved:16.3f} MiB")
    difference = max(abs(a - b) for a, b in zip(results["eager", 0.0][0], results["compiled", 0.0][0], strict=True))
    print(f"without dropout the losses are at most {difference:.1e} apart")


if __name__ == "__main__":
    main()
