"""The exact figures this library promises, counted on paper for an H200: saved bytes, kernels, instructions.

Plain Inductor and Inductor with ``activation_memory_budget=0.99`` are counted beside ours, in the same way, so that a
figure of ours is always read against upstream's of the same torch version.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import GELU_TANH, MLP, WITHOUT_BIAS, GeluMLP, Net, Stack, SwiGLU, meta, named, of_halves, on_meta
from torch import Tensor

from torch_fused_ops import FusionPolicy
from torch_fused_ops import functional as FF
from torch_fused_ops.lowerings.passes import compile_options

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

MIB = 1 << 20
TOKENS, WIDTH, FFN = 8192, 4096, 16384
BF16 = torch.bfloat16
fused = torch.ops.fused


# F.glu, and diffusers' GEGLU: up and gate in one tensor, the gate second.
Glu = named("Glu", MLP, activation=F.glu, halves=2, linear=WITHOUT_BIAS)
Packed = named("Packed", MLP, activation=of_halves(F.silu), halves=2)


class LlamaBlock(nn.Module):
    """A Llama-7B block: RMS norm, causal attention, SwiGLU."""

    def __init__(self, width: int = 4096, ffn: int = 11008, heads: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = SwiGLU(width, ffn)

    @staticmethod
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        return weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x, self.norm1)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x, self.norm2))


class LoRA(nn.Module):
    """A SwiGLU MLP of frozen weights, each with an adapter: two GEMMs read the activation."""

    def __init__(self, width: int = WIDTH, ffn: int = FFN, rank: int = 16) -> None:
        super().__init__()
        self.base = SwiGLU(width, ffn).requires_grad_(False)
        self.down = nn.ModuleDict({n: nn.Linear(m.in_features, rank, bias=False) for n, m in self.linears()})
        self.up = nn.ModuleDict({n: nn.Linear(rank, m.out_features, bias=False) for n, m in self.linears()})

    def linears(self) -> list[tuple[str, nn.Linear]]:
        return [(name, module) for name, module in self.base.named_modules() if isinstance(module, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (getattr(self.base, n)(x) + 2 * self.up[n](self.down[n](x)) for n in ("gate", "up"))
        h = F.silu(gate) * up
        return self.base.down(h) + 2 * self.up["down"](self.down["down"](h))


def attention() -> nn.Module:
    """Attention spelled out, with a bias on its scores, and an MLP: T5's."""

    def body(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax((q @ k.transpose(-1, -2) + s.bias).float(), -1).to(x.dtype)
        x = x + s.out((scores @ v).transpose(1, 2).flatten(2))
        return x + s.mlp(x)  # type: ignore[no-any-return]

    members = {"qkv": nn.Linear(512, 3 * 512), "out": nn.Linear(512, 512), "mlp": MLP(512, 2048)}
    return Net(body, bias=nn.Parameter(torch.zeros(8, 512, 512)), **members)


def blocks(mlp: Callable[[int, int], nn.Module], hidden: int) -> nn.Module:
    """Residual blocks: linear layers and MLPs behind norms."""
    layers = ((nn.LayerNorm(512), nn.Linear(512, 512), nn.LayerNorm(512), mlp(512, hidden)) for _ in range(4))
    return Stack((nn.Sequential(*block) for block in layers), residual=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GELU MLP": (lambda: GeluMLP(WIDTH, FFN), (TOKENS, WIDTH)),
    "SwiGLU MLP": (lambda: SwiGLU(WIDTH, FFN), (TOKENS, WIDTH)),
    "Llama-7B block": (LlamaBlock, (4, 2048, 4096)),
    "LoRA": (LoRA, (TOKENS, WIDTH)),
    "dropout": (lambda: MLP(WIDTH, FFN, lambda h: F.dropout(GELU_TANH(h), 0.1)), (TOKENS, WIDTH)),
    "GLU": (lambda: Glu(WIDTH, FFN), (TOKENS, WIDTH)),
    "attention": (attention, (4, 512, 512)),
    "blocks": (lambda: blocks(GeluMLP, 2048), (4, 512, 512)),
    "gated blocks": (lambda: blocks(Packed, 4096), (4, 512, 512)),
    "linear layers": (lambda: nn.Sequential(*(WITHOUT_BIAS(512, 512) for _ in range(4))), (4, 512, 512)),
}
POLICY = FusionPolicy(strict=True)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"memory_budget": 0.99},
    "ours": {"config": compile_options(POLICY)},
    "fp8": {"config": compile_options(FusionPolicy(memory="fp8", strict=True))},
    "input": {"config": compile_options(FusionPolicy(memory="input", strict=True))},
    "free": {"config": compile_options(FusionPolicy())},
    "off": {"config": compile_options(FusionPolicy(memory="off"))},
    "off, budget": {"config": compile_options(FusionPolicy(memory="off")), "memory_budget": 0.99},
    "ours, budget 0": {"config": compile_options(POLICY), "memory_budget": 0.0},
}


@cache
def on_paper(case: str, way: str) -> Any:
    make, shape = CASES[case]
    return virtual_gpu.compile_on_paper(on_meta(make), meta(*shape, requires_grad=True), **WAYS[way])


