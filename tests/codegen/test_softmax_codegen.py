"""Kernels, bytes and instructions of softmax in code generated for an H200, compared with plain PyTorch.

Plain is the code that users write: ``softmax((x·scale).masked_fill(mask, −∞).float()).to(dtype)``.
"""

import functools
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

virtual_gpu = pytest.importorskip("torch_fused_ops.virtual_gpu", reason="needs triton")

softmax = torch.ops.fused.scaled_masked_softmax
BF16 = torch.bfloat16
BATCH, HEADS, QUERIES = 4, 16, 512


def plain(x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    scores = x * 0.1
    if causal:
        sq, sk = x.shape[-2:]
        mask = torch.ones(sq, sk, dtype=torch.bool, device=x.device).triu(sk - sq + 1)
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
    return torch.softmax(scores.float(), -1).to(x.dtype)


meta = functools.partial(harness.meta, requires_grad=True)
VARIANTS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "plain": (lambda x: plain(x), ()),
    "fused": (lambda x: softmax(x, None, None, 0.1), ()),
    "plain causal": (lambda x: plain(x, causal=True), ()),
    "fused causal": (lambda x: softmax(x, None, None, 0.1, True), ()),
    "plain mask": (plain, ("mask",)),
    "fused mask": (lambda x, m: softmax(x, m, None, 0.1), ("mask",)),
    "fused everything": (lambda x, m, s: softmax(x, m, s, 0.1, True, 100), ("mask", "sink")),
}


@cache
def on_paper(variant: str, sk: int) -> Any:
    fn, extra_names = VARIANTS[variant]
    extra = {"mask": harness.meta(BATCH, 1, 1, sk, dtype=torch.bool), "sink": meta(HEADS)}
    return virtual_gpu.compile_on_paper(fn, meta(BATCH, HEADS, QUERIES, sk), *(extra[name] for name in extra_names))


def scores(sk: int, tensors: int) -> int:
    return tensors * BATCH * HEADS * QUERIES * sk * 2


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(
    ("variant", "sk"),
    [*((w, 512) for w in VARIANTS if w.startswith("fused")), ("fused causal", 4096), ("fused everything", 4096)],
)
def test_softmax_moves_only_inputs_and_results(variant: str, sk: int) -> None:
    """Forward and backward have one kernel each, which only touches inputs and results. A sink adds a float per row."""
    paper, sink = on_paper(variant, sk), "everything" in variant
    mask = BATCH * sk if sink or "mask" in variant else 0
    assert not paper.forward.extern and not paper.backward.extern
    assert (len(paper.forward.kernels), len(paper.backward.kernels)) == (1, 2 if sink else 1)
    assert paper.forward.bytes_moved == scores(sk, 2) + mask + (2 * HEADS if sink else 0)
    rows = 2 * 4 * BATCH * HEADS * QUERIES + 2 * HEADS if sink else 0
    assert paper.backward.bytes_moved == scores(sk, 3) + rows
    assert paper.saved_bytes() == scores(sk, 1)


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("case", ["", " causal", " mask"])
def test_softmax_moves_at_most_plains_bytes(case: str) -> None:
    """Plain needs a kernel to build a causal mask, and reads every mask in backward."""
    fused_paper, aten = on_paper(f"fused{case}", 512), on_paper(f"plain{case}", 512)
    for graph in ("forward", "backward"):
        a, b = getattr(fused_paper, graph), getattr(aten, graph)
        assert len(a.kernels) <= len(b.kernels) and a.bytes_moved <= b.bytes_moved
    assert fused_paper.saved_bytes() < aten.saved_bytes()
    if case == " causal":
        assert len(aten.forward.kernels) == 2


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("variant", "sk", "forward", "backward"),
    [
        ("fused", 1024, 14, 10.5),
        ("fused causal", 512, 18.5, 13.5),
        ("fused causal", 4096, 40, 24),
        pytest.param("fused", 4096, 35, 20, marks=pytest.mark.slow),
        pytest.param("fused mask", 1024, 36, 10.5, marks=pytest.mark.slow),
    ],
)
def test_softmax_is_vectorized_within_instruction_limits(
    variant: str, sk: int, forward: float, backward: float
) -> None:
    """Rows that do not fit in registers take three loops forward and two backward, as do rows with a mask."""
    paper = on_paper(variant, sk)
    for graph, limit in ((paper.forward, forward), (paper.backward, backward)):
        code = virtual_gpu.assemble(graph.kernels[-1])
        assert code.spills == 0
        assert code.instructions_per_element() <= limit, code.instructions_per_element()
        large = [i for i in code.instructions if i.startswith(("LDG", "STG"))]
        assert sum(i.endswith(".128") for i in large) >= len(large) // 2, "not vectorized"


def test_windows_read_no_mask_and_disable_loads() -> None:
    paper = on_paper("fused causal", 4096)
    for graph, inputs in ((paper.forward, 1), (paper.backward, 2)):
        (kernel,) = graph.kernels
        assert len(re.findall(r"'in_ptr\d': '", kernel.source)) == inputs
        loads = re.findall(r"tl\.load\(in_ptr\d \+ .*", kernel.source)
        assert loads and all(re.search(r"r0_mask & tmp\d+", load) for load in loads)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("sk", [512, 4096])
def test_bias_scale_and_dropout_fuse_into_the_softmax_kernel(sk: int) -> None:

    def fn(x: Tensor, b: Tensor) -> Tensor:
        return F.dropout(softmax(x * 2 + b, None, None, 0.1, True), 0.1)

    paper = virtual_gpu.compile_on_paper(fn, meta(BATCH, HEADS, QUERIES, sk), meta(HEADS, 1, sk).detach())
    assert len([k for k in paper.forward.kernels if "softmax" in k.name]) == 1
    assert len(paper.forward.kernels) <= 2 and len(paper.backward.kernels) == 1
