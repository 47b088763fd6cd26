"""Products of other libraries around an activation: custom autograd.Functions, and operators, seen or registered."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from functions import autograd_function
from harness import saving_step
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops.graphs import gemm_registry
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings import passes

D, H, TOKENS = 16, 64, 32


@torch.library.custom_op("torch_fused_ops_tests::opaque", mutates_args=())
def opaque(x: Tensor, w: Tensor) -> Tensor:
    """A product whose name does not say so."""
    return x @ w.t()


@opaque.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def of_weight(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def of_products(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ w, of_weight(grad, x)


def overwriting(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d_weight = of_weight(grad, x)
    return x.zero_() + grad @ w, d_weight


# Linear layers: forward and backward are torch's products; forward is an operator of its own; Dynamo does not look in.
Visible = autograd_function(lambda x, w: (x @ w.t(), x, w), of_products)
Hidden = autograd_function(lambda x, w: (opaque(x, w), x, w), of_products)
Closed = torch._dynamo.allow_in_graph(autograd_function(lambda x, w: (opaque(x, w), x, w), of_products))
# Backward uses the memory of its input; it writes what it has made itself.
WritesWhatItSaved = autograd_function(lambda x, w: (x @ w.t(), x, w), overwriting)
WritesItsOwn = autograd_function(
    lambda x, w: (x @ w.t(), x, w), lambda grad, x, w: ((grad @ w).mul_(1.0), of_weight(grad, x))
)
# No product: its weights are a vector.
Norm = autograd_function(lambda x, w: (x * w, w), lambda grad, w: (grad * w, grad.sum((0, 1))))


class Layer(nn.Module):
    def __init__(self, function: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return]


def swiglu(function: Any) -> nn.Module:
    """Between linear layers of some Function."""
    return harness.SwiGLU(D, H, functools.partial(Layer, function))


def gelu(function: Any) -> nn.Module:
    return harness.MLP(D, H, linear=functools.partial(Layer, function))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Takes out what a test registers."""
    before = dict(gemm_registry._registered)
    yield
    gemm_registry._registered.clear()
    gemm_registry._registered.update(before)
    passes.tag_caches()


def compiled(module: nn.Module, memory: str = "free", strict: bool = True) -> Any:
    return harness.compiled(module, FusionPolicy(memory=memory, strict=strict))


