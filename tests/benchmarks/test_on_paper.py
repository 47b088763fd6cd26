"""Estimates for an H200 reproduce the committed results."""

import pytest

pytest.importorskip("triton")

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.laboratory import on_paper


@pytest.mark.slow
@pytest.mark.parametrize("block", ["GELU MLP 8192 4096→16384", "SwiGLU MLP 8192 4096→16384"])
def test_blocks_reproduce_the_committed_results(block: str) -> None:
    committed = harness.read(on_paper.RESULTS, "on-paper")
    if on_paper.versions() != committed["versions"]:
        pytest.skip(f"counted with {committed['versions']}")
    (before,) = [row for row in committed["blocks"] if row["name"] == block]
    now = on_paper.block_figures(block, ("plain", "ours-free"))
    for way, figures in now["ways"].items():
        assert figures["saved_bytes"] == before["ways"][way]["saved_bytes"]
        for phase in ("forward", "backward"):
            for figure in ("kernels", "bytes", "flops"):
                assert figures[phase][figure] == before["ways"][way][phase][figure], (way, phase, figure)


def test_every_block_is_committed() -> None:
    committed = harness.read(on_paper.RESULTS, "on-paper")
    assert [row["name"] for row in committed["blocks"]] == list(on_paper.BLOCKS)
    assert all(tuple(row["ways"]) == on_paper.BLOCK_WAYS for row in committed["blocks"])
