"""Exact figures for an H200: ours has not become worse than what is committed."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from torch_fused_ops.benchmarks import harness
from torch_fused_ops.benchmarks.laboratory import on_paper
from torch_fused_ops.benchmarks.pointwise import Operator

OPERATORS = [Operator("bias_act", "gelu_tanh"), Operator("bias_act", "gelu"), Operator("glu", "silu")]
BLOCKS = ["GELU MLP 8192 4096→16384", "SwiGLU MLP 8192 4096→16384"]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    path = on_paper.default_out()
    if not path.exists():
        pytest.skip("installed without results")
    return harness.read(path, "on-paper")


def check(now: dict[str, Any], rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    (before,) = [row for row in rows if row["name"] == now["name"]]
    assert list(on_paper.regressions(now, before, same=versions == on_paper.versions())) == []


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_operators_are_no_worse(operator: Operator, committed: dict[str, Any]) -> None:
    now = on_paper.operator_figures(operator, ("plain", "ours-off", "ours-free"))
    check(now, committed["operators"], committed["versions"])
    for phase in ("forward", "backward"):
        assert now["eager"][phase]["spills"] == 0 and now["eager"][phase]["kernels"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_are_no_worse(block: str, committed: dict[str, Any]) -> None:
    check(on_paper.block_figures(block, ("plain", "ours-free")), committed["blocks"], committed["versions"])


def test_what_is_committed_is_whole(committed: dict[str, Any]) -> None:
    assert [row["name"] for row in committed["blocks"]] == list(on_paper.BLOCKS)
    assert {"plain", "budget", "ours-free", "ours-off"} <= committed["blocks"][0]["ways"].keys()
    names = [row["name"] for row in committed["operators"]]
    assert len(names) == len(set(names)) > 20 and set(names) <= set(map(str, on_paper.pointwise.OPERATORS))


def test_what_the_faq_says_of_losses(committed: dict[str, Any]) -> None:
    """docs/benchmarks.md has them all: it is generated."""
    losses, rows = on_paper.losses(committed), [*committed["operators"], *committed["blocks"]]
    assert all(loss.phase == "backward" and loss.figure != "kernels" for loss in losses)
    blocks = {row["name"] for row in committed["blocks"]}
    without = len({row["name"] for row in rows} - {loss.name for loss in losses})
    assert not blocks & {loss.name for loss in losses}
    page = (Path(__file__).parents[2] / "docs" / "is-it-for-me.md").read_text(encoding="utf-8")
    assert f"for {without} of {len(rows)} operators and blocks" in " ".join(page.split())
    by_default = len(rows) - len({loss.name for loss in losses if loss.ours == "ours-free"})
    assert f"(at the default level: {by_default})" in page


def figures(saved: int = 10, kernels: int = 1, nbytes: int = 100, instructions: float = 14.0) -> dict[str, Any]:
    side = {"kernels": kernels, "bytes": nbytes, "instructions": instructions}
    return {"forward": side, "backward": side, "saved_bytes": saved}


@pytest.mark.parametrize(
    ("now", "found"),
    [
        ({}, 0),
        ({"saved": 9, "instructions": 13.0}, 0),
        ({"instructions": 14.1}, 0),  # within the tolerance
        ({"instructions": 15.0}, 2),
        ({"saved": 11}, 1),
        ({"kernels": 2, "nbytes": 101}, 4),
    ],
)
def test_regressions_are_found(now: dict[str, Any], found: int) -> None:
    rows = [{"name": "row", "ways": {"plain": figures(), "ours-free": figures(**given)}} for given in (now, {})]
    assert len(list(on_paper.regressions(*rows, same=True))) == found
    other = list(on_paper.regressions(*rows, same=False))  # against plain; its backward does not compute values again
    assert len(other) <= found and bool(other) == bool(found)
