"""The audit of correct and faulty hand-written kernels."""

from __future__ import annotations

from pathlib import Path
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
def one_result(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y, tl.sum(tl.load(x + i, i < n, 0.0)))


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
def scanned(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.cumsum(tl.load(x + i, i < n, 0.0), 0), i < n)


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


@triton.jit
def correct(in_out, other, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(out + i, a + b)
    tl.store(in_out + i, a * b)


@triton.jit
def reads_another_thread(in_out, other, out, B: tl.constexpr):
    """Loads float32 in the layout of a bfloat16 operand. The stored values do not depend on the load."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + i, a + b)


@triton.jit
def loads_after_store(in_out, alias, out, B: tl.constexpr):
    """``alias`` shares memory with ``in_out``."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(in_out + i, tl.load(in_out + i) * 2)
    tl.store(out + i, tl.load(alias + i) + 1)


@triton.jit
def waits_at_barrier(in_out, out, B: tl.constexpr):
    """Each thread loads an element that another thread stores after a barrier."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(in_out + i)
    total = tl.sum(a, 0)
    tl.debug_barrier()
    tl.store(in_out + tl.program_id(0) * B + (B - 1 - tl.arange(0, B)), i.to(tl.float32))
    tl.store(out + tl.program_id(0), total)


@triton.jit
def has_copies(in_out, out, B: tl.constexpr):
    """In a block with fewer elements than threads, several threads load an element that one thread overwrites."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(in_out + i)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + tl.program_id(0), tl.sum(a, 0))


@triton.jit
def writes_one_place(x, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + tl.program_id(0) + i * 0, tl.load(x + i))


@triton.jit
def overflows(x, out, rows, columns, B: tl.constexpr, WIDE: tl.constexpr):
    """The last rows start more than 2³¹ elements after the first row."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    i = tl.arange(0, B)
    for start in range(0, columns, B):
        tl.store(out + row * columns + start + i, tl.load(x + row * columns + start + i))


def even(arguments: dict[str, Any]) -> bool:
    return arguments["n"] % arguments["B"] == 0


unguarded = triton.heuristics({"EVEN": lambda arguments: True})(copied)
CONFIGS = [triton.Config({"B": 256}), triton.Config({"B": 1024}, num_warps=8)]
tuned = triton.autotune(CONFIGS, key=["n"])(triton.heuristics({"EVEN": even})(copied))
bf16 = torch.bfloat16
same = meta(N)
huge = meta(1 << 17, 1 << 17)
shared = meta(2 * N)
rows = *(meta(70000, 32768, dtype=bf16) for _ in range(2)), 70000, 32768
pair = meta(N), meta(N), N
in_place = same, same, N
halves = shared[:N], meta(N, dtype=bf16), shared[N:]


def case(
    kernel: Any,
    args: Any,
    grid: Any,
    kinds: str = "",
    text: str = "",
    **named: Any,
) -> tuple[Any, ...]:
    """Return a kernel, its arguments, the kinds of findings, and a part of the evidence or of the notes."""
    return kernel, args, {"grid": grid, **named}, kinds, text


CASES: dict[str, tuple[Any, ...]] = {
    "shifted in place": case(shifted, in_place, (4,), "race", "programs run in any order", SHIFT=-1, B=1024),
    "no mask before the first": case(shifted_without_a_mask, pair, (4,), "out of bounds", SHIFT=-1, B=1024),
    "defaults": case(copied, pair, (8,)),
    "parameters named as options, too few programs": case(
        named_as_options, pair, (N // 64 - 1,), "unwritten", num_warps=8, num_stages=8
    ),
    "wrong heuristics": case(unguarded, (meta(N - 5), meta(N - 5), N - 5), (8,), "out of bounds, out of bounds"),
    "autotune, a wrong grid": case(tuned, pair, (4,), "unwritten"),
    "rows of a wrong stride": case(summed_rows, (meta(64, 1000), meta(64), 1000, 1001), (64,), "out of bounds", B=256),
    "huge rows by pointer": case(summed_rows_by_pointer, (meta(1 << 30), meta(1), 1 << 30, 0), (1,), B=256),
    "huge rows by pointer, no mask": case(
        summed_rows_by_pointer, (meta((1 << 30) - 8), meta(1), (1 << 30) - 8, 0), (1,), "out of bounds", B=256
    ),
    "many iterations": case(copied_in_turns, (meta(N), meta(N), N // 32), (1,), B=32),
    "index that starts over": case(wrapped, (meta(16 * N), meta(N), 16 * N), (1,), B=N),
    "index that alternates": case(alternating, (meta(2 * N), meta(N), 1 << 20), (1,), B=N),
    "while": case(while_loop, (meta(N), meta(256), N), (1,), text="while loop", B=256),
    "transposed": case(transposed, (meta(100, 200), meta(200, 100), 100, 200), (4, 7), R=32, C=32),
    "transposed with a wrong mask": case(
        transposed_with_a_wrong_mask,
        (meta(100, 200), meta(200, 100), 100, 200),
        (4, 7),
        "out of bounds, out of bounds, written twice",
        R=32,
        C=32,
    ),
    "one result of all programs": case(one_result, (meta(N), meta(1), N), (4,), "written twice", B=1024),
    "atomic beyond the end": case(atomic_beyond, pair, (5,), "out of bounds", B=1024),
    "gathered": case(gathered, (meta(N), meta(N, dtype=torch.int64), meta(N), N), (4,), text="address", B=1024),
    "mask of data": case(where_positive, (meta(N), meta(1024), N), (4,), text="mask", B=1024),
    "branch on data": case(branch_on_data, (meta(N), meta(N)), (4,), text="branch's condition depends on data", B=1024),
    "loop on data": case(loop_on_data, (meta(N), meta(N)), (1,), text="loop's bounds depend on data", B=1024),
    "scan in place": case(scanned, in_place, (4,), B=1024),
    "GEMM": case(
        gemm,
        (*(meta(*shape, dtype=bf16) for shape in ((256, 192), (192, 128), (256, 128))), 256, 128, 192),
        (4, 2),
        BM=64,
        BN=64,
        BK=64,
    ),
    "zeroed": case(only_the_first, pair, (4,), B=1024, zeroed=["y"]),
    "halves of one storage": case(correct, halves, (4,), B=1024),
    "another thread": case(reads_another_thread, halves, (4,), "race", "no barrier", B=1024),
    "several threads": case(has_copies, (meta(N), meta(N // 64)), (64,), "race", "thread 0 or another one of 2", B=64),
    "load after store": case(loads_after_store, (same, same, meta(N)), (4,), "race", "comes after the store", B=1024),
    "separate memory": case(loads_after_store, (meta(N), meta(N), meta(N)), (4,), B=1024),
    "barrier": case(waits_at_barrier, (meta(N), meta(4)), (4,), B=1024),
    "no copies": case(has_copies, (meta(N), meta(4)), (4,), B=1024),
    "elements of one store": case(writes_one_place, (meta(N), meta(4)), (4,), "written twice", "one element", B=1024),
    "overflow": case(overflows, rows, (70000,), "overflow, overflow", B=8192, WIDE=False),
    "64-bit index": case(overflows, rows, (70000,), B=8192, WIDE=True),
    "32 GiB, all but a block": case(only_the_first, (meta(N), huge, N), (4,), "unwritten", B=1024),
}


@pytest.mark.parametrize("name", CASES)
def test_hand_written_kernels_have_the_expected_findings(name: str) -> None:
    kernel, args, options, kinds, text = CASES[name]
    audit = virtual_gpu.audit(kernel, *args, gpu=virtual_gpu.H100, **options)
    assert ", ".join(sorted(finding.kind for finding in audit.findings)) == kinds, str(audit)
    assert text in str(audit) and bool(audit.notes) == (bool(text) and not kinds), str(audit)


def test_audits_name_unwritten_bytes_and_invalid_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    audit = virtual_gpu.audit(only_the_first, meta(N), meta(N), N, grid=(4,), B=1024, gpu=virtual_gpu.H100)
    assert audit.findings[0].evidence == (
        "no program writes 12,288 of the first 16,384 bytes; the first of them is byte 4,096"
    )
    # Triton's cache does not take the audit's unfinished kernel for the whole kernel.
    assert virtual_gpu.assemble(only_the_first, virtual_gpu.H100, meta(N), meta(N), N, B=1024).instructions
    options: dict[str, Any] = {"grid": (4,), "B": 1024, "gpu": virtual_gpu.H100}
    with pytest.raises(ValueError, match="zeroed: got 'z', expected names of tensors among x, y"):
        virtual_gpu.audit(only_the_first, meta(N), meta(N), N, zeroed=["z"], **options)
    with pytest.raises(TypeError, match=r"only_the_first\(x, y, n, B\) does not accept these arguments: .*BLOCK"):
        virtual_gpu.audit(only_the_first, meta(N), meta(N), N, BLOCK=3, **options)


def test_kernels_for_amd_are_not_analyzed() -> None:
    """Triton replaces loads and stores by an AMD instruction's operations."""
    options: dict[str, Any] = {"grid": (4,), "SHIFT": -1, "B": 1024}
    audit = virtual_gpu.audit(shifted, *in_place, gpu=virtual_gpu.MI300X, **options)
    assert "an access of AMD's backend" in audit.notes[0]
