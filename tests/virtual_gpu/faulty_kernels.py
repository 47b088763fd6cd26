"""Kernels with one planted fault each, and correct counterparts."""

import triton
import triton.language as tl


@triton.jit
def correct(in_out, other, out, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(out + i, a + b)
    tl.store(in_out + i, a * b)


@triton.jit
def reads_another_program(in_out, other, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(in_out + i, tl.load(in_out + (n - 1 - i)) * tl.load(other + i).to(tl.float32))


@triton.jit
def reads_another_thread(in_out, other, out, XBLOCK: tl.constexpr):
    """Loads float32 in the layout of a bfloat16 operand. The stored values do not depend on the load."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + i, a + b)


@triton.jit
def loads_after_store(in_out, alias, out, XBLOCK: tl.constexpr):
    """``alias`` shares memory with ``in_out``."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(in_out + i, tl.load(in_out + i) * 2)
    tl.store(out + i, tl.load(alias + i) + 1)


@triton.jit
def waits_at_barrier(in_out, out, XBLOCK: tl.constexpr):
    """Each thread loads an element that another thread stores after a barrier."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a = tl.load(in_out + i)
    total = tl.sum(a, 0)
    tl.debug_barrier()
    tl.store(in_out + tl.program_id(0) * XBLOCK + (XBLOCK - 1 - tl.arange(0, XBLOCK)), i.to(tl.float32))
    tl.store(out + tl.program_id(0), total)


@triton.jit
def has_copies(in_out, out, XBLOCK: tl.constexpr):
    """In a block with fewer elements than threads, several threads load an element that one thread overwrites."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a = tl.load(in_out + i)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + tl.program_id(0), tl.sum(a, 0))


@triton.jit
def writes_one_place(x, out, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out + tl.program_id(0) + i * 0, tl.load(x + i))


@triton.jit
def overflows(x, out, rows, columns, XBLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The last rows start more than 2³¹ elements after the first row."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    i = tl.arange(0, XBLOCK)
    for start in range(0, columns, XBLOCK):
        tl.store(out + row * columns + start + i, tl.load(x + row * columns + start + i))


@triton.jit
def reads_columns(x, out, rows, columns, XBLOCK: tl.constexpr):
    """Each program sums one column."""
    i = tl.arange(0, XBLOCK)
    total = tl.zeros([XBLOCK], tl.float32)
    for start in range(0, rows, XBLOCK):
        total += tl.load(x + (start + i) * columns + tl.program_id(0)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def spills(x, out, XBLOCK: tl.constexpr, TERMS: tl.constexpr):
    """All values are alive in the middle, so a few registers cannot hold them."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a = tl.load(x + i)
    values = ()
    for k in tl.static_range(TERMS):
        values = values + (tl.exp(a * (k + 1)),)  # noqa: RUF005 (Triton has no starred items)
    total = a
    for k in tl.static_range(TERMS):
        total = total * values[TERMS - 1 - k] + values[k]
    tl.store(out + i, total)


@triton.jit
def has_one_large_block(x, out, columns, XBLOCK: tl.constexpr):
    i = tl.arange(0, XBLOCK)
    row = tl.program_id(0) * columns
    a = tl.load(x + row + i, i < columns, other=0.0)
    largest = tl.max(a, 0)
    e = tl.exp(a - largest)
    tl.store(out + row + i, e / tl.sum(e, 0), i < columns)
