"""FusionPolicy(memory="tiled"): what a step in tiles computes and keeps, how tokens are cut, and what stays whole."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import MLP, WITHOUT_BIAS, Net, captured, conv1d, of_halves, saving, step
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy, Site
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings import recognize
from torch_fused_ops.lowerings.recognize import tiles as edit
from torch_fused_ops.settings import tiles

HIDDEN, FFN = 8, 12


class SwiGLU(harness.SwiGLU):
    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN, bias: bool = False) -> None:
        super().__init__(hidden, ffn, functools.partial(nn.Linear, bias=bias))


def adapted() -> nn.Module:
    """LoRA on both linear layers; the first weight is frozen. Dropouts that do nothing; views between."""

    def body(s: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        h = s.up(rows) + 2 * s.b(s.a(F.dropout(rows, 0.5, training=False)))
        return s.down(F.gelu(h.view(*x.shape[:-1], FFN))) + x  # type: ignore[no-any-return]

    up, down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
    up.weight.requires_grad_(False)
    return Net(body, up=up, down=down, a=WITHOUT_BIAS(HIDDEN, 2), b=WITHOUT_BIAS(2, FFN))


def masked(s: Any, x: Tensor) -> Tensor:
    """Gate and up with the same padding mask, in two forms."""
    pad = x[..., :1] > 0.5
    gate, up = s.mlp.gate(x).masked_fill(pad, 0.0), torch.where(pad, 1.0, s.mlp.up(x))
    return s.mlp.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def normed() -> nn.Module:
    """Two in a row, behind norms."""
    return nn.Sequential(nn.LayerNorm(HIDDEN), SwiGLU(), nn.LayerNorm(HIDDEN), SwiGLU(bias=True))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "swiglu": SwiGLU,
    "gelu": lambda: nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(), nn.Linear(FFN, HIDDEN)),
    "packed": lambda: MLP(HIDDEN, 2 * FFN, of_halves(F.gelu), halves=2),
    "adapted": adapted,
    "conv1d": lambda: conv1d(HIDDEN, FFN),
    "normed": normed,
    # Its tokens in another order: a view that picks as many rows is no other shape of them.
    "reversed": lambda: Net(lambda s, x: s.mlp(x.index_select(1, torch.arange(x.shape[1]).flip(0))), mlp=SwiGLU()),
    "detached": lambda: Net(lambda s, x: x + s.mlp(x.detach()), mlp=SwiGLU()),
    "masked": lambda: Net(masked, mlp=SwiGLU(bias=True)),
    "scaled": lambda: Net(
        lambda s, x: s.b(F.gelu(s.a(x) * x.mean(-1, keepdim=True))), a=nn.Linear(HIDDEN, FFN), b=nn.Linear(FFN, HIDDEN)
    ),
    "relu": lambda: nn.Sequential(nn.Linear(HIDDEN, FFN), nn.ReLU(inplace=True), nn.Linear(FFN, HIDDEN)),
}


def compiled(module: Any, memory: Any = "tiled:3", strict: bool = True, **settings: Any) -> Any:
    return harness.compiled(module, FusionPolicy(memory=memory, strict=strict), fullgraph=True, **settings)


def sites(fn: Callable[..., Any], *args: Any, memory: Any = "tiled:3", **policy: Any) -> tuple[Site, ...]:
    return tfo.explain(fn, *args, policy=FusionPolicy(memory=memory, **policy)).sites


def kept(fn: Callable[..., Any], *args: Any) -> int:
    return saving(lambda: fn(*args))[1]


@pytest.mark.codegen_is_slow
@pytest.mark.covering(every=8)
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_plain_one(name: str, dynamic: bool) -> None:
    module = MODELS[name]().double()
    x = torch.randn(2, 25, HIDDEN, dtype=torch.double)
    assert [site.tiles for site in sites(module, x)] == [3] * len(sites(module, x))
    fn = compiled(module, dynamic=dynamic)
    torch.testing.assert_close(step(fn, module, x), step(module, module, x), rtol=1e-12, atol=1e-12)
    if dynamic:
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in ((2, 31), (5, 16)):
                x = torch.randn(*shape, HIDDEN, dtype=torch.double)
                torch.testing.assert_close(step(fn, module, x), step(module, module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.codegen_is_slow
def test_its_input_is_all_that_is_kept() -> None:
    module, x = SwiGLU(), torch.randn(1000, HIDDEN, requires_grad=True)
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert kept(compiled(module), x) == kept(compiled(module, "input"), x) == x.numel() * 4 + weights
    assert kept(compiled(module, "free"), x) > 3 * x.numel() * 4


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_the_products_are_those_of_input() -> None:
    """Backward's: 4/3 of plain's. Results are not marked: else the residual stream would be made of products again."""
    module, x = normed(), torch.randn(64, HIDDEN, requires_grad=True)

    def flops(memory: str) -> int:
        y = compiled(lambda x: x + module(x), memory)(x).sum()
        with FlopCounterMode(display=False) as counter:
            y.backward()
        return int(counter.get_total_flops())

    assert flops("tiled:2") == flops("input") == flops("free") * 4 // 3


def rounding(x: Tensor, tangent: Tensor, module: nn.Module, memory: str, dtype: torch.dtype | None = None) -> float:
    """How far gradients of the weights are off, in the 2-norm and relative; under autocast to ``dtype``."""

    def gradients(module: nn.Module, fn: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = fn(x)
        grads = torch.autograd.grad(y, list(module.parameters()), tangent.to(y.dtype))
        assert {g.dtype for g in grads} == {p.dtype for p in module.parameters()}
        return torch.cat([g.double().flatten() for g in grads])

    found = gradients(module, compiled(module, memory), x)
    dtype, truth = None, gradients(wide := copy.deepcopy(module).double(), wide, x.double())
    return float((found - truth).norm() / truth.norm())


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("memory, most", (("tiled:8", 1.6), pytest.param("tiled:16", 2.0, marks=pytest.mark.slow)))
def test_sums_over_tiles_are_rounded_to_the_weights_dtype(memory: str, most: float) -> None:
    """In bfloat16 that shows: docs/memory.md says by how much."""
    module, x, tangent = SwiGLU(32, 64).bfloat16(), *torch.randn(2, 1024, 32).bfloat16()
    whole = rounding(x, tangent, module, "input")
    assert 1.2 * whole < rounding(x, tangent, module, memory) < most * whole


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_sums_over_tiles_under_autocast_are_in_float32() -> None:
    module, x, tangent = nn.Sequential(nn.LayerNorm(32), SwiGLU(32, 64)), *torch.randn(2, 1024, 32)
    whole = rounding(x, tangent, module, "input", torch.bfloat16)
    assert rounding(x, tangent, module, "tiled:8", torch.bfloat16) < 1.1 * whole


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_inside_a_checkpoint() -> None:
    module, x = normed().double(), torch.randn(50, HIDDEN, dtype=torch.double)
    fn = compiled(lambda x: x + checkpoint(module, x, use_reentrant=False))
    torch.testing.assert_close(step(fn, module, x), step(lambda x: x + module(x), module, x), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.codegen_is_slow
def test_a_dropout_behind_it_is_of_all_tokens() -> None:
    """The same mask as without tiles: it is a function of the seed and of the element's place."""
    module, x = SwiGLU().double(), torch.randn(50, HIDDEN, dtype=torch.double)
    results = []
    for memory in ("tiled:3", "input"):
        fn = compiled(lambda x: x + F.dropout(module(x), 0.5), memory)
        torch.manual_seed(3)
        results.append(step(fn, module, x))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.codegen_is_slow
