"""The Triton kernels that store and load float8: the bits are torch's, the numbers are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BUILTIN
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from kernel_harness import GPUS, Device, assemble, meta, recorded
from kernel_harness import assert_close as within_contract

from torch_fused_ops import activations, virtual_gpu
from torch_fused_ops.kernels import activation as kernels
from torch_fused_ops.kernels import launching
from torch_fused_ops.kernels.activation import launch_of
from torch_fused_ops.operators import reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


# ---- the bits --------------------------------------------------------------------------------------------------------


@triton.jit
def _round_trip(x, code, back, N: tl.constexpr):
    i = tl.arange(0, N)
    bits = kernels._to_fp8(tl.load(x + i), False)
    tl.store(code + i, bits)
    tl.store(back + i, kernels._from_fp8(bits, False))


def test_arithmetic_on_bits_rounds_as_torch_does() -> None:
    """Where the hardware has no conversion: every float8, the numbers half way between two, and those around them."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (exact[1:] + exact[:-1]) / 2
    x = torch.cat([exact, between, between.nextafter(torch.tensor(torch.inf)), between.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, torch.rand(1, 2048 - 2 * len(x) - 1).mul(460).clamp_max(448)[0], torch.tensor([448.00003]), x])
    x[-len(exact) :] *= -1
    x = x[:2048].contiguous()
    code, back = torch.empty(2048, dtype=torch.uint8), torch.empty(2048)
    virtual_gpu.interpret(_round_trip, x, code, back, grid=(1,), N=2048)
    expected = x.to(torch.float8_e4m3fn)
    assert torch.equal(code, expected.view(torch.uint8)) and torch.equal(back, expected.float())


# ---- the operators ---------------------------------------------------------------------------------------------------

OPERATORS = [("bias_act", ""), ("glu", ""), *(("bias_glu", layout) for layout in reference.LAYOUTS)]


def arguments(name: str, layout: str, shape: tuple[int, ...], dtype: torch.dtype, full: bool = True) -> list[Any]:
    g = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return (torch.randn(size, generator=g) * 3).to(dtype)

    n = shape[-1] * (2 if name == "bias_glu" else 1)
    second = normal(*shape) if name == "glu" else normal(n) if full else None
    args = [normal(*shape[:-1], n), second, normal(*shape[:-1]) if full else None, "gelu_tanh"]
    return args + ([layout] if layout else []) + ([] if name == "bias_act" else [0.5, 1.5])


