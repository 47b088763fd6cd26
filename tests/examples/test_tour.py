"""The notebook's cells run, one after the other, and what it shows is what they print."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(TOUR.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def shown(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def test_it_was_run_from_top_to_bottom() -> None:
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    pictures = [output for cell in cells() for output in cell["outputs"] if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr"
                   for cell in cells() for output in cell["outputs"])  # fmt: skip


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    script = tmp_path / "tour.py"
    marked = [f"print('cell {i}')\n" + "".join(cell["source"]).replace("%matplotlib inline\n", "")
              for i, cell in enumerate(cells())]  # fmt: skip
    script.write_text("\n".join(["import matplotlib", "matplotlib.use('Agg')", *marked]), encoding="utf-8")
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0, ran.stderr[-3000:]
    printed = re.split(r"^cell \d+\n", ran.stdout, flags=re.M)[1:]
    assert len(printed) == len(cells())
    for cell, text in zip(cells(), printed, strict=True):
        for line in (r"sites fused.*", r"^chosen: .*", r"^ok: .*", r"^saved for backward .*"):
            assert re.findall(line, shown(cell), re.M) == re.findall(line, text, re.M)
