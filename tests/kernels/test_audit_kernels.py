"""The audit finds no fault in any launch of hand-written kernels."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import BUILTIN, meta

pytest.importorskip("triton")

import test_activation_kernels
import test_dropout_kernels
import test_float8_machine_code
import test_softmax_kernels
from kernel_harness import recorded

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import kernels as float8

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def activations() -> Iterator[tuple[Any, ...]]:
    for activation in BUILTIN:
        yield from test_activation_kernels.calls(activation, BF16).values()
    for dtype, rows, n in ((F32, 33, 1000), (BF16, 3, 8192), (torch.float64, 65, 24), (torch.float16, 5, 77)):
        yield from test_activation_kernels.calls("silu", dtype, rows, n).values()


def dropouts() -> Iterator[tuple[Any, ...]]:
    for operator, args, _ in test_dropout_kernels.calls().values():
        yield operator, *args


def softmaxes() -> Iterator[tuple[Any, ...]]:
    for dtype, columns in ((BF16, 64), (BF16, 2048), (F32, 1000), (BF16, 8192), (F32, 40000)):
        yield from test_softmax_kernels.calls(dtype, columns).values()


def float8s() -> Iterator[tuple[Any, ...]]:
    for make, *_ in test_float8_machine_code.CALLS.values():
        yield make()
    yield from test_float8_machine_code.IN_ROWS.values()
    for rows, columns in ((256, 512), (144, 272)):
        for block in (128, 32):
            yield float8.quantize, meta(rows, columns), 1, block
            yield float8.quantize_both, meta(rows, columns), block
    values, scales = meta(4096, 8192, dtype=F8), meta(64, 4096, dtype=F32)
    yield float8.dequantize, values, scales, 1, BF16
    yield float8.requantize, values, scales


FAMILIES: dict[str, Callable[[], Iterator[tuple[Any, ...]]]] = {
    "activations": activations, "dropout": dropouts, "softmax": softmaxes, "float8": float8s
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("gpu", [virtual_gpu.H100, virtual_gpu.B200], ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_kernel_has_a_finding(family: str, gpu: virtual_gpu.GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_converts", lambda t: True)
    monkeypatch.setattr(float8, "_ptx", lambda device: True)
    launches, audits = 0, {}
    for call in FAMILIES[family]():
        for launch in recorded(*call):
            arguments = (*launch.tensors, *launch.integers)
            audit = virtual_gpu.audit(launch.kernel, *arguments, grid=launch.grid, gpu=gpu, **launch.constants)
            launches += 1
            audits[str(audit)] = audit
    print(f"{family}, {gpu.name}: {launches} launches", *audits, sep="\n")
    assert launches and all(audit.ok and not audit.notes for audit in audits.values())
