"""Generated GPU code around Inductor's GEMM templates: fused activations, kernels for small batches, no atomic adds."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import GEMM_TEMPLATES, MLP, GeluMLP, SwiGLU, meta, named, on_meta
from test_figures import Glu, LlamaBlock

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings.passes import compile_options

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

BF16 = torch.bfloat16
fused = torch.ops.fused
Model = Callable[[int, int], nn.Module]  # of a width and a hidden size


def options(**policy: Any) -> dict[str, Any]:
    return compile_options(FusionPolicy(**{"strict": True, **policy}))


def kernels(graph: Any) -> list[str]:
    """Return a graph's kernels by kind ("tem" for templates, "poi", "red", "per") and its external calls."""
    return sorted([k.name.split("_")[1] for k in graph.kernels for _ in range(k.launches)] + list(graph.extern))


PackedWithBias = named(
    "PackedWithBias", MLP, activation=F.glu, halves=2, linear=lambda n, m: nn.Linear(n, m, bias=m > n)
)


def inference(model: Model, *shape: int, dtype: torch.dtype = BF16, **arguments: Any) -> Any:
    module = on_meta(model, 256, 512, dtype=dtype)
    return virtual_gpu.compile_on_paper(module, meta(*shape, dtype=dtype), training=False, **arguments).inference


@cache
def by_templates(model: Model, is_fused: bool, training: bool = True) -> Any:
    module = on_meta(model, 4096, 16384)
    config = {**GEMM_TEMPLATES, **(options() if is_fused else {})}
    return virtual_gpu.compile_on_paper(
        module, meta(8192, 4096, requires_grad=training), training=training, config=config
    )


def stores(kernel: Any) -> int:
    """Count the results that a kernel writes."""
    return len(re.findall(r"\btl\.store\(", kernel.source))


def kernel_with(graph: Any, operator: str) -> Any:
    (kernel,) = (k for k in graph.kernels if k.name.startswith("triton_tem") and operator in k.name)
    return kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "inference", "forward", "backward"),
    [
        (GeluMLP, ["tem"] * 2, ["tem"] * 2, ["per", "red", "red", "tem", "tem", "tem", "tem"]),
        (SwiGLU, ["tem"] * 3, ["tem"] * 3, ["tem"] * 5),
        (Glu, ["poi", "tem", "tem"], ["poi", "tem", "tem"], ["poi", "tem", "tem", "tem", "tem"]),
    ],
)
def test_templates_fuse_the_same_epilogues_as_pytorch(
    model: Model, inference: list[str], forward: list[str], backward: list[str]
) -> None:
    """Activations and derivatives are fused, except for packed gate and up. Bias gradients are reductions."""
    for is_fused in (False, True):
        training = by_templates(model, is_fused)
        assert kernels(by_templates(model, is_fused, training=False).inference) == inference
        assert (kernels(training.forward), kernels(training.backward)) == (forward, backward)


def test_swiglu_is_in_gemm_epilogues() -> None:
    """In backward, one GEMM writes the gradients of gate and up, and their recomputed product."""
    paper = by_templates(SwiGLU, True)
    assert sum(map(stores, paper.forward.kernels)) == 4  # gate, up and the product, and the second linear
    assert stores(kernel_with(paper.backward, "glu_glu_backward")) == 3
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())


@pytest.mark.covering(every=18)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU])
@pytest.mark.parametrize("config", [{}, {"coordinate_descent_tuning": True}, GEMM_TEMPLATES], ids=str)
def test_decoding_launches_the_same_kernels_as_plain(model: Model, rows: int, config: dict[str, Any]) -> None:
    plain, fused = (inference(model, rows, 256, config=config | policy) for policy in ({}, options()))
    assert kernels(fused) == kernels(plain)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU, Glu, LlamaBlock, PackedWithBias])
@pytest.mark.parametrize("gemms", [{}, GEMM_TEMPLATES], ids=["library", "triton"])
def test_steps_have_no_atomic_adds(model: Model, gemms: dict[str, Any]) -> None:
    x, module = meta(2, 1024, 4096, requires_grad=True), on_meta(model, 4096, 16384)
    paper = virtual_gpu.compile_on_paper(module, x, config=gemms | options())
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["bias_act", "glu", "bias_glu"])
def test_gradients_of_all_arguments_have_no_atomic_adds(name: str) -> None:
    n = {"bias_act": 512, "glu": 512, "bias_glu": 1024}[name]
    x, scale = meta(4, 64, n, requires_grad=True), meta(4, 64, requires_grad=True)
    second = meta(4, 64, n, requires_grad=True) if name == "glu" else meta(n, requires_grad=True)
    paper = virtual_gpu.compile_on_paper(lambda *t: getattr(fused, name)(*t, "silu"), x, second, scale)
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())
