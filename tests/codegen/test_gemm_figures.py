"""Kernels, bytes and saved tensors of float8 GEMMs in generated code, and the table in docs/fp8.md."""

import contextlib
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from harness import meta, on_meta
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy
from torch_fused_ops import virtual_gpu as gpu
from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.laboratory import fp8_recipes
from torch_fused_ops.benchmarks.laboratory.fp8_recipes import GELUMLP
from torch_fused_ops.benchmarks.models import SwiGLUMLP
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.virtual_gpu.roofline import H200_RATES, Work

pytest.importorskip("triton")

TOKENS, HIDDEN, FFN = 8192, 4096, 14336
MIB = 2**20
LAYERS = {"SwiGLU": 3, "GELU": 2}


@cache
def on_paper(make: type[nn.Module], **policy: Any) -> gpu.PaperCompilation:
    torch._dynamo.reset()
    module = on_meta(make, HIDDEN, FFN if make is SwiGLUMLP else 4 * HIDDEN)
    with tfo.enabled(FusionPolicy(**policy)) if policy else contextlib.nullcontext():
        return gpu.compile_on_paper(module, meta(TOKENS, HIDDEN, requires_grad=True))


def extern(graph: gpu.GeneratedGraph) -> dict[str, int]:
    return dict(Counter(name.removeprefix("fused.") for name in graph.extern))


def test_a_step_quantizes_in_few_kernels() -> None:
    paper = on_paper(SwiGLUMLP, gemm="fp8")
    forward, backward = paper.forward, paper.backward
    # Inductor quantizes the input and the activation's result, fused::quantize the three weights.
    assert sum(k.launches for k in forward.kernels) == 2
    assert extern(forward) == {"quantize": 3, "scaled_mm": 3}
    # Inductor's kernel adds the two parts of the input's gradient. Everything else is in fused operators.
    assert sum(k.launches for k in backward.kernels) == 1
    fused_calls = {"quantize": 3, "quantize_both": 1, "requantize": 1, "glu_backward_quantized": 1}
    assert extern(backward) == {**fused_calls, "scaled_mm": 6}
    (activation,) = [k for k in forward.kernels if "glu" in k.name]
    assert activation.bytes_moved == TOKENS * FFN * (2 + 2 + 1) + TOKENS * FFN // 128 * 4


@pytest.mark.parametrize("tokens", (pytest.param((6,), marks=pytest.mark.slow), (2, 3)))
def test_one_kernel_computes_and_quantizes_packed_gradients(tokens: tuple[int, ...]) -> None:
    """A row has the gradients of gate and up. One kernel computes both, finds their largest element, and stores both.

    In a second pass over a row, it reads its bfloat16 results. The largest element is the float32 value before
    rounding, which may have another power of two as its bound.
    """
    rows, n = 6, 1280  # too long for a row to stay in registers
    g, h = torch.randn(*tokens, n), torch.randn(*tokens, 2 * n).bfloat16() * 4

    def fn(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        args = (None, None, "silu", "halves", 0.0, None, [True, False, False])
        d = torch.ops.fused.bias_glu_backward(g, h, *args)[0].view(rows, 2 * n)
        return (d, *torch.ops.fused.quantize(d, 1, 2 * n))

    (kernel,) = gpu.compile_on_paper(fn, g, h, training=False).inference.kernels
    assert kernel.bytes_moved == rows * (n * (4 + 2 * 2 + 2 * 2 + 2 * 1) + 4)
    expected = fn(g, h)[0]
    actual, scales = torch.zeros(rows, 2 * n, dtype=torch.bfloat16), torch.zeros(rows)
    values = torch.zeros(rows, 2 * n, dtype=float8.FP8)
    halves = {"*bf16": iter((actual, actual[:, n:])), "*fp8e4nv": iter((values, values[:, n:]))}
    halves |= {"*fp32": iter((scales,)), "*i32": iter((scales.view(torch.int32),))}  # torch 2.15 stores their bits
    inputs = {"*bf16": h, "*fp32": g}
    pointers = re.findall(r"'((?:in|out)_ptr\d+)': '(\*\w+)'", kernel.source)
    tensors = (inputs[kind] if name.startswith("in") else next(halves[kind]) for name, kind in pointers)
    gpu.interpret(kernel, *tensors)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)
    exact = float8.quantize(actual, 1, 2 * n)
    assert torch.equal(scales[None], exact[1]) and torch.equal(values.float(), exact[0].float())


