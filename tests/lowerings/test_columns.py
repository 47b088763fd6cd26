"""An activation with other columns beside it in front of its linear layer: blocks whose attention and MLP share one."""

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
    """A single-stream block of Flux, in short: attention and an MLP of one input, and one linear layer behind both."""

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
        gate, up = h.chunk(2, -1)  # FLUX.2's
        return F.silu(gate) * up

    def joined(self, x: Tensor) -> Tensor:
        return torch.cat([self.attention(x), self.mlp(x)], dim=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.joined(x))


class Cast(Parallel):
    """In another order, by another name, and with what only moves values between."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.concat((self.mlp(x), self.attention(x)), -1).reshape(-1, WIDTH + FFN)
        return x + self.out(F.dropout(h, 0.1, training=False).contiguous()).view_as(x)


class TwoActivations(Parallel):
    """Two sites, of one linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).split((FFN - WIDTH, WIDTH), -1)
        return self.out(torch.cat([F.gelu(a), torch.tanh(b), x], -1))


class ReadElsewhere(Parallel):
    """What is joined is the model's result as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.joined(x)
        return self.out(h), h.sum(-1)


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
        (ReadElsewhere, ["bias_act"]),
    ],
)
def test_it_is_a_site(make: Callable[[], nn.Module], operators: list[str]) -> None:
    sites = compare(make().double(), [tokens()])
    assert [site.op for site in sites] == [f"fused::{name}" for name in operators]
    assert all("linear" in site.users for site in sites)


class OtherAxis(Parallel):
    """More rows, not more columns."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(x)
        return F.linear(torch.cat([h, h.detach()], dim=1), self.out.weight[:, WIDTH:])


class CutAgain(Parallel):
    """What the linear layer reads is attention's part alone."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.joined(x)[..., :WIDTH], self.out.weight[:, :WIDTH])


class Stacked(Parallel):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([self.mlp(x), self.mlp(2 * x)], -1).sum(-1)
        return F.layer_norm(h, (FFN,))


@pytest.mark.parametrize(("make", "reader"), [(OtherAxis, "cat"), (CutAgain, "getitem"), (Stacked, "stack")])
def test_what_is_no_site(make: Callable[[], nn.Module], reader: str) -> None:
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
def test_what_each_level_keeps(gated: bool) -> None:
    """Backward joins the columns again: attention keeps its own, the MLP's are what the level makes of them."""
    module, x = Parallel(gated).float(), tokens(torch.float32)
    wanted, _ = saving_step(module, module, x)
    rows, columns = 2 * TOKENS, (1 + gated) * FFN
    kept = {}
    for memory in ("off", "free", "fp8", "input", "tiled:2"):
        got, kept[memory] = saving_step(compiled(module, memory), module, x)
        assert max(distances(got, wanted)) <= (0.05 if memory == "fp8" else 1e-5), memory
    assert kept["off"] - kept["free"] == 4 * rows * (WIDTH + FFN)
    assert kept["free"] - kept["fp8"] == rows * (3 * columns - 4), "a byte for each of four, and scales"
    assert kept["free"] - kept["input"] == 4 * rows * columns
    assert kept["tiled:2"] == kept["input"]


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_the_number_of_tokens_may_be_dynamic() -> None:
    module = Parallel().double()
    fn = compiled(module, "free", dynamic=True)
    for length in (TOKENS, 7):
        x = tokens()[:, :length].detach().contiguous().requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=length != TOKENS):
            assert max(distances(saving_step(fn, module, x)[0], saving_step(module, module, x)[0])) <= 1e-12


class Summed(Parallel):
    """Attention by hand: nothing keeps its result but what is joined."""

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


@pytest.mark.codegen_is_slow
def test_what_cannot_be_made_again_is_kept() -> None:
    """No product is computed twice for it, and no more is kept than without pick-up."""
    module, x = Summed().double(), tokens()
    wanted, _ = saving_step(module, module, x)
    off, free = (saving_step(compiled(module, memory), module, x) for memory in ("off", "free"))
    assert max(*distances(off[0], wanted), *distances(free[0], wanted)) <= 1e-12
    assert free[1] <= off[1]
