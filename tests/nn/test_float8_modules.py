"""gemm= of modules: nn.MLP, nn.GroupedMLP and replace_mlps multiply in float8, or report the reason."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import SwiGLU, raises
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_fused_ops import functional as FF
from torch_fused_ops import nn as fnn
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.graphs.reasons import Kind

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
    report = fnn.replace_mlps(module, x, gemm=recipe, memory=memory)
    (site,) = report.sites
    assert (site.gemm, site.gemm_reason) == (recipe, "") and "in float8" in " ".join(str(report).split())
    got = gradients(module(x), x, module)
    same(got, expected)
    assert all((a - b).norm() > 1e-4 * b.norm() for a, b in zip(got[1:], exact[1:], strict=True)), "not float8"
    report.restore()
    torch.testing.assert_close(gradients(module(x), x, module), exact)


def test_gemm_patterns_select_modules() -> None:
    model, x = nn.Sequential(Gated(), Gated(HIDDEN, 100), Gated()), torch.randn(2, HIDDEN)
    report = fnn.replace_mlps(model, x, gemm={"2": "fp8", "1": "fp8"})
    first, second, third = report.sites
    assert [site.gemm for site in report.sites] == ["", "", "fp8"]
    assert first.gemm_kind is None and second.gemm_kind is Kind.GEMM_SIZE and third.gemm_reason == ""
    assert "its weight is (100, 128): not multiples of 128" in second.gemm_reason
    report.restore()
    with pytest.raises(ValueError, match="gemm='7' matches no site's modules"):
        fnn.replace_mlps(model, x, gemm={"7": "fp8"})
    with pytest.raises(ValueError, match="gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"):
        fnn.replace_mlps(model, x, gemm="int8")


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
    linear = fnn.MLP(config(), gemm="fp8").linear_fc1
    with pytest.raises(ValueError, match="not accepted with a weight that 2 processes shard: they communicate"):
        linear.shard(SimpleNamespace(size=2))
    custom_linears = fnn.MLPSubmodules(linear_fc1=lambda *args, **kwargs: nn.Identity())
    raises(ValueError, "not accepted with a linear_fc1 of type Identity", fnn.MLP, config(), custom_linears, gemm="fp8")


COUNTS, WIDTH, INNER = (5, 0, 16), 48, 80
BF16 = torch.bfloat16


def experts(gemm: str = "fp8-rowwise", **flags: Any) -> fnn.GroupedMLP:
    torch.manual_seed(0)
    defaults = {"gated_linear_unit": True, "activation_func": F.silu, "params_dtype": BF16} | flags
    mlp = fnn.GroupedMLP(len(COUNTS), fnn.MLPConfig(WIDTH, moe_ffn_hidden_size=INNER, **defaults), gemm=gemm)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return mlp


def rows(counts: tuple[int, ...] = COUNTS, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Return (rows, number of rows per expert, probabilities)."""
    torch.manual_seed(1)
    x = torch.randn(sum(counts), WIDTH) * torch.exp2(torch.randint(-4, 4, (sum(counts), 1)))
    return x.to(dtype).requires_grad_(), torch.tensor(counts), torch.rand(sum(counts)).requires_grad_()


@pytest.mark.parametrize("memory", ("off", "free", "fp8", "input"))
def test_experts_equal_grouped_linear_fp8(memory: str) -> None:
    """Test every level, and a checkpoint. An expert without rows has zero gradients."""
    mlp, (x, counts, probs) = experts(memory=memory, add_bias_linear=False), rows()
    ends, weights = counts.cumsum(0).int(), [linear.weight for linear in (mlp.linear_fc1, mlp.linear_fc2)]

    def by_hand() -> Tensor:
        gate, up = FF.grouped_linear_fp8(x, weights[0].transpose(1, 2), ends).chunk(2, -1)
        return FF.grouped_linear_fp8(FF.swiglu(gate, up, probs), weights[1].transpose(1, 2), ends)

    def result_and_grads(y: Tensor) -> list[Tensor]:
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, probs, *weights))]

    expected, got = result_and_grads(by_hand()), result_and_grads(mlp(x, counts, probs)[0])
    checkpointed = result_and_grads(checkpoint(lambda *args: mlp(*args)[0], x, counts, probs, use_reentrant=False))
    for linear, same, exact in zip(got, checkpointed, expected, strict=True):
        assert torch.equal(linear, same) if memory != "fp8" else (linear - same).norm() <= 1e-3 * linear.norm()
        assert (linear - exact).norm() <= (0.05 if memory == "fp8" else 1e-3) * exact.norm()
    assert all((gradient[1] == 0).all() and (gradient[0] != 0).any() for gradient in got[3:])


def test_experts_without_rows_and_under_autocast() -> None:
    mlp, (x, counts, _) = experts(), rows((0, 0, 0))
    y, _ = mlp(x, counts)
    assert y.shape == (0, WIDTH)
    for gradient in torch.autograd.grad(y.sum(), (x, *mlp.parameters())):
        assert (gradient == 0).all()
    wide, (x, counts, probs) = experts(params_dtype=torch.float32), rows(dtype=torch.float32)
    narrow = experts()
    narrow.load_state_dict({name: t.to(BF16) for name, t in wide.state_dict().items()})
    with torch.autocast("cpu", BF16):
        y, _ = wide(x, counts, probs)
    assert torch.equal(y, narrow(x.to(BF16), counts, probs)[0])
    gradients = torch.autograd.grad(y.float().sum(), (x, *wide.parameters()))
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients)
    with pytest.raises(TypeError, match=r"gemm='fp8-rowwise' is not accepted of experts in torch\.float32: rows and"):
        wide(x, counts, probs)
    raises(TypeError, r"not accepted of experts in torch\.bfloat16 and torch\.float32", wide, x.to(BF16), counts, probs)


def test_experts_reject_unsupported_arguments() -> None:
    for recipe, settings in RECIPES.items():
        if not settings.scaling.grouped:
            raises(ValueError, f"gemm='{recipe}' is not accepted of experts: .*; accepted: bf16, fp8-", experts, recipe)
    raises(ValueError, "gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise", experts, "int8")
    for name, size in (("moe_ffn_hidden_size", 72), ("hidden_size", 40), ("moe_latent_size", 24)):
        mlp_config = fnn.MLPConfig(**{"hidden_size": WIDTH, "moe_ffn_hidden_size": INNER, name: size})
        words = f"{name}={size} is not accepted with gemm='fp8-rowwise'"
        raises(ValueError, words, fnn.GroupedMLP, 2, mlp_config, gemm="fp8-rowwise")
    with pytest.raises(ValueError, match="gemm='fp8-rowwise' is not accepted with delay_wgrad_compute=True"):
        experts(delay_wgrad_compute=True)
    with pytest.raises(ValueError, match="not accepted with a weight that 2 processes shard"):
        experts().linear_fc2.shard(SimpleNamespace(size=2, sequence_parallel=False))
    assert repr(experts()).count("gemm=fp8-rowwise") == 2 and "gemm" not in repr(experts("bf16"))
    assert list(experts().state_dict()) == list(experts("bf16").state_dict())
