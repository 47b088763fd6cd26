"""Activations between GEMMs of other libraries: custom autograd.Functions and operators, visible or registered."""

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
from torch_fused_ops.lowerings.recognize.graph import Call

D, H, TOKENS = 16, 64, 32


@torch.library.custom_op("torch_fused_ops_tests::opaque", mutates_args=())
def opaque(x: Tensor, w: Tensor) -> Tensor:
    """Compute a GEMM under a name that does not show that it is a GEMM."""
    return x @ w.t()


@opaque.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def weight_grad(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def linear_grads(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ w, weight_grad(grad, x)


def overwrite_input(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    d_weight = weight_grad(grad, x)
    return x.zero_() + grad @ w, d_weight


# Linear layers: with PyTorch's GEMMs, with a custom operator in forward, and opaque to Dynamo.
Visible = autograd_function(lambda x, w: (x @ w.t(), x, w), linear_grads)
Hidden = autograd_function(lambda x, w: (opaque(x, w), x, w), linear_grads)
Closed = torch._dynamo.allow_in_graph(autograd_function(lambda x, w: (opaque(x, w), x, w), linear_grads))
# The first function's backward overwrites the saved input. The second's backward overwrites its own tensor.
WritesWhatItSaved = autograd_function(lambda x, w: (x @ w.t(), x, w), overwrite_input)
WritesItsOwn = autograd_function(
    lambda x, w: (x @ w.t(), x, w), lambda grad, x, w: ((grad @ w).mul_(1.0), weight_grad(grad, x))
)
# This function is not a GEMM: its weight is a vector.
Norm = autograd_function(lambda x, w: (x * w, w), lambda grad, w: (grad * w, grad.sum((0, 1))))


class Layer(nn.Module):
    def __init__(self, function: Any, inputs: int, outputs: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return]


def swiglu(function: Any) -> nn.Module:
    """Return a SwiGLU MLP whose linear layers call a Function."""
    return harness.SwiGLU(D, H, functools.partial(Layer, function))


def gelu(function: Any) -> nn.Module:
    return harness.MLP(D, H, linear=functools.partial(Layer, function))


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Remove the GEMMs that a test registers."""
    before = dict(gemm_registry._registered)
    yield
    gemm_registry._registered.clear()
    gemm_registry._registered.update(before)
    passes.tag_caches()


def compiled(module: nn.Module, memory: str = "free", strict: bool = True) -> Any:
    return harness.compiled(module, FusionPolicy(memory=memory, strict=strict))


def data() -> Tensor:
    return torch.randn(2, TOKENS // 2, D)


COLUMN_BYTES = 4 * TOKENS  # one float32 column of all tokens


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("function", (Visible, Hidden, Closed), ids=("Visible", "Hidden", "Closed"))
def test_an_activation_between_custom_gemms_is_fused(function: Any) -> None:
    """Compiled gradients equal eager ones, and the level decides which of gate, up and the activation are saved."""
    if function is not Visible:
        tfo.register_gemm(function)
    module, x = swiglu(function), data()
    eager, _ = saving_step(module, module, x)
    # The input is saved for the weights' gradients. "free" also saves gate and up.
    for memory, columns in {"free": D + 2 * H, "input": D}.items():
        got, saved = saving_step(compiled(module, memory), module, x)
        torch.testing.assert_close(got, eager)
        recomputable = memory != "input" or function is Visible
        assert saved == COLUMN_BYTES * (columns if recomputable else D + 2 * H)


@pytest.mark.codegen_is_slow
def test_a_registered_operator_is_recomputed() -> None:
    """At "input", backward also recomputes GEMMs of registered operators."""
    tfo.register_gemm(Hidden)
    tfo.register_gemm(opaque)
    module, x = swiglu(Hidden), data()
    (got, saved), (eager, _) = saving_step(compiled(module, "input"), module, x), saving_step(module, module, x)
    torch.testing.assert_close(got, eager)
    # PyTorch saves a view of the argument. The operator needs the argument, which the caller may modify: a copy.
    assert saved == COLUMN_BYTES * 2 * D


@pytest.mark.parametrize("function", (Hidden, Closed), ids=("Hidden", "Closed"))
def test_unregistered_functions_are_opaque(function: Any) -> None:
    """An MLP of such functions is not a site, and raises an error under ``strict``."""
    module, x = gelu(function), data()
    report = tfo.explain(module, x)
    name = "Function" if function is Closed else "self.function"
    assert not report.sites
    assert [(site.kind, site.reason) for site in report.unread] == [
        (Kind.OPAQUE, f"not an MLP: it is not known whether {name} is a GEMM")
    ] * 2
    with pytest.raises(Exception, match="no MLP was found between 0 linear layers and 2 opaque calls") as error:
        compiled(module)(x)
    assert "register_gemm" in str(error.value)
    tfo.register_gemm(function)
    report = tfo.explain(module, x)
    assert report.sites[0].op == "fused::bias_act" and not report.unread


def test_a_single_linear_layer_that_is_a_function_is_not_a_missed_mlp() -> None:
    """The Function's forward and backward contain three GEMMs, and are graphs of the model."""
    module, x = Layer(Visible, D, H), data()
    torch.testing.assert_close(compiled(module)(x), module(x))


def test_a_registered_operator_alone() -> None:
    """Without gradients, Dynamo traces the operators that a Function calls."""

    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return opaque(F.gelu(opaque(x, w)), v)

    args = data(), torch.randn(H, D), torch.randn(D, H)
    assert not tfo.explain(fn, *args).sites
    tfo.register_gemm(torch.ops.torch_fused_ops_tests.opaque)
    (site,) = tfo.explain(fn, *args).sites
    assert site.op == "fused::bias_act"


def test_atens_other_gemms_are_gemms() -> None:
    """Dynamo's graphs call torch's function, and exported graphs call aten's overload."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in (torch._scaled_mm, torch.ops.aten._scaled_mm, torch.ops.aten._scaled_mm.default):
        assert Call(graph.call_function(target, (x, x))).gemm == (0, 1)


def test_functions_may_overwrite_only_their_own_tensors() -> None:
    """Backward must not overwrite the saved activation. It may overwrite tensors that it has computed."""
    (site,) = tfo.explain(gelu(WritesWhatItSaved), data()).sites
    assert (site.op, site.kind) == (None, Kind.WRITTEN)
    (site,) = tfo.explain(gelu(WritesItsOwn), data()).sites
    assert site.op == "fused::bias_act"


def test_functions_that_are_not_gemms() -> None:
    def body(s: Any, x: Tensor) -> Tensor:
        return Norm.apply(F.gelu(s.up(x)), s.weight)  # type: ignore[no-any-return]

    normed = harness.Net(body, up=nn.Linear(D, H), weight=nn.Parameter(torch.ones(H)))
    report = tfo.explain(normed, data())
    assert not report.sites and {site.kind for site in report.unread} == {Kind.NO_GEMM_READS}


def test_register_gemm_checks_its_argument() -> None:
    before = passes.identity()
    with pytest.raises(TypeError, match="fn=<built-in function tanh> is not accepted: it must be a subclass of"):
        tfo.register_gemm(math.tanh)
    tfo.register_gemm(Hidden)
    tfo.register_gemm(Hidden)
    assert passes.identity() != before, "registered GEMMs change compiled code, so they are part of cache keys"
    for gemm in (opaque, torch.ops.torch_fused_ops_tests.opaque, torch.ops.torch_fused_ops_tests.opaque.default):
        tfo.register_gemm(gemm)
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
        (got, saved), (eager, eager_saved) = (
            saving_step(compiled(module, memory), module, x),
            saving_step(module, module, x),
        )
        # Neighboring bfloat16 numbers may round to different float8 numbers, and tensorwise has gradients in e5m2. The
        # difference to eager is up to 0.049 for plain torch.compile, and up to 0.052 with fusion.
        assert all((a - b).float().norm() < 0.1 * b.float().norm() for a, b in zip(got, eager, strict=True))
        assert saved < eager_saved


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