@pytest.mark.covering(1)
@pytest.mark.parametrize("widest", [kernels._WIDEST_ROW, 16], ids=["row in registers", "row read twice"])
@pytest.mark.parametrize("shape", [(5, 40), (3, 2, 33), (7,), (0, 4), (4, 0), (70, 3)])
@pytest.mark.parametrize(("name", "layout"), OPERATORS)
def test_stores_and_loads_as_the_reference(
    device: Device, name: str, layout: str, shape: tuple[int, ...], widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_WIDEST_ROW", widest)
    data = 2 if name == "glu" else 1
    for dtype in (torch.bfloat16, torch.float64) if shape == (5, 40) else (torch.float32,):
        args = arguments(name, layout, shape, dtype)
        if len(shape) > 1 and args[0].numel():
            args[0][0], args[0][-1, ..., 0] = 0.0, float("nan")
        out, *kept = device.run(launch_of(f"{name}_fp8"), *args)
        assert device.names == (["_forward_fp8"] if out.numel() else [])
        assert torch.equal(out.nan_to_num(7), device.run(launch_of(name), *args).nan_to_num(7))
        _, *expected = getattr(reference, f"{name}_fp8")(*args)
        for (stored, scale), (e_stored, e_scale) in zip(
            [kept[i : i + 2] for i in (0, 2)[:data]],
            [expected[i : i + 2] for i in (0, 2)[:data]],
            strict=True,
        ):
            assert stored.is_contiguous() and torch.equal(scale.nan_to_num(7), e_scale.nan_to_num(7))
            finite = e_scale.isfinite()
            assert torch.equal(stored[finite].view(torch.uint8), e_stored[finite].view(torch.uint8))
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        backward = (grad, *expected, *args[data:], *[dtype] * data, (True, True, True))
        got = device.run(launch_of(f"{name}_fp8_backward"), *backward)
        assert device.names.count("_backward") == (1 if grad.numel() else 0) and len(device.names) <= 3
        wide = [a.double() if isinstance(a, Tensor) and a.dtype != reference.FP8 else a for a in backward]
        wide[-1 - data : -1] = [torch.float64] * data
        for i, (g, e) in enumerate(zip(got, getattr(reference, f"{name}_fp8_backward")(*wide), strict=True)):
            near = max(1.0, float(e.abs().nan_to_num(0.0).max())) if e.numel() else 1.0
            terms = max(1.0, (grad.numel() / max(1, g.numel())) ** 0.5) if i >= data else 1.0
            within_contract(g, e, gradient=True, absolute=8 * torch.finfo(torch.float32).eps * near * terms)


@pytest.mark.parametrize("activation", BUILTIN)
def test_every_activation_at_every_stored_value(device: Device, activation: str) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).repeat(4, 1)
    stored, scale = codes[:, codes[0].float().isfinite()].contiguous(), torch.tensor([1e-3, 0.02, 1.0, 30.0])
    grad, rest = torch.ones(stored.shape), (None, None, activation, torch.float32, (True, False, False))
    got = device.run(launch_of("bias_act_fp8_backward"), grad, stored, scale, *rest)[0]
    x = reference.load_fp8(stored, scale, torch.float64)
    near_zero = 4 * torch.finfo(torch.float32).eps * ((x > -2) & (x < 0)).double()
    within_contract(got, activations.get(activation).derivative(x), gradient=True, absolute=near_zero)
    on_cpu = torch.ops.fused.bias_act_fp8_backward(grad, stored, scale, *rest)[0]
    assert on_cpu is not None
    within_contract(on_cpu, activations.get(activation).derivative(x), gradient=True, absolute=near_zero)


def test_wide_offsets_give_the_same(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, layout in OPERATORS:
        args = arguments(name, layout, (50, 20), torch.float32)
        narrow = device.run(launch_of(f"{name}_fp8"), *args)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "INT32_MAX", 0)
            patch.setattr(launching, "GRID_LIMIT", 3)
            kernels._row_plan.cache_clear()
            wide = device.run(launch_of(f"{name}_fp8"), *args)
            assert device.launches[0][2]["WIDE"]
            kernels._row_plan.cache_clear()
        for a, b in zip(narrow, wide, strict=True):
            assert torch.equal(a.float(), b.float())


def test_strides(device: Device) -> None:
    x, u = torch.randn(24, 6).t(), torch.randn(6, 49)[:, 1::2]
    out, *kept = device.run(launch_of("glu_fp8"), x, u, None, "silu", 0.0, None)
    for got, expected in zip(kept, (*reference.store_fp8(x), *reference.store_fp8(u)), strict=True):
        assert got.is_contiguous() and torch.equal(got.float(), expected.float())
    torch.testing.assert_close(out, reference.glu(x, u, None, "silu"))


# ---- machine code ----------------------------------------------------------------------------------------------------


def calls(activation: str, dtype: torch.dtype = torch.bfloat16, rows: int = 4096, n: int = 8192) -> dict[str, Any]:
    x, packed, b, packed_b = (meta(*s, dtype=dtype) for s in ((rows, n), (rows, 2 * n), (n,), (2 * n,)))
    s = meta(rows, dtype=torch.float32)
    x8, packed8 = (meta(*t.shape, dtype=torch.uint8).view(reference.FP8) for t in (x, packed))
    none, both = (None, None), (True, True, False)
    every = (True, True, True)
    found: dict[str, Any] = {
        "bias_act": (launch_of("bias_act_fp8"), x, *none, activation),
        "bias_act full": (launch_of("bias_act_fp8"), x, b, s, activation),
        "glu": (launch_of("glu_fp8"), x, x, None, activation),
        "bias_act backward": (
            launch_of("bias_act_fp8_backward"), x, x8, s, *none, activation, dtype, (True, False, False),
        ),
        "bias_act full backward": (launch_of("bias_act_fp8_backward"), x, x8, s, b, s, activation, dtype, every),
        "glu backward": (
            launch_of("glu_fp8_backward"), x, x8, s, x8, s, None, activation, 0.0, None, dtype, dtype, both,
        ),
    }  # fmt: skip
    for layout in reference.LAYOUTS:
        full = (activation, layout, 1.0, 7.0)
        found[layout] = (launch_of("bias_glu_fp8"), packed, packed_b, s, *full)
        found[f"{layout} backward"] = (
            launch_of("bias_glu_fp8_backward"), x, packed8, s, packed_b, s, *full, dtype, every,
        )  # fmt: skip
    return found


