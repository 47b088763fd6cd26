"""The audit of correct and faulty hand-written kernels."""
# ruff: noqa: E501 (a table)

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from torch_fused_ops import virtual_gpu

N = 4096


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@triton.jit
def shifted(x, y, n, SHIFT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i + SHIFT, (i + SHIFT >= 0) & (i < n), 0.0), i < n)


@triton.jit
def shifted_without_a_mask(x, y, n, SHIFT: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i + SHIFT, i < n), i < n)


@triton.jit
def named_as_options(x, y, n, num_warps: tl.constexpr, num_stages: tl.constexpr):
    i = tl.program_id(0) * num_warps * num_stages + tl.arange(0, num_warps * num_stages)
    tl.store(y + i, tl.load(x + i, i < n), i < n)


@triton.jit
def copied(x, y, n, B: tl.constexpr = 512, EVEN: tl.constexpr = False):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if EVEN:
        tl.store(y + i, tl.load(x + i))
    else:
        tl.store(y + i, tl.load(x + i, i < n), i < n)


@triton.jit
def summed_rows(x, y, columns, stride, B: tl.constexpr):
    row, total = tl.program_id(0), 0.0
    for start in range(0, columns, B):
        i = start + tl.arange(0, B)
        total += tl.sum(tl.load(x + row * stride + i, i < columns, 0.0))
    tl.store(y + row, total)


@triton.jit
def summed_rows_by_pointer(x, y, columns, stride, B: tl.constexpr):
    """Carries pointers between iterations, and loads blocks without a mask."""
    pointers = x + tl.program_id(0) * stride + tl.arange(0, B)
    total = tl.zeros([B], tl.float32)
    for _ in range(tl.cdiv(columns, B)):
        total += tl.load(pointers)
        pointers += B
    tl.store(y + tl.program_id(0), tl.sum(total))


@triton.jit
def while_loop(x, y, n, B: tl.constexpr):
    start = 0
    total = tl.zeros([B], tl.float32)
    while start < n:
        total += tl.load(x + start + tl.arange(0, B))
        start += B
    tl.store(y + tl.arange(0, B), total)


