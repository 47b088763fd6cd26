"""On paper: what products in float8 move and keep, what makes their operands, and what docs/fp8.md says of it."""

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
from torch_fused_ops.benchmarks import harness, models
from torch_fused_ops.benchmarks.laboratory import fp8_recipes
from torch_fused_ops.benchmarks.laboratory.fp8_recipes import GELUMLP, bytes_besides_products
from torch_fused_ops.benchmarks.models import SwiGLUMLP
from torch_fused_ops.families.float8 import formulas as float8
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.virtual_gpu.roofline import rates_of, works_of
from torch_fused_ops.virtual_gpu.work import FLOAT8_FLOP

pytest.importorskip("triton")

TOKENS, HIDDEN, FFN = 8192, 4096, 14336
MIB = 2**20
RATES = rates_of(gpu.H200)
COMMITTED = harness.results_folder() / "fp8_recipes.json"
LAYERS = {"SwiGLU": 3, "GELU": 2}


@cache
def on_paper(make: type[nn.Module], **policy: Any) -> gpu.PaperCompilation:
    torch._dynamo.reset()
    module = on_meta(make, HIDDEN, FFN if make is SwiGLUMLP else 4 * HIDDEN)
    with tfo.enabled(FusionPolicy(**policy)) if policy else contextlib.nullcontext():
        return gpu.compile_on_paper(module, meta(TOKENS, HIDDEN, requires_grad=True))


def extern(graph: gpu.GeneratedGraph) -> dict[str, int]:
    return dict(Counter(name.removeprefix("fused.") for name in graph.extern))


def test_kernels_and_calls_of_a_step() -> None:
    paper = on_paper(SwiGLUMLP, gemm="fp8")
    forward, backward = paper.forward, paper.backward
    # The input, and gate and up with the activation: Inductor's. Three weights: ours.
    assert sum(k.launches for k in forward.kernels) == 2
    assert extern(forward) == {"quantize": 3, "scaled_mm": 3}
    # The two parts of the input's gradient are added; everything else is ours.
    assert sum(k.launches for k in backward.kernels) == 1
    ours = {"quantize": 3, "quantize_both": 1, "requantize": 1, "glu_backward_quantized": 1}
    assert extern(backward) == {**ours, "scaled_mm": 6}
    (activation,) = [k for k in forward.kernels if "glu" in k.name]
    assert activation.bytes_moved == TOKENS * FFN * (2 + 2 + 1) + TOKENS * FFN // 128 * 4


@pytest.mark.parametrize("tokens", (pytest.param((6,), marks=pytest.mark.slow), (2, 3)))
def test_packed_gradients_are_quantized_where_they_are_made(tokens: tuple[int, ...]) -> None:
    """A row of theirs is gate's and up's together: one kernel makes both, finds the largest of both, and stores both.

    In the second pass over a row it reads back what it wrote, in bfloat16; the largest is that of float32, before it is
    rounded, which another power of two may bound. Its numbers are Triton's interpreter's.
    """
    rows, n = 6, 1280  # too many for a row to be held
    g, h = torch.randn(*tokens, n), torch.randn(*tokens, 2 * n).bfloat16() * 4

    def fn(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        args = (None, None, "silu", "halves", 0.0, None, [True, False, False])
        d = torch.ops.fused.bias_glu_backward(g, h, *args)[0].view(rows, 2 * n)
        return (d, *torch.ops.fused.quantize(d, 1, 2 * n))

    (kernel,) = gpu.compile_on_paper(fn, g, h, training=False).inference.kernels
    assert kernel.bytes_moved == rows * (n * (4 + 2 * 2 + 2 * 2 + 2 * 1) + 4)
    wanted = fn(g, h)[0]
    found, scales = torch.zeros(rows, 2 * n, dtype=torch.bfloat16), torch.zeros(rows)
    values = torch.zeros(rows, 2 * n, dtype=float8.FP8)
    halves = {"*bf16": iter((found, found[:, n:])), "*fp8e4nv": iter((values, values[:, n:]))}
    halves |= {"*fp32": iter((scales,)), "*i32": iter((scales.view(torch.int32),))}  # torch 2.15 stores their bits
    given = {"*bf16": h, "*fp32": g}
    pointers = re.findall(r"'((?:in|out)_ptr\d+)': '(\*\w+)'", kernel.source)
    gpu.interpret(kernel, *(given[kind] if name.startswith("in") else next(halves[kind]) for name, kind in pointers))
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-6)
    exact = float8.quantize(found, 1, 2 * n)
    assert torch.equal(scales[None], exact[1]) and torch.equal(values.float(), exact[0].float())


