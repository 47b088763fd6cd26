"""``bench on-paper``: its arithmetic, and that ours has not become worse than what is committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from torch_fused_ops.benchmarks import harness, on_paper
from torch_fused_ops.benchmarks.pointwise import Operator
from torch_fused_ops.cli import main as cli

OPERATORS = [Operator("bias_act", "gelu_tanh"), Operator("bias_act", "gelu"), Operator("glu", "silu")]
BLOCKS = ["GELU MLP 8192 4096→16384", "SwiGLU MLP 8192 4096→16384"]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    path = Path(on_paper.__file__).resolve().with_name("results") / "on_paper.json"
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
    assert len(committed["operators"]) == len(on_paper.pointwise.OPERATORS)


def test_what_the_faq_says_of_losses(committed: dict[str, Any]) -> None:
    """docs/benchmarks.md has them all: it is generated."""
    losses, rows = on_paper.losses(committed), [*committed["operators"], *committed["blocks"]]
    assert all(loss.phase == "backward" and loss.figure != "kernels" for loss in losses)
    blocks = {row["name"] for row in committed["blocks"]}
    without = len({row["name"] for row in rows} - {loss.name for loss in losses})
    assert not blocks & {loss.name for loss in losses}
    page = (Path(__file__).parents[2] / "docs" / "faq.md").read_text(encoding="utf-8")
    assert f"for {without} of {len(rows)} operators and blocks" in " ".join(page.split())
    by_default = len(rows) - len({loss.name for loss in losses if loss.ours == "ours-free"})
    assert f"(at the default level: {by_default})" in page


def test_losses_are_found() -> None:
    def row(way: dict[str, Any]) -> dict[str, Any]:
        ways = {name: figures() for name in ("plain", "budget", "ours-off")} | {"ours-free": figures(**way)}
        for side in (side for each in ways.values() for side in (each["forward"], each["backward"])):
            side["estimated"] = False
        return {"operators": [{"name": "row", "ways": ways}], "blocks": []}

    assert on_paper.losses(row({"instructions": 14.2})) == []
    found = on_paper.losses(row({"instructions": 15.0, "kernels": 2}))
    assert [(x.phase, x.theirs, x.ours, x.figure, x.values) for x in found] == [
        (phase, "budget", "ours-free", *figure)
        for phase in ("forward", "backward")
        for figure in (("kernels", "1 → 2"), ("instructions", "14 → 15"))
    ]


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


def test_occupancy() -> None:
    assert on_paper.occupancy(32, 4) == 1.0
    assert on_paper.occupancy(33, 4) == 48 / 64
    assert on_paper.occupancy(64, 4) == 0.5
    assert on_paper.occupancy(255, 8) == 8 / 64


@pytest.mark.slow
def test_a_part_from_one_end_to_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "paper.json"
    assert cli(["bench", "on-paper", "--only", "bias_act relu2 bias", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (row,) = result["operators"]
    assert row["name"] == "bias_act relu2 bias" and result["blocks"] == []
    for way in on_paper.OPERATOR_WAYS:
        for phase in ("forward", "backward"):
            cost = row["ways"][way][phase]
            assert cost["kernels"] >= 1 and cost["registers"] > 0 and 0 < cost["occupancy"] <= 1
            assert cost["floor_us"] >= 1e6 * cost["bytes"] / on_paper._rates().nbytes - 0.01
    assert "bias_act relu2 bias" in capsys.readouterr().out
