"""MLPs beyond transformers' own: torch's modules, hand-written functions, experts, mixers, convolutions, adapters.

Each is fused as what it is, at every site, and computes with pick-up what it computes without, gradients included.
"""

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import compare
from torch import Tensor
from torch.func import functional_call


class MLP(harness.MLP):
    def __init__(self, act: Callable[[Tensor], Tensor], width: int = 8, ffn: int = 16, halves: int = 1) -> None:
        super().__init__(width, ffn, act, halves=halves)


class Mixer(nn.Module):
    """MLP-Mixer: one MLP over tokens, one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = MLP(nn.GELU(), 4, 12), MLP(nn.GELU(), 8, 16), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm(x))


class ConvNeXt(nn.Module):
    """A ConvNeXt block, its pointwise convolutions as Linear, or as what they are."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.up, self.down = (
            (nn.Linear(8, 32), nn.Linear(32, 8)) if linear else (nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        if isinstance(self.up, nn.Linear):
            return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)
        return x + self.down(F.gelu(self.up(y.permute(0, 3, 1, 2))))


class Experts(nn.Module):
    """Experts in one tensor, multiplied by ``bmm`` or ``einsum``."""

    def __init__(self, einsum: bool) -> None:
        super().__init__()
        self.einsum = einsum
        self.gate, self.up = (nn.Parameter(torch.randn(3, 8, 16)) for _ in range(2))
        self.down = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        def product(x: Tensor, w: Tensor) -> Tensor:
            return torch.einsum("ecd,edf->ecf", x, w) if self.einsum else torch.bmm(x, w)

        return product(F.silu(product(x, self.gate)) * product(x, self.up), self.down)


class Adapted(nn.Linear):
    """LoRA: a frozen weight and an adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach()) + 2 * self.b(F.dropout(self.a(x), 0.0))


ENCODER: dict[str, Any] = dict(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
X, IMAGE, ROWS = (4, 8), (2, 8, 4, 4), (2, 4, 8)

# What to build, the input's shape, and what each site becomes.
FUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, str]]]] = {
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X, [("bias_act", "gelu")]),
    "dropout in front": (lambda: MLP(nn.Sequential(nn.Dropout(0.5), nn.GELU())), X, [("bias_act", "gelu")]),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(activation="gelu", **ENCODER), 2),
        ROWS,
        [("bias_act", "gelu")] * 2,
    ),
    "TransformerDecoderLayer": (
        lambda: Twice(nn.TransformerDecoderLayer(activation=F.silu, **ENCODER)),
        ROWS,
        [("bias_act", "silu")],
    ),
    "MLP-Mixer": (Mixer, ROWS, [("bias_act", "gelu")] * 2),
    "ConvNeXt, linear": (lambda: ConvNeXt(True), IMAGE, [("bias_act", "gelu")]),
    "ConvNeXt, pointwise convolutions": (lambda: ConvNeXt(False), IMAGE, [("bias_act", "gelu")]),
    "experts by bmm": (lambda: Experts(False), (3, 4, 8), [("glu", "silu")]),
    "experts by einsum": (lambda: Experts(True), (3, 4, 8), [("glu", "silu")]),
    "LoRA": (lambda: harness.SwiGLU(8, 16, Adapted), X, [("glu", "silu")]),
}


class Twice(nn.Module):
    """A decoder layer whose memory is its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str) -> None:
    make, shape, wanted = FUSED[name]
    model = make().double().train()
    names = [n for n, _ in model.named_parameters()]

    def fn(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    sites = compare(fn, [x, *model.parameters()])
    assert [(str(s.op).removeprefix("fused::"), s.activation) for s in sites if s.is_mlp] == wanted


def test_grouped_products() -> None:
    """Experts by grouped GEMMs, in bfloat16, which is all that they take."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this torch has no F.grouped_mm")

    def fn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        h = F.silu(F.grouped_mm(x, gate, offs=ends)) * F.grouped_mm(x, up, offs=ends)
        return F.grouped_mm(h, down, offs=ends)

    weights = [torch.randn(4, *s).bfloat16().requires_grad_() for s in ((32, 64), (32, 64), (64, 32))]
    x, ends = torch.randn(16, 32).bfloat16().requires_grad_(), torch.tensor([4, 8, 12, 16], dtype=torch.int32)
    (site,) = compare(fn, [x, *weights, ends])
    assert (site.op, site.activation) == ("fused::glu", "silu")


class GatheredExperts(nn.Module):
    """Each token's expert, gathered by a router's choice: weights stay weights."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 32, 8)), nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        expert = self.router(x).argmax(-1)
        gate, up = torch.bmm(self.up[expert], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(self.down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)


def test_gathered_experts() -> None:
    (site,) = compare(GatheredExperts().double(), [torch.randn(4, 8, dtype=torch.float64, requires_grad=True)])
    assert (site.op, site.activation) == ("fused::bias_glu", "silu")