@pytest.mark.parametrize(
    ("device", "gemm", "named"),
    [(gpu.A100, "fp8-rowwise", "sm_80"), (gpu.B200, "fp8", "sm_100"), (gpu.MI300X, "fp8", "ROCm, gfx942")],
)
def test_a_device_without_such_products_is_asked_on_paper(device: gpu.GPU, gemm: str, named: str) -> None:
    """The graph is captured on CPU tensors, which stand in for the GPU's; a CPU has all products."""
    module, x = torch.nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), torch.randn(8, 128)
    message = f"this device ({named}) does not support float8 GEMMs with a scale for each {RECIPES[gemm].scaling.noun}"
    with tfo.enabled(FusionPolicy(gemm=gemm, strict=True)), pytest.raises(Exception) as raised:
        gpu.compile_on_paper(module, x, gpu=device)
    assert message in " ".join(str(raised.value).split()), "a table, whose cells are wrapped"
    assert gpu.target_device(x.device) == x.device, "the CPU is itself again"
    assert tfo.explain(module, x, policy=FusionPolicy(gemm=gemm)).sites[0].gemm == gemm


@pytest.mark.slow
def test_blocks_of_32_on_sm_100() -> None:
    """In forward all is Inductor's, which writes scales of 8 bits as the products read them; across, it is ours."""
    x = meta(TOKENS, HIDDEN, requires_grad=True)
    with tfo.enabled(FusionPolicy(gemm="mxfp8", strict=True)):
        paper = gpu.compile_on_paper(on_meta(SwiGLUMLP, HIDDEN, FFN), x, gpu=gpu.B200)
    forward, backward = paper.forward, paper.backward
    # Three weights, the activation, and the input, whose scales, kept for backward, are brought into tiles by a fifth.
    assert sum(k.launches for k in forward.kernels) == 6 and extern(forward) == {"scaled_mm_tiled": 3}
    activation = TOKENS * FFN * (2 + 2 + 1) + TOKENS * FFN // 32
    assert activation in [k.bytes_moved for k in forward.kernels]
    # Three weights' transposes and the gradient of the result; the input as it was kept; the activation in one pass.
    ours = {"quantize": 4, "requantize": 1, "glu_backward_quantized": 1}
    assert extern(backward) == {**ours, "scaled_mm_tiled": 6}


@pytest.mark.slow
def test_a_gelu_mlp_with_biases() -> None:
    backward = on_paper(GELUMLP, gemm="fp8").backward
    ours = {"quantize": 2, "quantize_both": 1, "requantize": 1, "bias_act_backward_quantized": 1}
    assert extern(backward) == {**ours, "scaled_mm": 4}


@pytest.mark.slow
def test_what_tanh_costs_where_weights_gradients_are_in_bf16() -> None:
    moved = []
    for make in (GELUMLP, models.GELUMLP):
        backward = on_paper(make, gemm="fp8-wgrad-bf16").backward
        moved.append(bytes_besides_products(backward))
    assert moved[1] - moved[0] == TOKENS * 4 * HIDDEN * 2  # it reads both operands of the gradient again, not itself


DEFAULT = (("SwiGLU, 14336", "plain"), ("SwiGLU, 14336", '`gemm="fp8"`'))
POLICIES: dict[str, dict[str, str]] = {
    "plain": {},
    '`gemm="fp8"`': {"gemm": "fp8"},
    '`gemm="fp8", memory="fp8"`': {"gemm": "fp8", "memory": "fp8"},
    '`gemm="fp8", memory="input"`': {"gemm": "fp8", "memory": "input"},
    '`gemm="fp8-wgrad-bf16"`': {"gemm": "fp8-wgrad-bf16"},
    '`gemm="fp8-rowwise"`': {"gemm": "fp8-rowwise"},
}
# Linear layers, and those in front of the activation.
MODELS: dict[str, tuple[type[nn.Module], int, int]] = {
    "SwiGLU, 14336": (SwiGLUMLP, 3, FFN),
    "GELU, 16384": (GELUMLP, 2, 4 * HIDDEN),
}


def page() -> dict[tuple[str, str], tuple[float, ...]]:
    """The page's own table."""
    text = (Path(__file__).parents[2] / "docs" / "fp8.md").read_text(encoding="utf-8")
    text = text.partition("## Beside torchao's recipes")[0]
    found, model = {}, ""
    row = r"^\| (.*?) ?\| (\S.*?)" + r" \| ([\d.]+)" * 4 + r" \|$"
    for name, policy, *numbers in re.findall(row, text, re.M):
        model = name or model
        found[model, policy] = tuple(map(float, numbers))
    return found


def seconds(model: str, policy: str) -> float:
    make, layers, ffn = MODELS[model]
    paper, own = on_paper(make, **POLICIES[policy]), POLICIES[policy]
    product = 2 * TOKENS * HIDDEN * ffn
    fp8 = layers * (2 + RECIPES[own["gemm"]].wgrad) if "gemm" in own else 0
    again = layers - 1 if own.get("memory") == "input" else 0
    moved = sum(bytes_besides_products(graph) for graph in paper.graphs.values())
    assert RATES is not None
    return product * ((fp8 + again) / FLOAT8_FLOP + (3 * layers - fp8) / RATES.flop) + moved / RATES.nbytes


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
def test_the_page_says_what_was_counted(model: str, policy: str) -> None:
    paper = on_paper(MODELS[model][0], **POLICIES[policy])
    moved = [bytes_besides_products(paper.graphs[name]) / MIB for name in ("forward", "backward")]
    share = seconds(model, policy) / seconds(model, "plain")
    counted = *map(round, moved), round(paper.saved_bytes() / MIB), round(share, 2)
    assert page()[model, policy] == counted
    works = [work for graph in paper.graphs.values() for work in works_of(graph)]
    assert RATES.seconds(works) == pytest.approx(seconds(model, policy), rel=0.03), "as reports: with instructions"
    if policy == '`gemm="fp8"`':
        assert share <= 0.70