DEFAULT = {virtual_gpu.H100: True, virtual_gpu.MI300X: False}  # one by hardware and one by arithmetic


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ("glu", "bias_act", "bias_act backward", "glu backward"))
@pytest.mark.parametrize(
    ("gpu", "native"),
    [
        pytest.param(gpu, native, marks=() if native == DEFAULT.get(gpu) else pytest.mark.slow)
        for gpu in GPUS
        for native in (False, True)
    ],
    ids=lambda value: getattr(value, "name", str(value)).replace(" ", "_"),
)
def test_compiles_where_it_runs(gpu: virtual_gpu.GPU, native: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With hardware's conversion from sm_89 on; everywhere with arithmetic on bits, as on sm_80 and on AMD's."""
    monkeypatch.setattr(kernels, "_native_fp8", lambda _: native)
    if native and gpu in (virtual_gpu.A100, virtual_gpu.MI300X):
        pytest.skip("not used there")
    (code,) = assemble(gpu, *calls("silu")[name])
    assert code.spills == 0


@pytest.mark.slow
def test_wide_loads_and_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_native_fp8", lambda _: True)
    for name, call in calls("gelu_tanh").items():
        if "interleaved" in name or "full" in name or name in ("halves", "swapped"):
            continue
        code = assemble(virtual_gpu.H100, *call)[0]
        assert "LDG.E.128" in code.instructions and "STG.E.128" in code.instructions, name


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("name", "columns"), [("bias_act_fp8", 4096), ("glu_fp8", 4096), ("glu_fp8", 14336)])
def test_several_rows_are_under_way_at_once(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a program waits for its row's largest number, four others or more load and store; loads are wide."""
    monkeypatch.setattr(kernels, "_native_fp8", lambda _: True)
    x = meta(512, columns)
    scalars = ("silu",) if name == "bias_act_fp8" else ("silu", 0.0, None)
    (code,) = assemble(virtual_gpu.H100, launch_of(name), x, None if name == "bias_act_fp8" else x, None, *scalars)
    warps, registers = code.threads // 32, -(-code.registers // 8) * 8
    assert warps <= 8
    assert 65536 // (registers * code.threads) >= 5
    assert code.spills == 0
    large = [i for i in code.instructions if i.startswith(("LDG", "STG")) and i != "STG.E"]  # the rows' scales
    assert all(i.endswith(".128") for i in large)


def test_rows_that_fit_are_read_once() -> None:
    for n, whole in ((64, True), (4096, True), (kernels._WIDEST_ROW, True), (kernels._WIDEST_ROW + 1, False)):
        ((kernel, *_, constants),) = recorded(launch_of("bias_act_fp8"), meta(512, n), None, None, "silu")
        assert kernel is kernels._forward_fp8 and constants["WHOLE"] == whole
        assert constants["BLOCK_N"] >= min(n, kernels._WIDEST_ROW)
        assert constants["BLOCK_M"] * constants["BLOCK_N"] >= kernels._LEAST_TILE


@pytest.mark.slow
def test_results_are_the_same_in_every_run(device: Device) -> None:
    for name, layout in OPERATORS:
        args = arguments(name, layout, (300, 40), torch.bfloat16)
        data = 2 if name == "glu" else 1
        grad, runs = torch.randn(300, 40).bfloat16(), []
        for _ in range(2):
            out, *kept = device.run(launch_of(f"{name}_fp8"), *args)
            rest = (*args[data:], *[torch.bfloat16] * data, (True, True, True))
            runs.append([out, *kept, *device.run(launch_of(f"{name}_fp8_backward"), grad, *kept, *rest)])
            plain = launch_of(f"{name}_backward")
            runs[-1] += device.run(plain, grad, *args, (True, True, True))
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a.double(), b.double())
