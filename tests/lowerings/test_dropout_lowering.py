"""``fused::dropout_add``: its lowering, the dropouts that the fusion pass replaces or rejects, and training."""

import re
from collections.abc import Callable
from typing import Any

import differential
import harness
import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn as nn
import torch.nn.functional as F
from harness import captured
from test_operators import check, cpp, leaf
from torch import Tensor
from torch._inductor.inductor_prims import seed as inductor_seed

import torch_fused_ops as tfo
from torch_fused_ops import functional
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings.dropout import _unrounded_grad
from torch_fused_ops.lowerings.recognize import rewrite
from torch_fused_ops.policy import FusionPolicy

fused = torch.ops.fused
SEED = torch.tensor([-3141592653589793238])


@pytest.fixture(autouse=True)
def without_vectors() -> Any:
    # Without vector instructions gcc takes a sixth of the time.
    with inductor_config.patch({"force_disable_caches": True, "cpp.simdlen": 1}):
        yield


# ---- the lowering ----------------------------------------------------------------------------------------------------


BF16 = torch.bfloat16
CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "every argument": (
        lambda x, b, r: fused.dropout_add(x * 2, b, r, SEED, 0.3) + 1,
        lambda: [leaf(3, 11, 23), leaf(23), leaf(3, 11, 23)],
    ),
    "bf16, fp32 residual": (
        lambda x, r: fused.dropout_add(x, None, r, SEED, 0.3).sin(),
        lambda: [leaf(33, 24, dtype=BF16), leaf(33, 24)],
    ),
    "transposed, frozen": (
        lambda x, b: fused.dropout_add(x.mT, b, None, SEED, 0.5),
        lambda: [leaf(3, 17, 9, grad=False), leaf(17)],
    ),
    "float64 bias, half": (
        lambda x, b: fused.dropout_add(x, b, None, SEED, 0.5),
        lambda: [leaf(10, 7, dtype=torch.float16), leaf(7, dtype=torch.float64)],
    ),
    "p 0": (lambda x, b, r: fused.dropout_add(x, b, r, SEED, 0.0), lambda: [leaf(5, 6), leaf(6), leaf(5, 6)]),
    "p 1": (lambda x, b, r: fused.dropout_add(x, b, r, SEED, 1.0), lambda: [leaf(5, 6), leaf(6), leaf(5, 6)]),
    "one axis, seed of none": (lambda x: fused.dropout_add(x, None, None, SEED.view(()), 0.5), lambda: [leaf(41)]),
    "empty": (lambda x, b: fused.dropout_add(x, b, None, SEED, 0.5) + 1, lambda: [leaf(0, 8), leaf(8)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager(name: str, vectors: bool) -> None:
    fn, args = CASES[name]
    with inductor_config.patch({"cpp.simdlen": None if vectors else 1}):
        code = check(fn, args())
    if name == "every argument":
        assert len(re.findall(r"= async_compile\.\w+\(", code[0])) == 2, "one draws, the other fuses with its neighbors"


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("name", ["every argument", pytest.param("bf16, fp32 residual", marks=pytest.mark.slow)])
def test_dynamic_shapes(name: str) -> None:
    fn, args = CASES[name]
    check(fn, args(), dynamic=True)


@pytest.mark.codegen_is_slow
def test_masks_are_bitwise_equal() -> None:
    """An element's index is row-major in its tensor, in every order of the kernel's loops."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = fused.dropout_add(x, None, None, SEED, 0.5)
        return y, y.mT.contiguous(), y.flip(0), y[:, 1:].sum(0)

    for dynamic in (False, True):
        torch._dynamo.reset()
        x = torch.ones(37, 53)
        assert all(map(torch.equal, torch.compile(fn, dynamic=dynamic)(x), fn(x)))


@pytest.mark.slow
def test_cpus_draw_once_for_four_elements() -> None:
    """The generator computes in 64-bit words. Only its result is int32, for four elements."""
    draw, use = cpp(lambda x: fused.dropout_add(x, None, None, SEED, 0.3), leaf(8, 64, dtype=BF16, grad=False))
    assert "<static_cast<int64_t>(128L)" in draw and draw.count("convert<int32_t") == 1 and "const uint8_t*" in use


@pytest.mark.codegen_is_slow
def test_zeros_and_nonfinite_values_reach_the_bias() -> None:
    """The bias's sum skips elements where d_input is zero. Zeros in the incoming gradient do not change the sum."""
    g = torch.ones(64, 12, dtype=BF16)
    for i, special in enumerate((0.0, float("inf"), float("nan"), 1e-7)):  # 1e-7 is 0 in float16
        g[::2, 3 * i : 3 * i + 2] = special

    def fn(g: Tensor) -> list[Any]:
        return [fused.dropout_add_backward(g, SEED, 0.5, d, torch.float32, [True, True]) for d in (BF16, torch.float16)]

    torch.testing.assert_close(torch.compile(fn)(g), fn(g), equal_nan=True)
    torch.testing.assert_close(_unrounded_grad(g.float(), fn(g)[0][0], 0.5).sum(0), fn(g)[0][1], equal_nan=True)


@pytest.mark.codegen_is_slow
def test_the_probability_may_change() -> None:
    compiled = torch.compile(lambda x, p: functional.bias_dropout_add(x, None, None, p))
    for p in (0.1, 0.9):
        assert abs(float((compiled(torch.ones(400, 100), p) == 0).float().mean()) - p) < 0.02


@pytest.mark.codegen_is_slow
def test_functional_dropout_draws_in_the_graph() -> None:
    x, r = torch.ones(64, 64), torch.zeros(64, 64)
    compiled = torch.compile(lambda x: functional.bias_dropout_add(x, None, r, 0.5), fullgraph=True)
    torch.manual_seed(3)
    once, twice = compiled(x), compiled(x)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), once) and not torch.equal(once, twice)


