"""Saved bytes, kernels and instructions of the code generated for an H200.

Each figure is compared with plain Inductor, and with Inductor under ``activation_memory_budget=0.99``, of the same
torch version.
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
from torch_fused_ops.lowerings.passes import compile_options

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

MIB = 1 << 20
TOKENS, WIDTH, FFN = 8192, 4096, 16384
BF16 = torch.bfloat16
fused = torch.ops.fused


# As in F.glu and diffusers' GEGLU, the gate is the second half of a packed tensor.
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
    """A frozen SwiGLU MLP with an adapter for each weight. Two GEMMs read the activation."""

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
    """Return a model with T5's explicit attention, whose scores have a bias, and an MLP."""

    def body(s: Any, x: Tensor) -> Tensor:
        q, k, v = s.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.softmax((q @ k.transpose(-1, -2) + s.bias).float(), -1).to(x.dtype)
        x = x + s.out((scores @ v).transpose(1, 2).flatten(2))
        return x + s.mlp(x)  # type: ignore[no-any-return]

    members = {"qkv": nn.Linear(512, 3 * 512), "out": nn.Linear(512, 512), "mlp": MLP(512, 2048)}
    return Net(body, bias=nn.Parameter(torch.zeros(8, 512, 512)), **members)


def blocks(mlp: Callable[[int, int], nn.Module], hidden: int) -> nn.Module:
    """Return residual blocks of norms, linear layers and MLPs."""
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
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "budget": {"memory_budget": 0.99},
    "default": {"config": compile_options(POLICY)},
    "fp8": {"config": compile_options(FusionPolicy(memory="fp8", strict=True))},
    "input": {"config": compile_options(FusionPolicy(memory="input", strict=True))},
    "free": {"config": compile_options(FusionPolicy())},
    "off": {"config": compile_options(FusionPolicy(memory="off"))},
    "off, budget": {"config": compile_options(FusionPolicy(memory="off")), "memory_budget": 0.99},
    "default, budget 0": {"config": compile_options(POLICY), "memory_budget": 0.0},
}


@cache
def on_paper(case: str, variant: str) -> Any:
    make, shape = CASES[case]
    return virtual_gpu.compile_on_paper(on_meta(make), meta(*shape, requires_grad=True), **VARIANTS[variant])


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
def test_default_saves_at_most_the_budgets_bytes(case: str, plain: int, budget: int) -> None:
    saved = {variant: on_paper(case, variant).saved_bytes() / MIB for variant in ("plain", "budget", "default")}
    assert round(saved["plain"]) == plain and round(saved["budget"]) == budget
    assert round(saved["default"]) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("case", ["attention", "blocks", "gated blocks"])
def test_default_moves_fewer_bytes_than_the_budget(case: str) -> None:
    """The default saves a softmax's result, like plain torch.compile. The budget recomputes it."""
    plain, budget, fused_paper = (on_paper(case, variant) for variant in ("plain", "budget", "default"))
    assert budget.saved_bytes() <= fused_paper.saved_bytes() <= plain.saved_bytes()
    assert len(fused_paper.kernels) <= len(plain.kernels) and fused_paper.bytes_moved < budget.bytes_moved
    if case == "attention":
        scores = [t.nbytes for t in fused_paper.saved if t.shape == (4 * 8, 512, 512)]
        assert scores and fused_paper.saved_bytes() == budget.saved_bytes() + scores[0], (
            "the softmax's result, which its GEMM reads"
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["linear layers", "attention", "blocks", "gated blocks"])
def test_off_saves_the_same_bytes_as_plain(case: str) -> None:
    plain, off = on_paper(case, "plain"), on_paper(case, "off")
    assert off.saved_bytes() == plain.saved_bytes()
    assert len(off.kernels) <= len(plain.kernels)


@pytest.mark.slow
def test_free_recomputes_no_gemm() -> None:
    """The budget recomputes a GEMM. If this fails, PyTorch has fixed that: reconsider how "free" works."""
    papers = [on_paper("linear layers", variant) for variant in ("plain", "budget", "free")]
    plain, budget, free = (paper.backward.extern for paper in papers)
    assert sorted(free) == sorted(plain) and len(budget) > len(plain)


@pytest.mark.slow
def test_the_users_budget_takes_precedence() -> None:
    assert on_paper("GELU MLP", "default, budget 0").saved_bytes() < on_paper("GELU MLP", "default").saved_bytes()
    assert on_paper("GELU MLP", "off, budget").saved_bytes() == on_paper("GELU MLP", "budget").saved_bytes()


