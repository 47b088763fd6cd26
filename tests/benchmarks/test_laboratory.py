"""The scripts of benchmarks/laboratory start. Slow tests run the GPU's parts on a CPU."""

import runpy
import sys
from pathlib import Path

import pytest

from torch_fused_ops.benchmarks import harness, laboratory
from torch_fused_ops.benchmarks.laboratory import gpu

PACKAGE = laboratory.__name__
SCRIPTS = sorted(path.stem for path in Path(laboratory.__file__).parent.glob("*.py") if path.stem != "__init__")
MODULES = {"gpu_tests"}  # a plug-in of pytest


def run(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> int | str | None:
    """Run a script in this process, as its command would, and return the exit status."""
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.{script}", raising=False)  # else runpy warns
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"{PACKAGE}.{script}", run_name="__main__")
    return ended.value.code


def test_every_script_has_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(SCRIPTS) > MODULES
    for script in SCRIPTS:
        assert script in str(laboratory.__doc__), "the folder's list"
        if script not in MODULES:
            assert run(monkeypatch, script, "--help") == 0 and "--help" in capsys.readouterr().out, script
    assert run(monkeypatch, "gpu", "--part", "steps", "--out", "out", "--device", "cuda:77") == 2
    assert capsys.readouterr().err.startswith("error: --device cuda:77 ")


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.PARTS)
def test_gpu_parts_run_on_a_cpu(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of a part passes on a CPU."""
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--limit", "900"]
    assert run(monkeypatch, "gpu", "--part", part, *options) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{part}.json", f"{part}.log"]
    result = harness.read(tmp_path / f"{part}.json", "gpu")
    assert all(step["status"] == "passed" for step in result["steps"])