# ---- the fusion pass -------------------------------------------------------------------------------------------------


def Net(body: Callable[..., Tensor]) -> nn.Module:
    """Return a model that calls ``body(self, x)``, with linear layers as members."""
    a, b, c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8, bias=False)
    return harness.Net(body, a=a, b=b, c=c)


X = (5, 8)


def capture(
    model: Callable[..., Any], *args: Any, policy: FusionPolicy | None = None, **settings: Any
) -> tuple[list[Any], torch.fx.Graph]:
    """Return the dropouts' sites and the rewritten graph."""
    with inductor_config.patch(settings):
        _, sites, (graph, *_) = differential.capture(model, *args, policy=policy or FusionPolicy(strict=True))
    return [site for site in sites if site.activation == "dropout"], graph


def calls(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if n.target is fused.dropout_add.default]


# The body, and the number of its dropouts.
FOUND: dict[str, tuple[Callable[..., Tensor], int]] = {
    "residual": (lambda s, x: x + F.dropout(s.c(x), 0.3), 1),
    "torch": (lambda s, x: torch.add(x, torch.dropout(s.c(x), 0.3, True), alpha=2), 1),
    "aten": (lambda s, x: torch.ops.aten.add.Tensor(x, torch.ops.aten.dropout.default(s.c(x), 0.3, True)), 1),
    "keywords": (lambda s, x: x + F.dropout(input=s.c(x), training=True, p=0.3), 1),
    "alone": (lambda s, x: F.dropout(s.c(x), 0.3).sin(), 1),
    "in place": (lambda s, x: x + F.dropout(s.c(x), 0.3, True, True), 1),
    "whole MLP": (lambda s, x: x + F.dropout(s.b(F.dropout(F.gelu(s.a(x)), 0.3)), 0.3), 2),
    "through a view": (lambda s, x: F.dropout(s.c(x).view(5, 2, 4), 0.3).flatten(1) + x, 1),
    "two readers": (lambda s, x: (d := F.dropout(s.c(x), 0.3)) * (x + d), 1),
    "narrow residual": (lambda s, x: F.dropout(s.c(x), 0.3) + x.bfloat16(), 1),
    "in-place sum": (lambda s, x: x.sin().add_(F.dropout(s.c(x), 0.3)), 1),
    "in place in another mode": (lambda s, x: _in_place_in_another_mode(s, x), 1),
    "written between": (lambda s, x: _written(s, x), 1),
}


