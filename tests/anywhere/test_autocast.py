"""Autocast: operators have the dtypes of the same functions in PyTorch, and values within the precision contract.

One difference is intended. A result has the dtype of the *first* tensor (for dropout_add, of the residual). PyTorch's
type promotion would widen it if a later tensor is wider, such as a float32 bias after a bfloat16 GEMM.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import quick_gelu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

import torch_fused_ops as tfo
from torch_fused_ops import functional as FF
from torch_fused_ops import megatron
from torch_fused_ops.lowerings.recognize import rewrite
from torch_fused_ops.testing import precision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = (BF16, FP16)


@contextlib.contextmanager
def autocast(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Enter ``torch.autocast``, for "cuda" even without a GPU. If ``dtype`` is None, disable autocast."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, dtype is not None)
    if dtype is not None:
        torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()


# ---- the operators ---------------------------------------------------------------------------------------------------


class Formula(NamedTuple):
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    vector: bool = True  # whether the second tensor is a vector over the last axis
    result: int = 0  # index of the tensor whose dtype the result has


FORMULAS = {
    "bias_gelu": Formula(lambda x, b: FF.bias_gelu(x, b, "tanh"), lambda x, b: F.gelu(x + b, approximate="tanh")),
    "relu2": Formula(lambda x, b: FF.bias_act(x, b, activation="relu2"), lambda x, b: F.relu(x + b) * F.relu(x + b)),
    "quick_gelu": Formula(lambda x, b: FF.bias_act(x, b, activation="quick_gelu"), lambda x, b: quick_gelu(x + b)),
    "swiglu": Formula(FF.swiglu, lambda x, u: F.silu(x) * u, vector=False),
    "bias_geglu": Formula(
        lambda x, b: FF.bias_glu(x, b, activation="gelu"), lambda x, b: harness.of_halves(F.gelu)(x + b)
    ),
    "bias_dropout_add": Formula(
        lambda x, r: FF.bias_dropout_add(x, None, r, 0.5, False), lambda x, r: r + F.dropout(x, 0.5, False), False, 1
    ),
    "megatron": Formula(lambda x, b: megatron.bias_swiglu_impl(x, b), lambda x, b: swiglu(x + b)),
}


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def arguments(vector: bool, first: torch.dtype, second: torch.dtype, device: str = "cpu") -> list[Tensor]:
    g, shapes = torch.Generator().manual_seed(0), ((3, 8), (8,) if vector else (3, 8))
    if device != "cpu":
        return [torch.empty(s, device=device, dtype=d) for s, d in zip(shapes, (first, second), strict=True)]
    return [torch.randn(s, generator=g).to(d) for s, d in zip(shapes, (first, second), strict=True)]


def check_against_float64(formula: Formula, run: Callable[..., Tensor], args: list[Tensor]) -> None:
    """Check dtypes of ``run``'s result and gradients, and compare values with the formula in float64."""
    leaves = [a.clone().requires_grad_() for a in args]
    out = run(*leaves)
    assert out.dtype == args[formula.result].dtype
    wide = [a.double().requires_grad_() for a in args]
    truth = formula.plain(*wide)
    assert precision.error(out.detach(), truth.detach()).max() <= precision.LIMITS["forward", out.dtype]
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    truths = torch.autograd.grad(truth, wide, torch.ones_like(truth))
    for got, expected, a in zip(grads, truths, args, strict=True):
        assert got.dtype == a.dtype
        eps = max(torch.finfo(got.dtype).eps, 1e-6)
        torch.testing.assert_close(got.double(), expected, rtol=4 * eps, atol=4 * eps)


REGIONS = {
    "plain": lambda low: [low],
    "nested": lambda low: [FP16 if low is BF16 else BF16, low],
    "disabled": lambda low: [low, None],
    "enabled again": lambda low: [low, None, low],
}


