"""gemm= of modules: FusedMLP and replace_mlps multiply in float8."""

import pytest
import torch
import torch.nn as nn
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_mlp_multiplies_in_float8(recipe: str) -> None:
    mlp = fnn.FusedMLP(HIDDEN, FFN, "silu", gated=True, gemm=recipe)
    x = torch.randn(5, 7, HIDDEN, requires_grad=True)

    def by_hand() -> Tensor:
        gate, up = (FF.linear_fp8(x, mlp.fc1.weight, recipe=recipe) + mlp.fc1.bias).chunk(2, -1)
        return FF.linear_fp8(FF.swiglu(gate.contiguous(), up.contiguous()), mlp.fc2.weight, mlp.fc2.bias, recipe=recipe)

    same(gradients(mlp(x), x, mlp), gradients(by_hand(), x, mlp))
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16


def test_fused_mlp_rejects_unsupported_recipes_and_sizes() -> None:
    words = "hidden=128, ffn=100 are not accepted with gemm='fp8': they must be multiples of 128"
    raises(ValueError, words, fnn.FusedMLP, HIDDEN, 100, gemm="fp8")
    raises(ValueError, "gemm='int8' is not known; accepted: bf16, fp8", fnn.FusedMLP, HIDDEN, FFN, gemm="int8")
