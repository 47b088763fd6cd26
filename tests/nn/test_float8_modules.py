"""gemm= of modules: nn.MLP and replace_mlps multiply in float8, or report the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import SwiGLU, raises
from torch import Tensor

from torch_fused_ops import functional as FF
from torch_fused_ops import nn as fnn
from torch_fused_ops.families.float8.recipes import RECIPES

HIDDEN, FFN = 128, 256


class Gated(SwiGLU):
    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN) -> None:
        super().__init__(hidden, ffn, nn.Linear)

    def by_hand(self, x: Tensor, recipe: str) -> Tensor:
        gate, up = (FF.linear_fp8(x, linear.weight, linear.bias, recipe=recipe) for linear in (self.gate, self.up))
        return FF.linear_fp8(FF.swiglu(gate, up), self.down.weight, self.down.bias, recipe=recipe)


def gradients(y: Tensor, x: Tensor, module: nn.Module) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


def same(got: list[Tensor], expected: list[Tensor]) -> None:
    """Assert equality, except for a few numbers that round differently to float8."""
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=8)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("memory", ("free", "input"))
def test_replaced_mlps_multiply_in_float8(recipe: str, memory: str) -> None:
    module, x = Gated(), torch.randn(3, 50, HIDDEN, requires_grad=True)
    exact, expected = gradients(module(x), x, module), gradients(module.by_hand(x, recipe), x, module)
    handle = fnn.replace_mlps(module, x, gemm=recipe, memory=memory)
    got = gradients(module(x), x, module)
    same(got, expected)
    assert all((a - b).norm() > 1e-4 * b.norm() for a, b in zip(got[1:], exact[1:], strict=True)), "not float8"
    handle.restore()
    torch.testing.assert_close(gradients(module(x), x, module), exact)


def config(**flags: Any) -> fnn.MLPConfig:
    return fnn.MLPConfig(HIDDEN, **{"ffn_hidden_size": FFN, **flags})


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatrons_mlp_multiplies_in_float8(recipe: str) -> None:
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


def test_megatrons_mlp_rejects_unsupported_arguments() -> None:
    with pytest.raises(ValueError, match="ffn_hidden_size=100 is not accepted with gemm='fp8': it must be a multiple"):
        fnn.MLP(config(ffn_hidden_size=100), gemm="fp8")
    with pytest.raises(ValueError, match="gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"):
        fnn.MLP(config(), gemm="int8")
    with pytest.raises(ValueError, match="gemm='fp8' is not accepted with delay_wgrad_compute=True"):
        fnn.MLP(config(delay_wgrad_compute=True), gemm="fp8")
    linear = fnn.MLP(config()).linear_fc1
    linear.parallel = SimpleNamespace(size=2)
    raises(ValueError, "not accepted with a weight that 2 processes shard: they communicate", linear.set_gemm, "fp8")
    custom_linears = fnn.MLPSubmodules(linear_fc1=lambda *args, **kwargs: nn.Identity())
    raises(ValueError, "not accepted with a linear_fc1 of type Identity", fnn.MLP, config(), custom_linears, gemm="fp8")
