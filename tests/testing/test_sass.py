"""One call lists NVIDIA's machine code of several kernels. The listings equal cuobjdump's output."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from torch_fused_ops import virtual_gpu
from torch_fused_ops.virtual_gpu import sass
from torch_fused_ops.virtual_gpu.machine_code import MachineCode

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?;)", re.M)


@triton.jit
def divide_kernel(x, out, n, BLOCK: tl.constexpr):  # a loop, and a division in float64: a subroutine
    total = tl.zeros([BLOCK], tl.float64)
    for i in range(0, n, BLOCK):
        offsets = i + tl.arange(0, BLOCK)
        total += 1.0 / tl.load(x + offsets, mask=offsets < n, other=1.0)
    tl.store(out + tl.arange(0, BLOCK), total)


def assembled(gpu: Any, block: int) -> MachineCode:
    x = torch.empty(block, dtype=torch.float64, device="meta")
    return virtual_gpu.assemble(divide_kernel, gpu, x, x, block, block={"BLOCK": block})


def instructions(text: str) -> list[tuple[str, str]]:
    return [(address, " ".join(rest.split())) for address, rest in INSTRUCTION.findall(text)]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of kernels in each call of nvdisasm."""
    counts: list[int] = []
    original = sass._disassembled

    def counted(codes: Any, arch: str) -> list[str]:
        counts.append(len(codes))
        return original(codes, arch)

    monkeypatch.setattr(sass, "_disassembled", counted)
    monkeypatch.setattr(sass, "_WAITING", type(sass._WAITING)())
    return counts


def test_waiting_kernels_are_listed_together_as_by_cuobjdump(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: list[int]
) -> None:
    cubins = []
    original = sass._functions

    def record(cubin: bytes) -> list[bytes]:
        cubins.append(cubin)
        return original(cubin)

    monkeypatch.setattr(sass, "_functions", record)
    codes = [assembled(virtual_gpu.H100, block) for block in (32, 64)]
    assembled(virtual_gpu.H100, 128)  # no reference to it remains
    older = assembled(virtual_gpu.A100, 64)
    assert processes == []
    assert codes[1].instructions and processes == [2], "the kernels for the same GPU that are still referenced"
    assert all(code.instructions for code in codes) and processes == [2]
    assert older.instructions and processes == [2, 1]
    tools = sass.nvidia_tools()
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}  # cuobjdump calls nvdisasm
    for code, cubin in ((codes[0], cubins[0]), (codes[1], cubins[1])):
        (tmp_path / "cubin").write_bytes(cubin)
        command = [str(tools / "cuobjdump"), "-sass", str(tmp_path / "cubin")]
        listing = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        assert instructions(code.asm) == instructions(listing)
        jumps = {name.split(".")[0] for name in code.instructions}
        assert jumps > {"BRA", "CALL", "RET"}, "instructions with an address"
