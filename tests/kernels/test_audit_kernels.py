"""The audit finds no fault in any launch of eager kernels, hand-written or generated."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import meta

pytest.importorskip("triton")

import test_float8_machine_code
from kernel_harness import recorded
from test_eager_gpu import CALLS

from torch_fused_ops import virtual_gpu
from torch_fused_ops.families.float8 import kernels as float8

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
GPUS = virtual_gpu.H100, virtual_gpu.B200


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


def audited(*audits: virtual_gpu.Audit) -> None:
    print(*audits, sep="\n")
    assert audits and all(audit.ok and not audit.notes for audit in audits)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_no_hand_written_kernel_has_a_finding(gpu: virtual_gpu.GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_converts", lambda t: True)
    monkeypatch.setattr(float8, "_ptx", lambda device: True)
    launches = [launch for call in float8s() for launch in recorded(*call)]
    audited(
        *(
            virtual_gpu.audit(
                launch.kernel, *launch.tensors, *launch.integers, grid=launch.grid, gpu=gpu, **launch.constants
            )
            for launch in launches
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("name", CALLS)
def test_no_eager_kernel_has_a_finding(name: str, gpu: virtual_gpu.GPU) -> None:
    operator, args = CALLS[name]
    audited(virtual_gpu.audit(virtual_gpu.compile_operator_on_paper(operator, *args, gpu=gpu)))
