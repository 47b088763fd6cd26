"""Picked-up MLPs compiled for a GPU and run there: every memory level, with and without CUDA graphs, against float64.

float64 is eager PyTorch's on the CPU, so nothing is compared with a kernel of its own kind. Where there is no GPU its
cases are skipped, and a few run on the CPU, their graphs interpreted: that the tests themselves are right is then known
before there is a GPU to run them on.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH, MLP, SwiGLU
from torch import Tensor, nn

from torch_fused_ops import FusionPolicy
from torch_fused_ops import functional as FF
from torch_fused_ops.benchmarks import harness, variants, ways
from torch_fused_ops.policy import MEMORY

ROWS, WIDTH, HIDDEN, HEADS = 384, 256, 1024, 4
BF16 = torch.bfloat16
P = 0.25


class GELU(MLP):
    def __init__(self) -> None:
        super().__init__(WIDTH, HIDDEN, GELU_TANH)


class Dropout(GELU):
    """A dropout at the end whose mask its zeros show, and ours, with a seed that stays, around the MLP."""

    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seed", torch.tensor([-3141592653589793238]))

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        y = super().forward(FF.dropout_add(x, None, x, seed=self.seed, p=P))
        return F.dropout(y, P, self.training) if kept is None else y * kept / (1 - P)


class Attention(GELU):
    """Scores, masked softmax and values in front of the MLP."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(0, 1)
        scores = heads @ heads.mT
        weights = FF.scaled_masked_softmax(scores, scale=(WIDTH // HEADS) ** -0.5, causal=True)
        return super().forward(x + (weights @ heads).transpose(0, 1).flatten(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gelu": GELU,
    "swiglu": lambda: SwiGLU(WIDTH, HIDDEN),
    "glu": lambda: MLP(WIDTH, 2 * HIDDEN, F.glu, halves=2),
    "dropout": Dropout,
    "softmax": Attention,
}
MODES = ("default", "reduce-overhead")
# One of each mode, and of the levels but "free", which other tests of this file have.
ON_CPU = [("gelu", "fp8", "default"), ("swiglu", "input", "reduce-overhead"), ("dropout", "off", "default")]


def on(device: str, *values: Any, slow: bool = False) -> Any:
    """A case of a device: on the CPU its graphs are interpreted."""
    marks = [pytest.mark.skipif(device == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")]
    marks += [pytest.mark.slow] * slow
    how = "interpreted" if device == "cpu" else "generated"
    return pytest.param(how, device, *values, marks=marks, id="-".join((device, *map(str, values))))


def everywhere(
    *names: str, gpu: list[tuple[Any, ...]], cpu: list[tuple[Any, ...]], slow: bool = False
) -> Callable[[Any], Any]:
    cases = [*(on("cuda", *case) for case in gpu), *(on("cpu", *case, slow=slow) for case in cpu)]
    return pytest.mark.parametrize(("inductor_code", "device", *names), cases, indirect=["inductor_code"])


def inputs(rows: int, device: str) -> list[Tensor]:
    """An input and the gradient that comes in; drawn on the CPU, so that they are the same everywhere."""
    return [torch.randn(rows, WIDTH).to(BF16).to(device) for _ in range(2)]


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor, tangent: Tensor, *more: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and of each parameter; copies, as CUDA graphs write them again."""
    leaf = x.detach().clone().requires_grad_()
    out = run(leaf, *more)
    gradients = torch.autograd.grad(out, [leaf, *model.parameters()], tangent.to(out.dtype))
    return [t.detach().clone() for t in (out, *gradients)]


def exact(model: nn.Module, x: Tensor, tangent: Tensor, *more: Tensor) -> list[Tensor]:
    """The same in float64 on the CPU."""
    double = copy.deepcopy(model).cpu().double()
    return step(double, double, *(t.cpu().double() for t in (x, tangent, *more)))


def assert_exact(found: list[Tensor], wanted: list[Tensor], memory: str, gemm: str = "bf16") -> None:
    allowed = max(harness.LIMIT[BF16], *(ways.LOOSE.get(way, 0.0) for way in (f"fused-{memory}", f"gemm-{gemm}")))
    assert harness.relative_error([t.cpu() for t in found], wanted) <= allowed


def check(
    name: str,
    memory: str,
    mode: str,
    device: str,
    rows: tuple[int, ...] = (ROWS,) * 3,
    gemm: str = "bf16",
    **settings: Any,
) -> None:
    """Steps of a model, each of other inputs; with CUDA graphs the first warms up, one records, the last replays."""
    model = MODELS[name]().to(BF16).to(device)
    compiled = ways.ours(memory, mode, gemm=gemm)(model, fullgraph=True, **settings)
    for count in rows:
        x, tangent = inputs(count, device)
        torch.compiler.cudagraph_mark_step_begin()
        found = step(compiled, model, x, tangent)
        kept = [(found[0] != 0).to(BF16)] if name == "dropout" else []
        if kept:
            assert abs(float(kept[0].float().mean()) - (1 - P)) < 0.02
        assert_exact(found, exact(model, x, tangent, *kept), memory, gemm)


@everywhere(
    "name", "memory", "mode", gpu=[(n, memory, mode) for n in MODELS for memory in MEMORY for mode in MODES], cpu=ON_CPU
)
def test_a_training_step(inductor_code: None, device: str, name: str, memory: str, mode: str) -> None:
    check(name, memory, mode, device, dynamic=False)


@everywhere(
    "name",
    "memory",
    "mode",
    gpu=[(name, memory, mode) for name in ("gelu", "swiglu", "glu") for memory in MEMORY for mode in MODES],
    cpu=[("glu", "free", "default")],
    slow=True,
)
def test_products_in_float8(inductor_code: None, device: str, name: str, memory: str, mode: str) -> None:
    check(name, memory, mode, device, rows=(ROWS, 200, 200), gemm="fp8", dynamic=False)


@everywhere("name", gpu=[("gelu",)], cpu=[("gelu",)], slow=True)
def test_max_autotune(inductor_code: None, device: str, name: str) -> None:
    check(name, "free", variants.AUTOTUNE, device, dynamic=False)


@everywhere("name", "memory", gpu=[("gelu", "free"), ("swiglu", "fp8"), ("glu", "input")], cpu=[("gelu", "free")])
def test_one_program_for_all_batches(inductor_code: None, device: str, name: str, memory: str) -> None:
    check(name, memory, "default", device, rows=(ROWS, 200, 8), dynamic=True)


@everywhere("name", gpu=[("swiglu",)], cpu=[("swiglu",)])
def test_a_wrong_result_is_found(inductor_code: None, device: str, name: str) -> None:
    model = MODELS[name]().to(BF16).to(device)
    x, tangent = inputs(8, device)
    wanted = exact(model, x, tangent)
    assert_exact(wanted, wanted, "off")
    wrong = [*wanted[:-1], wanted[-1] * 1.05]
    with pytest.raises(AssertionError):
        assert_exact(wrong, wanted, "off")
    assert FusionPolicy().memory in MEMORY
