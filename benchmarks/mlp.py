"""Training steps of GELU and SwiGLU MLPs: ``bench mlp``.

A step is forward, and backward to input and weights. In addition to the variants of ``ways``, *gemms* runs only the
MLP's GEMMs, a lower bound for any fusion.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_fused_ops.virtual_gpu.roofline import Work

from . import models, ways
from .harness import DTYPES, Case, Device, Plan, Trial, sets_of

MLPS: dict[str, Callable[[int, int], nn.Module]] = {"gelu_tanh": models.GELUMLP, "swiglu": models.SwiGLUMLP}


@dataclass(frozen=True)
class Size:
    """Rows and width of the input, and the hidden width, which is by default 4 times the input's width."""

    tokens: int
    width: int
    hidden: int

    @staticmethod
    def of(numbers: Sequence[int]) -> Size:
        tokens, width, *hidden = numbers
        return Size(tokens, width, hidden[0] if hidden else 4 * width)

    def __str__(self) -> str:
        return f"{self.tokens}×{self.width}→{self.hidden}"


SHAPE = "TOKENSxWIDTH or TOKENSxWIDTHxHIDDEN, e.g. 8192x4096 or 8192x4096x14336"
QUICK = [Size(32, 128, 256)]  # float8 GEMMs need multiples of 128
CPU_SIZES = [Size(256, 256, 1024), Size(1024, 512, 2048), Size(2048, 1024, 4096)]
CUDA_SIZES = [Size.of(s) for s in (
    (8192, 4096), (8192, 1024), (16384, 2048), (2048, 8192), (65536, 1024), (256, 512), (2048, 16384, 32768),
)]  # fmt: skip
OTHER_DTYPES = {torch.float16: [Size.of((8192, 2048))], torch.float32: [Size.of((4096, 1024))]}


def build(
    mlp: str, size: Size, dtype: torch.dtype, device: Device, sets: int, seed: int
) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """Return the MLP, inputs, and output gradients. Activations are of order 1."""
    generator = torch.Generator(device=device.where).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device.where).to(dtype)

    with torch.device(device.where):
        module = MLPS[mlp](size.width, size.hidden).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(normal(*p.shape))
            if p.dim() == 2:
                p.div_(math.sqrt(p.shape[1]))
    inputs = [normal(size.tokens, size.width).requires_grad_() for _ in range(sets)]
    tangents = [normal(size.tokens, size.width) for _ in range(sets)]
    return module, inputs, tangents


def truth(module: nn.Module, x: Tensor, tangent: Tensor) -> Callable[[], list[Tensor]]:
    """Return a function that computes the step in float64."""

    def compute() -> list[Tensor]:
        doubled = copy.deepcopy(module).double()
        leaves = [x.detach().double().requires_grad_(), *doubled.parameters()]
        out = doubled(leaves[0])
        return [out.detach(), *torch.autograd.grad(out, leaves, tangent.double())]

    return compute


def gemms(mlp: str, size: Size, dtype: torch.dtype, device: Device) -> Trial:
    """Return a trial of only a step's GEMMs, which write into preallocated tensors."""
    t, w, h = size.tokens, size.width, size.hidden

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device.where).to(dtype)

    into, out = normal(t, w), normal(t, h)  # the input and the hidden tensor, or their gradients
    first, second = normal(h, w), normal(w, h)
    result, inner = torch.empty_like(into), torch.empty_like(out)
    d_first, d_second = torch.empty_like(first), torch.empty_like(second)
    firsts = 2 if mlp == "swiglu" else 1
    products = [(into, first.t(), inner)] * firsts + [(out, second.t(), result)]
    products += [(into, second, inner), (into.t(), out, d_second)]
    products += [(out, first, result), (out.t(), into, d_first)] * firsts

    def run(_: int) -> list[Tensor]:
        with torch.no_grad():
            for a, b, c in products:
                torch.mm(a, b, out=c)
        return []

    return Trial(run, lambda i: i)


def works(mlp: str, size: Size, dtype: torch.dtype, way: str) -> list[Work]:
    """Return the least work of a variant's kernels: GEMMs, and one pass over the hidden tensors in each direction.

    Level "off" saves as much as ``torch.compile``. At other levels, backward also writes the activation. "fp8" writes
    and reads the activation's inputs in one byte each, and "input" recomputes the first GEMMs. Bias gradients are not
    counted, as all variants compute them.
    """
    level = way.removeprefix("fused-") if way.startswith("fused-") else "off"
    firsts, number, elements = (2 if mlp == "swiglu" else 1), dtype.itemsize, size.tokens * size.hidden
    product = Work(flop=2.0 * size.tokens * size.width * size.hidden)
    kernels = [product] * (firsts + 1)
    fp8 = level == "fp8"
    kernels.append(Work(nbytes=elements * ((firsts + 1) * number + (firsts if fp8 else 0))))
    kernels += [product] * (2 * (firsts + 1) + (firsts if level == "input" else 0))
    saved = 1 if fp8 else number
    recomputed = 0 if level == "off" else number
    kernels.append(Work(nbytes=elements * (number + firsts * (saved + number) + recomputed)))
    return kernels


def case(mlp: str, size: Size, dtype: torch.dtype, device: Device, plan: Plan) -> Case:
    """Return the case of a training step."""
    sets = sets_of(device, size.tokens * size.width * dtype.itemsize * 2, most=8)
    module, inputs, tangents = build(mlp, size, dtype, device, sets, plan.seed)
    xs = [(x,) for x in inputs]
    trials: dict[str, Callable[[], Trial]] = {
        name: ways.training(name, module, xs, tangents, fullgraph=True, dynamic=False) for name in ways.COMPILED
    }
    trials["gemms"] = functools.partial(gemms, mlp, size, dtype, device)
    return Case(
        name_of(mlp, size, dtype),
        {"mlp": mlp, "tokens": size.tokens, "width": size.width, "hidden": size.hidden},
        trials,
        truth(module, inputs[0], tangents[0]),
        sets,
        dtype,
        ours=ways.OURS,
        unchecked=("gemms",),
        loose=ways.LOOSE,
        named_only=ways.NAMED_ONLY,
    )


def name_of(mlp: str, size: Size, dtype: torch.dtype) -> str:
    return f"{mlp} {size} {str(dtype).removeprefix('torch.')}"


Combination = tuple[str, Size, torch.dtype]


def grid(device: Device, quick: bool, sizes: Sequence[Size], dtypes: Sequence[str]) -> list[Combination]:
    """Return the cases, the most important first: all sizes, then other dtypes on GPUs."""
    gpu = device.type == "cuda"
    chosen = sizes or (QUICK if quick else CUDA_SIZES if gpu else CPU_SIZES)
    main = [DTYPES[d] for d in dtypes] or ([torch.bfloat16] if gpu else [torch.float32, torch.bfloat16])
    if quick and not dtypes:
        main = main[:1]
    cases = [(mlp, size, dtype) for size in chosen for dtype in main for mlp in MLPS]
    if gpu and not (quick or sizes or dtypes):
        cases += [(mlp, size, dtype) for dtype, few in OTHER_DTYPES.items() for size in few for mlp in MLPS]
    return cases
