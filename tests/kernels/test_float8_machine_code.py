"""The kernels of linear layers in float8 as sm_90 and sm_100 run them: registers, spills, instructions an element."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from harness import meta
from kernel_harness import assemble

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import kernels

ELEMENTS = 128 * 128 / (32 * kernels._WARPS)  # of a tile per thread; kernels have no loops
ROWS, COLUMNS = 4096, 8192


def gradients(name: str, activation: str, rows: int = ROWS, columns: int = 128) -> tuple[Any, ...]:
    x, packed = meta(rows, COLUMNS), meta(rows, 2 * COLUMNS)
    data = {"bias_act": (x,), "glu": (x, x), "bias_glu": (packed,)}[name]
    scalars = () if name == "bias_act" else (0.0, None)
    layout = ("halves",) if name == "bias_glu" else ()
    return kernels.launch_of(f"{name}_backward_quantized"), x, *data, activation, *layout, *scalars, columns


def transposed() -> Tensor:
    return meta(COLUMNS, ROWS).t()


# Per call: upper limits for registers, spilled bytes and instructions per element; exact numbers of loads of 16 bytes,
# and of stores of 16 and 8 bytes. A tile has 8 loads per tensor, 4 stores per transposed float8 result and 8 per other
# result. "glu" also stores and loads its result in 16 bits; it spills 8 bytes: two words, stored once and loaded twice.
# For "32 glu" Triton 3.6 generates 68.1 instructions per element, 3.7 and 3.9 generate 66.
OF_32_GLU = 69 if triton.__version__.startswith("3.6.") else 67
CALLS: dict[str, tuple[Callable[[], tuple[Any, ...]], int, int, float, int, int, int]] = {
    "glu": (lambda: gradients("glu", "silu"), 128, 8, 67, 32, 20, 16),
    "bias_act": (lambda: gradients("bias_act", "gelu_tanh"), 128, 0, 50, 16, 8, 8),
    "both": (lambda: (kernels.quantize_both, meta(ROWS, COLUMNS)), 128, 0, 17, 8, 4, 8),
    "straight": (lambda: (kernels.quantize, meta(ROWS, COLUMNS), 1), 64, 0, 10, 8, 0, 8),
    "turned": (lambda: (kernels.quantize, transposed(), 1), 64, 0, 12, 8, 4, 0),
    "weight": (lambda: (kernels.quantize, meta(ROWS, COLUMNS), 128), 64, 0, 11, 8, 0, 8),
    "weight turned": (lambda: (kernels.quantize, transposed(), 128), 64, 0, 12, 8, 4, 0),
    "32 glu": (lambda: gradients("glu", "silu", columns=32), 128, 96, OF_32_GLU, 32, 20, 16),
    "32 bias_act": (lambda: gradients("bias_act", "gelu_tanh", columns=32), 128, 64, 51, 16, 8, 8),
    "32 straight": (lambda: (kernels.quantize, meta(ROWS, COLUMNS), 1, 32), 72, 0, 11, 8, 0, 9),
    "32 turned": (lambda: (kernels.quantize, transposed(), 1, 32), 64, 0, 12, 8, 4, 1),
    "32 both": (lambda: (kernels.quantize_both, meta(ROWS, COLUMNS), 32), 128, 0, 17, 8, 4, 10),
}


def machine_code(
    call: tuple[Any, ...], gpu: virtual_gpu.GPU, monkeypatch: pytest.MonkeyPatch
) -> virtual_gpu.MachineCode:
    monkeypatch.setattr(kernels, "_ptx", lambda _: True)
    (code,) = assemble(gpu, *call)
    return code


SLOW = ("glu", "weight", "weight turned", "32 straight", "32 glu", "32 bias_act", "32 both")


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CALLS])
def test_fits_sm_90(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, registers, spills, instructions, loads, wide_stores, stores = CALLS[name]
    code = machine_code(call(), virtual_gpu.H200, monkeypatch)
    assert code.registers <= registers and code.spills <= spills
    assert len(code.instructions) <= instructions * ELEMENTS
    counts = Counter(code.instructions)
    assert (counts["LDG.E.128"], counts["STG.E.128"], counts["STG.E.64"]) == (loads, wide_stores, stores)
    assert not [i for i in counts if "NAN" in i and "MNMX" in i], "ptxas 12.9 stores float8 wrongly after those"


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_assembles_for_sm_100(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = machine_code(CALLS[name][0](), virtual_gpu.B200, monkeypatch)
    assert code.registers <= CALLS[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, ROWS - 16])
@pytest.mark.parametrize(("name", "activation"), [("bias_glu", "quick_gelu"), ("glu", "gelu"), ("bias_act", "relu2")])
def test_two_programs_fit_a_multiprocessor(
    name: str, activation: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = machine_code(gradients(name, activation, rows), virtual_gpu.H200, monkeypatch)
    assert code.registers <= 128 and 2 * code.shared <= 228 * 1024 and code.spills <= 48
    assert len(code.instructions) <= 77 * ELEMENTS


@pytest.mark.slow
def test_before_sm_90_it_is_arithmetic_on_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ptx", lambda _: False)
    (code,) = assemble(virtual_gpu.A100, kernels.quantize, transposed(), 1)
    assert code.spills == 0 and not [i for i in code.instructions if i.startswith("F2FP.SATFINITE")]


SCALE = meta(1, 1, dtype=torch.float32)
IN_ROWS: dict[str, tuple[Any, ...]] = {
    "row": (kernels.quantize, meta(ROWS, 14336), 1, 14336),
    "weight turned": (kernels.quantize_by, transposed(), SCALE),
    "experts turned": (kernels.quantize_by, meta(8, COLUMNS, ROWS).mT, meta(8, 1, 1, dtype=torch.float32)),
}


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", IN_ROWS)
@pytest.mark.parametrize("gpu", [virtual_gpu.L40S, virtual_gpu.H100, virtual_gpu.MI300X], ids=lambda gpu: gpu.arch)
def test_rows_spill_nowhere(name: str, gpu: virtual_gpu.GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 14336 is loaded once, into registers; a transpose is stored by words of 4 elements, or more."""
    monkeypatch.setattr(kernels, "_converts", lambda t: not gpu.is_amd)
    (code,) = assemble(gpu, *IN_ROWS[name])
    assert code.spills == 0 and code.registers <= 128
    counts = Counter(code.instructions)
    if not gpu.is_amd:
        loads, stores = (4, 2) if name == "row" else (8, 4)
        of_16 = counts["LDG.E.128"], counts["STG.E.128"] + counts["STG.E.64"]
        assert of_16 == (loads, stores), counts
