"""``FusionPolicy(gemm="fp8")``: the linear layers that multiply in float8, a compiled step's results and its bytes."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import conv1d, distances, raises, step
from torch import Tensor

import torch_fused_ops as tfo
from torch_fused_ops import FusionPolicy, Site
from torch_fused_ops import functional as FF
from torch_fused_ops import nn as fnn
from torch_fused_ops.families.float8.recipes import RECIPES
from torch_fused_ops.graphs.reasons import Kind
from torch_fused_ops.lowerings.recognize import gemms, rewrite
from torch_fused_ops.nn import FusedMLP

HIDDEN, FFN = 128, 256


class SwiGLU(harness.SwiGLU):
    def __init__(self, hidden: int = HIDDEN, ffn: int = FFN) -> None:
        super().__init__(hidden, ffn)


class InFloat8(SwiGLU):
    """A SwiGLU MLP that calls the float8 operators itself, for eager mode."""

    recipe = "fp8"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (FF.linear_fp8(x, layer.weight, recipe=self.recipe) for layer in (self.gate, self.up))
        return FF.linear_fp8(FF.swiglu(gate, up), self.down.weight, recipe=self.recipe)


def gelu_mlp(hidden: int = HIDDEN, ffn: int = FFN) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, ffn), nn.GELU(), nn.Linear(ffn, hidden))


def in_float8(module: nn.Module, recipe: str = "fp8", copied_class: type[nn.Module] | None = None) -> Any:
    """Copy a module. The copy calls the float8 operators itself."""
    copied: Any = copy.deepcopy(module)
    copied.__class__, copied.recipe = copied_class or InFloat8, recipe
    return copied


def compiled(module: nn.Module, **policy: Any) -> Any:
    return harness.compiled(module, FusionPolicy(**policy), fullgraph=True)


def sites(fn: Callable[..., Any], *args: Any, **policy: Any) -> tuple[Site, ...]:
    return tfo.explain(fn, *args, policy=FusionPolicy(**{"gemm": "fp8", **policy})).sites


def distance(a: Tensor, b: Tensor) -> float:
    return distances([a], [b])[0]


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=32)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("memory", ("off", "free", "fp8", "input"))
def test_compiled_steps_equal_eager_float8(recipe: str, memory: str) -> None:
    module, x = SwiGLU(), torch.randn(3, 50, HIDDEN)
    by_hand = in_float8(module, recipe)
    exact, expected = step(module, module, x), step(by_hand, by_hand, x)
    got = step(compiled(module, gemm=recipe, memory=memory, strict=True), module, x)
    for mine, eager, plain in zip(got, expected, exact, strict=True):
        # Some values round differently or are saved in float8. That changes results less than float8 GEMMs do.
        assert distance(mine, eager) < (0.08 if memory == "fp8" else 0.02)
        assert 1e-4 < distance(mine, plain) < 0.12


@pytest.mark.slow
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("recipe", (pytest.param("fp8", marks=pytest.mark.slow), "mxfp8"))
def test_merged_gpu_passes_are_equivalent(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the backward graph that is edited for GPUs, with the operators' formulas."""
    from torch_fused_ops.lowerings import float8 as lowered

    calls: list[str] = []
    merge = lowered._replace_pair
    monkeypatch.setattr(lowered, "_is_on_gpu", lambda node: isinstance(node.meta.get("val"), (Tensor, tuple, list)))
    monkeypatch.setattr(lowered, "_replace_pair", lambda old, *new: (calls.append(""), merge(old, *new)))
    module, x, plain = gelu_mlp(), torch.randn(128, HIDDEN), SwiGLU()
    expected = in_float8(plain, recipe)
    got, eager = step(compiled(plain, gemm=recipe, strict=True), plain, x), step(expected, expected, x)
    assert len(calls) == {"fp8": 7, "mxfp8": 5}[recipe] and max(distances(got, eager)) < 0.02
    got, exact = step(compiled(module, gemm=recipe, strict=True), module, x), step(module, module, x)
    assert max(distances(got, exact)) < 0.12


