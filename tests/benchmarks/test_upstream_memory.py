"""PyTorch's own ways to keep less, beside the memory levels: what docs/memory.md says of them is what was measured."""

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from torch_fused_ops.benchmarks.laboratory import upstream_memory as measured

RESULT: dict[str, Any] = json.loads(measured.RESULTS.read_text(encoding="utf-8"))
PAPER = RESULT["paper"]


def kept(name: str, block: str = "GELU MLP") -> int:
    found: int = PAPER[name][block]["kept"]
    return found


def test_what_the_page_says_of_pytorchs_own_ways() -> None:
    store, free = "torch's fp8 store", '`"free"`'
    for block in ("GELU MLP", "Llama-3-8B block"):
        both = [PAPER[name][block] for name in (f"budget 0.99 + {store}", f"{free} + {store}")]
        assert both[0]["kept"] == pytest.approx(both[1]["kept"], rel=1e-3)
    ours, theirs = PAPER['`"fp8"`']["GELU MLP"], PAPER[f"{free} + {store}"]["GELU MLP"]
    assert theirs["kept"] == ours["kept"] and theirs["moved"] == pytest.approx(ours["moved"], rel=1e-4)
    region, inputs = PAPER["region's budget 0"]["GELU MLP"], PAPER['`"input"`']["GELU MLP"]
    assert region["kept"] == inputs["kept"] and region["calls"] == inputs["calls"]
    off = PAPER["torch's offloading"]["GELU MLP"]
    assert off["host"] > 0 and off["kept"] + off["host"] == kept("torch.compile")
    for level in ("fp8", "input"):  # nothing is stored twice
        assert kept(f'`"{level}"` + {store}') >= kept(f'`"{level}"`')
    gradients = RESULT["gradients"]
    assert gradients['`"fp8"`'] < gradients[f"{free} + {store}"]
    assert all(gradients[name] == pytest.approx(gradients["torch.compile"], rel=1e-3) for name in (free, '`"input"`'))


def test_the_budget_and_free_on_blocks() -> None:
    for block, less in (("T5 block", "budget"), ("Mixtral block", "free")):
        plain, budget, free = (PAPER[name][block] for name in measured.KNOBS)
        assert max(budget["kept"], free["kept"]) < plain["kept"] and free["moved"] < budget["moved"]
        assert (free["kept"] < budget["kept"]) == (less == "free")


@pytest.mark.parametrize("name", ["torch.compile", '`"free"`', "torch's offloading"])
def test_the_table_is_what_is_counted_now(name: str) -> None:
    found = measured.paper_figures("GELU MLP", measured.WAYS[name])
    counts = ("kept", "host", "calls")
    assert {key: found[key] for key in counts} == {key: PAPER[name]["GELU MLP"][key] for key in counts}


@pytest.mark.slow
def test_gradients_are_as_far_off_as_the_table_says() -> None:
    ways = {name: measured.WAYS[name] for name in ("torch.compile", "torch's fp8 store", '`"fp8"`')}
    for name, found in measured.distances(ways).items():
        assert found == pytest.approx(RESULT["gradients"][name], rel=0.1)
