"""The scripts of benchmarks/laboratory start; slow: what is for a GPU, and on paper, runs from one end to the other."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from torch_fused_ops.benchmarks import harness, laboratory
from torch_fused_ops.benchmarks.laboratory import gpu

PACKAGE = laboratory.__name__
SCRIPTS = sorted(path.stem for path in Path(laboratory.__file__).parent.glob("*.py") if path.stem != "__init__")
MODULES = {"decisions", "gpu_tests"}  # imported by a script, and by pytest


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int | str | None:
    """A script as its command runs it, in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.{script}", raising=False)  # else runpy warns
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"{PACKAGE}.{script}", run_name="__main__")
    return ended.value.code


def test_every_script_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(SCRIPTS) > MODULES
    for script in SCRIPTS:
        assert script in str(laboratory.__doc__), "the folder's list"
        if script not in MODULES:
            assert run(monkeypatch, script, "--help") == 0 and "--help" in capsys.readouterr().out, script
    assert run(monkeypatch, "gpu", "--part", "nothing") == 2
    assert capsys.readouterr().err == "error: --part nothing is not accepted: it must be correctness, kernels, steps\n"


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_for_a_gpu(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: every step runs and every question that a CPU can answer is answered."""
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--limit", "900"]
    assert run(monkeypatch, "gpu", "--part", part, *options) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{part}.json", f"{part}.log"]
    result = harness.read(tmp_path / f"{part}.json", "gpu")
    assert all(step["status"] == "passed" for step in result["steps"])
    assert all(d["answer"] != "not measured" or "host" in d["question"] for d in result["decisions"])


@pytest.mark.slow
def test_an_operator_on_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "paper.json"
    assert run(monkeypatch, "on_paper", "--only", "bias_act relu2 bias", "--out", str(out)) == 0
    result = json.loads(out.read_text())
    (row,) = result["operators"]
    assert row["name"] == "bias_act relu2 bias" and result["blocks"] == []
    for figures in row["ways"].values():
        for phase in ("forward", "backward"):
            cost = figures[phase]
            assert cost["kernels"] >= 1 and cost["registers"] > 0 and 0 < cost["occupancy"] <= 1
            assert cost["floor_us"] >= 1e6 * cost["bytes"] / result["constants"]["copy_bytes_per_s"] - 0.01
    assert "bias_act relu2 bias" in capsys.readouterr().out