@triton.jit
def transposed(x, y, rows, columns, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    mask = (r < rows) & (c < columns)
    tl.store(y + c * rows + r, tl.load(x + r * columns + c, mask), mask)


@triton.jit
def transposed_with_a_wrong_mask(x, y, rows, columns, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    tl.store(y + c * rows + r, tl.load(x + r * columns + c, c < columns), c < columns)


@triton.jit
def softmax(x, y, columns, B: tl.constexpr):
    i = tl.arange(0, B)
    v = tl.load(x + tl.program_id(0) * columns + i, i < columns, -float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + tl.program_id(0) * columns + i, e / tl.sum(e, 0), i < columns)


@triton.jit
def one_result(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y, tl.sum(tl.load(x + i, i < n, 0.0)))


@triton.jit
def atomic_result(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(y, tl.sum(tl.load(x + i, i < n, 0.0)))


@triton.jit
def atomic_beyond(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(y + i, tl.load(x + i, i < n, 0.0), i <= n)


@triton.jit
def gathered(x, index, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + tl.load(index + i, i < n, 0), i < n), i < n)


@triton.jit
def where_positive(x, y, n, B: tl.constexpr):
    """The mask depends on data, so several programs may write an element."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(x + i, i < n, 0.0)
    tl.store(y + tl.arange(0, B), v, v > 0)


@triton.jit
def branch_on_data(x, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if tl.load(x) > 0:
        tl.store(y + i, 1.0)


@triton.jit
def loop_on_data(x, y, B: tl.constexpr):
    for k in range(tl.load(x).to(tl.int32)):
        tl.store(y + k * B + tl.arange(0, B), 0.0)


@triton.jit
def only_the_first(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    if tl.program_id(0) == 0:
        tl.store(y + i, tl.load(x + i))


@triton.jit
def grouped(x, y, groups, B: tl.constexpr):
    """Divides program ids and takes their remainder, as GEMMs do."""
    pid = tl.program_id(0)
    i = (pid % groups * tl.num_programs(0) // groups + pid // groups) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i))


@triton.jit
def triangle(x, y, n, B: tl.constexpr):
    """Each program has a different number of iterations."""
    total = tl.zeros([B], tl.float32)
    for k in range(0, tl.program_id(0) + 1):
        total += tl.load(x + k * B + tl.arange(0, B))
    tl.store(y + tl.program_id(0) * B + tl.arange(0, B), total)


@triton.jit
def scanned(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.cumsum(tl.load(x + i, i < n, 0.0), 0), i < n)


@triton.jit
def strided(x, y, from_stride, to_stride, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i * to_stride, tl.load(x + i * from_stride))


@triton.jit
def gemm(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    r = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    q = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, k, BK):
        i = start + tl.arange(0, BK)
        left = tl.load(a + r * k + i[None, :], (r < m) & (i[None, :] < k), 0.0)
        right = tl.load(b + i[:, None] * n + q, (i[:, None] < k) & (q < n), 0.0)
        total += tl.dot(left, right)
    tl.store(c + r * n + q, total.to(tl.bfloat16), (r < m) & (q < n))


@triton.jit
def copied_in_turns(x, y, turns, B: tl.constexpr):
    for k in range(turns):
        i = k * B + tl.arange(0, B)
        tl.store(y + i, tl.load(x + i))


@triton.jit
def wrapped(x, y, n, B: tl.constexpr):
    """Carries an index that starts over, so the first iterations do not predict its last value."""
    offset = 0
    total = tl.zeros([B], tl.float32)
    for _ in range(1 << 20):
        total += tl.load(x + offset + tl.arange(0, B))
        offset = (offset + B) % n
    tl.store(y + tl.arange(0, B), total)


@triton.jit
def alternating(x, y, turns, B: tl.constexpr):
    """Carries an index that alternately grows and shrinks."""
    offset = 0
    total = tl.zeros([B], tl.float32)
    for k in range(turns):
        total += tl.load(x + offset + tl.arange(0, B))
        offset += B - 2 * B * (k % 2)
    tl.store(y + tl.arange(0, B), total)


def even(arguments: dict[str, Any]) -> bool:
    return arguments["n"] % arguments["B"] == 0


guarded = triton.heuristics({"EVEN": even})(copied)
unguarded = triton.heuristics({"EVEN": lambda arguments: True})(copied)
CONFIGS = [triton.Config({"B": 256}), triton.Config({"B": 1024}, num_warps=8)]
tuned = triton.autotune(CONFIGS, key=["n"])(triton.heuristics({"EVEN": even})(copied))
bf16 = torch.bfloat16
same = meta(N)
huge = meta(1 << 17, 1 << 17)
# name: kernel, arguments, grid, named arguments, the kinds of findings, a part of the notes
CASES: dict[str, tuple[Any, tuple[Any, ...], Any, dict[str, Any], str, str]] = {
    "shifted": (shifted, (meta(N), meta(N), N), (4,), {"SHIFT": -1, "B": 1024}, "", ""),
    "shifted in place": (shifted, (same, same, N), (4,), {"SHIFT": -1, "B": 1024}, "race", ""),
    "no mask before the first": (shifted_without_a_mask, (meta(N), meta(N), N), (4,), {"SHIFT": -1, "B": 1024}, "out of bounds", ""),
    "no mask behind the last": (shifted_without_a_mask, (meta(N), meta(N), N), (4,), {"SHIFT": 1, "B": 1024}, "out of bounds", ""),
    "defaults": (copied, (meta(N), meta(N), N), (8,), {}, "", ""),
    "all by name": (copied, (), (8,), {"x": meta(N), "y": meta(N), "n": N}, "", ""),
    "constexpr by position": (copied, (meta(N), meta(N), N, 1024, True), (4,), {}, "", ""),
    "parameters named as options, too few programs": (named_as_options, (meta(N), meta(N), N), (N // 64 - 1,), {"num_warps": 8, "num_stages": 8}, "unwritten", ""),
    "wrong heuristics": (unguarded, (meta(N - 5), meta(N - 5), N - 5), (8,), {}, "out of bounds, out of bounds", ""),
    "autotune, a wrong grid": (tuned, (meta(N), meta(N), N), (4,), {}, "unwritten", ""),
    "rows": (summed_rows, (meta(64, 1000), meta(64), 1000, 1000), (64,), {"B": 256}, "", ""),
    "rows of a wrong stride": (summed_rows, (meta(64, 1000), meta(64), 1000, 1001), (64,), {"B": 256}, "out of bounds", ""),
    "huge rows by pointer": (summed_rows_by_pointer, (meta(1 << 30), meta(1), 1 << 30, 0), (1,), {"B": 256}, "", ""),
    "huge rows by pointer, no mask": (summed_rows_by_pointer, (meta((1 << 30) - 8), meta(1), (1 << 30) - 8, 0), (1,), {"B": 256}, "out of bounds", ""),
    "many iterations": (copied_in_turns, (meta(N), meta(N), N // 32), (1,), {"B": 32}, "", ""),
    "index that starts over": (wrapped, (meta(16 * N), meta(N), 16 * N), (1,), {"B": N}, "", ""),
    "index that alternates": (alternating, (meta(2 * N), meta(N), 1 << 20), (1,), {"B": N}, "", ""),
    "while": (while_loop, (meta(N), meta(256), N), (1,), {"B": 256}, "", "while loop"),
    "transposed": (transposed, (meta(100, 200), meta(200, 100), 100, 200), (4, 7), {"R": 32, "C": 32}, "", ""),
    "transposed in place": (transposed, (same, same, 64, 64), (2, 2), {"R": 32, "C": 32}, "race", ""),
    "transposed with a wrong mask": (transposed_with_a_wrong_mask, (meta(100, 200), meta(200, 100), 100, 200), (4, 7), {"R": 32, "C": 32}, "out of bounds, out of bounds, written twice", ""),
    "softmax": (softmax, (meta(64, 1000), meta(64, 1000), 1000), (64,), {"B": 1024}, "", ""),
    "softmax in place": (softmax, (same, same, 64), (64,), {"B": 64}, "", ""),
    "one result of all programs": (one_result, (meta(N), meta(1), N), (4,), {"B": 1024}, "written twice", ""),
    "atomic": (atomic_result, (meta(N), meta(1), N), (4,), {"B": 1024}, "", ""),
    "atomic beyond the end": (atomic_beyond, (meta(N), meta(N), N), (5,), {"B": 1024}, "out of bounds", ""),
    "gathered": (gathered, (meta(N), meta(N, dtype=torch.int64), meta(N), N), (4,), {"B": 1024}, "", "address"),
    "mask of data": (where_positive, (meta(N), meta(1024), N), (4,), {"B": 1024}, "", "mask"),
    "branch on data": (branch_on_data, (meta(N), meta(N)), (4,), {"B": 1024}, "", "branch's condition depends on data"),
    "loop on data": (loop_on_data, (meta(N), meta(N)), (1,), {"B": 1024}, "", "loop's bounds depend on data"),
    "only the first program": (only_the_first, (meta(N), meta(N), N), (4,), {"B": 1024}, "unwritten", ""),
    "groups of programs": (grouped, (meta(N), meta(N), 4), (16,), {"B": 256}, "", ""),
    "triangle": (triangle, (meta(N), meta(N), N), (16,), {"B": 256}, "", ""),
    "triangle in place": (triangle, (same, same, N), (16,), {"B": 256}, "race", ""),
    "scan in place": (scanned, (same, same, N), (4,), {"B": 1024}, "", ""),
    "GEMM": (gemm, (meta(256, 192, dtype=bf16), meta(192, 128, dtype=bf16), meta(256, 128, dtype=bf16), 256, 128, 192), (4, 2), {"BM": 64, "BN": 64, "BK": 64}, "", ""),
    "GEMM with too few programs": (gemm, (meta(256, 192, dtype=bf16), meta(192, 128, dtype=bf16), meta(256, 128, dtype=bf16), 256, 128, 192), (3, 2), {"BM": 64, "BN": 64, "BK": 64}, "unwritten", ""),
    "zeroed": (only_the_first, (meta(N), torch.zeros(N, device="meta"), N), (4,), {"B": 1024}, "", ""),
    "said to be zeroed": (only_the_first, (meta(N), meta(N), N), (4,), {"B": 1024, "zeroed": ["y"]}, "", ""),
    "32 GiB, all but a block": (only_the_first, (meta(N), huge, N), (4,), {"B": 1024}, "unwritten", ""),
}  # fmt: skip
QUICK = (
    "no mask before the first", "one result of all programs", "shifted in place", "defaults", "wrong heuristics",
    "autotune, a wrong grid", "parameters named as options, too few programs", "said to be zeroed",
    "huge rows by pointer, no mask", "many iterations", "index that starts over", "index that alternates",
    "while", "mask of data", "branch on data", "loop on data", "zeroed", "32 GiB, all but a block",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_hand_written_kernels_have_the_expected_findings(name: str) -> None:
    kernel, args, grid, named, kinds, note = CASES[name]
    audit = virtual_gpu.audit(kernel, *args, grid=grid, gpu=virtual_gpu.H100, **named)
    assert ", ".join(sorted(finding.kind for finding in audit.findings)) == kinds, str(audit)
    assert note in " ".join(audit.notes) and bool(note) == bool(audit.notes), str(audit)


def test_audits_name_unwritten_bytes_and_invalid_arguments() -> None:
    audit = virtual_gpu.audit(only_the_first, meta(N), meta(N), N, grid=(4,), B=1024, gpu=virtual_gpu.H100)
    assert audit.findings[0].evidence == (
        "no program writes 12,288 of the first 16,384 bytes; the first of them is byte 4,096"
    )
    options: dict[str, Any] = {"grid": (4,), "B": 1024, "gpu": virtual_gpu.H100}
    with pytest.raises(ValueError, match="zeroed: got 'z', expected names of tensors among x, y"):
        virtual_gpu.audit(only_the_first, meta(N), meta(N), N, zeroed=["z"], **options)
    with pytest.raises(TypeError, match=r"only_the_first\(x, y, n, B\) does not accept these arguments: .*BLOCK"):
        virtual_gpu.audit(only_the_first, meta(N), meta(N), N, BLOCK=3, **options)


@pytest.mark.parametrize("strided_store", [False, True])
def test_equally_uncoalesced_accesses_are_found(strided_store: bool) -> None:
    n = 1 << 22
    args = meta(8 * n), meta(8 * n if strided_store else n), 8, 8 if strided_store else 1
    audit = virtual_gpu.audit(strided, *args, grid=(n // 1024,), B=1024, gpu=virtual_gpu.H100)
    assert [finding.kind for finding in audit.findings] == ["uncoalesced"] * (1 + strided_store), str(audit)