def test_a_budget_recomputes_fused_operators_without_passes() -> None:

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
def test_levels_save_fewer_bytes_than_the_default(case: str, level: str) -> None:
    """ "fp8" saves half of an activation's input and 4 bytes per row; "input" saves none, but repeats GEMMs."""
    free, level_paper = on_paper(case, "default"), on_paper(case, level)
    assert round(level_paper.saved_bytes() / MIB) == BELOW[level][case]
    repeated_gemms = len(level_paper.backward.extern) - len(free.backward.extern)
    gates = 2 if case in ("SwiGLU MLP", "Llama-7B block") else 4 if case == "LoRA" else 1
    assert repeated_gemms == (gates if level == "input" else 0)
    extra = level == "input" and case in ("Llama-7B block", "LoRA")  # a kernel recomputes the GEMMs' inputs
    assert len(level_paper.backward.kernels) <= len(free.backward.kernels) + extra
    assert sorted(level_paper.forward.extern) == sorted(free.forward.extern)
    bias_copies = level == "input" and case in ("GELU MLP", "dropout")
    assert len(level_paper.forward.kernels) == len(free.forward.kernels) + bias_copies, "the activation's kernel casts"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "plain", "default"), [("LoRA", 833, 577), ("dropout", 704, 320), ("GLU", 448, 320)])
def test_adapters_dropout_and_packed_glu_save_fewer_bytes(case: str, plain: int, default: int) -> None:
    """A dropout saves its seed instead of its mask."""
    assert [round(on_paper(case, variant).saved_bytes() / MIB) for variant in ("plain", "default")] == [plain, default]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "GELU MLP" else pytest.mark.slow)
        for case in CASES
        if case != "linear layers"
    ],
)
def test_fusion_adds_no_kernels_or_gemms(case: str) -> None:
    fused_paper, plain = on_paper(case, "default"), on_paper(case, "plain")
    for graph in ("forward", "backward"):
        assert len(getattr(fused_paper, graph).kernels) <= len(getattr(plain, graph).kernels)
        calls = [sorted(name.replace("addmm", "mm") for name in getattr(c, graph).extern) for c in (fused_paper, plain)]
        assert calls[0] == calls[1], "the same GEMMs, except for added biases and sums, and one draw of all seeds"
        assert "ops.fused" not in getattr(fused_paper, graph).code.split("def call(")[-1]
    assert any("fused" in str(n.target) for n in fused_paper.forward.graph.graph.nodes)


# fused, PyTorch, number of inputs, upper limit of fused's instructions per element
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int, int]] = {
    "gelu_tanh": (lambda x: fused.bias_act(x, None, None, "gelu_tanh"), GELU_TANH, 1, 15),
    "gelu": (lambda x: fused.bias_act(x, None, None, "gelu"), F.gelu, 1, 23),
    "silu·up": (lambda g, u: fused.glu(g, u, None, "silu"), lambda g, u: F.silu(g) * u, 2, 16),
}


@pytest.mark.parametrize(
    "name", ["gelu_tanh", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gelu", "silu·up"))]
)
def test_fused_operators_take_fewer_instructions_than_pytorchs(name: str) -> None:
    *functions, inputs, limit = FUNCTIONS[name]
    counts = []
    for fn in functions:
        paper = virtual_gpu.compile_on_paper(fn, *(meta(TOKENS, FFN) for _ in range(inputs)), training=False)
        (kernel,) = paper.inference.kernels
        code = virtual_gpu.assemble(kernel)
        assert code.spills == 0
        counts.append(code.instructions_per_element())
    assert counts[0] <= limit < counts[1]


def test_packed_gate_and_up_take_one_kernel_in_each_direction() -> None:
    x = meta(256, 1024, requires_grad=True)
    paper = virtual_gpu.compile_on_paper(lambda x: fused.bias_glu(x, None, None, "silu"), x)
    counted = [(len(graph.kernels), graph.bytes_moved) for graph in (paper.forward, paper.backward)]
    assert counted == [(1, 256 * 1024 * 3), (1, 256 * 1024 * 5)]


@pytest.mark.slow
@pytest.mark.parametrize("column, level", [(0, "off"), (1, "free"), (2, "fp8"), (3, "input"), (3, "tiled")])
def test_the_page_lists_saved_tensors_of_each_level(column: int, level: str) -> None:
    """Check the table of docs/memory.md: tensors, dtypes and bytes of Llama-3-8B's MLP."""
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
