"""Short runs of the examples print and draw plausible results."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import python

EXAMPLES = Path(__file__).parents[2] / "examples"
TOUR = EXAMPLES / "tour.ipynb"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


def run(folder: Path, cache: Path, *arguments: str, **environment: str) -> str:
    """Run a Python program in a folder and return its output."""
    return python(*arguments, cwd=folder, TORCHINDUCTOR_CACHE_DIR=str(cache), PYTHONUTF8="1", **environment)


@pytest.mark.slow
@pytest.mark.parametrize(("mlp", "backend"), [("swiglu", "aot_eager"), ("gelu", "fused"), ("swiglu", "fused")])
def test_megatron_block_trains(mlp: str, backend: str, cache: Path, tmp_path: Path) -> None:
    """Eager and compiled training with Megatron-LM's calls give the same losses."""
    script, options = str(EXAMPLES / "megatron_block.py"), ["--mlp", mlp, "--backend", backend]
    out = run(tmp_path, cache, script, *options, "--layers", "1", "--steps", "3")
    row = r"^(eager|compiled), dropout (0\.\d) +([\d.]+) +([\d.]+) +([\d.]+) MiB$"
    rows = {(name, p): (float(a), float(b), float(saved)) for name, p, a, b, saved in re.findall(row, out, re.M)}
    difference = re.search(r"at most (\S+) apart", out)
    assert len(rows) == 4 and difference and float(difference[1]) < 1e-4, out
    for (name, p), (first, last, saved) in rows.items():
        assert last < first and saved > 0
        assert abs(saved - rows[name, "0.0"][2]) < 0.01  # dropout saves no mask
        if (name, backend) == ("compiled", "fused"):
            assert saved < rows["eager", p][2]


@pytest.mark.slow
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_quickstart_saves_less_at_each_level(mlp: str, cache: Path, tmp_path: Path) -> None:
    options = ["--mlp", mlp, "--steps", "4", "--layers", "1", "--batch", "2", *["--budget"] * (mlp == "gelu")]
    out = run(tmp_path, cache, str(EXAMPLES / "quickstart.py"), *options, "--out", "picture.svg")
    assert "1 of 1 MLP sites fused" in out
    ways = r"eager|torch\.compile|budget 0\.99|fused|fused, fp8|fused, input"
    row = rf"^  ({ways}) +([\d.]+) MiB +([\d.]+) +[\d.]+ … [\d.]+ +(\S+)$"
    rows = {name: (float(saved), float(difference)) for name, saved, _, difference in re.findall(row, out, re.M)}
    assert ("budget 0.99" in rows) == (mlp == "gelu") and len(rows) == 5 + (mlp == "gelu"), out
    saved = {name: row[0] for name, row in rows.items()}
    assert 0 < saved["fused, input"] < saved["fused, fp8"] < saved["fused"] < saved["torch.compile"]
    assert saved["fused"] <= saved.get("budget 0.99", math.inf)
    differences = [difference for name, (_, difference) in rows.items() if name != "fused, fp8"]
    assert max(differences) < 1e-4, out  # only rounding differs
    against = re.search(r"^  fused +([\d.]+)% less activation memory saved for backward, too few steps", out, re.M)
    assert against and abs(float(against[1]) / 100 - (1 - saved["fused"] / saved["torch.compile"])) < 0.005
    assert re.search(r"6\d% of PyTorch's are off by more than an ulp, 0% of ours", out)
    picture = ElementTree.parse(tmp_path / "picture.svg").getroot()
    bars = picture.findall("{http://www.w3.org/2000/svg}rect")[1:]  # the first is the background
    assert picture.tag.endswith("svg") and len(bars) == 2 * len(rows)
    assert all(0 < float(bar.get("width", 0)) <= 160 for bar in bars)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.parametrize("options", [["swiglu"], ["gelu"], ["swiglu", "--compile"]])
def test_tensor_parallel_trains_saves_and_loads(options: list[str], cache: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--mlp", *options, "--steps", "3", "--layers", "1", "--batch", "2"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    out = run(tmp_path, cache, *launch, str(EXAMPLES / "tensor_parallel.py"), *options, **environment)
    difference = re.search(r"losses +differ by (\S+) at most", out)
    assert difference and float(difference[1]) < 1e-4
    assert "saved     by 2, loaded by 1, bit for bit" in out


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(TOUR.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_the_tour_s_cells_ran_in_order() -> None:
    assert [cell["execution_count"] for cell in cells()] == list(range(1, len(cells()) + 1))
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)


@pytest.mark.slow
def test_the_tour_prints_its_committed_output(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    sources = ["".join(cell["source"]).replace("%matplotlib inline\n", "") for cell in cells()]
    marked = [f"print('cell {i}')\n{source}" for i, source in enumerate(sources)]
    (tmp_path / "tour.py").write_text("\n".join(["import matplotlib", "matplotlib.use('Agg')", *marked]), "utf-8")
    printed = re.split(r"^cell \d+\n", run(tmp_path, cache, "tour.py"), flags=re.M)[1:]
    for cell, text in zip(cells(), printed, strict=True):
        expected = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        for line in (r"sites fused.*", r"^chosen: .*", r"^ok: .*", r"^saved for backward.*"):
            assert re.findall(line, expected, re.M) == re.findall(line, text, re.M)


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted((EXAMPLES / "upstream").glob("*.py")), ids=lambda path: path.stem)
def test_a_fault_of_pytorch_persists(program: Path, cache: Path, tmp_path: Path) -> None:
    """A program of docs/upstream.md asserts PyTorch's fault. If it fails, PyTorch may have fixed the fault."""
    run(tmp_path, cache, str(program))
