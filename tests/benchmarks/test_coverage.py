"""The census of architectures: what it counts, and how long one may take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from torch_fused_ops.benchmarks import coverage
from torch_fused_ops.sites import DROPOUT


def test_a_dropout_is_no_mlp() -> None:
    """It is a site of reports, with an operator of ours."""
    mlp = {"op": "fused::bias_act", "activation": "gelu", "kind": None, "count": 2}
    dropout = {"op": "fused::dropout_add", "activation": DROPOUT, "kind": None, "count": 4}
    built = [{"architecture": "bert", "modes": {"train": {"graphs": 1, "sites": [dropout, mlp]}}}]
    assert [coverage.outcome(site) for _, site in coverage._sites(built)] == ["fused", "fused"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_the_limit_is_of_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is built does not depend on what else the machine does."""
    pytest.importorskip("transformers")

    def busy(*_: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(coverage, "SECONDS", 1)
    monkeypatch.setattr(coverage, "capture", busy)
    coverage.run(["albert"], out := tmp_path / "coverage.jsonl", jobs=1, fresh=True)
    (record,) = coverage.load(out)
    assert record["error"] == "more than 1 s"
