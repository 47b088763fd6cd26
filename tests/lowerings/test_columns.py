"""Activations that are concatenated with other columns before a linear layer, as in blocks with parallel attention."""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import compare
from harness import distances, saving_step
from torch import Tensor

from torch_fused_ops import FusionPolicy, explain
from torch_fused_ops.graphs.reasons import Kind

WIDTH, FFN, HEADS, TOKENS = 8, 24, 2, 10


class Parallel(nn.Module):
    """A short single-stream block of Flux: attention and an MLP read one input, and share the last linear layer."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.qkv, self.up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, (1 + gated) * FFN)
        self.out = nn.Linear(WIDTH + FFN, WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def mlp(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if not self.gated:
            return F.gelu(h, approximate="tanh")
        gate, up = h.chunk(2, -1)  # as in FLUX.2
        return F.silu(gate) * up

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat([self.attention(x), self.mlp(x)], dim=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.joined(x))


class Cast(Parallel):
    """The columns are in reverse order, ``concat`` is used instead of ``cat``, and views and copies follow."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.concat((self.mlp(x), self.attention(x)), -1).reshape(-1, WIDTH + FFN)
        return x + self.out(F.dropout(h, 0.1, training=False).contiguous()).view_as(x)


class TwoActivations(Parallel):
    """Two sites read the result of one linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).split((FFN - WIDTH, WIDTH), -1)
        return self.out(torch.cat([F.gelu(a), torch.tanh(b), x], -1))


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "operators"),
    [
        (Parallel, ["bias_act"]),
        (lambda: Parallel(gated=True), ["bias_glu"]),
        (Cast, ["bias_act"]),
        (TwoActivations, ["bias_act", "bias_act"]),
    ],
)
def test_concatenated_activations_are_sites(make: Callable[[], nn.Module], operators: list[str]) -> None:
    sites = compare(make().double(), [tokens()])
    assert [site.op for site in sites] == [f"fused::{name}" for name in operators]
    assert all("linear" in site.users for site in sites)


class OtherAxis(Parallel):
    """The concatenation adds rows instead of columns."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x)
        return F.linear(torch.cat([h, h.detach()], dim=1), self.out.weight[:, WIDTH:])


class CutAgain(Parallel):
    """The linear layer reads only attention's columns."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.joined(x)[..., :WIDTH], self.out.weight[:, :WIDTH])


class Stacked(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([self.mlp(x), self.mlp(2 * x)], -1).sum(-1)
        return F.layer_norm(h, (FFN,))


@pytest.mark.parametrize(("make", "reader"), [(OtherAxis, "cat"), (CutAgain, "getitem"), (Stacked, "stack")])
def test_other_concatenations_are_not_sites(make: Callable[[], nn.Module], reader: str) -> None:
    module = make().double()
    report = explain(module, tokens())
    assert report.sites == ()
    assert {site.kind for site in report.unread} == {Kind.NO_GEMM_READS}
    assert all(site.reason == f"not an MLP: no GEMM reads it, but {reader}" for site in report.unread)
    assert compare(module, [tokens()]) == []


def compiled(module: nn.Module, memory: str, **settings: Any) -> Any:
    policy = FusionPolicy(memory=memory, strict=memory != "tiled:2")
    return harness.compiled(module, policy, fullgraph=True, **settings)


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("gated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bytes_saved_at_each_level(gated: bool) -> None:
    """Backward repeats the concatenation. Attention's columns are saved. The level decides about the MLP's columns."""
    module, x = Parallel(gated).float(), tokens(torch.float32)
    expected, _ = saving_step(module, module, x)
    rows, columns = 2 * TOKENS, (1 + gated) * FFN
    saved = {}
    for memory in ("off", "free", "fp8", "input", "tiled:2"):
        got, saved[memory] = saving_step(compiled(module, memory), module, x)
        assert max(distances(got, expected)) <= (0.05 if memory == "fp8" else 1e-5), memory
    assert saved["off"] - saved["free"] == 4 * rows * (WIDTH + FFN)
    assert saved["free"] - saved["fp8"] == rows * (3 * columns - 4), "one byte instead of four, and scales"
    assert saved["free"] - saved["input"] == 4 * rows * columns - 4 * columns, "a copy of the bias is saved"
    assert saved["tiled:2"] == saved["input"]


class Summed(Parallel):
    """Attention uses basic operators, so only the concatenation needs attention's result."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.codegen_is_slow
def test_values_that_cannot_be_recomputed_are_saved() -> None:
    """Backward repeats no GEMM, and fusion saves no more bytes than "off"."""
    module, x = Summed().double(), tokens()
    expected, _ = saving_step(module, module, x)
    off, free = (saving_step(compiled(module, memory), module, x) for memory in ("off", "free"))
    assert max(*distances(off[0], expected), *distances(free[0], expected)) <= 1e-12
    assert free[1] <= off[1]
