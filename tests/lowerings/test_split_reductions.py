"""A gradient's kernel also sums the gradient for a bias: bytes, kernels, numbers, and unsupported sums."""

from collections.abc import Callable, Sequence
from typing import Any

import harness
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import torch_fused_ops as tfo
from torch_fused_ops.lowerings import split_reductions

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

BF16 = torch.bfloat16
fused = torch.ops.fused
TOKENS = 8192

GELU = harness.named("GELU", harness.GeluMLP, 64)
SwiGLU = harness.named("SwiGLU", harness.SwiGLU, 64, linear=nn.Linear)


def backward(
    model: Callable[[int], nn.Module],
    width: int = 3072,
    rows: Sequence[int] = (TOKENS,),
    memory: str | None = "free",
    **settings: Any,
) -> Any:
    """Return a step's backward graph. If ``memory`` is None, compile without fusion."""
    config = settings | ({} if memory is None else tfo.compile_options(tfo.FusionPolicy(memory=memory, strict=True)))
    x = torch.empty(*rows, 64, dtype=BF16, device="meta", requires_grad=True)
    return virtual_gpu.compile_on_paper(harness.on_meta(model, width), x, config=config).backward


def moved(graph: Any, elements: int) -> list[float]:
    """Return bytes per hidden element, for the activation's kernel and for the last kernel, which adds the blocks."""
    (computed,) = [k for k in graph.kernels if "backward" in k.name]
    return [k.bytes_moved / elements for k in (computed, graph.kernels[-1])]


@pytest.mark.parametrize(
    ("model", "rows", "memory", "nbytes"),
    [
        (GELU, (8, 1024), "free", 8),
        pytest.param(GELU, (TOKENS,), "off", 6, marks=pytest.mark.slow),
        pytest.param(GELU, (16, 1024), "off", 6, marks=pytest.mark.slow),  # Inductor has 43 blocks of 382 rows
        pytest.param(GELU, (3, 1000), "off", 6, marks=pytest.mark.slow),
        pytest.param(GELU, (TOKENS,), "fp8", 7, marks=pytest.mark.slow),
        pytest.param(GELU, (TOKENS,), "input", 8, marks=pytest.mark.slow),
        pytest.param(SwiGLU, (TOKENS,), "off", 10, marks=pytest.mark.slow),
        pytest.param(SwiGLU, (TOKENS,), "free", 12, marks=pytest.mark.slow),
    ],
)
def test_summands_are_not_read_again(
    model: Callable[[int], nn.Module], rows: tuple[int, ...], memory: str, nbytes: int
) -> None:
    """Bytes are per element, for incoming gradients, data, their gradients, recomputed values and sums of blocks."""
    graph = backward(model, rows=rows, memory=memory)
    kernel, sums = moved(graph, torch.Size(rows).numel() * 3072)
    assert nbytes < kernel < nbytes + 0.07 and sums < 0.07


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["off", "free"])
@pytest.mark.parametrize("model", [GELU, SwiGLU])
def test_gradients_stay_in_gemm_epilogues(model: Callable[[int], nn.Module], memory: str) -> None:
    """With Inductor's templates, the GEMM before the activation computes d in its epilogue, which saves more bytes."""
    activation_gradient, fused_graph = (
        backward(model, memory=level, **harness.GEMM_TEMPLATES) for level in (None, memory)
    )
    kinds = [sorted(k.name.split("_")[1] for k in graph.kernels) for graph in (activation_gradient, fused_graph)]
    assert kinds[0] == kinds[1]
    assert fused_graph.bytes_moved <= activation_gradient.bytes_moved + (2 * TOKENS * 3072 if memory == "free" else 0)


@pytest.mark.parametrize(("columns", "kernels"), [(8440, 3), (8448, 1)])
def test_the_bound_is_the_same_as_in_inductor(columns: int, kernels: int) -> None:
    """Below the bound, a kernel writes the summand and two kernels sum it. From the bound on, one kernel does both."""

    def summed(x: Tensor) -> tuple[Tensor, Tensor]:
        d = x * x.sin()
        return d @ d.t(), d.sum(0)

    x = torch.empty(TOKENS, columns, dtype=BF16, device="meta")
    assert len(virtual_gpu.compile_on_paper(summed, x, training=False).inference.kernels) == kernels
    with virtual_gpu.described(virtual_gpu.H200):
        actual = split_reductions.rows_of_a_block(TOKENS, columns, torch.device("cuda", 0))
    assert (actual is None) == (kernels == 1)


def test_rows_per_block() -> None:
    with virtual_gpu.described(virtual_gpu.H200):
        cuda = torch.device("cuda", 0)
        assert split_reductions.rows_of_a_block(TOKENS, 3072, cuda) == 128
        assert split_reductions.rows_of_a_block(16384, 3072, cuda) == 256
        assert split_reductions.rows_of_a_block(3000, 3072, cuda) == 125
        few_or_prime = [split_reductions.rows_of_a_block(rows, 3072, cuda) for rows in (0, 1, 32, 64, 8191)]
        assert few_or_prime == [None] * 5
        assert split_reductions.rows_of_a_block(TOKENS, 3072, torch.device("cpu")) is None


SILU = {"activation": "silu", "up_offset": 0.0, "clamp": None, "output_mask": [True, False, False]}