def _written(s: Any, x: Tensor) -> Tensor:
    """Overwrite the linear's result between the dropout and the sum. The operator would read it after the write."""
    h = s.c(x)
    d = F.dropout(h, 0.3)
    h.mul_(2)
    return x + d + h


def count_dropouts(graph: torch.fx.Graph) -> int:
    return sum(n.target in (F.dropout, torch.dropout, torch.ops.aten.dropout.default) for n in graph.nodes)


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    body, expected = FOUND[name]
    sites, graph = capture(Net(body), torch.randn(X, requires_grad=True))
    assert [site.op for site in sites] == ["fused::dropout_add"] * expected
    assert [n.args[1:3] for n in calls(graph)] == [(None, None)] * expected and count_dropouts(graph) == 0
    assert [n.target for n in graph.nodes].count(inductor_seed) == expected
    assert all("backward recomputes its mask from a seed" in site.reason and not site.is_mlp for site in sites)


def weights(s: Any, x: Tensor) -> Tensor:
    return torch.softmax(s.c(x) @ s.c(x).mT, -1)


REFUSED: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "excluded": (
        lambda s, x: F.dropout(s.c(x)), "the policy excludes ''", {"policy": FusionPolicy(exclude=("",))},
    ),
    "in place, read afterwards": (
        lambda s, x: (h := s.c(x)) is not None and F.dropout(h, 0.5, True, True) + h,
        "works in place, and add reads the tensor afterwards", {},
    ),
    "eager's rounding": (
        lambda s, x: F.dropout(s.c(x).bfloat16()), "emulate_precision_casts", {"emulate_precision_casts": True},
    ),
    "another order": (lambda s, x: F.dropout(s.c(x).t()), "does not support the memory order of its result", {}),
    "under a transform": (
        lambda s, x: torch.func.grad(lambda x: (x + F.dropout(s.c(x), 0.5)).sum())(x),
        "under a torch.func transform", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, reason, settings = REFUSED[name]
    (site,), graph = capture(Net(body), torch.randn(X, requires_grad=True), **settings)
    assert site.op is None and reason in site.reason and not site.is_mlp
    assert not calls(graph) and count_dropouts(graph) == 1
    assert not any(n.target is inductor_seed for n in graph.nodes)


def test_fused_under_autocast_with_dynamic_sizes() -> None:
    def body(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + F.dropout(s.c(x), 0.3)  # type: ignore[no-any-return]

    x = torch.randn(X, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    _, graph = capture(Net(body), x)
    (call,) = calls(graph)
    assert call.meta["example_value"].dtype == torch.bfloat16


def attended(s: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(s.c(x), x, x, dropout_p=0.5)


OTHERS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "attention's probabilities": (lambda s, x: F.dropout(weights(s, x), 0.5) @ x, "it reads softmax, not a linear"),
    "a norm": (lambda s, x: s.c(F.dropout(F.layer_norm(s.c(x), (8,)), 0.5)), "it reads layer_norm, not a linear"),
    "an alpha dropout": (lambda s, x: F.alpha_dropout(s.c(x), 0.5, True), "alpha_dropout does not drop elements of"),
    "inside attention": (attended, "scaled_dot_product_attention does not drop elements of its input"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_dropouts_of_other_results_are_listed_but_not_fused(name: str) -> None:
    body, reason = OTHERS[name]
    (site,), graph = capture(Net(body), torch.randn(X, requires_grad=True), policy=FusionPolicy(strict=True))
    assert site.op is None and reason in site.reason and not site.is_missed and not calls(graph)


UNLISTED: dict[str, Callable[..., Tensor]] = {
    "in evaluation": lambda s, x: s.c(x) + F.dropout(s.c(x), 0.5, training=False),
    "p 0": lambda s, x: s.c(x) + F.dropout(s.c(x), 0.0),
    "attention without": lambda s, x: F.scaled_dot_product_attention(s.c(x), x, x),
}


@pytest.mark.parametrize("name", UNLISTED)
def test_inactive_dropouts_are_not_listed(name: str) -> None:
    sites, graph = capture(Net(UNLISTED[name]), torch.randn(X, requires_grad=True), policy=FusionPolicy())
    assert not sites and not calls(graph)


class Softmax(torch.autograd.Function):
    """A function that is not pointwise. Without gradients, Dynamo inlines its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.softmax(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Product(torch.autograd.Function):
    """A GEMM and a function of its result. Dynamo shows neither name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w).cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.mT @ x


def _in_place_in_another_mode(s: Any, x: Tensor) -> Tensor:
    h = s.c(x)
    with torch.no_grad():
        d = F.dropout(h.contiguous(), 0.3, True, True)  # h itself
    return d * 2


EITHER_WAY: dict[str, tuple[Callable[..., Any], list[tuple[float, bool]]]] = {
    "whole MLP": (FOUND["whole MLP"][0], [(0.3, True), (0.3, True)]),
    # The activation is proved only without gradients.
    "a kink": (lambda s, x: s.b(F.dropout(torch.maximum(h := s.a(x), torch.zeros_like(h)), 0.3)), [(0.3, True)]),
    "an input that is returned": (lambda s, x: (h := s.a(x), s.b(F.dropout(F.silu(h), 0.3))), [(0.3, True)]),
    "in place in another mode": (_in_place_in_another_mode, [(0.3, True)]),
    # With gradients Dynamo captures a call of the Function, without gradients the operators in its forward.
    "a function, not pointwise": (lambda s, x: F.dropout(Softmax.apply(s.c(x)), 0.3), [(0.3, False)]),
    "a function with a GEMM": (lambda s, x: F.dropout(Product.apply(x, s.c.weight * 2), 0.3), [(0.3, True)]),
}


@pytest.mark.parametrize("name", EITHER_WAY)
def test_the_same_dropouts_are_fused_without_gradients(name: str) -> None:
    """A reentrant checkpoint runs forward without gradients, and again with gradients. Both runs drop the same."""
    body, expected = EITHER_WAY[name]
    model = Net(body)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            _, graph = capture(model, torch.randn(X, requires_grad=gradients), policy=FusionPolicy())
        seeded = {
            seed: call.args[4] for call in calls(graph) for seed in call.all_input_nodes if seed.target is inductor_seed
        }
        probabilities = [
            (seeded[n], True) if n in seeded else (n.args[1], False)
            for n in graph.nodes if n in seeded or n.target is F.dropout
        ]  # fmt: skip
        assert probabilities == expected, gradients


@pytest.mark.parametrize("setting", ["fallback_random", "align_random_eager"])
def test_dropouts_keep_eagers_masks_if_a_setting_requests_them(setting: str) -> None:
    if not hasattr(inductor_config, setting):
        pytest.skip("this torch does not have the setting")
    with inductor_config.patch(setting, True):
        sites, _ = capture(Net(lambda s, x: F.dropout(s.c(x), 0.3)), torch.randn(X))
    assert [site.kind for site in sites] == [Kind.FALLBACK_RANDOM]


def test_strict_does_not_count_dropouts() -> None:
    from torch_fused_ops.lowerings.passes import PreGradPass

    model = Net(FOUND["whole MLP"][0])
    recognize = PreGradPass(FusionPolicy(strict=True, dropout=False))
    _, (graph,) = captured(
        model, torch.randn(X, requires_grad=True),
        edit=lambda gm: recognize(gm.graph) or gm.graph,  # raises if it counts a miss
    )  # fmt: skip
    assert count_dropouts(graph) == 2
    report = tfo.explain(model, torch.randn(X))
    assert report.summary == "1 of 1 MLP sites fused, 2 of 2 dropouts (1 graph)"
    assert "fused::dropout_add" in str(report) and "dropout" in report.to_json()


# ---- a rewritten graph computes what the original did ----------------------------------------------------------------


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", FOUND)
def test_rewritten_graphs_are_equivalent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operator's masks in F.dropout, the original has the same value and gradients as the rewritten graph."""
    body, _ = FOUND[name]
    model, x = Net(body), torch.randn(X, requires_grad=True)
    parameters = [x, *model.parameters()]
    sites, _ = capture(model, x)
    probabilities = torch.randint(0, 2**63 - 1, (len(sites),))
    masked, seeds = iter(probabilities.split(1)), iter(probabilities)

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        result: Tensor = fused.dropout_add(input, None, None, next(masked), p)
        return input.copy_(result) if inplace else result

    def run(fn: Callable[[Tensor], Tensor]) -> list[Any]:
        y = fn(x)
        return [y, *torch.autograd.grad(y.float().cos().sum(), parameters, allow_unused=True)]

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        rewrite(gm.graph, FusionPolicy())
        for node in gm.graph.nodes:
            if node.target is inductor_seed:
                node.target = lambda _: next(seeds)
        gm.recompile()
        return gm.forward

    got = run(torch.compile(model, backend=backend, fullgraph=True))
    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        patch.setattr(torch, "dropout", dropout)
        patch.setattr(torch.ops.aten, "dropout", type("aten", (), {"default": staticmethod(dropout)}))
        expected = run(model)
    torch.testing.assert_close(got, expected)


def test_an_in_place_dropout_under_no_grad_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    test_rewritten_graphs_are_equivalent("in place in another mode", monkeypatch)


# ---- training --------------------------------------------------------------------------------------------------------


def dropped_everywhere(s: Any, x: Tensor) -> Tensor:
    """Call dropouts before, inside and after an MLP with biases."""
    h = F.dropout(s.norm(F.dropout(x, 0.25)), 0.25)
    a = F.gelu(s.up(h)) if s.gate is None else F.silu(s.gate(h)) * s.up(h)
    return x + F.dropout(s.down(F.dropout(a, 0.25)), 0.25)


@pytest.mark.covering(1)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("memory", ["off", "free", "fp8", "input"])  # an MLP with a dropout inside cannot be tiled
def test_every_memory_level_recomputes_the_same_masks(memory: str, gated: bool) -> None:
    """Gradients equal finite differences of forward, so backward recomputes the masks that forward draws."""
    members = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    model = harness.Net(dropped_everywhere, **members, gate=nn.Linear(8, 16) if gated else None).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(32, 8, dtype=torch.double, requires_grad=True)
    compiled = torch.compile(model, backend="fused", options={"policy": FusionPolicy(memory=memory, strict=True)})
    weight = torch.randn(32, 8, dtype=torch.double)

    def loss() -> Tensor:
        torch.manual_seed(1)
        return (compiled(x) * weight).sum()

    inputs = {"x": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(loss(), list(inputs.values()))
    for (name, t), gradient in zip(inputs.items(), gradients, strict=True):
        direction = torch.randn(t.shape, dtype=torch.double)
        direction *= 1e-5 / direction.square().mean().sqrt()
        with torch.no_grad():
            t.add_(direction)
        after = loss().item()
        with torch.no_grad():
            t.sub_(2 * direction)
        difference = (after - loss().item()) / 2
        with torch.no_grad():
            t.add_(direction)
        off = abs(difference - (gradient * direction).sum().item()) / 1e-5
        assert off <= (0.1 if memory == "fp8" else 1e-5) * gradient.norm().item(), name


@pytest.mark.codegen_is_slow
def test_every_graph_draws_its_own_seeds() -> None:
    a = nn.Linear(8, 8, bias=False)
    nn.init.eye_(a.weight)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first = F.dropout(a(x), 0.5)
        torch._dynamo.graph_break()
        return first, F.dropout(a(x), 0.5)

    first, second = torch.compile(fn, backend="fused")(torch.ones(64, 8))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}