@pytest.mark.codegen_is_slow("lowered")
def test_layers_of_the_same_size_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_fused_ops.lowerings import float8

    traces: dict[tuple[Any, ...], Any] = {}
    monkeypatch.setattr(float8, "_traces", traces)
    x, first, second = torch.randn(256, HIDDEN), InFloat8(), InFloat8()
    runs = []
    with torch.no_grad():
        for module, tokens in ((first, x), (nn.Sequential(second, first), x), (first, x[:128])):
            assert distance(compiled(module)(tokens), module(tokens)) < 0.02
            runs.append(list(traces.values()))
    assert runs[0] and runs[0] == runs[1] and runs[1] == runs[2][: len(runs[1])] and len(runs[1]) < len(runs[2])
    nodes_with_metadata = [node for traced in traces.values() for node in traced.graph.nodes if node.meta]
    assert not nodes_with_metadata, "tensors in the metadata would keep the whole compilation in memory"


@pytest.mark.codegen_is_slow
def test_biases_stay_within_float8_rounding_under_autocast() -> None:
    """Inductor's C++ backend fuses two loops of different order, which quantize a gradient in rows and in columns."""
    module, x = gelu_mlp(), torch.randn(128, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        got, exact = step(compiled(module, gemm="fp8", strict=True), module, x), step(module, module, x)
    assert all(distance(a, b) < 0.12 for a, b in zip(got, exact, strict=True))


@pytest.mark.slow  # symbolic sizes are slow: 10 s of CPU time for each of two graphs
@pytest.mark.parametrize(
    ("recipe", "hidden", "ffn"), (("fp8", HIDDEN, FFN), ("fp8-rowwise", 80, 144), ("mxfp8", 96, 160))
)
def test_dynamic_sizes_stay_within_float8_rounding(recipe: str, hidden: int, ffn: int) -> None:
    """Up to 128 tokens are one block and need another graph. Zero tokens and one token also need their own graphs."""
    module = SwiGLU(hidden, ffn)
    fn = torch.compile(module, backend="fused", options={"policy": FusionPolicy(gemm=recipe)}, dynamic=True)
    for tokens in (130, 7, 256, 1, 0):
        x = torch.randn(tokens, hidden)
        for mine, plain in zip(step(fn, module, x), step(module, module, x), strict=True):
            assert torch.equal(mine, plain) if tokens == 0 else distance(mine, plain) < 0.12


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("tokens", (1, 37))
def test_rowwise_accepts_sizes_that_are_not_multiples_of_blocks(tokens: int) -> None:
    module, x = SwiGLU(80, 144).bfloat16(), torch.randn(tokens, 80, dtype=torch.bfloat16)
    (site,) = sites(module, x, gemm="fp8-rowwise")
    assert (site.gemm, site.gemm_reason) == ("fp8-rowwise", "")
    by_hand = in_float8(module, "fp8-rowwise")
    got, expected = step(compiled(module, gemm="fp8-rowwise", strict=True), module, x), step(by_hand, by_hand, x)
    for mine, eager, plain in zip(got, expected, step(module, module, x), strict=True):
        assert distance(mine, eager) < 0.02
        assert 1e-3 < distance(mine, plain) < 0.12


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("gated", (False, True))
def test_fused_mlp_stays_within_float8_rounding(gated: bool) -> None:
    mlp = FusedMLP(HIDDEN, FFN, "silu", gated=gated, gemm="fp8")
    plain = FusedMLP(HIDDEN, FFN, "silu", gated=gated)
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(40, HIDDEN)
    exact, eager = step(plain, plain, x), step(mlp, mlp, x)
    assert all(1e-5 < distance(a, b) < 0.12 for a, b in zip(eager[:3], exact[:3], strict=True))
    assert all(distance(a, b) < 0.02 for a, b in zip(step(compiled(mlp), mlp, x), eager, strict=True))
    for memory in ("off", "fp8", "input"):
        mlp.memory = memory
        assert all(distance(a, b) < 0.06 for a, b in zip(step(mlp, mlp, x), eager, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="ffn=100 are not accepted with gemm='fp8': they must be multiples of 128"):
        FusedMLP(HIDDEN, 100, gemm="fp8")
    with pytest.raises(ValueError, match="gemm='int8' is not known; accepted: bf16, fp8, fp8-wgrad-bf16, fp8-rowwise"):
        FusedMLP(HIDDEN, FFN, gemm="int8")


@pytest.mark.codegen_is_slow
def test_rounding_in_the_model_stays() -> None:
    """Backward quantizes an exact tensor instead of its quantized copy, unless the model itself rounds the tensor."""

    def rounded(x: Tensor) -> Tensor:
        stored = torch.ops.fused.quantize(x.detach() * 1.01, 1)
        return x + (torch.ops.fused.dequantize(*stored, 1, x.dtype) - x).detach()

    module, x = SwiGLU(), torch.randn(50, HIDDEN)
    by_hand = in_float8(module)
    got = step(compiled(lambda x: module(rounded(x)), gemm="fp8", strict=True), module, x)
    assert max(distances(got, step(lambda x: by_hand(rounded(x)), by_hand, x))) < 0.02


# ---- saved bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("memory", ("free", "fp8"))
def test_float8_gemms_save_no_more_bytes(memory: str) -> None:
    module, x = SwiGLU().bfloat16(), torch.randn(512, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    saved = {}
    for gemm in ("bf16", "fp8"):
        mlp = compiled(module, gemm=gemm, memory=memory)
        saved[gemm] = harness.saving(lambda mlp=mlp: mlp(x), module.parameters())[1]
    # The input has one byte per element instead of two, and a scale for each block.
    assert saved["bf16"] - saved["fp8"] == 512 * HIDDEN - 512 * 4


# ---- sites -----------------------------------------------------------------------------------------------------------


def test_sites_list_the_gemm_recipe() -> None:
    x = torch.randn(4, HIDDEN)
    (site,) = sites(SwiGLU(), x)
    assert (site.op, site.gemm, site.gemm_reason) == ("fused::glu", "fp8", "")
    (site,) = sites(SwiGLU(), x, gemm="bf16")
    assert site.gemm == ""
    text = str(tfo.explain(SwiGLU(), x, policy=FusionPolicy(gemm="fp8")))
    assert "its linear layers are in float8" in " ".join(text.split())


def test_patterns_select_gemm_recipes() -> None:
    model = nn.Sequential(gelu_mlp(), SwiGLU())
    fused_sites = sites(model, torch.randn(4, HIDDEN), gemm={"1": "fp8-wgrad-bf16"})
    assert [site.gemm for site in fused_sites] == ["", "fp8-wgrad-bf16"]


def adapted() -> nn.Module:
    """A layer with LoRA: the adapter's weights are too narrow for float8, but the layer's own weight is not."""
    base, a, b, out = (nn.Linear(*s) for s in ((HIDDEN, FFN), (HIDDEN, 8), (8, FFN), (FFN, HIDDEN)))
    return harness.Net(lambda s, x: s.out(F.gelu(s.base(x) + 2 * s.b(s.a(x)))), base=base, a=a, b=b, out=out)


class Experts(nn.Module):
    """A mixture's experts as in transformers: sorted rows, grouped GEMMs."""

    def __init__(self, hidden: int = 48, ffn: int = 80) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(3, 2 * ffn, hidden).bfloat16() / hidden**0.5)
        self.down = nn.Parameter(torch.randn(3, hidden, ffn).bfloat16() / ffn**0.5)
        self.register_buffer("ends", torch.tensor((5, 5, 21), dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.transpose(-2, -1), offs=self.ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=self.ends)


class ExpertsInFloat8(Experts):
    """Experts that call the float8 operators themselves, for eager mode."""

    def forward(self, x: Tensor) -> Tensor:
        product = torch.ops.fused.grouped_linear_fp8
        gate, up = product(x, self.gate_up.transpose(-2, -1), self.ends).chunk(2, -1)
        return product(FF.swiglu(gate, up), self.down.transpose(-2, -1), self.ends)  # type: ignore[no-any-return]


@pytest.mark.covering(every=4)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("memory", ("free", "off", "fp8", "input"))
def test_compiled_experts_equal_eager_float8(memory: str) -> None:
    module, x = Experts(), torch.randn(21, 48).bfloat16()
    by_hand = in_float8(module, copied_class=ExpertsInFloat8)
    (site,) = sites(module, x, gemm="fp8-rowwise")
    assert (site.op, site.gemm, site.gemm_reason) == ("fused::bias_glu", "fp8-rowwise", "")
    got = step(compiled(module, gemm="fp8-rowwise", memory=memory, strict=True), module, x)
    for mine, eager, plain in zip(got, step(by_hand, by_hand, x), step(module, module, x), strict=True):
        assert distance(mine, eager) < (0.08 if memory == "fp8" else 0.02)
        assert 1e-3 < distance(mine, plain) < 0.12


@pytest.mark.slow
def test_experts_accept_changing_and_zero_rows() -> None:
    module, by_hand = Experts(), ExpertsInFloat8()
    by_hand.load_state_dict(module.state_dict())
    options = {"policy": FusionPolicy(gemm="fp8-rowwise", strict=True)}
    fn = torch.compile(module, backend="fused", options=options, dynamic=True)
    for counts in ((5, 0, 16), (0, 0, 1), (40, 60, 3)):
        for experts in (module, by_hand):
            experts.ends.copy_(torch.tensor(counts).cumsum(0))
        x = torch.randn(sum(counts), 48).bfloat16()
        for mine, eager in zip(step(fn, module, x), step(by_hand, by_hand, x), strict=True):
            assert distance(mine, eager) < 0.03


def test_unsupported_experts_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(21, 48).bfloat16()
    (site,) = sites(Experts(), x)
    assert (site.gemm, site.gemm_kind) == ("", Kind.GEMM_EXPERTS)
    assert "grouped float8 GEMMs have a scale for each row, not for each block of 128" in site.gemm_reason
    (site,) = sites(Experts(ffn=72), x, gemm="fp8-rowwise")
    assert site.gemm_kind is Kind.GEMM_SIZE and "its weight is (72, 48): not multiples of 16" in site.gemm_reason
    monkeypatch.setattr(gemms, "no_scaled_products", lambda device, scaling, grouped: "sm_89" if grouped else "")
    (site,) = sites(Experts(), x, gemm="fp8-rowwise")
    assert site.gemm_kind is Kind.GEMM_DEVICE
    assert "this device (sm_89) does not support grouped float8 GEMMs with a scale for each row" in site.gemm_reason


# ---- models that call fused operators --------------------------------------------------------------------------------


def model_with_fused_calls() -> Any:
    """A model that calls this library: a function, a module with a dropout, and a module that requests float8."""

    def body(s: Any, x: Tensor) -> Tensor:
        y = s.down(F.dropout(FF.bias_act(s.up(x), None, activation="gelu"), 0.0))
        return s.float8(s.mlp(y))  # type: ignore[no-any-return]

    fused = fnn.FusedMLP(HIDDEN, FFN, gated=True, dropout=0.1), fnn.FusedMLP(HIDDEN, FFN, gemm="fp8-wgrad-bf16")
    return harness.Net(body, up=nn.Linear(HIDDEN, FFN), down=nn.Linear(FFN, HIDDEN), mlp=fused[0], float8=fused[1])


def test_called_operators_are_sites_if_float8_is_requested() -> None:
    model, x = model_with_fused_calls(), torch.randn(5, HIDDEN)
    assert sites(model, x, gemm="bf16") == ()
    fused_sites = sites(model, x)
    assert [(site.op, site.activation, site.gemm, site.is_missed) for site in fused_sites] == [
        ("fused::bias_act", "gelu", "fp8", False),
        ("fused::bias_glu", "gelu_tanh", "fp8", False),
    ], "the third module already multiplies in float8"
    assert [site.module for site in fused_sites] == ["", "mlp"] and all(
        "calls the operator itself" in s.reason for s in fused_sites
    )
    assert [site.module for site in sites(model, x, exclude=("mlp",))] == [""]
    assert [site.module for site in sites(model, x, gemm={"mlp": "fp8"})] == ["mlp"]


@pytest.mark.codegen_is_slow
def test_called_operators_multiply_in_float8() -> None:
    model, x = model_with_fused_calls().eval(), torch.randn(5, HIDDEN)
    got = step(compiled(model, gemm={"mlp": "fp8"}, strict=True), model, x)
    model.mlp.gemm = "fp8"
    torch.testing.assert_close(got, step(model, model, x), rtol=2e-2, atol=2e-2)


@pytest.mark.codegen_is_slow("lowered")
@pytest.mark.parametrize("tokens", ((21,), (3, 7)))
def test_packed_gradients_are_quantized_in_rows(tokens: tuple[int, ...]) -> None:
    """Gate and up share a weight, so their packed gradients share a scale. Generated code equals eager mode."""

    def fn(g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        args = (None, None, "silu", "halves", 0.0, None, [True, False, False])
        d = torch.ops.fused.bias_glu_backward(g, h, *args)[0].view(-1, h.shape[-1])
        return (d, *torch.ops.fused.quantize(d, 1, d.shape[1]))

    g, h = torch.randn(*tokens, 80), torch.randn(*tokens, 160) * 4
    h[..., 0, 3], h[..., 1, 90] = float("nan"), float("inf")
    got, expected = torch.compile(fn, fullgraph=True)(g, h), fn(g, h)
    for actual, exact in zip(got, expected, strict=True):
        assert actual.is_contiguous() and actual.stride() == exact.stride()
    torch.testing.assert_close(got[0], expected[0], equal_nan=True)
    torch.testing.assert_close(got[2], expected[2], rtol=0, atol=0, equal_nan=True)
    finite = expected[2][0].isfinite()
    assert 0 < int(finite.sum()) < finite.numel()
    torch.testing.assert_close(got[1][finite].float(), expected[1][finite].float(), rtol=2**-3, atol=2**-9)
    assert (got[1][finite].float() == expected[1][finite].float()).float().mean() > 0.99


@pytest.mark.slow
@pytest.mark.covering(every=2)
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("make", (adapted, lambda: conv1d(HIDDEN, FFN)), ids=("adapted", "conv1d"))
def test_adapters_and_conv1d_multiply_in_float8(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(5, 6, HIDDEN)
    (site,) = sites(module, x)
    assert site.gemm == "fp8"
    assert (site.gemm_kind is Kind.GEMM_SIZE) == (make is adapted)
    got, exact = step(compiled(module, gemm="fp8", strict=True), module, x), step(module, module, x)
    assert all(distance(a, b) < 0.12 for a, b in zip(got, exact, strict=True))


@pytest.mark.codegen_is_slow
@pytest.mark.parametrize(
    "make, dtype, kind",
    [(lambda: gelu_mlp(120, FFN), torch.float32, Kind.GEMM_SIZE), (lambda: gelu_mlp(), torch.float64, Kind.GEMM_DTYPE)],
)
def test_unsupported_layers_have_a_reason(make: Callable[[], nn.Module], dtype: torch.dtype, kind: Kind) -> None:
    module = make().to(dtype)
    x = torch.randn(4, next(module.parameters()).shape[1], dtype=dtype)
    (site,) = sites(module, x)
    assert (site.op, site.gemm, site.gemm_kind) == ("fused::bias_act", "", kind)
    torch.testing.assert_close(compiled(module, gemm="fp8")(x), module(x))
    text = r"(?s)these MLPs were not fused as the policy asks:\n.*its linear layers are not in float8: linear: "
    hint = '.*gemm="fp8-rowwise" takes multiples of 16' if kind is Kind.GEMM_SIZE else ""
    raises(Exception, text + hint, compiled(module, gemm="fp8", strict=True), x)


def test_gemms_with_computed_weights_are_not_linear_layers() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor, u: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, F.linear(u, w))), v)

    shapes = ((4, FFN), (FFN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))
    args = [torch.randn(s) for s in shapes]
    for site in sites(fn, *args):
        assert site.gemm_kind in (None, Kind.GEMM_FORM)


def test_gemms_with_another_tensor_per_row_are_not_linear_layers() -> None:
    def fn(x: Tensor, b: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(torch.addmm(b, x, w)), v)

    (site,) = sites(fn, *(torch.randn(s) for s in ((4, HIDDEN), (4, FFN), (HIDDEN, FFN), (HIDDEN, FFN))))
    assert site.gemm_kind is Kind.GEMM_FORM and site.gemm_reason == "addmm: addmm is not a linear layer"


def test_float8_on_a_cpu_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    gemms.warning_once.cache_clear()
    for _ in range(2):
        harness.captured(SwiGLU(), torch.randn(4, HIDDEN), edit=lambda gm: rewrite(gm.graph, FusionPolicy(gemm="fp8")))
    levels = [r.levelname for r in caplog.records if "float8 GEMMs on a CPU are correct, but slower" in r.message]
    assert levels == ["WARNING"]


DEVICES: tuple[tuple[tuple[int, int] | str, str, str, str, str], ...] = (
    # capability or architecture, CUDA or HIP version, reasons against "fp8", "fp8-rowwise" and "mxfp8"
    ((9, 0), "12.9", "", "", "sm_90"),
    ((9, 0), "12.8", "CUDA 12.8", "", "sm_90"),
    ((8, 9), "12.9", "sm_89", "", "sm_89"),
    ((10, 0), "13.0", "sm_100", "", ""),
    ((10, 3), "12.9", "sm_103", "", ""),
    ((10, 0), "12.6", "sm_100", "", "CUDA 12.6"),
    ((12, 0), "12.9", "sm_120", "", "sm_120"),
    ((8, 0), "12.9", "sm_80", "sm_80", "sm_80"),
    ("gfx942:sramecc+:xnack-", "7.0", "ROCm, gfx942", "ROCm, gfx942", "ROCm, gfx942"),
    ("gfx950", "7.0", "ROCm, gfx950", "", "ROCm, gfx950"),
    ("gfx90a", "7.0", "ROCm, gfx90a", "ROCm, gfx90a", "ROCm, gfx90a"),
)


@pytest.mark.parametrize(("gpu", "version", "blocks", "rows", "narrow"), DEVICES)
def test_devices_that_support_float8_gemms(
    gpu: Any, version: str, blocks: str, rows: str, narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd = isinstance(gpu, str)
    monkeypatch.setattr(torch.version, "hip", version if amd else None)
    monkeypatch.setattr(torch.version, "cuda", None if amd else version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4) if amd else gpu)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=gpu))
    for recipe, (scaling, _) in RECIPES.items():
        expected = rows if recipe == "fp8-rowwise" else narrow if recipe.startswith("mxfp8") else blocks
        assert gemms.no_scaled_products(torch.device("cuda"), scaling) == expected
        experts = recipe == "fp8-rowwise" and gpu == (9, 0)
        assert (gemms.no_scaled_products(torch.device("cuda"), scaling, grouped=True) == "") is experts
        assert gemms.no_scaled_products(torch.device("xpu"), scaling) == "xpu"
        assert gemms.no_scaled_products(torch.device("cpu"), scaling) == ""


@pytest.mark.slow
@pytest.mark.codegen_is_slow
@pytest.mark.parametrize("recipe", ("fp8", pytest.param("fp8-rowwise", marks=pytest.mark.slow)))
def test_verify_accepts_float8_rounding(recipe: str) -> None:
    result = tfo.verify(SwiGLU(), torch.randn(16, HIDDEN), policy=FusionPolicy(gemm=recipe))
    assert result.ok, str(result)