@pytest.mark.parametrize(
    ("device", "gemm", "arch_name"),
    [(gpu.A100, "fp8-rowwise", "sm_80"), (gpu.B200, "fp8", "sm_100"), (gpu.MI300X, "fp8", "ROCm, gfx942")],
)
def test_unsupported_devices_are_rejected_on_paper(device: gpu.GPU, gemm: str, arch_name: str) -> None:
    """The graph is captured on CPU tensors, and a CPU supports all recipes."""
    module, x = torch.nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), torch.randn(8, 128)
    block = RECIPES[gemm].scaling.noun
    message = f"this device ({arch_name}) does not support float8 GEMMs with a scale for each {block}"
    with tfo.enabled(FusionPolicy(gemm=gemm, strict=True)), pytest.raises(Exception) as raised:
        gpu.compile_on_paper(module, x, gpu=device)
    assert message in " ".join(str(raised.value).split()), "the table's cells are wrapped"
    assert gpu.target_device(x.device) == x.device, "the emulation has ended"
    assert tfo.explain(module, x, policy=FusionPolicy(gemm=gemm)).sites[0].gemm == gemm


@pytest.mark.slow
def test_mxfp8_quantizes_forward_in_inductors_kernels() -> None:
    """They write 8-bit scales in the GEMMs' layout. In backward, fused operators quantize along the other dimension."""
    x = meta(TOKENS, HIDDEN, requires_grad=True)
    with tfo.enabled(FusionPolicy(gemm="mxfp8", strict=True)):
        paper = gpu.compile_on_paper(on_meta(SwiGLUMLP, HIDDEN, FFN), x, gpu=gpu.B200)
    forward, backward = paper.forward, paper.backward
    # Three weights, the activation, and the input. Another kernel tiles the input's scales, which are saved untiled.
    assert sum(k.launches for k in forward.kernels) == 6 and extern(forward) == {"scaled_mm_tiled": 3}
    activation = TOKENS * FFN * (2 + 2 + 1) + TOKENS * FFN // 32
    assert activation in [k.bytes_moved for k in forward.kernels]
    # Three transposed weights and the result's gradient; the saved input; the activation in one pass.
    fused_calls = {"quantize": 4, "requantize": 1, "glu_backward_quantized": 1}
    assert extern(backward) == {**fused_calls, "scaled_mm_tiled": 6}


DEFAULT = (("SwiGLU, 14336", "plain"), ("SwiGLU, 14336", '`gemm="fp8"`'))
POLICIES: dict[str, dict[str, str]] = {
    "plain": {},
    '`gemm="fp8"`': {"gemm": "fp8"},
    '`gemm="fp8", memory="fp8"`': {"gemm": "fp8", "memory": "fp8"},
    '`gemm="fp8", memory="input"`': {"gemm": "fp8", "memory": "input"},
    '`gemm="fp8-wgrad-bf16"`': {"gemm": "fp8-wgrad-bf16"},
    '`gemm="fp8-rowwise"`': {"gemm": "fp8-rowwise"},
}
MODELS: dict[str, type[nn.Module]] = {"SwiGLU, 14336": SwiGLUMLP, "GELU, 16384": GELUMLP}


