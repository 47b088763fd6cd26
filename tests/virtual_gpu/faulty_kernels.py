"""Kernels with one planted fault each, and their right counterparts."""

import triton
import triton.language as tl


@triton.jit
def right(in_out, other, out, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(out + i, a + b)
    tl.store(in_out + i, a * b)


@triton.jit
def of_another_program(in_out, other, n, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(in_out + i, tl.load(in_out + (n - 1 - i)) * tl.load(other + i).to(tl.float32))


@triton.jit
def of_another_thread(in_out, other, out, XBLOCK: tl.constexpr):
    """Float32 is loaded for a bfloat16 result, in its layout; the float32 result does not depend on it."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a, b = tl.load(in_out + i), tl.load(other + i).to(tl.float32)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + i, a + b)


@triton.jit
def after_the_store(in_out, alias, out, XBLOCK: tl.constexpr):
    """`alias` is `in_out`."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(in_out + i, tl.load(in_out + i) * 2)
    tl.store(out + i, tl.load(alias + i) + 1)


@triton.jit
def behind_a_barrier(in_out, out, XBLOCK: tl.constexpr):
    """Each thread loads what another one stores, and a barrier is between them."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a = tl.load(in_out + i)
    total = tl.sum(a, 0)
    tl.debug_barrier()
    tl.store(in_out + tl.program_id(0) * XBLOCK + (XBLOCK - 1 - tl.arange(0, XBLOCK)), i.to(tl.float32))
    tl.store(out + tl.program_id(0), total)


@triton.jit
def of_a_copy(in_out, out, XBLOCK: tl.constexpr):
    """Where a block has fewer elements than threads, several load each; one stores, and a sum takes any of them."""
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    a = tl.load(in_out + i)
    tl.store(in_out + i, i.to(tl.float32))
    tl.store(out + tl.program_id(0), tl.sum(a, 0))


@triton.jit
def copied(x, out, STEP, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, XBLOCK)
    tl.store(out + i, tl.load(x + i))


@triton.jit
def in_one_place(x, out, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out + tl.program_id(0) + i * 0, tl.load(x + i))


@triton.jit
def of_some_programs(x, out, n, XBLOCK: tl.constexpr):
    """Programs behind the end return, and the first one stores an element more."""
    if tl.program_id(0) * XBLOCK >= n:
        return
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    if tl.program_id(0) == 0:
        tl.store(out + n, 0.0)
    tl.store(out + i, tl.load(x + i), i < n)


@triton.jit
def far_away(x, out, rows, columns, XBLOCK: tl.constexpr, WIDE: tl.constexpr):
    """The last rows begin more than 2³¹ elements from the first."""
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    i = tl.arange(0, XBLOCK)
    for start in range(0, columns, XBLOCK):
        tl.store(out + row * columns + start + i, tl.load(x + row * columns + start + i))


@triton.jit
def column_by_column(x, out, rows, columns, XBLOCK: tl.constexpr):
    """A program sums one column."""
    i = tl.arange(0, XBLOCK)
    total = tl.zeros([XBLOCK], tl.float32)
    for start in range(0, rows, XBLOCK):
        total += tl.load(x + (start + i) * columns + tl.program_id(0)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def many_values(x, out, XBLOCK: tl.constexpr, TERMS: tl.constexpr):
    """All values are alive at the middle; with few registers they do not fit."""
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
def one_large_block(x, out, columns, XBLOCK: tl.constexpr):
    i = tl.arange(0, XBLOCK)
    row = tl.program_id(0) * columns
    a = tl.load(x + row + i, i < columns, other=0.0)
    largest = tl.max(a, 0)
    e = tl.exp(a - largest)
    tl.store(out + row + i, e / tl.sum(e, 0), i < columns)


@triton.jit
def transposed_float8(in0, in1, out0, out1, ynumel, xnumel, YBLOCK: tl.constexpr, XBLOCK: tl.constexpr):
    """A store in float8, straight and transposed, of values limited by minimum and maximum."""
    yindex = tl.program_id(1) * YBLOCK + tl.arange(0, YBLOCK)[:, None]
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    ymask, xmask = yindex < ynumel, xindex < xnumel
    v = tl.load(in0 + (xindex + 4096 * yindex), ymask & xmask, eviction_policy="evict_last").to(tl.float32)
    v = v * tl.broadcast_to(tl.load(in1 + tl.full([1, 1], 0, tl.int32)), [YBLOCK, XBLOCK])
    v = tl.maximum(v, tl.full([1, 1], -57344.0, tl.float32), tl.PropagateNan.ALL)
    q = tl.minimum(v, tl.full([1, 1], 57344.0, tl.float32), tl.PropagateNan.ALL).to(tl.float8e5)
    tl.store(out0 + (xindex + 4096 * yindex), q, ymask & xmask)
    tl.store(out1 + (yindex + 8192 * xindex), q, ymask & xmask)