@pytest.mark.parametrize(
    ("case", "plain", "budget"),
    [
        ("GELU MLP", 576, 320),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("SwiGLU MLP", 832, 576),
                ("Llama-7B block", 1029, 729),
                ("blocks", 96, 48),
                ("gated blocks", 128, 80),
            )
        ),
    ],
)
def test_bytes_saved_for_backward(case: str, plain: int, budget: int) -> None:
    saved = {way: on_paper(case, way).saved_bytes() / MIB for way in ("plain", "budget", "ours")}
    assert round(saved["plain"]) == plain and round(saved["budget"]) == budget
    assert round(saved["ours"]) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("case", ["attention", "blocks", "gated blocks"])
def test_less_work_than_with_the_budget(case: str) -> None:
    """A softmax is kept, as plain torch.compile keeps it; the budget rebuilds it, for more kernels and bytes."""
    plain, budget, ours = (on_paper(case, way) for way in ("plain", "budget", "ours"))
    assert budget.saved_bytes() <= ours.saved_bytes() <= plain.saved_bytes()
    assert len(ours.kernels) <= len(plain.kernels) and ours.bytes_moved < budget.bytes_moved
    if case == "attention":
        scores = [t.nbytes for t in ours.saved if t.shape == (4 * 8, 512, 512)]
        assert scores and ours.saved_bytes() == budget.saved_bytes() + scores[0], (
            "the softmax's result, for its product"
        )


@pytest.mark.parametrize(
    "case",
    ["linear layers", *(pytest.param(c, marks=pytest.mark.slow) for c in ("attention", "blocks", "gated blocks"))],
)
def test_off_is_upstreams_choice(case: str) -> None:
    plain, off = on_paper(case, "plain"), on_paper(case, "off")
    assert off.saved_bytes() == plain.saved_bytes()
    assert len(off.kernels) <= len(plain.kernels)


def test_no_gemm_is_ever_computed_twice() -> None:
    """With the budget one is, so "free" is not made of it. If that fails, upstream has mended it: look again."""
    plain, budget, free = (on_paper("linear layers", way).backward.extern for way in ("plain", "budget", "free"))
    assert sorted(free) == sorted(plain) and len(budget) > len(plain)


@pytest.mark.slow
def test_the_users_budget_wins() -> None:
    assert on_paper("GELU MLP", "ours, budget 0").saved_bytes() < on_paper("GELU MLP", "ours").saved_bytes()
    assert on_paper("GELU MLP", "off, budget").saved_bytes() == on_paper("GELU MLP", "budget").saved_bytes()


def test_operators_called_directly_are_rebuilt_too() -> None:
    """Without any pass: a budget treats our operators as it treats aten's."""

    def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(fused.bias_act(x @ w, None, None, "silu"), v)

    x, w, v = (meta(*s, requires_grad=True) for s in ((64, 32), (32, 128), (32, 128)))
    paper = virtual_gpu.compile_on_paper(mlp, x, w, v, memory_budget=0.99)
    assert not any("bias_act" in s.name for s in paper.saved)


BELOW = {
    "fp8": {"GELU MLP": 192, "SwiGLU MLP": 320, "Llama-7B block": 557, "LoRA": 321, "dropout": 192, "GLU": 192},
    "input": {"GELU MLP": 64, "SwiGLU MLP": 64, "Llama-7B block": 385, "LoRA": 65, "dropout": 64, "GLU": 64},
}


@pytest.mark.covering(1, "level")
@pytest.mark.parametrize("level", BELOW)
@pytest.mark.parametrize("case", BELOW["fp8"])
def test_bytes_saved_below_the_knob(case: str, level: str) -> None:
    """Half of what an activation reads, and scales of 4 bytes a row; or nothing of it, for a GEMM more in backward."""
    free, less = on_paper(case, "ours"), on_paper(case, level)
    assert round(less.saved_bytes() / MIB) == BELOW[level][case]
    again = len(less.backward.extern) - len(free.backward.extern)
    gates = 2 if case in ("SwiGLU MLP", "Llama-7B block") else 4 if case == "LoRA" else 1
    assert again == (gates if level == "input" else 0)
    more = level == "input" and case in ("Llama-7B block", "LoRA")  # what the GEMMs read is made in a kernel of its own
    assert len(less.backward.kernels) <= len(free.backward.kernels) + more
    assert sorted(less.forward.extern) == sorted(free.forward.extern)
    assert len(less.forward.kernels) == len(free.forward.kernels), "the cast is in the activation's own kernel"


