"""s·(a·W) = (s·a)·W: per-row scales that move in front of the GEMM, and the saved tensors and results of such steps."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from differential import compare
from functions import within
from harness import captured, distances, nbytes, normal, step_of
from torch import Tensor

from torch_fused_ops import FusionPolicy, explain
from torch_fused_ops.lowerings.recognize import rewrite
from torch_fused_ops.policy import MEMORY

TOKENS, WIDTH, FFN, EXPERTS, CHOSEN = 64, 32, 48, 4, 2
MOVED = "by a number for each row is moved in front of"
DOUBLE = torch.float64


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route tokens as in transformers. Return rows sorted by expert, float32 weights, group ends, inverse order."""
    weights, experts = F.softmax(F.linear(x, router).float(), -1).topk(CHOSEN, -1)
    sorted_experts, order = torch.sort((experts).reshape(-1))
    counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return order // CHOSEN, weights.reshape(-1)[order], torch.cumsum(counts, 0, dtype=torch.int32), back


def mixture(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows, weights, ends, back = routed(x, router)
    gate, up = F.grouped_mm(x[rows], gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    y = (y * weights.unsqueeze(-1))[back]
    return y.view(x.shape[0], CHOSEN, -1).sum(1).to(x.dtype)


def one_by_one(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the mixture in any dtype, one expert of each token at a time."""
    weights, experts = F.softmax(F.linear(x, router), -1).topk(CHOSEN, -1)
    total = torch.zeros_like(x)
    for i in range(CHOSEN):
        gate, up = torch.einsum("nd,nhd->nh", x, gate_up[experts[:, i]]).chunk(2, -1)
        total = total + torch.einsum("nh,ndh->nd", F.silu(gate) * up, down[experts[:, i]]) * weights[:, i, None]
    return total


def mixtures_tensors(tokens: int = TOKENS) -> list[Tensor]:
    shapes = ((tokens, WIDTH), (EXPERTS, WIDTH), (EXPERTS, 2 * FFN, WIDTH), (EXPERTS, WIDTH, FFN))
    return [normal(*shape, dtype=torch.bfloat16, seed=i) for i, shape in enumerate(shapes)]


def gated(x: Tensor, up: Tensor, down: Tensor, gate: Tensor) -> Tensor:
    """Compute a shared expert with a sigmoid gate."""
    return torch.sigmoid(F.linear(x, gate)) * F.linear(F.silu(F.linear(x, up)), down)


def batched(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
    """Compute experts with equal numbers of rows. The weighted rows belong to one matrix."""
    h = F.relu(x.unflatten(0, (2, -1)) @ up.t()) @ down.t().expand(2, -1, -1)
    return h.flatten(0, 1) * s


def rows_of_two_axes(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, up)).unflatten(0, (2, -1))
    return torch.matmul(h, down.t()).double() * s.unflatten(0, (2, -1))


def scaled(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
    """Compute an MLP with Falcon-H1's scales, which do not move."""
    return 3 * F.silu(0.7 * F.linear(x, up)) @ down.t() * s


def small(tokens: int = 6, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    """Return x, up, down, and a factor for each row."""
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(((tokens, 8), (12, 8), (8, 12), (tokens, 1)))]


def inputs_of(fn: Callable[..., Tensor]) -> list[Tensor]:
    return [*small()[:3], normal(1, 8, dtype=DOUBLE, seed=9)] if fn is gated else small()


FORMS = (gated, batched, rows_of_two_axes, scaled)


@pytest.mark.parametrize("fn", FORMS)
def test_scales_are_moved(fn: Callable[..., Tensor]) -> None:
    (site,) = compare(fn, inputs_of(fn))
    assert MOVED in site.reason, site.reason


def compiled(fn: Callable[..., Any], memory: str, **settings: Any) -> Any:
    return harness.compiled(fn, FusionPolicy(memory=memory), fullgraph=True, **settings)


@pytest.mark.codegen_is_slow
@pytest.mark.slow
def test_a_mixture_at_every_level() -> None:
    """The last GEMM's result is not saved. Except at "fp8", errors relative to float64 do not grow."""
    inputs = mixtures_tensors()
    expected, _ = step_of(one_by_one, [t.detach().double().requires_grad_() for t in inputs])
    eager = distances(step_of(mixture, inputs)[0], expected)
    steps = {memory: step_of(compiled(mixture, memory), inputs) for memory in MEMORY if memory != "tiled"}
    rows = TOKENS * CHOSEN
    saving = nbytes(steps["off"][1]) - nbytes(steps["free"][1])
    assert saving == rows * 2 * (WIDTH + FFN + WIDTH) - rows, "result, activation and gathered tokens; a mask is more"
    assert max(eager) < 0.005 and 0.03 < distances(steps["fp8"][0], expected)[2] < 0.055, "docs/memory.md says so"
    for memory, most in {"off": 1.1, "free": 1.0, "fp8": 12, "input": 1.0}.items():
        assert all(a <= most * b for a, b in zip(distances(steps[memory][0], expected), eager, strict=True)), memory


@pytest.mark.slow
def test_the_number_of_tokens_may_be_dynamic() -> None:
    fn = compiled(mixture, "free", dynamic=True)
    for tokens in (TOKENS, 40):
        inputs = mixtures_tensors(tokens)
        with torch._dynamo.config.patch(error_on_recompile=tokens != TOKENS):
            actual, _ = step_of(fn, inputs)
        expected, _ = step_of(one_by_one, [t.detach().double().requires_grad_() for t in inputs])
        eager, _ = step_of(mixture, inputs)
        assert all(a <= 1.1 * b for a, b in zip(distances(actual, expected), distances(eager, expected), strict=True))


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=3)
@pytest.mark.parametrize("fn", FORMS[:3])
def test_dynamic_rows_of_other_products(fn: Callable[..., Tensor]) -> None:
    compiled_fn = compiled(fn, "free", dynamic=True)
    for tokens in (6, 10):
        inputs = [*small(tokens)[:3], inputs_of(fn)[3] if fn is gated else small(tokens)[3]]
        torch.testing.assert_close(step_of(compiled_fn, inputs)[0], step_of(fn, inputs)[0], rtol=1e-12, atol=1e-12)


class Poisoned(torch.autograd.Function):
    """A grouped GEMM whose undefined rows are NaN, in its result and in its input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        y, start = x.new_full((x.shape[0], weight.shape[-1]), torch.nan), 0
        for i, end in enumerate(ends.tolist()):
            y[start:end], start = x[start:end] @ weight[i], end
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight, ends = ctx.saved_tensors
        dx, dw, start = torch.full_like(x, torch.nan), torch.zeros_like(weight), 0
        for i, end in enumerate(ends.tolist()):
            dx[start:end], dw[i] = grad[start:end] @ weight[i].t(), x[start:end].t() @ grad[start:end]
            start = end
        return dx, dw, None


def test_rows_after_the_last_group_are_ignored() -> None:
    """The model does not read these rows, and their factors have no gradient."""
    ends = torch.tensor([2, 4], dtype=torch.int32)
    weights = [normal(2, *shape, dtype=torch.bfloat16) for shape in ((8, 16), (16, 8))]
    x, s = normal(6, 8, dtype=torch.bfloat16), normal(6, 1, dtype=torch.float32)

    def fn(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
        h = F.relu(F.grouped_mm(x, up, offs=ends))
        y = F.grouped_mm(h, down, offs=ends) * s
        return torch.where(torch.arange(6)[:, None] < ends[-1], y, 0.0)

    def poison(gm: torch.fx.GraphModule) -> None:
        (site,) = rewrite(gm.graph, FusionPolicy())
        assert MOVED in site.reason
        for node in gm.graph.nodes:
            if "grouped_mm" in getattr(node.target, "__name__", ""):
                node.target = lambda x, w, offs, **_: Poisoned.apply(x, w, offs)

    out, _ = captured(fn, x, *weights, s, edit=poison, fullgraph=True)
    _, *dw, ds = torch.autograd.grad(out.sum(), (x, *weights, s))
    assert out.isfinite().all() and ds.isfinite().all() and ds[:4].all() and not ds[4:].any()
    torch.testing.assert_close(dw, torch.autograd.grad(fn(x, *weights, s)[:4].sum(), weights), rtol=0.02, atol=0.02)


def stays(fn: Callable[..., Any], *changed: Tensor, **policy: Any) -> None:
    """Assert that the activation is fused, the factor stays after the GEMM, and no result changes."""
    inputs = list(changed) or small()
    sites = explain(fn, *inputs, policy=FusionPolicy(**policy)).sites
    assert [site.op is not None and MOVED not in site.reason for site in sites] == [True], sites
    compare(fn, inputs)


def hidden(x: Tensor, up: Tensor) -> Tensor:
    return F.gelu(F.linear(x, up))


def after_gemm(body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls ``body`` with the activation, the GEMM's result, and a factor for each row."""

    def fn(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
        h = hidden(x, up)
        return body(h, F.linear(h, down), s)

    return fn


def squared(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
    y = F.linear(hidden(x, up), down[:1])  # one number per row, multiplied by itself
    return y * y


def written(x: Tensor, up: Tensor, down: Tensor, s: Tensor) -> Tensor:
    weight = down * 2
    y = F.linear(hidden(x, up), weight)
    weight.mul_(3)
    return y * s + weight.sum()


ORDER = torch.arange(5, -1, -1)
half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
STAYING: dict[str, Callable[..., Tensor]] = {
    "a factor for each column": lambda x, up, down, s: F.linear(hidden(x, up), down) * s[:1].expand(6, 8)[:, :8],
    "a vector": lambda x, up, down, s: F.linear(hidden(x, up), down) * down[:, 0],
    "a bias": lambda x, up, down, s: F.linear(hidden(x, up), down, s[:1].expand(8, 1)[:, 0]) * s,
    "rows picked in between": lambda x, up, down, s: F.linear(hidden(x, up), down)[ORDER] * s,
    "rows picked before the product": lambda x, up, down, s: F.linear(hidden(x, up)[ORDER], down) * s,
    "an active dropout": lambda x, up, down, s: F.linear(F.dropout(hidden(x, up), 0.5), down) * s,
    "detached": lambda x, up, down, s: F.linear(hidden(x, up), down).detach() * s + F.linear(x, down.t()[:8]),
    "from the left": lambda x, up, down, s: torch.matmul(down, hidden(x, up).t()) * s[:1].expand(8, 1),
    "no gradient": lambda x, up, down, s: F.linear(hidden(x, up), down) * s.detach(),
    "read twice": after_gemm(lambda h, y, s: y * s + y),
    "the activation is read twice": after_gemm(lambda h, y, s: y * s + h.sum(-1, keepdim=True)),
    "a factor of the product's result": after_gemm(lambda h, y, s: y * y.norm(dim=-1, keepdim=True)),
    "a factor of the activation": after_gemm(lambda h, y, s: y * h.norm(dim=-1, keepdim=True)),
    "the product's result itself": squared,
    "weights that are written in between": written,
    "in place": after_gemm(lambda h, y, s: operator.imul(y, s)),
    "in another autocast region": after_gemm(lambda h, y, s: within(half, torch.mul, y, s)),
}


def test_scales_that_cannot_move_stay() -> None:
    """All functions are in one graph. Two of them are not compared: a mask differs, and eager raises an error."""
    uncompared = ("an active dropout", "weights that are written in between")
    functions = [fn for name, fn in STAYING.items() if name not in uncompared]

    def together(*inputs: Tensor) -> list[Tensor]:
        return [fn(*inputs[4 * i : 4 * i + 4]) for i, fn in enumerate(functions)]

    sites = compare(together, [t for _ in functions for t in small()])
    sites += [explain(STAYING[name], *small()).sites[0] for name in uncompared]
    assert len(sites) == len(STAYING)
    assert all(site.op and MOVED not in site.reason for site in sites), sites


def test_scales_stay_if_policy_or_user_decide() -> None:
    import torch._functorch.config as functorch_config

    stays(gated, *inputs_of(gated), memory="off")
    with functorch_config.patch(activation_memory_budget=0.5):
        stays(gated, *inputs_of(gated))
    with torch.no_grad():
        stays(gated, *inputs_of(gated))
    frozen = [t.detach().requires_grad_(i == 3) for i, t in enumerate(small())]
    stays(batched, *frozen)  # only the factor needs a gradient, for which the activation's input would be saved
    (site,) = explain(gated, *inputs_of(gated), policy=FusionPolicy(memory="tiled:2")).sites
    assert site.tiles == 2 and MOVED not in site.reason


def test_a_linear_layer_in_float8_keeps_its_factor() -> None:
    shapes = ((128, 128), (256, 128), (128, 256), (1, 128))
    inputs = [normal(*shape, dtype=torch.bfloat16) for shape in shapes]
    (site,) = explain(gated, *inputs, policy=FusionPolicy(gemm="fp8")).sites
    assert site.gemm == "fp8" and MOVED not in site.reason


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_factor_of_a_wider_dtype(wide: torch.dtype) -> None:
    """The result has the multiplication's dtype. In float64 it may exceed the range of the GEMM's dtype."""
    x, up, down, _ = small(dtype=torch.bfloat16)
    s = normal(6, 1, dtype=wide)
    (site,) = compare(lambda *args: batched(*args), [x, up, down, s], dtype=torch.bfloat16)
    assert (MOVED in site.reason) == (wide == torch.float32) and batched(x, up, down, s).dtype == wide


def normalized(x: Tensor, up: Tensor, down: Tensor, n: Tensor) -> Tensor:
    """Compute an MLP between a norm and its inverse, for large inputs."""
    return F.linear(F.gelu(F.linear(x / n * 512, up)), down) * n


@pytest.mark.codegen_is_slow
def test_a_factor_stays_where_its_dtype_has_too_small_a_range() -> None:
    """In float16, the activation times the factor is infinite, but the GEMM's result times the factor is not."""
    x, up, down, _ = small(dtype=torch.float16)
    with torch.no_grad():
        x, down = x.mul(200).requires_grad_(), down.mul(2**-7).requires_grad_()
        n = x.norm(dim=-1, keepdim=True).requires_grad_()
        assert (F.gelu(F.linear(x / n * 512, up)) * n).isinf().any()
    fn = torch.compile(normalized, backend="fused", fullgraph=True)
    expected = normalized(x, up, down, n)
    assert expected.isfinite().all()
    torch.testing.assert_close(fn(x, up, down, n), expected, rtol=0.01, atol=5)
