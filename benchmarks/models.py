"""Define the benchmarks' models in plain PyTorch: GPT-2 and Llama."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        kv_heads: heads of keys and values (Llama); 0 means as many as heads.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    context: int
    vocabulary: int
    kv_heads: int = 0


QUICK = Config(layers=1, width=128, hidden=256, heads=4, context=32, vocabulary=64)
SMALL = Config(layers=3, width=256, hidden=1024, heads=4, context=128, vocabulary=256)  # as in examples/quickstart.py
# A GPT and a Llama of equal size, which train in a minute on one core of a CPU.
TINY = Config(layers=2, width=128, hidden=512, heads=4, context=64, vocabulary=256)
TINY_LLAMA = Config(layers=2, width=128, hidden=384, heads=4, context=64, vocabulary=256)
GPT2 = Config(layers=12, width=768, hidden=3072, heads=12, context=1024, vocabulary=50257)  # 124 M parameters
LLAMA = Config(layers=4, width=4096, hidden=14336, heads=32, context=8192, vocabulary=128256, kv_heads=8)  # Llama-3-8B


class GPTAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GELUMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GPTBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(c.width), GPTAttention(c)
        self.norm2, self.mlp = nn.LayerNorm(c.width), GELUMLP(c.width, c.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """GPT-2, with its head tied to the embedding. forward(tokens, targets), both (batch, length), returns the loss."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(c.vocabulary, c.width), nn.Embedding(c.context, c.width)
        self.blocks = nn.ModuleList(GPTBlock(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class LlamaAttention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = c.heads, c.kv_heads or c.heads, c.width // c.heads
        self.q = nn.Linear(c.width, self.heads * self.size, bias=False)
        self.k, self.v = (nn.Linear(c.width, self.kv_heads * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(self.heads * self.size, c.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding: x (batch, heads, length, size), cos and sin (length, size / 2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SwiGLUMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(c.width), LlamaAttention(c)
        self.norm2, self.mlp = RMSNorm(c.width), SwiGLUMLP(c.width, c.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Llama 3. forward(tokens, targets), both (batch, length), returns the loss."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.size = c.width // c.heads
        self.token, self.head = nn.Embedding(c.vocabulary, c.width), nn.Linear(c.width, c.vocabulary, bias=False)
        self.blocks = nn.ModuleList(LlamaBlock(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        steps = torch.arange(0, self.size, 2, device=x.device) / self.size
        angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), 500000.0**-steps)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def initialize(model: nn.Module, seed: int) -> None:
    """Draw matrices and embeddings from N(0, 0.02²), on the model's own device."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(0.0, 0.02, generator=generator)