def data() -> Tensor:
    return torch.randn(2, TOKENS // 2, D)


ELEMENTS = 4 * TOKENS  # bytes of a float32 column of all tokens


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("function", (Visible, Hidden, Closed), ids=("Visible", "Hidden", "Closed"))
def test_an_activation_between_custom_products_is_fused(function: Any) -> None:
    """Eager = compiled with all gradients; and of gate, up and the activation is kept what the level says."""
    if function is not Visible:
        tfo.register_gemm(function)
    module, x = swiglu(function), data()
    eager, _ = saving_step(module, module, x)
    # The input is kept for the weights' gradients; and silu(gate), gate, up and the product; gate and up; neither.
    for memory, columns in {"free": D + 2 * H, "input": D}.items():
        got, kept = saving_step(compiled(module, memory), module, x)
        torch.testing.assert_close(got, eager)
        recomputable = memory != "input" or function is Visible
        assert kept == ELEMENTS * (columns if recomputable else D + 2 * H)


@pytest.mark.codegen_is_slow
def test_a_registered_operator_is_computed_again() -> None:
    """ "input" computes a product again in backward: where it is registered itself, an operator's, too."""
    tfo.register_gemm(Hidden)
    tfo.register_gemm(opaque)
    module, x = swiglu(Hidden), data()
    (got, kept), (eager, _) = saving_step(compiled(module, "input"), module, x), saving_step(module, module, x)
    torch.testing.assert_close(got, eager)
    assert kept == ELEMENTS * D


@pytest.mark.parametrize("function", (Hidden, Closed), ids=("Hidden", "Closed"))
def test_a_function_that_is_not_registered_is_opaque(function: Any) -> None:
    """An MLP of such functions is not a site, and an error under ``strict``."""
    module, x = gelu(function), data()
    report = tfo.explain(module, x)
    name = "Function" if function is Closed else "self.function"
    assert not report.sites
    assert [(site.kind, site.reason) for site in report.unread] == [
        (Kind.OPAQUE, f"not an MLP: it is not known whether {name} is a GEMM")
    ] * 2
    with pytest.raises(Exception, match="linear layers and 2 opaque calls") as error:
        compiled(module)(x)
    assert "register_gemm" in str(error.value)
    tfo.register_gemm(function)
    report = tfo.explain(module, x)
    assert report.sites[0].op == "fused::bias_act" and not report.unread


def test_a_registered_operator_alone() -> None:
    """Without gradients Dynamo shows what a Function calls."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return opaque(F.gelu(opaque(x, w)), v)

    args = data(), torch.randn(H, D), torch.randn(D, H)
    assert not tfo.explain(fn, *args).sites
    tfo.register_gemm(torch.ops.torch_fused_ops_tests.opaque)
    (site,) = tfo.explain(fn, *args).sites
    assert site.op == "fused::bias_act"


def test_what_a_function_writes() -> None:
    """What it saved, it read from the activation: that must stay as it was. What it has made itself it may write."""
    (site,) = tfo.explain(gelu(WritesWhatItSaved), data()).sites
    assert (site.op, site.kind) == (None, Kind.WRITTEN)
    (site,) = tfo.explain(gelu(WritesItsOwn), data()).sites
    assert site.op == "fused::bias_act"


def test_functions_that_are_no_products() -> None:
    def body(s: Any, x: Tensor) -> Tensor:
        return Norm.apply(F.gelu(s.up(x)), s.weight)  # type: ignore[no-any-return]

    normed = harness.Net(body, up=nn.Linear(D, H), weight=nn.Parameter(torch.ones(H)))
    report = tfo.explain(normed, data())
    assert not report.sites and {site.kind for site in report.unread} == {Kind.NO_GEMM_READS}


def test_what_can_be_registered() -> None:
    before = passes.identity()
    with pytest.raises(TypeError, match="fn=<built-in function tanh> is not accepted: it must be a subclass of"):
        tfo.register_gemm(math.tanh)
    tfo.register_gemm(Hidden)
    tfo.register_gemm(Hidden)
    assert passes.identity() != before, "what is registered changes what is compiled, so it is in every cache's key"
    for one in (opaque, torch.ops.torch_fused_ops_tests.opaque, torch.ops.torch_fused_ops_tests.opaque.default):
        tfo.register_gemm(one)
    assert len(gemm_registry._registered) == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise", "rowwise_with_gw_hp"))
def test_torchao(recipe: str) -> None:
    float8 = pytest.importorskip("torchao.float8")
    module = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)).bfloat16()
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    module = float8.convert_to_float8_training(module, config=config)
    x = data().bfloat16()
    assert [site.op for site in tfo.explain(module, x).sites] == ["fused::bias_act"]
    for memory in ("free", "input"):
        (got, kept), (eager, more) = saving_step(compiled(module, memory), module, x), saving_step(module, module, x)
        # Two numbers of bfloat16 next to each other may be two of float8, and tensorwise has gradients in e5m2: there
        # plain torch.compile is off eager by up to 0.049, and this by up to 0.052.
        assert all((a - b).float().norm() < 0.1 * b.float().norm() for a, b in zip(got, eager, strict=True))
        assert kept < more


@pytest.mark.slow
@pytest.mark.parametrize("bits", (4, 8))
def test_bitsandbytes(bits: int) -> None:
    layers = pytest.importorskip("bitsandbytes.nn")
    kind, settings = {
        4: (layers.Linear4bit, {"compute_dtype": torch.float32, "quant_type": "nf4"}),
        8: (layers.Linear8bitLt, {"has_fp16_weights": False, "threshold": 0.0}),
    }[bits]
    module = nn.Sequential(kind(64, 128, bias=False, **settings), nn.GELU(), kind(128, 64, bias=False, **settings))
    module, x = module.to("cpu"), torch.randn(2, 8, 64)
    assert [site.op for site in tfo.explain(module, x).sites] == ["fused::bias_act"]
    for memory in ("free", "input"):
        got, eager = saving_step(compiled(module, memory), module, x)[0], saving_step(module, module, x)[0]
        torch.testing.assert_close(got, eager)
