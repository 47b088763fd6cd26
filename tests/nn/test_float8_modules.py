"""gemm= of modules: nn.MLP and replace_mlps multiply in float8 as FusedMLP does, or say why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from torch_fused_ops import functional as FF
from torch_fused_ops import nn as fnn
from torch_fused_ops.reasons import Kind
from torch_fused_ops.recipes import RECIPES

HIDDEN, FFN = 128, 256


class Gated(nn.Module):
    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, ffn) for _ in range(2))
        self.down = nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]

    def by_hand(self, x: Tensor, recipe: str) -> Tensor:
        gate, up = (FF.linear_fp8(x, one.weight, one.bias, recipe=recipe) for one in (self.gate, self.up))
        return FF.linear_fp8(FF.swiglu(gate, up), self.down.weight, self.down.bias, recipe=recipe)


def gradients(y: Tensor, x: Tensor, module: nn.Module) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


def same(got: list[Tensor], wanted: list[Tensor]) -> None:
    """Alike, but for numbers that fall the other way when they are rounded to float8."""
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("memory", ("free", "input"))
def test_replaced_mlps_multiply_in_float8(recipe: str, memory: str) -> None:
    torch.manual_seed(0)
    module, x = Gated(), torch.randn(3, 50, HIDDEN, requires_grad=True)
    exact, wanted = gradients(module(x), x, module), gradients(module.by_hand(x, recipe), x, module)
    report = fnn.replace_mlps(module, gemm=recipe, memory=memory)
    (site,) = report.sites
    assert (site.gemm, site.gemm_reason) == (recipe, "") and "in float8" in " ".join(str(report).split())
    got = gradients(module(x), x, module)
    same(got, wanted)
    assert all((a - b).norm() > 1e-4 * b.norm() for a, b in zip(got[1:], exact[1:], strict=True)), "not float8"
    report.restore()
    torch.testing.assert_close(gradients(module(x), x, module), exact)


def test_replaced_mlps_by_module_and_what_stays() -> None:
    model = nn.Sequential(Gated(), Gated(HIDDEN, 100), Gated())
    report = fnn.replace_mlps(model, gemm={"2": "fp8", "1": "fp8"})
    first, second, third = report.sites
    assert [site.gemm for site in report.sites] == ["", "", "fp8"]
    assert first.gemm_kind is None and second.gemm_kind is Kind.GEMM_SIZE and third.gemm_reason == ""
    assert "its weight is (100, 128): not multiples of 128" in second.gemm_reason
    assert model(torch.randn(2, HIDDEN)).isfinite().all()
    report.restore()
    with pytest.raises(ValueError, match="gemm='7' is not accepted: it must fit a module of the model"):
        fnn.replace_mlps(model, gemm={"7": "fp8"})
    with pytest.raises(ValueError, match="gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"):
        fnn.replace_mlps(model, gemm="int8")


def config(**more: Any) -> fnn.MLPConfig:
    settings: dict[str, Any] = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": 1}
    return fnn.MLPConfig(**{k: v for k, v in settings.items() if k in fnn.MLPConfig.__dataclass_fields__} | more)


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatrons_mlp_multiplies_in_float8(recipe: str) -> None:
    torch.manual_seed(0)
    mlp = fnn.MLP(config(gated_linear_unit=True, activation_func=F.silu), gemm=recipe)
    x = torch.randn(5, 7, HIDDEN, requires_grad=True)
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2

    def by_hand() -> Tensor:
        h = FF.linear_fp8(x, fc1.weight, recipe=recipe) + fc1.bias
        gate, up = h.chunk(2, -1)
        return FF.linear_fp8(FF.swiglu(gate.contiguous(), up.contiguous()), fc2.weight, recipe=recipe) + fc2.bias

    y, bias = mlp(x)
    same(gradients(y + bias, x, mlp), gradients(by_hand(), x, mlp))
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x)[0].dtype == torch.bfloat16


def test_megatrons_mlp_says_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="ffn_hidden_size=100 is not accepted with gemm='fp8': it must be a multiple"):
        fnn.MLP(config(ffn_hidden_size=100), gemm="fp8")
    with pytest.raises(ValueError, match="gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"):
        fnn.MLP(config(), gemm="int8")
    with pytest.raises(ValueError, match="gemm='fp8' is not accepted with delay_wgrad_compute=True"):
        fnn.MLP(config(delay_wgrad_compute=True), gemm="fp8")
    linear = fnn.MLP(config(), gemm="fp8").linear_fc1
    with pytest.raises(ValueError, match="not accepted where 2 processes hold a weight together: they communicate"):
        linear.share(SimpleNamespace(size=2))

    class Other(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    with pytest.raises(ValueError, match="gemm='fp8' is not accepted with a linear_fc1 of type Other"):
        fnn.MLP(config(), fnn.MLPSubmodules(linear_fc1=Other), gemm="fp8")
