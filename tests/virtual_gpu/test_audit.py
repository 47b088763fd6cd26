"""The audit finds every planted fault, and has no findings for correct programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import faulty_kernels as kernels
import triton
from torch import nn

import torch_fused_ops as tfo
from torch_fused_ops import virtual_gpu

N = 4096


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bf16(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bfloat16)


def audited(kernel: Any, *args: Any, **options: Any) -> virtual_gpu.Audit:
    return virtual_gpu.audit(kernel, *args, gpu=virtual_gpu.H100, **options)


def kinds(audit: virtual_gpu.Audit) -> list[str]:
    return [finding.kind for finding in audit.findings]


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("warps", [1, 4, 8])
@pytest.mark.parametrize("block", [64, 1024])
def test_correct_kernels_have_no_findings(block: int, warps: int) -> None:
    shared = meta(2 * N)
    args = shared[:N], bf16(N), shared[N:]  # halves of one storage
    audit = audited(kernels.correct, *args, grid=(N // block,), XBLOCK=block, num_warps=warps)
    assert audit.ok and not audit.notes, str(audit)


RACES: dict[str, tuple[Callable[[], tuple[Any, ...]], int, str]] = {
    "reads_another_program": (lambda: (meta(N), bf16(N), N), 1024, "programs run in any order"),
    "reads_another_thread": (lambda: (meta(N), bf16(N), meta(N)), 1024, "no barrier"),
    "has_copies": (lambda: (meta(N), meta(N // 64)), 64, "thread 0 or another one of 2"),
    "loads_after_store": (lambda: (*[meta(N)] * 2, meta(N)), 1024, "the load comes after the store"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_are_found(name: str) -> None:
    args, block, evidence = RACES[name]
    audit = audited(getattr(kernels, name), *args(), grid=(N // block,), XBLOCK=block)
    assert kinds(audit) == ["race"] and not audit.ok
    assert evidence in audit.findings[0].evidence and "store of in_out" in audit.findings[0].where


def test_barriers_and_separate_memory_prevent_races() -> None:
    assert audited(kernels.loads_after_store, meta(N), meta(N), meta(N), grid=(4,), XBLOCK=1024).ok, "separate memory"
    assert audited(kernels.waits_at_barrier, meta(N), meta(4), grid=(4,), XBLOCK=1024).ok
    assert audited(kernels.has_copies, meta(N), meta(4), grid=(4,), XBLOCK=1024).ok, "no two threads hold an element"


def test_repeated_stores_of_one_program_are_found() -> None:
    audit = audited(kernels.writes_one_place, meta(N), meta(4), grid=(4,), XBLOCK=1024)
    assert kinds(audit) == ["written twice"], str(audit)


@pytest.mark.parametrize("wide", [False, True])
def test_overflows_of_32_bit_indices_are_found(wide: bool) -> None:
    rows, columns = 70000, 32768
    args = bf16(rows, columns), bf16(rows, columns), rows, columns
    audit = audited(kernels.overflows, *args, grid=(rows,), XBLOCK=8192, WIDE=wide)
    assert kinds(audit) == ([] if wide else ["overflow"] * 2), str(audit)


def test_column_reads_are_uncoalesced() -> None:
    audit = audited(kernels.reads_columns, bf16(N, N), meta(N), N, N, grid=(N,), XBLOCK=1024)
    assert kinds(audit) == ["uncoalesced"] and "moves 16 × its bytes" in audit.findings[0].evidence
    assert audited(kernels.reads_columns, bf16(N, 16), meta(16), N, 16, grid=(16,), XBLOCK=1024).ok, "small"


def test_spills_and_low_occupancy_are_found() -> None:
    large = meta(1 << 22), meta(1 << 22)
    assert kinds(audited(kernels.spills, *large, grid=(N,), XBLOCK=1024, TERMS=24, maxnreg=24)) == ["spills"]
    rows = meta(N, 20000), meta(N, 20000), 20000
    audit = audited(kernels.has_one_large_block, *rows, grid=(N,), XBLOCK=32768, num_warps=32)
    assert kinds(audit) == ["occupancy"] and audit.findings[0].where == "1 block a multiprocessor"
    rows = meta(N, 1000), meta(N, 1000), 1000
    assert audited(kernels.has_one_large_block, *rows, grid=(N,), XBLOCK=1024, num_warps=4).ok


def test_audits_convert_to_text_and_json() -> None:
    audit = audited(
        kernels.reads_another_program, meta(N), bf16(N), N, grid=lambda meta: (N // meta["XBLOCK"],), XBLOCK=512
    )
    text, data = str(audit), json.loads(audit.to_json())
    assert text.startswith("1 kernel in 1 configuration for NVIDIA H100 80GB HBM3: 1 finding\n")
    assert "race: reads_another_program (4 warps)" in text
    assert data["ok"] is False and set(data["findings"][0]) == {"kernel", "configuration", "kind", "where", "evidence"}
    with pytest.raises(ValueError, match="grid=64 is not accepted: it must be a tuple"):
        audited(kernels.correct, meta(N), bf16(N), meta(N), grid=64, XBLOCK=512)
    with pytest.raises(TypeError, match="got int"):
        audited(3, grid=(1,))


def test_autotuned_kernels_are_audited_in_every_configuration() -> None:
    configs = [triton.Config({"XBLOCK": 64}), triton.Config({"XBLOCK": 1024}, num_warps=8)]
    tuned = triton.autotune(configs, key=[])(kernels.has_copies)
    audit = audited(tuned, meta(N), meta(N // 64), grid=lambda meta: (N // meta["XBLOCK"],))
    assert audit.configurations == 2 and [f.configuration for f in audit.findings if f.kind == "race"] == [
        "XBLOCK 64, 4 warps"
    ]


# ---- programs --------------------------------------------------------------------------------------------------------


def _mlp(activation: nn.Module, bias: bool) -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 512, bias), activation, nn.Linear(512, 128, bias)).bfloat16()
    return model, bf16(256, 128).requires_grad_()


PROGRAMS: dict[str, tuple[Callable[[], tuple[Any, Tensor]], dict[str, Any] | None]] = {
    "plain": (lambda: _mlp(nn.GELU(approximate="tanh"), False), None),
    "fused": (lambda: _mlp(nn.GELU(approximate="tanh"), True), {}),
    "fp8": (lambda: _mlp(nn.SiLU(), False), {"memory": "fp8"}),
}


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_generated_programs_have_no_findings(name: str) -> None:
    make, policy = PROGRAMS[name]
    model, x = make()
    config = None if policy is None else tfo.compile_options(policy=tfo.FusionPolicy(**policy))
    paper = virtual_gpu.compile_on_paper(model, x, gpu=virtual_gpu.H100, config=config)
    audit = virtual_gpu.audit(paper)
    assert audit.ok and not audit.notes, str(audit)
    assert audit.kernels >= 2 and audit.configurations > audit.kernels