@pytest.mark.covering(every=6)
@pytest.mark.parametrize(("case", "plain", "ours"), [("LoRA", 833, 577), ("dropout", 704, 320), ("GLU", 448, 320)])
def test_bytes_saved_with_more_around_the_activation(case: str, plain: int, ours: int) -> None:
    """A second reader, a dropout behind (no mask is kept: its seed is), up and gate packed in one tensor."""
    assert [round(on_paper(case, way).saved_bytes() / MIB) for way in ("plain", "ours")] == [plain, ours]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("GELU MLP", "LoRA") else pytest.mark.slow)
        for case in CASES
        if case != "linear layers"
    ],
)
def test_no_more_kernels_and_every_mlp_is_fused(case: str) -> None:
    ours, plain = on_paper(case, "ours"), on_paper(case, "plain")
    for graph in ("forward", "backward"):
        assert len(getattr(ours, graph).kernels) <= len(getattr(plain, graph).kernels)
        calls = [sorted(name.replace("addmm", "mm") for name in getattr(c, graph).extern) for c in (ours, plain)]
        assert calls[0] == calls[1], "the same GEMMs, an added bias or sum aside, and one draw of all seeds"
        assert "ops.fused" not in getattr(ours, graph).code.split("def call(")[-1]
    assert any("fused" in str(n.target) for n in ours.forward.graph.graph.nodes)


GRAD_OF_INPUT = [True, False, False]


def backward_and_value(activation: str) -> Callable[..., Any]:
    return lambda g, x: (
        fused.bias_act_backward(g, x, None, None, activation, GRAD_OF_INPUT)[0],
        fused.bias_act(x, None, None, activation),
    )


FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {  # and how many tensors they read
    "gelu_tanh": (lambda x: fused.bias_act(x, None, None, "gelu_tanh"), 1),
    "gelu_tanh backward and the value again": (backward_and_value("gelu_tanh"), 2),
    "silu·up": (lambda g, u: fused.glu(g, u, None, "silu"), 2),
    "gelu": (lambda x: fused.bias_act(x, None, None, "gelu"), 1),
    "gelu backward and the value again": (backward_and_value("gelu"), 2),
    "upstream's gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 1),
    "upstream's gelu": (F.gelu, 1),
    "upstream's silu·up": (lambda g, u: F.silu(g) * u, 2),
}


@cache
def instructions(name: str) -> tuple[float, Any]:
    """Instructions per element of the one kernel that a function becomes, 8 elements a thread, and its machine code."""
    fn, inputs = FUNCTIONS[name]
    graph = virtual_gpu.compile_on_paper(fn, *(meta(TOKENS, FFN) for _ in range(inputs)), training=False).inference
    (kernel,) = graph.kernels
    code = virtual_gpu.assemble(kernel)
    return code.instructions_per_element(), code


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("gelu_tanh", 16),
        ("gelu_tanh backward and the value again", 31),
        ("silu·up", 16),
        ("gelu", 24),
        pytest.param("gelu backward and the value again", 32, marks=pytest.mark.slow),
    ],
)
def test_instructions_per_element(name: str, limit: float) -> None:
    count, code = instructions(name)
    assert count <= limit, f"{name}: {count:.1f}"
    assert code.spills == 0


@pytest.mark.parametrize("name", ["gelu_tanh", pytest.param("gelu", marks=pytest.mark.slow), "silu·up"])
def test_fewer_instructions_than_upstream(name: str) -> None:
    assert instructions(name)[0] < instructions(f"upstream's {name}")[0]


def test_blocks_of_gate_and_up_cost_what_halves_do() -> None:
    """One kernel each way, of what is read and written: blocks are read as they lie."""
    paper = virtual_gpu.compile_on_paper(lambda x: FF.bias_swiglu(x, layout=32), meta(256, 1024, requires_grad=True))
    found = [(len(graph.kernels), graph.bytes_moved) for graph in (paper.forward, paper.backward)]
    assert found == [(1, 256 * 1024 * 3), (1, 256 * 1024 * 5)]


@pytest.mark.slow
@pytest.mark.parametrize("column, level", [(0, "off"), (1, "free"), (2, "fp8"), (3, "input"), (3, "tiled")])
def test_the_page_lists_what_each_level_saves(column: int, level: str) -> None:
    """The table of docs/memory.md: tensor, dtype and bytes of Llama-3-8B's MLP."""
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    cells = [row[column] for row in re.findall(r"^\| .+? \| \d+ × \d+ " + r"\| (.+?) " * 4 + r"\|$", page, re.M)]
    stated: Counter[str] = Counter()
    for dtype, size in re.findall(r"(\w+), ([\d.]+) MiB", "\n".join(cells)):
        stated[dtype.replace("bf16", "bfloat16")] += float(size)
    paper = virtual_gpu.compile_on_paper(
        SwiGLU(4096, 14336).to("meta", BF16),
        meta(8192, 4096, requires_grad=True),
        config=compile_options(FusionPolicy(memory=level)),
    )
    counted: Counter[str] = Counter()
    for saved in paper.saved:
        counted[str(saved.dtype).removeprefix("torch.")] += 0 if saved.is_parameter else saved.nbytes / MIB
    assert len(cells) == 5 and {name: round(size, 2) for name, size in counted.items() if size} == dict(stated)
    total = re.findall(r"^\| \*\*sum\*\* \| " + r"\| \*\*(\d+) MiB\*\* " * 4 + r"\|$", page, re.M)[0][column]
    assert int(total) == round(paper.saved_bytes() / MIB)
