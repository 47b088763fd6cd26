"""``bench gpu`` and ``bench probe``: what keeps the time, survives failures and decides, on steps that are nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in import stand_in

from torch_fused_ops.benchmarks import decisions, gpu, gpu_tests, harness, mlp, pointwise, probe
from torch_fused_ops.cli import main as cli

# ---- time and failures -----------------------------------------------------------------------------------------------


def part(tmp_path: Path, steps: dict[str, str], limit: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A part of steps that are Python texts."""
    made = [gpu.Step(name, "command", (text,), 1.0) for name, text in steps.items()]
    monkeypatch.setattr(gpu, "steps", lambda *_: made)
    monkeypatch.setattr(gpu, "_module", lambda text: [sys.executable, "-S", "-c", text])
    monkeypatch.setattr(gpu, "FEWEST", 0.3)
    monkeypatch.setattr(gpu, "LAST", 0.0)
    return gpu.Part("steps", tmp_path, "cpu", True, limit).run()


def test_a_part_keeps_its_limit_and_writes_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    steps = {"prints": "print('a figure')", "hangs": "import time; time.sleep(60)", "dies": "import os; os.abort()"}
    result = part(tmp_path, steps, 4.0, monkeypatch)
    assert time.monotonic() - began < 30
    assert {s["name"]: s["status"] for s in result["steps"]} == {"prints": "passed", "hangs": "cut", "dies": "failed"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.json", "steps.log"]
    assert json.loads((tmp_path / "steps.json").read_text()) == result
    assert "a figure" in (tmp_path / "steps.log").read_text()


def test_what_finds_no_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = part(tmp_path, {"one": "pass", "two": "pass"}, 0.1, monkeypatch)
    assert [s["status"] for s in result["steps"]] == ["not run", "not run"]
    assert "limit" in result["steps"][0]["reason"]


FAKE = """
import json, os, sys
out, arguments = sys.argv[1], sys.argv[2:]
given = arguments[arguments.index("--out") + 1]
runs = json.load(open(out)) if os.path.exists(out) else []
runs.append(arguments)
json.dump(runs, open(out, "w"))
result = {"benchmark": "mlp", "schema": 1, "cases": [], "not_run": [], "lost": None, "running": None}
if len(runs) == 1:
    result["lost"] = "a case"
if len(runs) == 2:
    result["running"] = "another case"
json.dump(result, open(given, "w"))
if len(runs) == 2:
    os.abort()
"""


def test_a_benchmark_goes_on_without_what_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, runs = tmp_path / "fake.py", tmp_path / "runs.json"
    script.write_text(FAKE)
    monkeypatch.setattr(gpu, "_module", lambda *given: [sys.executable, "-S", str(script), str(runs), *given])
    running = gpu.Part("steps", tmp_path, "cpu", False, 100.0)
    running.log.write_text("")
    step = gpu.Step("mlp", "bench", ("mlp", "--skip", "tuned", "--ways", "compile"), 1.0)
    found = gpu._bench(running, step, 60.0, tmp_path)
    assert found["status"] == "passed" and found["ended_the_process"] == ["another case"]
    first, second, third = json.loads(runs.read_text())
    assert "--resume" not in first and "--resume" in second and "--resume" in third
    assert third[third.index("--skip") + 1 :][:2] == ["another case", "tuned"]
    assert all(float(run[run.index("--limit") + 1]) < 60 for run in (first, second, third))


def test_results_of_tests(tmp_path: Path) -> None:
    file = tmp_path / "tests.jsonl"
    lines: list[dict[str, Any]] = [
        {"collected": 4},
        {"test": "a", "outcome": "passed", "seconds": 1.0, "reason": ""},
        {"test": "b", "outcome": "failed", "seconds": 2.0, "reason": "AssertionError: 3 of 4"},
        {"test": "b", "outcome": "failed", "seconds": 0.0, "reason": gpu_tests.LOST},
        {"test": "c", "outcome": "skipped", "seconds": 0.0, "reason": ""},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = gpu_tests.read(file)
    assert [found[k] for k in ("collected", "passed", "failed", "skipped", "not_run")] == [4, 1, 1, 1, 1]
    assert found["failures"] == [{"test": "b", "reason": f"AssertionError: 3 of 4; {gpu_tests.LOST}"}]
    assert gpu_tests.read(tmp_path / "none")["collected"] == 0


@pytest.mark.slow
def test_a_test_that_takes_the_device_along_takes_its_process(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        """
import torch
gone = False

def synchronize():
    if gone:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize

def test_one(): pass

def test_two():
    global gone
    gone = True
    synchronize()

def test_three(): assert not gone
"""
    )
    report = tmp_path / "report.jsonl"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", gpu_tests.__name__, "--gpu-report", str(report), "-n", "1",
        "--max-worker-restart", "9", "-p", "no:cacheprovider", "test_some.py",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=200)
    found = gpu_tests.read(report)
    assert [found[k] for k in ("collected", "passed", "failed", "not_run")] == [3, 2, 1, 0]
    assert "illegal memory access" in found["failures"][0]["reason"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--part", "nothing", "--out", "x"], "--part nothing is not accepted: it must be correctness, kernels, steps"),
        (["--part", "steps"], "--out DIR is needed"),
        (["--part", "steps", "--out", "x", "--device", "cpu"], "--device cpu is for --quick alone"),
        (["--part", "steps", "--out", "x", "--device", "cpu", "--quick", "--limit", "0"], "it must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "gpu", *given]) == 2
    assert message in capsys.readouterr().err


def test_every_step_is_a_command_that_is_there() -> None:
    root = Path(gpu.ROOT)
    for name in gpu.PARTS:
        for device, quick in (("cuda", False), ("cpu", True)):
            steps = gpu.steps(name, device, quick)
            assert len({step.name for step in steps}) == len(steps)
            for step in steps:
                if step.kind == "tests":
                    assert (root / step.arguments[0]).exists()
    only = {s.name: s.arguments for s in gpu.steps("kernels", "cuda", False)}
    names = [pointwise.name_of(*each) for each in pointwise.grid(stand_in(), False, [], [])]
    for step in ("operators", "compared"):
        texts = only[step][2 : only[step].index("--ways")]
        assert sum(all(text in name for text in texts) for name in names) >= 2, step


# ---- decisions -------------------------------------------------------------------------------------------------------


def timed(ms: float, host: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"status": "measured", "ms": {"median": ms}, "host_ms": {"median": host}, **more}


def case(name: str, facts: dict[str, Any], flops: float = 0.0, **ways: Any) -> dict[str, Any]:
    return {"name": name, "dtype": "bfloat16", "facts": facts, "work": {"flops": flops, "bytes": 1.0}, "ways": ways}


def answers(part: str, **results: list[dict[str, Any]]) -> dict[str, tuple[str, list[str]]]:
    ceilings = {"copy_bytes_per_s": 4e12, "matmul_flop_per_s": {"bfloat16": 8e14}}
    steps = [{"name": n, "status": "passed", "result": {"cases": c, "ceilings": ceilings}} for n, c in results.items()]
    found = decisions.of({"part": part, "steps": steps})
    return {d["question"]: (d["answer"], d["rows"]) for d in found}


def answer(found: dict[str, tuple[str, list[str]]], word: str) -> tuple[str, list[str]]:
    (question,) = (q for q in found if word in q)
    return found[question]


def test_decisions_on_kernels() -> None:
    found = answers(
        "kernels",
        operators=[
            case("quick", {}, operators=timed(1.0), copy=timed(0.95)),
            case("slow", {}, operators=timed(1.0), copy=timed(0.8)),
        ],
        probe=[
            case("swept", {"kind": "kernel"}, operators=timed(1.0), copy=timed(0.8), **{"warps=8": timed(0.85)}),
            case("product", {"kind": "product"}, 2e12, bf16=timed(2.5), **{"fp8 row": timed(1.6)}),
            case("launch", {"kind": "launch"}, operators=timed(1, 0.06), **{"compiled[grid]": timed(1, 0.005)}),
            case("bias", {"kind": "reduction"}, compile=timed(2.0), operators=timed(1.5), copy=timed(1.0)),
        ],
    )
    text, rows = answer(found, "reach 0.90")
    assert text.startswith("3 of 4 are below") and [r.split()[-1] for r in rows] == ["bias", "slow", "swept"]
    text, rows = answer(found, "Which plan")
    assert text.startswith("1 of 1 gain") and "warps=8" in rows[0] and "0.80 → 0.94" in rows[0] and "+15.0 %" in rows[0]
    assert answer(found, "fp8")[0].startswith("fp8 products pay: the best is 1.25 PFLOP/s")
    assert answer(found, "host")[0].startswith("a launch cache pays: an operator takes up to 55 µs")
    assert "operators 0.75" in answer(found, "reduction")[1][0]


def test_decisions_on_steps() -> None:
    facts = {"mlp": "swiglu", "tokens": 8192, "width": 1024, "hidden": 4096}
    size, dtype = mlp.Size(8192, 1024, 4096), torch.bfloat16
    works = {way: mlp.works("swiglu", size, dtype, way, True) for way in ("fused-off", "fused-free")}
    rates = harness.Rates(8e14, 4e12)
    off, free = (1e3 * rates.seconds(works[way]) for way in works)
    assert free - off == pytest.approx(1e3 * 2 * 8192 * 4096 / 4e12)  # 2 bytes an element
    ratio = {"median": 1.02, "interval": [1.01, 1.03]}
    ways = {
        "compile": timed(1.0, saved_bytes=8 << 20),
        "fused-off": timed(off, ratio_to={"compile": ratio}, saved_bytes=8 << 20),
        "fused-free": timed(free, saved_bytes=4 << 20),
        "gemms": timed(0.9),
    }
    found = answers("steps", mlp=[case("a", facts, **ways)])
    assert answer(found, "fused-off")[0].startswith("a lowering is wrong in 1 of 1")
    text, rows = answer(found, "memory level")
    assert text.startswith("0 of 1 cost more") and "4 MiB less kept" in rows[0]
    ways["fused-free"] = timed(free + 3 * (free - off), saved_bytes=4 << 20)
    assert answer(answers("steps", mlp=[case("a", facts, **ways)]), "memory level")[0].startswith("1 of 1 cost more")
    text, rows = answer(found, "any fusion")
    assert text.startswith("1 of 1 are above") and rows == ["10.0 %  a"]
    assert answer(found, "whole model") == ("not measured", [])


def test_decisions_on_failures() -> None:
    tests = {"failures": [{"test": "t.py::test_a[1]", "reason": "x"}, {"test": "t.py::test_a[2]", "reason": "x"}]}
    steps = [{"name": "kernels", "status": "failed", "tests": tests}, {"name": "info", "status": "passed"}]
    (found,) = decisions.of({"part": "correctness", "steps": steps})
    assert found["answer"].startswith("some does not") and found["rows"] == ["kernels: failed", "2 × t.py::test_a"]
    (found,) = decisions.of({"part": "correctness", "steps": steps[1:]})
    assert found["answer"] == "all that ran does"


# ---- the probe -------------------------------------------------------------------------------------------------------


def test_every_plan_of_the_probe_is_another_plan_somewhere() -> None:
    """A constant that no kernel's plan depends on any more would be timed for nothing."""
    pytest.importorskip("triton")
    used: dict[str, set[str]] = {}
    for subject in probe.SUBJECTS:
        columns = subject.width or 8192
        shapes = subject.shapes(8192 * 8192 // columns, columns)
        dtypes = (torch.int64 if isinstance(s, int) else torch.bfloat16 for s in shapes)
        tensors = [
            torch.empty(1 if isinstance(s, int) else s, dtype=d, device="meta")
            for s, d in zip(shapes, dtypes, strict=True)
        ]
        found = {probe.plan_name(knobs) for knobs in probe.distinct(subject, tensors)}
        assert len(found) >= 2, subject.name
        used.setdefault(str(subject.plans), set()).update(found)
    for subject in probe.SUBJECTS:
        assert used[str(subject.plans)] >= {probe.plan_name(knobs) for knobs in subject.plans}


def test_the_probe_names_what_it_measures() -> None:
    gpu_grid = probe.grid(stand_in(), False, [], [])
    names = [probe.name_of(*each) for each in gpu_grid]
    assert len(set(names)) == len(names)
    with pytest.raises(AttributeError, match="_NO_SUCH"), probe.planned({"_NO_SUCH": 1}):
        pass


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (128, 128), (1, 256)])
def test_what_fp8_stores_is_the_tensor(rows: int, columns: int) -> None:
    t = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 257)[:, None]
    bits, scale = probe.stored(t, rows, columns)
    assert scale.shape == (256 // rows, 256 // columns)
    back = bits.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    assert harness.relative_error([back], [t.double()]) < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_from_one_end_to_the_other(part: str, tmp_path: Path) -> None:
    """On the CPU: every step runs and every question that a CPU can answer is answered."""
    given = ["bench", "gpu", "--part", part, "--quick", "--device", "cpu", "--out", str(tmp_path), "--limit", "900"]
    assert cli(given) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{part}.json", f"{part}.log"]
    result = harness.read(tmp_path / f"{part}.json", "gpu")
    assert all(step["status"] == "passed" for step in result["steps"])
    assert all(d["answer"] != "not measured" or "host" in d["question"] for d in result["decisions"])
