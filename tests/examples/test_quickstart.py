"""The quickstart runs as a new user would run it, in its shortest form, and its figures are the right way round."""

import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.py"
WAYS = r"eager|torch\.compile|budget 0\.99|fused|fused, fp8|fused, input"
ROW = re.compile(rf"^  ({WAYS}) +([\d.]+) MiB +([\d.]+) +[\d.]+ … [\d.]+ +(\S+)$", re.M)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.slow  # of the examples, megatron_block.py runs by default
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_quickstart(mlp: str, cache: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(QUICKSTART), "--mlp", mlp, "--steps", "4", "--layers", "1", "--batch", "2"]
    command += ["--budget"] * (mlp == "gelu")
    ran = subprocess.run(
        [*command, "--out", "picture.svg"],
        cwd=tmp_path,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert "1 of 1 MLP sites fused" in ran.stdout

    rows = {name: (float(saved), float(ms), float(apart)) for name, saved, ms, apart in ROW.findall(ran.stdout)}
    assert ("budget 0.99" in rows) == (mlp == "gelu") and len(rows) == 5 + (mlp == "gelu"), ran.stdout
    saved = {name: row[0] for name, row in rows.items()}
    assert 0 < saved["fused, input"] < saved["fused, fp8"] < saved["fused"] < saved["torch.compile"]
    assert saved["fused"] <= saved.get("budget 0.99", math.inf)
    exact = [apart for name, (_, _, apart) in rows.items() if name != "fused, fp8"]
    assert all(apart < 1e-4 for apart in exact), ran.stdout  # float32: rounding alone
    against = re.search(r"^  fused +([\d.]+)% less memory, too few steps to compare times$", ran.stdout, re.M)
    assert against and abs(float(against[1]) / 100 - (1 - saved["fused"] / saved["torch.compile"])) < 0.005
    assert re.search(r"6\d% of PyTorch's are off by more than an ulp, 0% of ours", ran.stdout)

    picture = ElementTree.parse(tmp_path / "picture.svg").getroot()
    bars = picture.findall("{http://www.w3.org/2000/svg}rect")[1:]  # the first is the background
    assert picture.tag.endswith("svg") and len(bars) == 2 * len(rows)
    assert all(0 < float(bar.get("width", 0)) <= 160 for bar in bars)
