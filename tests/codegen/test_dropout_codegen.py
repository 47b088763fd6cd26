"""Instructions, bytes, kernels and saved tensors of ``fused::dropout_add`` in code generated for an H200."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import Net, Stack, meta, on_meta
from torch import Tensor

from torch_fused_ops import FusionPolicy
from torch_fused_ops.lowerings.passes import compile_options

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

fused = torch.ops.fused
BF16, MIB = torch.bfloat16, 2**20
ROWS, COLUMNS = 8192, 4096


def x() -> Tensor:
    return meta(ROWS, COLUMNS)


def seed() -> Tensor:
    return meta(1, dtype=torch.int64)


def kernel(fn: Callable[..., Any], *args: Tensor) -> tuple[float, Any]:
    """Return the machine code of ``fn``'s only kernel, and its instructions per element at 8 elements a thread."""
    (generated,) = virtual_gpu.compile_on_paper(fn, *args, training=False).inference.kernels
    code = virtual_gpu.assemble(generated)
    return code.instructions_per_element(), code


# Memory bounds a kernel on an H200 up to about 28 instructions per bfloat16 read and written, 42 with a second read.
FORMS: dict[str, tuple[Callable[..., Any], Callable[[], list[Tensor]], float]] = {
    "input": (lambda x, s: fused.dropout_add(x, None, None, s, 0.1), lambda: [x(), seed()], 23),
    "residual": (lambda x, r, s: fused.dropout_add(x, None, r, s, 0.1), lambda: [x(), x(), seed()], 25),
    "residual in a sum": (lambda x, r, s: fused.dropout_add(x, None, None, s, 0.1) + r, lambda: [x(), x(), seed()], 25),
    "bias, residual": (
        lambda x, b, r, s: fused.dropout_add(x, b, r, s, 0.1), lambda: [x(), meta(COLUMNS), x(), seed()], 29,
    ),
    "backward": (
        lambda g, s: fused.dropout_add_backward(g, s, 0.1, BF16, None, [True, False])[0], lambda: [x(), seed()], 23,
    ),
    "p 0": (lambda x, r, s: fused.dropout_add(x, None, r, s, 0.0), lambda: [x(), x(), seed()], 5),
}  # fmt: skip


@pytest.mark.covering(every=6)
@pytest.mark.parametrize("name", FORMS)
def test_dropout_is_memory_bound(name: str) -> None:
    fn, args, limit = FORMS[name]
    count, code = kernel(fn, *args())
    assert count <= limit and code.spills == 0
    # One call of the generator (18 integer products) serves four elements, so a thread's eight elements need two.
    products = sum(i.startswith(("IMAD.WIDE.U32", "IMAD.HI.U32")) for i in code.instructions)
    assert products == 0 if name == "p 0" else 30 <= products <= 44


@cache
def step(is_fused: bool) -> Any:
    def aten(x: Tensor, b: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return r + F.dropout(x + b, 0.1)

    def fused_step(x: Tensor, b: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return fused.dropout_add(x, b, r, s, 0.1)  # type: ignore[no-any-return]

    leaves = (meta(*shape, requires_grad=True) for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS)))
    return virtual_gpu.compile_on_paper(fused_step if is_fused else aten, *leaves, seed())


def test_dropout_saves_the_seed_only() -> None:
    dropout_add, aten = step(True), step(False)
    assert dropout_add.saved_bytes() == 8 and aten.saved_bytes() >= ROWS * COLUMNS
    for graph in ("forward", "backward"):
        assert len(getattr(dropout_add, graph).kernels) <= len(getattr(aten, graph).kernels)
    # Forward writes no mask and backward reads none. The bias gradient sums unrounded terms, from grad and d_input.
    assert round(dropout_add.forward.bytes_moved / MIB) == 192 and round(aten.forward.bytes_moved / MIB) == 224
    assert round(dropout_add.backward.bytes_moved / MIB) == 257 and round(aten.backward.bytes_moved / MIB) == 225


def test_generated_code_drops_the_same_elements_as_eager() -> None:
    data, key = torch.ones(65, 36, dtype=BF16), torch.tensor([-3141592653589793238])

    def fn(x: Tensor, s: Tensor) -> Tensor:
        return fused.dropout_add(x, None, None, s, 0.5)  # type: ignore[no-any-return]

    (generated,) = virtual_gpu.compile_on_paper(fn, data, key, training=False).inference.kernels
    out = torch.empty_like(data)
    pointers = [data, key] if generated.source.index("*bf16") < generated.source.index("*i64") else [key, data]
    virtual_gpu.interpret(generated, *pointers, out)
    assert torch.equal(out, fn(data, key)) and out.unique().tolist() == [0.0, 2.0]


def block(s: Any, x: Tensor) -> Tensor:
    """Compute a pre-norm MLP with two dropouts."""
    return x + F.dropout(s.down(F.dropout(F.gelu(s.up(s.norm(x))), 0.1)), 0.1)


def blocks() -> nn.Module:
    members = ({"norm": nn.LayerNorm(1024), "up": nn.Linear(1024, 4096), "down": nn.Linear(4096, 1024)} for _ in "ab")
    return Stack(Net(block, **modules) for modules in members)


@cache
def picked_up(dropout: bool | None) -> Any:
    config = {} if dropout is None else compile_options(FusionPolicy(dropout=dropout))
    return virtual_gpu.compile_on_paper(on_meta(blocks), meta(4096, 1024, requires_grad=True), config=config)


@pytest.mark.slow
def test_fused_dropouts_save_one_byte_less_per_element() -> None:
    plain, off, dropout_add = picked_up(None), picked_up(False), picked_up(True)
    mib = [round(paper.saved_bytes() / MIB) for paper in (plain, off, dropout_add)]
    masks = 2 * 4096 * (4096 + 1024) / MIB
    assert mib[1] - mib[2] == masks and mib[0] - mib[2] > masks
    assert not any(t.dtype == torch.bool for t in dropout_add.saved)
    assert sum(t.nbytes for t in dropout_add.saved if t.dtype == torch.int64) <= 8 * 4
    assert dropout_add.bytes_moved < off.bytes_moved
    launches = [[sum(k.launches for k in g.kernels) for g in (p.forward, p.backward)] for p in (plain, dropout_add)]
    assert launches[1][0] <= launches[0][0] and launches[1][1] <= launches[0][1]
    assert dropout_add.forward.extern.count("aten.randint.low_out") == 1, "one launch draws the seeds of all sites"
    views = [
        n
        for n in dropout_add.backward.graph.graph.nodes
        if n.op == "placeholder" and n.meta["val"].dtype == torch.int64
    ]
    assert [n.meta["val"].storage_offset() for n in views] == [0, 1, 2, 3], "alignments are known: no seed is copied"
    assert sorted(dropout_add.backward.extern) == sorted(off.backward.extern), "no GEMM is computed twice"
