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
    """The kernels of a graph by kind ("tem" for a template, "poi", "red" and "per" for the rest) and external calls."""
    return sorted([k.name.split("_")[1] for k in graph.kernels for _ in range(k.launches)] + list(graph.extern))


PackedWithBias = named(
    "PackedWithBias", MLP, activation=F.glu, halves=2, linear=lambda n, m: nn.Linear(n, m, bias=m > n)
)


def inference(model: Model, *shape: int, dtype: torch.dtype = BF16, **arguments: Any) -> Any:
    made = on_meta(model, 256, 512, dtype=dtype)
    return virtual_gpu.compile_on_paper(made, meta(*shape, dtype=dtype), training=False, **arguments).inference


@cache
def by_templates(model: Model, ours: bool, training: bool = True) -> Any:
    made = on_meta(model, 4096, 16384)
    config = {**GEMM_TEMPLATES, **(options() if ours else {})}
    return virtual_gpu.compile_on_paper(
        made, meta(8192, 4096, requires_grad=training), training=training, config=config
    )


def stores(kernel: Any) -> int:
    """How many results a kernel writes."""
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
def test_what_fuses_into_templates(model: Model, inference: list[str], forward: list[str], backward: list[str]) -> None:
    """Exactly what fuses upstream's: activations and their derivatives, but for packed gate and up, whose halves are no
    epilogue of one tile; and not the bias gradient, a reduction.
    """
    for ours in (False, True):
        training = by_templates(model, ours)
        assert kernels(by_templates(model, ours, training=False).inference) == inference
        assert (kernels(training.forward), kernels(training.backward)) == (forward, backward)


@pytest.mark.slow
def test_gelu_in_the_gemms_epilogues() -> None:
    """Forward: the sum that backward needs and the activation from one GEMM. Backward: the gradient, and the activation
    again for the weight gradient, from the one that makes the activation's gradient.
    """
    paper = by_templates(GeluMLP, True)
    assert stores(paper.forward.kernels[0]) == 2 and "addmm" in paper.forward.kernels[0].name
    assert stores(kernel_with(paper.backward, "bias_act_backward")) == 2
    assert stores(by_templates(GeluMLP, True, training=False).inference.kernels[0]) == 1


def test_swiglu_in_the_gemms_epilogues() -> None:
    """Backward: gradients of gate and up, and the product again, from one GEMM."""
    paper = by_templates(SwiGLU, True)
    assert sum(map(stores, paper.forward.kernels)) == 4  # gate, up and the product, and the second linear
    assert stores(kernel_with(paper.backward, "glu_glu_backward")) == 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU])
@pytest.mark.parametrize("config", [{}, {"coordinate_descent_tuning": True}, GEMM_TEMPLATES], ids=str)
def test_decoding_takes_no_more_kernels(model: Model, rows: int, config: dict[str, Any]) -> None:
    plain, fused = (inference(model, rows, 256, config=config | policy) for policy in ({}, options()))
    assert kernels(fused) == kernels(plain)


@pytest.mark.covering(every=10)
@pytest.mark.parametrize("model", [GeluMLP, SwiGLU, Glu, LlamaBlock, PackedWithBias])
@pytest.mark.parametrize("gemms", [{}, GEMM_TEMPLATES], ids=["library", "triton"])
def test_nothing_is_added_atomically(model: Model, gemms: dict[str, Any]) -> None:
    x, module = meta(2, 1024, 4096, requires_grad=True), on_meta(model, 4096, 16384)
    paper = virtual_gpu.compile_on_paper(module, x, config=gemms | options())
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["bias_act", "glu", "bias_glu"])
def test_no_gradient_is_added_atomically(name: str) -> None:
    """Of any argument: biases and token scales too."""
    n = {"bias_act": 512, "glu": 512, "bias_glu": 1024}[name]
    x, scale = meta(4, 64, n, requires_grad=True), meta(4, 64, requires_grad=True)
    second = meta(4, 64, n, requires_grad=True) if name == "glu" else meta(n, requires_grad=True)
    paper = virtual_gpu.compile_on_paper(lambda *t: getattr(fused, name)(*t, "silu"), x, second, scale)
    assert not any("tl.atomic" in graph.code for graph in paper.graphs.values())