@cache
def recipes() -> dict[str, Any]:
    """What is committed."""
    if not COMMITTED.exists():
        pytest.skip("installed without results")
    return harness.read(COMMITTED, "fp8-recipes")


def test_recipes_are_all_there() -> None:
    """No case is missing; all multiply as much, and ours and plain's are what the page's own table has."""
    result, found = recipes(), {}
    assert [case["mlp"] for case in result["cases"]] == list(fp8_recipes.MLPS)
    thirds = {"plain": 0, "torchao rowwise_with_gw_hp": 2, **{way: 2 + r.wgrad for way, r in RECIPES.items()}}
    for case in result["cases"]:
        assert tuple(case["ways"]) == fp8_recipes.WAYS
        plain, step = case["ways"]["plain"], 6 * LAYERS[case["mlp"]] * result["tokens"] * case["width"] * case["hidden"]
        for way, f in case["ways"].items():
            third = thirds.get(way, 3)
            assert f["flop"] == {"bf16": step * (3 - third) // 3, "fp8": step * third // 3}, (case["mlp"], way)
            if not way.startswith("torchao"):
                numbers = [f["forward"]["bytes"], f["backward"]["bytes"], f["saved_bytes"]]
                name = way if way == "plain" else f'`gemm="{way}"`'
                share = round(f["seconds"] / plain["seconds"], 2)
                found[f"{case['mlp']}, {case['hidden']}", name] = (*(round(n / MIB) for n in numbers), share)
    assert found == {row: numbers for row, numbers in page().items() if "memory" not in row[1]}


def test_experts_are_there() -> None:
    """Two of three products are in float8; what is kept is bf16's and the scale of each expert's two weights."""
    found = recipes()["experts"]
    experts, width, hidden = found["sizes"]
    step, fp8 = 3 * 3 * 2 * found["rows"] * width * hidden, found["ways"]["fp8-rowwise"]
    assert fp8["flop"] == {"bf16": step // 3, "fp8": 2 * step // 3}
    assert all(found["ways"][way]["flop"] == {"bf16": step, "fp8": 0} for way in ("plain", "bf16"))
    assert fp8["saved_bytes"] - found["ways"]["bf16"]["saved_bytes"] == 2 * experts * 4
    weights, rows = experts * 3 * width * hidden, found["rows"]
    moved = fp8["forward"]["bytes"] - weights * 3  # a weight is read in 16 bits, and written in 8
    assert abs(moved / (rows * (width * 3 + hidden * 5)) - 1) < 0.01
    moved = fp8["backward"]["bytes"] - weights * 3  # the gradients of gate and up are written, and not read again
    assert abs(moved / (rows * (width * 3 + hidden * 14)) - 1) < 0.001
    assert found["ways"]["plain"]["seconds"] * 0.85 < fp8["seconds"] < found["ways"]["plain"]["seconds"] * 0.90


@pytest.mark.slow
@pytest.mark.parametrize("way", ("bf16", "fp8-rowwise"))
def test_experts_are_what_was_counted(way: str) -> None:
    if fp8_recipes.versions() != recipes()["versions"]:
        pytest.skip(f"counted with {recipes()['versions']}")
    assert fp8_recipes.figures(fp8_recipes.compiled_experts(way)) == recipes()["experts"]["ways"][way]


@pytest.mark.slow
def test_gfx942_after_an_h200() -> None:
    """Layers of one size share a trace, and GPUs do not: gfx942's float8 is float8_e4m3fnuz."""
    for device, dtype in ((gpu.H200, "fp8e4nv"), (gpu.MI300X, "fp8e4b8"), (gpu.H200, "fp8e4nv")):
        forward = fp8_recipes.compiled("GELU", "fp8-rowwise", 256, 256, device).forward
        assert forward is not None and set(re.findall(r"fp8e4\w+", forward.code)) == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("mlp", fp8_recipes.MLPS)
@pytest.mark.parametrize("way", fp8_recipes.WAYS)
def test_recipes_are_what_was_counted(mlp: str, way: str) -> None:
    result = recipes()
    if way.startswith("torchao"):
        pytest.importorskip("torchao")
    if fp8_recipes.versions() != result["versions"]:
        pytest.skip(f"counted with {result['versions']}")
    (case,) = [case for case in result["cases"] if case["mlp"] == mlp]
    assert fp8_recipes.figures(fp8_recipes.compiled(mlp, way)) == case["ways"][way]