def page() -> dict[tuple[str, str], tuple[float, ...]]:
    """Read the page's table."""
    text = (Path(__file__).parents[2] / "docs" / "fp8.md").read_text(encoding="utf-8")
    text = text.partition("## Beside torchao's recipes")[0]
    table, model = {}, ""
    row = r"^\| (.*?) ?\| (\S.*?)" + r" \| ([\d.]+)" * 4 + r" \|$"
    for name, policy, *numbers in re.findall(row, text, re.M):
        model = name or model
        table[model, policy] = tuple(map(float, numbers))
    return table


def test_the_page_has_every_policy() -> None:
    assert list(page()) == [(model, policy) for model in MODELS for policy in POLICIES]


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        pytest.param(model, policy, marks=() if (model, policy) in DEFAULT else pytest.mark.slow)
        for model in MODELS
        for policy in POLICIES
    ],
)
def test_the_page_has_the_counted_figures(model: str, policy: str) -> None:
    paper = on_paper(MODELS[model], **POLICIES[policy])
    counted, plain = fp8_recipes.figures(paper), fp8_recipes.figures(on_paper(MODELS[model]))
    nbytes = counted["forward"]["bytes"], counted["backward"]["bytes"], counted["saved_bytes"]
    share = counted["seconds"] / plain["seconds"]
    assert page()[model, policy] == (*(round(n / MIB) for n in nbytes), round(share, 2))
    works = [Work(call.flop, call.nbytes) for call in paper.timeline().events]
    assert H200_RATES.seconds(works) == pytest.approx(counted["seconds"], rel=0.03), "as in plans"
    if policy == '`gemm="fp8"`':
        assert share <= 0.70


@cache
def recipes() -> dict[str, Any]:
    """Read the committed results."""
    return harness.read(fp8_recipes.RESULTS, "fp8-recipes")


def test_committed_recipes_are_complete_and_match_the_page() -> None:
    result, rows = recipes(), {}
    assert [case["mlp"] for case in result["cases"]] == list(fp8_recipes.MLPS)
    thirds = {"plain": 0, "torchao rowwise_with_gw_hp": 2, **{recipe: 2 + r.wgrad for recipe, r in RECIPES.items()}}
    for case in result["cases"]:
        assert tuple(case["ways"]) == fp8_recipes.WAYS
        plain, step = case["ways"]["plain"], 6 * LAYERS[case["mlp"]] * result["tokens"] * case["width"] * case["hidden"]
        for recipe, f in case["ways"].items():
            third = thirds.get(recipe, 3)
            assert f["flop"] == {"bf16": step * (3 - third) // 3, "fp8": step * third // 3}, (case["mlp"], recipe)
            if not recipe.startswith("torchao"):
                numbers = [f["forward"]["bytes"], f["backward"]["bytes"], f["saved_bytes"]]
                name = recipe if recipe == "plain" else f'`gemm="{recipe}"`'
                share = round(f["seconds"] / plain["seconds"], 2)
                rows[f"{case['mlp']}, {case['hidden']}", name] = (*(round(n / MIB) for n in numbers), share)
    assert rows == {row: numbers for row, numbers in page().items() if "memory" not in row[1]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("bf16", "fp8-rowwise"))
def test_committed_experts_have_the_counted_figures(recipe: str) -> None:
    if fp8_recipes.versions() != recipes()["versions"]:
        pytest.skip(f"counted with {recipes()['versions']}")
    assert fp8_recipes.figures(fp8_recipes.compiled_experts(recipe)) == recipes()["experts"]["ways"][recipe]


@pytest.mark.slow
@pytest.mark.parametrize("mlp", fp8_recipes.MLPS)
@pytest.mark.parametrize("recipe", fp8_recipes.WAYS)
def test_committed_recipes_have_the_counted_figures(mlp: str, recipe: str) -> None:
    result = recipes()
    if recipe.startswith("torchao"):
        pytest.importorskip("torchao")
    if fp8_recipes.versions() != result["versions"]:
        pytest.skip(f"counted with {result['versions']}")
    (case,) = [case for case in result["cases"] if case["mlp"] == mlp]
    assert fp8_recipes.figures(fp8_recipes.compiled(mlp, recipe)) == case["ways"][recipe]
