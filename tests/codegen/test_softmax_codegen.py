"""What softmax becomes on an H200, counted on paper: kernels, bytes moved and saved, instructions; and plain PyTorch's.

Plain is the spelling that users have: ``softmax((x·scale).masked_fill(mask, −∞).float()).to(dtype)``.
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
WAYS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "plain": (lambda x: plain(x), ()),
    "ours": (lambda x: softmax(x, None, None, 0.1), ()),
    "plain causal": (lambda x: plain(x, causal=True), ()),
    "ours causal": (lambda x: softmax(x, None, None, 0.1, True), ()),
    "plain mask": (plain, ("mask",)),
    "ours mask": (lambda x, m: softmax(x, m, None, 0.1), ("mask",)),
    "ours everything": (lambda x, m, s: softmax(x, m, s, 0.1, True, 100), ("mask", "sink")),
}


@cache
def on_paper(way: str, sk: int) -> Any:
    fn, more = WAYS[way]
    extra = {"mask": harness.meta(BATCH, 1, 1, sk, dtype=torch.bool), "sink": meta(HEADS)}
    return virtual_gpu.compile_on_paper(fn, meta(BATCH, HEADS, QUERIES, sk), *(extra[name] for name in more))


def scores(sk: int, tensors: int) -> int:
    return tensors * BATCH * HEADS * QUERIES * sk * 2


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("way", "sk"), [*((w, 512) for w in WAYS if w.startswith("ours")), ("ours causal", 4096), ("ours everything", 4096)]
)
def test_kernels_and_bytes(way: str, sk: int) -> None:
    """One kernel each way, and nothing but what is given and returned; a sink's gradient: one float a row, and back."""
    paper, sink = on_paper(way, sk), "everything" in way
    mask = BATCH * sk if sink or "mask" in way else 0
    assert not paper.forward.extern and not paper.backward.extern
    assert (len(paper.forward.kernels), len(paper.backward.kernels)) == (1, 2 if sink else 1)
    assert paper.forward.bytes_moved == scores(sk, 2) + mask + (2 * HEADS if sink else 0)
    rows = 2 * 4 * BATCH * HEADS * QUERIES + 2 * HEADS if sink else 0
    assert paper.backward.bytes_moved == scores(sk, 3) + rows
    assert paper.saved_bytes() == scores(sk, 1)


@pytest.mark.parametrize("case", ["", " causal", " mask"])
def test_no_more_than_plain_pytorch(case: str) -> None:
    """A causal mask that is spelled out is a kernel more; every mask is read again in backward."""
    ours, theirs = on_paper(f"ours{case}", 512), on_paper(f"plain{case}", 512)
    for graph in ("forward", "backward"):
        a, b = getattr(ours, graph), getattr(theirs, graph)
        assert len(a.kernels) <= len(b.kernels) and a.bytes_moved <= b.bytes_moved
    assert ours.saved_bytes() < theirs.saved_bytes()
    if case == " causal":
        assert len(theirs.forward.kernels) == 2


@pytest.mark.covering(every=3)
@pytest.mark.parametrize(
    ("way", "sk", "forward", "backward"),
    [
        ("ours", 1024, 14, 10.5),
        ("ours causal", 512, 18.5, 13.5),
        ("ours causal", 4096, 40, 24),
        pytest.param("ours", 4096, 35, 20, marks=pytest.mark.slow),
        pytest.param("ours mask", 1024, 36, 10.5, marks=pytest.mark.slow),
    ],
)
def test_instructions_per_element(way: str, sk: int, forward: float, backward: float) -> None:
    """In rows that are not held there are three loops forward, two backward; a mask is reason enough for Inductor."""
    paper = on_paper(way, sk)
    for graph, most in ((paper.forward, forward), (paper.backward, backward)):
        # Their number depends on the block: as Inductor tries it first.
        first = virtual_gpu.kernels.load(graph.kernels[-1]).configurations[0]
        code = virtual_gpu.assemble(graph.kernels[-1], block=first.block, num_warps=first.num_warps)
        assert code.spills == 0
        assert code.instructions_per_element() <= most, code.instructions_per_element()
        large = [i for i in code.instructions if i.startswith(("LDG", "STG"))]
        assert sum(i.endswith(".128") for i in large) >= len(large) // 2, "not vectorized"


@pytest.mark.slow
def test_fewer_instructions_than_plain_pytorch() -> None:
    counts = [
        [virtual_gpu.assemble(k[-1]).instructions_per_element() for k in (p.forward.kernels, p.backward.kernels)]
        for p in (on_paper("ours causal", 512), on_paper("plain causal", 512))
    ]
    assert counts[0][0] < 0.75 * counts[1][0] and counts[0][1] < 0.75 * counts[1][1]


def test_windows_read_no_memory_and_switch_loads_off() -> None:
    paper = on_paper("ours causal", 4096)
    for graph, inputs in ((paper.forward, 1), (paper.backward, 2)):
        (kernel,) = graph.kernels
        assert len(re.findall(r"'in_ptr\d': '", kernel.source)) == inputs
        loads = re.findall(r"tl\.load\(in_ptr\d \+ .*", kernel.source)
        assert loads and all(re.search(r"r0_mask & tmp\d+", load) for load in loads)


@pytest.mark.parametrize("sk", [512, 4096])
def test_neighbors_are_in_the_same_kernels(sk: int) -> None:
    """A bias and a scale in front, a dropout behind: one kernel forward (and the seed), one backward."""

    def fn(x: Tensor, b: Tensor) -> Tensor:
        return F.dropout(softmax(x * 2 + b, None, None, 0.1, True), 0.1)

    paper = virtual_gpu.compile_on_paper(fn, meta(BATCH, HEADS, QUERIES, sk), meta(HEADS, 1, sk).detach())
    assert len([k for k in paper.forward.kernels if "softmax" in k.name]) == 1
    assert len(paper.forward.kernels) <= 2 and len(paper.backward.kernels) == 1
