"""MLPs beyond transformers' own: torch's modules, hand-written functions, experts, mixers, convolutions, adapters.

Each is fused as what it is, at every site, and computes with pick-up what it computes without, gradients included.
"""

from __future__ import annotations

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

from torch_fused_ops import register_activation


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


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


def geglu(h: Tensor) -> Tensor:
    """As in diffusion models: the gate is the second half."""
    up, gate = h.chunk(2, dim=-1)
    return up * F.gelu(gate)


def gpt_oss(h: Tensor) -> Tensor:
    gate, up = h[..., ::2].clamp(max=7.0), h[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def dropped(p: float, inplace: bool = False) -> nn.Module:
    return nn.Sequential(nn.GELU(), nn.Dropout(p, inplace=inplace))


ENCODER: dict[str, Any] = dict(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
X, IMAGE, ROWS = (4, 8), (2, 8, 4, 4), (2, 4, 8)

# What to build, the input's shape, and what each site becomes.
FUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, str]]]] = {
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X, [("bias_act", "gelu")]),
    "ReLU(inplace)": (lambda: MLP(nn.ReLU(inplace=True)), X, [("bias_act", "relu")]),
    "SiLU(inplace)": (lambda: MLP(nn.SiLU(inplace=True)), X, [("bias_act", "silu")]),
    "Tanh": (lambda: MLP(nn.Tanh()), X, [("bias_act", "tanh")]),
    "Sigmoid": (lambda: MLP(nn.Sigmoid()), X, [("bias_act", "sigmoid")]),
    "GELU(tanh)": (lambda: MLP(nn.GELU("tanh")), X, [("bias_act", "gelu_tanh")]),
    "GLU": (lambda: MLP(nn.GLU(), halves=2), X, [("bias_glu", "sigmoid")]),
    "GEGLU": (lambda: MLP(geglu, halves=2), X, [("bias_glu", "gelu")]),
    "gpt-oss": (lambda: MLP(gpt_oss, halves=2), X, [("bias_glu", "quick_gelu")]),
    "dropout behind": (lambda: MLP(dropped(0.5)), X, [("bias_act", "gelu")]),
    "dropout behind, in place": (lambda: MLP(dropped(0.5, inplace=True)), X, [("bias_act", "gelu")]),
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
    "swish with a learnable slope": (lambda: MLP(Swish()), X, [("glu", "sigmoid")]),
}


class Twice(nn.Module):
    """A decoder layer whose memory is its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@pytest.mark.every(2)
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


class XIELU(nn.Module):
    """Apertus' activation, with learnable parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, self.alpha * x * x + 0.5 * x, self.alpha * torch.expm1(x.clamp(max=-1e-6)) + 0.5 * x)


class Swish(nn.Module):
    """SiLU with a learnable slope: a gate, β·x, that is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.parametrize("act", [XIELU, nn.PReLU])
def test_learnable_activations_are_left_alone(act: type[nn.Module]) -> None:
    model = MLP(act()).double()
    (site,) = compare(model, [torch.randn(4, 8, dtype=torch.float64, requires_grad=True)])
    assert site.op is None and site.reason.startswith("a learnable parameter takes part: ")


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


def test_registered_functions_of_their_own() -> None:
    torch.manual_seed(0)
    register_activation("snake", lambda x: x + torch.sin(x) ** 2)
    model = MLP(lambda h: h + torch.sin(h).square()).double()
    (site,) = compare(model, [torch.randn(4, 8, dtype=torch.float64, requires_grad=True)])
    assert (site.op, site.activation) == ("fused::bias_act", "snake")