def step(x: Tensor, g: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    d, d_bias, _ = fused.bias_act_backward(g, x, bias, None, "gelu", [True, True, False])
    y = fused.bias_act(x, bias, None, "gelu")
    flat = d.reshape(-1, x.shape[-1])
    layouts, joined = ("halves", "interleaved"), torch.cat((x, g), -1)
    packed = [fused.bias_glu_backward(g, joined, None, None, layout=layout, **SILU)[0] for layout in layouts]
    sums = [t.flatten(0, -2).sum(0) for t in packed]
    return d, d_bias, y, flat.sum(0), flat.sum([0], keepdim=True), d.sum(-1), *packed, *sums


@pytest.fixture
def blocks_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_reductions, "rows_of_a_block", lambda rows, columns, device: 8)


@pytest.mark.parametrize("leading", [(64,), (2, 32)])
@pytest.mark.usefixtures("blocks_of_8")
def test_the_rewritten_graph_is_equivalent(leading: tuple[int, ...]) -> None:
    from torch_fused_ops.lowerings.operators import ROWS_PER_BLOCK_KEY  # not earlier: it imports Inductor's lowerings

    args = [torch.randn(s, dtype=torch.float64) for s in ((*leading, 24), (*leading, 24), (24,))]
    gm = make_fx(step, tracing_mode="fake")(*args)
    assert split_reductions.rewrite(gm.graph) == 3
    gm.graph.lint()
    gm.recompile()
    marked = [n.target for n in gm.graph.nodes if ROWS_PER_BLOCK_KEY in n.meta]
    assert marked == [fused.bias_act_backward.default, fused.bias_act.default] + 2 * [fused.bias_glu_backward.default]
    sums = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert [n.args[1] for n in sums] == [[1], [0], [1], [0], [-1]]
    torch.testing.assert_close(gm(*args), step(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("blocks_of_8")
@pytest.mark.parametrize("vectors", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_loops_over_blocks_are_equivalent(vectors: int | None) -> None:
    """Without vector instructions gcc takes a sixth of the time."""
    args = [torch.randn(s, dtype=torch.float64) for s in ((2, 32, 24), (2, 32, 24), (24,))]
    options = tfo.compile_options(tfo.FusionPolicy(strict=True), {"cpp.simdlen": vectors})
    actual = torch.compile(step, options=options)(*args)
    torch.testing.assert_close(actual, step(*args), rtol=1e-12, atol=1e-12)


# Sums of bias gradients of two tiles, in which only the first has no other addend.
ADDED: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda s, t, v: s + t,
    lambda s, t, v: (v + 1.5) + s + t,
    lambda s, t, v: torch.add(s, t, alpha=3) + s,
    lambda s, t, v: s + v + t,
]


def test_sums_of_tiles_are_joined() -> None:
    def program(v: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        def gradient(t: Tensor) -> Tensor:
            d: Tensor = fused.bias_act_backward(t, t, None, None, "gelu", [True, False, False])[0]
            return d.sum(0)

        return [added(gradient(x + i), gradient(y - i), v) for i, added in enumerate(ADDED)]

    args = torch.randn(48), torch.randn(64, 48), torch.randn(64, 48)
    paper = virtual_gpu.compile_on_paper(program, *args, training=False, config=tfo.compile_options(tfo.FusionPolicy()))
    assert str(paper.inference.graph.graph).count("aten.cat.default") == 1
    actual, _ = virtual_gpu.interpret_step(paper, args)
    torch.testing.assert_close(list(actual), program(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("blocks_of_8")
def test_unsupported_sums_do_not_change() -> None:
    """The pass rejects graphs without sums over rows, with sums along rows, and with symbolic sizes."""

    def count(fn: Any, *shapes: tuple[int, ...], mode: str = "fake") -> int:
        gm = make_fx(fn, tracing_mode=mode)(*(torch.randn(s) for s in shapes))
        return split_reductions.rewrite(gm.graph)

    def gradients_with(mask: list[bool], scale: bool = False) -> Any:
        return lambda g, x, b, s: fused.bias_act_backward(g, x, b, s if scale else None, "gelu", mask)

    def activation_gradient(g: Tensor, x: Tensor) -> Tensor:
        d: Tensor = fused.bias_act_backward(g, x, None, None, "gelu", [True, False, False])[0]
        return d

    matrix = (64, 8)
    assert count(gradients_with([True, True, False]), matrix, matrix, (8,), (64,)) == 1
    assert count(gradients_with([True, False, False]), matrix, matrix, (8,), (64,)) == 0
    assert count(gradients_with([True, True, True], True), matrix, matrix, (8,), (64,)) == 0
    assert count(lambda g, x: activation_gradient(g, x).sum(0), matrix, matrix) == 1
    assert count(lambda g, x: activation_gradient(g, x).sum(1), matrix, matrix) == 0
    assert count(lambda g, x: activation_gradient(g, x).sum(), matrix, matrix) == 0
    assert count(lambda g, x: activation_gradient(g, x).sum(0), matrix, matrix, mode="symbolic") == 0

    def before_dropout(g: Tensor, x: Tensor) -> Tensor:
        dropped = fused.dropout_add_backward(g, torch.zeros(1, dtype=torch.int64), 0.5, g.dtype, None, [True, False])[0]
        return activation_gradient(dropped, x).sum(0)

    assert count(before_dropout, matrix, matrix) == 0
