"""Published measurements of other programs on GPUs are predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_fused_ops.benchmarks.laboratory import paper_and_devices
from torch_fused_ops.virtual_gpu import A100, H100, roofline


@pytest.mark.slow
def test_published_times_and_peaks_are_predicted() -> None:
    result = paper_and_devices.predictions()
    assert all(row["predicted"] == pytest.approx(row["measured"], rel=0.001) for row in result["memory"])
    for gpu in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"):
        rows = [row for row in result["speed"] if row["gpu"] == gpu and row["measured"] > paper_and_devices.LARGE]
        near = sum(row["predicted"] == pytest.approx(row["measured"], rel=0.1) for row in rows)
        assert near >= 0.9 * len(rows)
    page = (Path(__file__).parents[2] / "docs" / "paper-and-devices.md").read_text()
    tables = paper_and_devices.tables(result)
    assert all(line in page for line in tables.splitlines())
    for gpu in (A100, H100):
        fitted, used = result["rates"][gpu.name], roofline.estimated_rates(gpu)
        name = "flop" if gpu is A100 else "nbytes"
        assert getattr(used, name) == pytest.approx(fitted[name], rel=0.01)