def in_regions(device: str, regions: list[torch.dtype | None], fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for dtype in regions:
                stack.enter_context(autocast(device, dtype))
            return fn(*args)

    return run


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_operators_keep_dtypes_on_cpus(name: str, low: torch.dtype, region: str) -> None:
    formula = FORMULAS[name]
    for first, second in itertools.product((FP32, low), repeat=2):
        args = arguments(formula.vector, first, second)
        run = in_regions("cpu", REGIONS[region](low), formula.fused)
        check_against_float64(formula, run, args)
        with torch.no_grad():
            assert torch.equal(run(*args), formula.fused(*args)), "autocast changes nothing"
            plain = in_regions("cpu", REGIONS[region](low), formula.plain)(*args)
        expected = args[formula.result].dtype
        promoted = torch.promote_types(first, second)
        assert plain.dtype == promoted and (plain.dtype == expected or expected == low), "the difference on purpose"


@pytest.mark.parametrize("low", LOW, ids=str)
def test_softmax_keeps_its_dtype_on_cpus(low: torch.dtype) -> None:
    """On CPUs autocast does not widen softmax: our result and torch.softmax's have the input's dtype."""
    for dtype in (FP32, low):
        x = torch.randn(2, 3, 4).to(dtype).requires_grad_()
        with torch.autocast("cpu", low):
            fused_result, plain = FF.scaled_masked_softmax(x), torch.softmax(x, -1)
            (g,) = torch.autograd.grad(fused_result.square().sum(), x)
        assert fused_result.dtype == plain.dtype == g.dtype == dtype
        torch.testing.assert_close(fused_result, plain)


# ---- CUDA's lists, on fake tensors -----------------------------------------------------------------------------------


# "PyTorch is not linked with support for cuda devices": a build without CUDA cannot index fake CUDA tensors.
SLICED = () if torch.backends.cuda.is_built() else ("bias_geglu", "megatron")
ON_GPUS = {name: formula for name, formula in FORMULAS.items() if name not in SLICED}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("low", LOW, ids=str)
def test_operators_keep_dtypes_on_gpus(low: torch.dtype, region: str) -> None:
    for (name, formula), first, second in itertools.product(ON_GPUS.items(), (FP32, low), (FP32, low)):
        with FakeTensorMode():
            args = arguments(formula.vector, first, second, "cuda")
            fused_result, plain = (in_regions("cuda", REGIONS[region](low), f)(*args) for f in formula[:2])
        expected = args[formula.result].dtype
        assert fused_result.dtype == expected and fused_result.device.type == "cuda", name
        assert plain.dtype in (expected, torch.promote_types(first, second)), name
        if first == second:
            assert plain.dtype == fused_result.dtype, name


ATTENTION = megatron.FusedScaleMaskSoftmax(
    False, False, megatron.AttnMaskType.causal, True, megatron.attention_mask_func, True, 0.5
)
SOFTMAXES: dict[str, Callable[..., Tensor]] = {
    "operator": lambda x, s: torch.ops.fused.scaled_masked_softmax(x, None, s),
    "functional": lambda x, s: FF.scaled_masked_softmax(x, None, s, scale=0.5),
    "megatron": lambda x, s: ATTENTION(x[None], None, s)[0],
}
INSIDE: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "call": lambda f: f,
    "grad": lambda f: lambda x, s: grad(lambda x: f(x, s).double().sum())(x),
    "jvp": lambda f: lambda x, s: jvp(lambda x: f(x, s), (x,), (x,))[1],
    "vmap": lambda f: lambda x, s: vmap(lambda x: f(x, s))(torch.stack((x, x))),
    "vmap of grad": lambda f: lambda x, s: vmap(grad(lambda x: f(x, s).double().sum()))(torch.stack((x, x))),
}


BACKWARDS = ("grad", "vmap of grad")  # need CUDA streams: test_gradients_have_their_inputs_dtypes


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("inside", [k for k in INSIDE if k not in BACKWARDS])
@pytest.mark.parametrize("name", [name for name in SOFTMAXES if name not in SLICED])
def test_softmax_widens_on_gpus(name: str, inside: str) -> None:
    """The result is float32, or float64 for float64 inputs, as for torch.softmax, also under transforms.

    vmap decomposes torch.softmax before autocast sees it, so its dtype stays: vmap(f)(x)[i] differs from f(x[i]). For
    our operator both dtypes are equal.
    """

    for low, region, dtype in itertools.product(LOW, REGIONS, (*LOW, FP32, FP64)):
        with FakeTensorMode():
            x, s = (torch.empty(shape, dtype=dtype, device="cuda") for shape in ((2, 3, 4), (2,)))
            result = in_regions("cuda", REGIONS[region](low), INSIDE[inside](SOFTMAXES[name]))(x, s)
            expected = in_regions("cuda", REGIONS[region](low), lambda x: torch.softmax(x, -1))(x)
        assert (result.dtype, result.shape[-3:]) == (expected.dtype, x.shape), (low, region, dtype)


# ---- fused -----------------------------------------------------------------------------------------------------------


SIZES = ((8, 16), (8, 16), (16, 8))


@pytest.mark.slow
@pytest.mark.parametrize("low", LOW, ids=str)
def test_gradients_have_their_inputs_dtypes(low: torch.dtype) -> None:
    """Code compiled for an absent GPU has the right dtypes of results and gradients."""
    virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

    def dtypes(fn: Callable[..., Tensor], *args: Tensor) -> list[torch.dtype]:
        def inside(*args: Tensor) -> Tensor:
            with torch.autocast("cuda", low):
                return fn(*args)

        torch.compiler.reset()
        paper = virtual_gpu.compile_on_paper(inside, *args)
        result = paper.forward.graph.graph.output_node().args[0][0]
        grads = paper.backward.graph.graph.output_node().args[0]
        return [n.meta["val"].dtype for n in (result, *grads) if n is not None]

    meta = functools.partial(harness.meta, requires_grad=True)
    x, sink = meta(2, 64, 64, dtype=low), meta(2, dtype=low)
    assert dtypes(lambda x: torch.softmax(x, -1), x) == [FP32, low]
    assert dtypes(lambda x, s: FF.scaled_masked_softmax(x, None, s), x, sink) == [FP32, low, low]
    for first, second in itertools.product((FP32, low), repeat=2):
        args = meta(64, 64, dtype=first), meta(64, dtype=second)
        assert dtypes(FF.bias_gelu, *args) == [first, first, second]