def test_a_buffer_that_forward_writes() -> None:
    def counting(s: Any, x: Tensor) -> Tensor:
        y = s.mlp(x + s.scale)
        s.scale.mul_(0.5)
        return y  # type: ignore[no-any-return]

    one, two = (Net(counting, mlp=SwiGLU(), scale=torch.ones(HIDDEN)).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    fn, x = compiled(one), torch.randn(50, HIDDEN, dtype=torch.double)
    for _ in range(2):
        torch.testing.assert_close(step(fn, one, x), step(two, two, x), rtol=1e-12, atol=1e-12)


def through_integers(dtype: torch.dtype, between: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    up, down = (w.detach().to(dtype) for w in weights((FFN, HIDDEN), (HIDDEN, FFN)))
    return lambda x: F.linear(between(F.gelu(F.linear((x * 2).to(dtype), up))), down)


@pytest.mark.codegen_is_slow
def test_a_view_as_another_dtype_is_no_view_of_its_rows() -> None:
    """No gradient flows through one as integers, and one as float16 is of other numbers."""
    x = torch.randn(50, HIDDEN, requires_grad=True)
    fn = through_integers(torch.float32, lambda h: h.view(torch.int32).view(torch.float32))
    assert not fn(x).requires_grad and not compiled(fn, strict=False)(x).requires_grad
    fn = through_integers(torch.bfloat16, lambda h: h.view(torch.float16).bfloat16())
    result, expected = compiled(fn, strict=False)(x), fn(x)
    torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.codegen_is_slow
def test_what_the_caller_writes_under_autocast() -> None:
    """PyTorch keeps a copy in bfloat16 there: the input, and results that are as much, the caller may write."""
    module, x = SwiGLU(), torch.randn(50, HIDDEN)

    def with_its_input(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x * 2
        return module(h), h.view(-1)

    for fn, place in ((lambda x: (module(x), x), 1), (with_its_input, 1)):
        gradients = []
        for way in (fn, compiled(fn, strict=False)):
            given = x.clone()
            with torch.autocast("cpu", torch.bfloat16):
                results = way(given)
            with torch.no_grad():
                results[place].zero_()
            gradients.append(torch.autograd.grad(results[0].float().square().sum(), list(module.parameters())))
        assert all((a - b).norm() < 0.02 * b.norm() for b, a in zip(*gradients, strict=True))


@pytest.mark.codegen_is_slow
def test_hooks_of_a_parameter_run_once() -> None:
    module, x = SwiGLU(), torch.randn(50, HIDDEN)
    calls: list[Tensor] = []
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(calls.append)
    compiled(module)(x).sum().backward()
    assert len(calls) == len(list(module.parameters()))


@pytest.mark.codegen_is_slow
def test_inference_is_whole() -> None:
    module, x = SwiGLU(), torch.randn(50, HIDDEN)
    with torch.no_grad():
        (site,) = sites(module, x)
        assert (site.op, site.tiles, site.tiles_kind) == ("fused::glu", 0, None)
        torch.testing.assert_close(compiled(module)(x), module(x))


@pytest.mark.parametrize(
    "tokens, asked, expected", ((16383, 0, 1), (16384, 0, 2), (65536, 0, 8), (1 << 20, 0, 16), (64, 8, 8), (8, 8, 1))
)
def test_the_number_of_tiles(tokens: int, asked: int, expected: int) -> None:
    assert tiles.tile_count(tokens, asked) == expected


@pytest.mark.parametrize("tokens", (9, 50, 8191, 65536, 100_003))
@pytest.mark.parametrize("count", (2, 3, 8))
def test_tiles_cover_all_tokens(tokens: int, count: int) -> None:
    each, last = tiles.lengths(tokens, count)
    assert each > 0 and (count - 1) * each + last == tokens and each <= last
    if tokens > 1000 * count:
        assert last <= 1.3 * each + 128 * count


def test_the_level_by_module() -> None:
    model = nn.Sequential(SwiGLU(), SwiGLU())
    found = sites(model, torch.randn(50, HIDDEN), memory={"1": "tiled:4", "*": "input"})
    assert {site.module: site.tiles for site in found} == {"0": 0, "1": 4}


def weights(*shapes: tuple[int, int]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def refused(kind: Kind, fn: Callable[[Tensor], Any], shape: tuple[int, ...] = (50, HIDDEN), **policy: Any) -> None:
    """It is fused, and in one piece, for a reason of this kind; what is kept is what "input" keeps."""
    found = [site for site in sites(fn, torch.randn(shape), **policy) if site.tiles_kind is not None]
    assert [site.tiles_kind for site in found] == [kind], found
    assert found[0].op and found[0].tiles == 1


def test_what_is_left_whole() -> None:
    up, down = weights((FFN, HIDDEN), (HIDDEN, FFN))
    linear = F.linear
    refused(Kind.TILE_READER, lambda x: (lambda a: linear(a, down) + a.sum())(F.gelu(linear(x, up))))
    refused(Kind.TILE_READER, lambda x: (lambda h: linear(F.gelu(h), down) + h.sum())(linear(x, up)))
    refused(Kind.TILE_READER, lambda x: (lambda a: linear(a, down) + linear(a, down))(F.gelu(linear(x, up))))
    refused(Kind.TILE_DROPOUT, lambda x: linear(F.dropout(F.gelu(linear(x, up)), 0.1), down))
    refused(Kind.TILE_FORM, lambda x: linear(F.gelu(linear(x, up))[:, 1:], down), (5, 10, HIDDEN))
    refused(Kind.TILE_FORM, lambda x: linear(F.gelu(linear(x, up))[torch.arange(49, -1, -1)], down))
    refused(Kind.TILE_FORM, lambda x: linear(F.gelu(linear(x, up) + x.sum(-1, keepdim=True)), down))
    refused(Kind.TILE_FORM, lambda x: linear(F.silu(linear(x, up)) * linear(x.flip(0), up), down))
    refused(
        Kind.TILE_FORM, lambda x: linear(F.gelu(linear(x, up).masked_fill(x[:1, :, :1] > 0, 0)), down), (5, 10, HIDDEN)
    )
    refused(Kind.TILE_FORM, lambda x: linear(F.gelu(linear(x, up).masked_fill_(x[:, :1] > 0, 0)), down))

    def scaled(x: Tensor) -> Tensor:  # PyTorch does not save the factor: the layer that it scales is frozen
        y = x * 2
        return linear(F.silu(linear(y, up)) * (linear(y, up.detach()) * x[:, :1]), down)

    refused(Kind.TILE_CALLERS, scaled)
    refused(Kind.TILE_FEW, lambda x: linear(F.gelu(linear(x, up)), down), memory="tiled")

    def written(x: Tensor) -> Tensor:
        x = x * 2
        h = linear(x, up)
        x.add_(1)
        return linear(F.gelu(h), down) + x

    refused(Kind.WRITTEN, written)


def test_of_three_linear_layers_in_a_row_the_first_two_are_tiled() -> None:
    sizes = (HIDDEN, FFN, HIDDEN, FFN)
    layers = [one for i in range(3) for one in (nn.Linear(sizes[i], sizes[i + 1]), nn.GELU())][:-1]
    module, x = nn.Sequential(*layers).double(), torch.randn(50, HIDDEN, dtype=torch.double)
    assert [(site.tiles, site.tiles_kind) for site in sites(module, x)] == [(3, None), (1, Kind.TILE_FORM)]


def test_float8_products_come_first() -> None:
    module = SwiGLU(128, 128)
    refused(Kind.TILE_FP8, module, (50, 128), gemm="fp8")


def test_a_miss_is_strict_where_it_is_no_choice() -> None:
    up, down = weights((FFN, HIDDEN), (HIDDEN, FFN))
    x = torch.randn(50, HIDDEN)
    (site,) = (s for s in sites(lambda x: F.linear(F.dropout(F.gelu(F.linear(x, up)), 0.1), down), x) if s.tiles)
    assert site.is_missed and site.tiles_reason == "it contains an active dropout"
    (site,) = sites(SwiGLU(), x, memory="tiled")
    assert not site.is_missed and site.tiles_reason == "50 tokens are too few for two tiles of 8192"


def test_a_failure_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = SwiGLU(), torch.randn(50, HIDDEN)
    _, (gm,) = captured(module, x)
    before = str(gm.graph)
    calls = 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the second tile")
        return original(*args)

    original = edit._written
    monkeypatch.setattr(edit, "_written", fails)
    with pytest.raises(RuntimeError, match="the second tile"):
        recognize.rewrite(gm.graph, FusionPolicy(memory="tiled:3"))
    assert str(gm.graph) == before


def test_a_budget_of_the_users_decides() -> None:
    import torch._functorch.config as functorch_config

    with functorch_config.patch(activation_memory_budget=0.5):
        (site,) = sites(SwiGLU(), torch.randn(50, HIDDEN))
    assert site.tiles == 0 and site.tiles_kind is None
