"""MLPs beyond transformers' own: torch's modules, hand-written functions, experts, mixers, convolutions, adapters.

Each is fused as what it is, at every site, and computes with pick-up what it computes without, gradients included.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from differential import compare
from harness import MLP, Net, SwiGLU
from torch import Tensor
from torch.func import functional_call


def mixer() -> nn.Module:
    """MLP-Mixer: one MLP over tokens, one over channels."""

    def body(s: Any, x: Tensor) -> Tensor:
        x = x + s.tokens(s.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + s.channels(s.norm(x))  # type: ignore[no-any-return]

    return Net(body, tokens=MLP(4, 12, nn.GELU()), channels=MLP(8, 16, nn.GELU()), norm=nn.LayerNorm(8))


def convnext(linear: bool) -> nn.Module:
    """A ConvNeXt block, its pointwise convolutions as Linear, or as what they are."""

    def body(s: Any, x: Tensor) -> Tensor:
        y = s.norm(s.depthwise(x).permute(0, 2, 3, 1))
        return x + (s.mlp(y).permute(0, 3, 1, 2) if linear else s.mlp(y.permute(0, 3, 1, 2)))  # type: ignore[no-any-return]

    mlp = MLP(8, 32, linear=nn.Linear if linear else functools.partial(nn.Conv2d, kernel_size=1))
    return Net(body, depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8), norm=nn.LayerNorm(8), mlp=mlp)


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def experts(product: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Experts in one tensor."""
    gate, up, down = weights((3, 8, 16), (3, 8, 16), (3, 16, 8))
    return Net(lambda s, x: product(F.silu(product(x, s.gate)) * product(x, s.up), s.down), gate=gate, up=up, down=down)


class Adapted(nn.Linear):
    """LoRA: a frozen weight and an adapter."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out, bias=False)
        self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach()) + 2 * self.b(F.dropout(self.a(x), 0.0))


ENCODER: dict[str, Any] = dict(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0, batch_first=True)
EINSUM = functools.partial(torch.einsum, "ecd,edf->ecf")
X, IMAGE, ROWS = (4, 8), (2, 8, 4, 4), (2, 4, 8)

# What to build, the input's shape, and what each site becomes.
FUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, str]]]] = {
    "Sequential": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), X, [("bias_act", "gelu")]),
    "dropout in front": (lambda: MLP(8, 16, nn.Sequential(nn.Dropout(0.5), nn.GELU())), X, [("bias_act", "gelu")]),
    "TransformerEncoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(activation="gelu", **ENCODER), 2),
        ROWS,
        [("bias_act", "gelu")] * 2,
    ),
    "TransformerDecoderLayer": (
        lambda: Net(lambda s, x: s.layer(x, x), layer=nn.TransformerDecoderLayer(activation=F.silu, **ENCODER)),
        ROWS,
        [("bias_act", "silu")],
    ),
    "MLP-Mixer": (mixer, ROWS, [("bias_act", "gelu")] * 2),
    "ConvNeXt, linear": (lambda: convnext(True), IMAGE, [("bias_act", "gelu")]),
    "ConvNeXt, pointwise convolutions": (lambda: convnext(False), IMAGE, [("bias_act", "gelu")]),
    "experts by bmm": (lambda: experts(torch.bmm), (3, 4, 8), [("glu", "silu")]),
    "experts by einsum": (lambda: experts(EINSUM), (3, 4, 8), [("glu", "silu")]),
    "LoRA": (lambda: SwiGLU(8, 16, Adapted), X, [("glu", "silu")]),
}


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


def test_gathered_experts() -> None:
    """Each token's expert, gathered by a router's choice: weights stay weights."""

    def body(s: Any, x: Tensor) -> Tensor:
        expert = s.router(x).argmax(-1)
        gate, up = torch.bmm(s.up[expert], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        return torch.bmm(s.down[expert], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)

    up, down = weights((3, 32, 8), (3, 8, 16))
    model = Net(body, router=nn.Linear(8, 3), up=up, down=down).double()
    (site,) = compare(model, [torch.randn(4, 8, dtype=torch.float64, requires_grad=True)])
    assert (site.op, site.activation) == ("fused::bias_glu", "silu")
