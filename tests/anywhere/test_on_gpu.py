"""Fused MLPs run on a GPU at every memory level, with and without CUDA graphs, and are compared with float64.

The reference is eager PyTorch in float64 on the CPU, so no kernel is compared with itself. Without a GPU its cases are
skipped. A few cases run on the CPU with interpreted graphs, so that the tests are known to work without a GPU.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import GELU_TANH, MLP, SwiGLU
from torch import Tensor, nn

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
    """The MLP between our dropout, with a fixed seed, and a dropout whose zeros show its mask."""

    seed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seed", torch.tensor([-3141592653589793238]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(FF.dropout_add(x, None, x, seed=self.seed, p=P))
        return F.dropout(y, P, self.training) if mask is None else y * mask / (1 - P)


class Attention(GELU):
    """Attention with our softmax, then the MLP."""

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
# Both modes, and every level except "free", which this file's other tests use.
ON_CPU = [("gelu", "fp8", "default"), ("swiglu", "input", "reduce-overhead"), ("dropout", "off", "default")]


def on(device: str, *values: Any, slow: bool = False) -> Any:
    """Return a case for a device. On the CPU, graphs are interpreted."""
    marks = [pytest.mark.skipif(device == "cuda" and not torch.cuda.is_available(), reason="needs a GPU")]
    marks += [pytest.mark.slow] * slow
    how = "interpreted" if device == "cpu" else "generated"
    return pytest.param(how, device, *values, marks=marks, id="-".join((device, *map(str, values))))


def on_devices(
    *names: str, gpu: list[tuple[Any, ...]], cpu: list[tuple[Any, ...]], slow: bool = False
) -> Callable[[Any], Any]:
    cases = [*(on("cuda", *case) for case in gpu), *(on("cpu", *case, slow=slow) for case in cpu)]
    return pytest.mark.parametrize(("inductor_code", "device", *names), cases, indirect=["inductor_code"])


def inputs(rows: int, device: str) -> list[Tensor]:
    """Return an input and an output gradient, drawn on the CPU so that all devices get the same numbers."""
    return [torch.randn(rows, WIDTH).to(BF16).to(device) for _ in range(2)]


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor, tangent: Tensor, *args: Tensor) -> list[Tensor]:
    """Return copies of the result and all gradients, since CUDA graphs overwrite them."""
    leaf = x.detach().clone().requires_grad_()
    out = run(leaf, *args)
    gradients = torch.autograd.grad(out, [leaf, *model.parameters()], tangent.to(out.dtype))
    return [t.detach().clone() for t in (out, *gradients)]


def exact(model: nn.Module, x: Tensor, tangent: Tensor, *args: Tensor) -> list[Tensor]:
    """Return the step's result and gradients in float64 on the CPU."""
    double = copy.deepcopy(model).cpu().double()
    return step(double, double, *(t.cpu().double() for t in (x, tangent, *args)))


def assert_exact(actual: list[Tensor], expected: list[Tensor], memory: str, gemm: str = "bf16") -> None:
    allowed = max(harness.LIMIT[BF16], *(ways.LOOSE.get(way, 0.0) for way in (f"fused-{memory}", f"gemm-{gemm}")))
    assert harness.relative_error([t.cpu() for t in actual], expected) <= allowed


def check(
    name: str,
    memory: str,
    mode: str,
    device: str,
    rows: tuple[int, ...] = (ROWS,) * 3,
    gemm: str = "bf16",
    **settings: Any,
) -> None:
    """Check steps with different inputs. With CUDA graphs, the first step warms up, one records, the last replays."""
    model = MODELS[name]().to(BF16).to(device)
    compiled = ways.ours(memory, mode, gemm=gemm)(model, fullgraph=True, **settings)
    for count in rows:
        x, tangent = inputs(count, device)
        torch.compiler.cudagraph_mark_step_begin()
        actual = step(compiled, model, x, tangent)
        mask = [(actual[0] != 0).to(BF16)] if name == "dropout" else []
        if mask:
            assert abs(float(mask[0].float().mean()) - (1 - P)) < 0.02
        assert_exact(actual, exact(model, x, tangent, *mask), memory, gemm)


@on_devices(
    "name", "memory", "mode", gpu=[(n, memory, mode) for n in MODELS for memory in MEMORY for mode in MODES], cpu=ON_CPU
)
def test_a_training_step_is_right(inductor_code: None, device: str, name: str, memory: str, mode: str) -> None:
    check(name, memory, mode, device, dynamic=False)


@on_devices(
    "name",
    "memory",
    "mode",
    gpu=[(name, memory, mode) for name in ("gelu", "swiglu", "glu") for memory in MEMORY for mode in MODES],
    cpu=[("glu", "free", "default")],
    slow=True,
)
def test_float8_gemms_are_right(inductor_code: None, device: str, name: str, memory: str, mode: str) -> None:
    check(name, memory, mode, device, rows=(ROWS, 200, 200), gemm="fp8", dynamic=False)


@on_devices("name", gpu=[("gelu",)], cpu=[("gelu",)], slow=True)
def test_max_autotune_is_right(inductor_code: None, device: str, name: str) -> None:
    check(name, "free", variants.AUTOTUNE, device, dynamic=False)


@on_devices("name", "memory", gpu=[("gelu", "free"), ("swiglu", "fp8"), ("glu", "input")], cpu=[("gelu", "free")])
def test_dynamic_batches_are_right(inductor_code: None, device: str, name: str, memory: str) -> None:
    check(name, memory, "default", device, rows=(ROWS, 200, 8), dynamic=True)