def Net(body: Callable[[Any, Tensor], Tensor], dtype: torch.dtype) -> nn.Module:
    """Return a module with linear layers of ``dtype`` that calls ``body(self, x)``."""
    torch.manual_seed(0)
    a, b, c = (nn.Linear(*sizes, dtype=dtype) for sizes in SIZES)
    return harness.Net(body, a=a, b=b, c=c, bias=nn.Parameter(torch.randn(16, dtype=dtype)))


def without_autocast(device: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast(device, enabled=False):
        return fn(x)


NETS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "gelu": lambda s, x: s.c(F.gelu(s.a(x))),
    "gelu, bias apart": lambda s, x: s.c(F.gelu(F.linear(x, s.a.weight) + s.bias)),
    "relu, squared by pow": lambda s, x: s.c(F.relu(s.a(x)) ** 2),
    "swiglu": lambda s, x: s.c(F.silu(s.a(x)) * s.b(x)),
    "geglu, widened": lambda s, x: s.c(F.gelu(s.a(x).float()).to(x.dtype) * s.b(x)),
    "dropout and residual": lambda s, x: x + F.dropout(s.c(F.gelu(s.a(x))), 0.0),
    "the result of an activation": lambda s, x: F.silu(s.a(x)) * s.b(x),
    "softmax": lambda s, x: torch.softmax(s.a(x), -1) @ s.c.weight.t(),
    "off in between": lambda s, x: s.c(without_autocast("cpu", F.gelu, s.a(x))),
    "two activations": lambda s, x: s.c(F.gelu(s.a(x))) + s.c(F.silu(s.b(x))),
}


def step(net: Callable[..., Tensor], parameters: list[Tensor], x: Tensor, low: torch.dtype) -> list[Any]:
    with torch.autocast("cpu", low):
        y = net(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *parameters], allow_unused=True)]


def fused_cases() -> Iterator[Any]:
    for name, weights, low in itertools.product(NETS, ("float32", "low"), LOW):
        quick = low is BF16 and weights == "float32" and name in ("gelu, bias apart", "relu, squared by pow", "swiglu")
        yield pytest.param(name, weights, low, marks=[] if quick else [pytest.mark.slow], id=f"{name}-{weights}-{low}")


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(("name", "weights", "low"), fused_cases())
def test_fused_mlps_have_eager_dtypes(name: str, weights: str, low: torch.dtype) -> None:
    """backend="fused" gives eager PyTorch's dtypes, and values about as near to float64 as eager's values."""
    dtype = FP32 if weights == "float32" else low
    net = Net(NETS[name], dtype)
    exact = Net(NETS[name], dtype).double()
    exact.load_state_dict(net.state_dict())
    for dtype_of_x in (FP32, low):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(dtype_of_x).requires_grad_()
        torch.compiler.reset()
        parameters = list(net.parameters())
        eager = step(net, parameters, x, low)
        fused_step = step(torch.compile(net, backend="fused", fullgraph=True), parameters, x, low)
        wide = x.detach().double().requires_grad_()
        y = exact(wide)
        truth = [y, *torch.autograd.grad(y.square().sum(), [wide, *exact.parameters()], allow_unused=True)]
        for o, t, e in zip(fused_step, eager, truth, strict=True):
            assert (o is None) == (t is None)
            if o is not None:
                assert o.dtype == t.dtype
                scale = e.abs().max()
                assert (o - e).abs().max() <= 2 * (t - e).abs().max() + 2 * torch.finfo(low).eps * scale


class Recorder(torch.fx.Interpreter):
    """Records example values, as Dynamo does."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, *self)


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", [n for n in NETS if "off" not in n])
def test_fused_graphs_have_the_same_dtypes(name: str, low: torch.dtype) -> None:
    """Under CUDA's autocast lists, the rewritten graph has the same result dtype as the original."""
    for weights, dtype_of_x in itertools.product((FP32, low), repeat=2):

        def net(x: Tensor, bias: Tensor, *parts: Tensor) -> Tensor:
            a, b, c = (Linear(*parts[i : i + 2]) for i in (0, 2, 4))
            return NETS[name](SimpleNamespace(a=a, b=b, c=c, bias=bias), x)

        shapes = [(16,), *itertools.chain(*(((n, m), (n,)) for m, n in SIZES))]
        with FakeTensorMode(), autocast("cuda", low):
            x = torch.empty(4, 8, dtype=dtype_of_x, device="cuda")
            args = x, *(torch.empty(shape, dtype=weights, device="cuda") for shape in shapes)
            names = ", ".join(f"t{i}" for i in range(len(args)))
            graph = torch.fx.symbolic_trace(eval(f"lambda {names}: net({names})", {"net": net}))  # fx rejects *args
            before = Recorder(graph).run(*args)
            sites = rewrite(graph.graph, tfo.FusionPolicy())
            graph.recompile()
            after = graph(*args)
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        assert any(site.op for site in sites) == (name not in ("softmax", "the result of an activation")), sites
