"""The test suite: each test file is in one part of .ci/slow, and its lines are limited."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import torch_fused_ops as tfo

ROOT = Path(__file__).parents[1]
SLOW = ROOT / ".ci" / "slow"


@pytest.fixture(scope="module")
def parts() -> dict[str, str]:
    """Return the parts of .ci/slow with their files."""
    if not SLOW.exists() or shutil.which("bash") is None:
        pytest.skip("needs a clone and bash")
    listed = subprocess.run(["bash", str(SLOW)], capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ", 1) for line in listed.splitlines())


def test_every_test_file_is_in_one_part_of_the_slow_run(parts: dict[str, str]) -> None:
    files = [file for part in parts.values() for file in part.split()]
    assert all(part.strip() for part in parts.values()), "no part is empty"
    assert sorted(files) == sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py"))


def test_lines_are_counted_and_limited(tmp_path: Path) -> None:
    if not SLOW.exists() or shutil.which("bash") is None:
        pytest.skip("needs a clone and bash")
    for folder in (".ci", "one/inner", "two"):
        (tmp_path / folder).mkdir(parents=True)
    script = shutil.copy(ROOT / ".ci" / "size", tmp_path / ".ci")
    for file, lines in (("one/a.py", 3), ("one/inner/b.py", 2), ("two/c.py", 4), ("two/d.txt", 9)):
        (tmp_path / file).write_text("\n" * lines)
    for limit, status in ((5, 0), (9, 0), (4, 1)):
        (tmp_path / ".ci" / "lines").write_text(f"# a comment\nsome {limit} one\nothers 4 two\n")
        counted = subprocess.run(["bash", script], capture_output=True, text=True)
        assert counted.returncode == status, counted
        assert "some: 5 lines" in (counted.stderr if status else counted.stdout)
        assert "others: 4 lines of at most 4\n" in counted.stdout, "all rows are counted"
    limits = [line for line in (ROOT / ".ci" / "lines").read_text().splitlines() if line[0] != "#"]
    assert [line.split()[0] for line in limits] == ["product", "tests", "benchmarks"]


def test_a_part_uses_every_processor(parts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each processor runs one process with one thread. By default, nproc returns OMP_NUM_THREADS."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$OMP_NUM_THREADS" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, variables, workers in (("none", {}, len(os.sched_getaffinity(0))), ("WORKERS", {"WORKERS": "7"}, 7)):
        env = {k: v for k, v in os.environ.items() if k != "WORKERS"} | {"OMP_NUM_THREADS": "1"} | variables
        ran = subprocess.run(["bash", str(SLOW), "ops", "--lf"], capture_output=True, text=True, check=True, env=env)
        called = ran.stdout.split("==== ops", 1)[1].split()
        assert called[0] == "1" and called[called.index("-n") + 1] == str(workers), name
        assert called[called.index("--lf") + 1 :] == parts["ops"].split()


def test_the_workflow_runs_every_part(parts: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["slow"]["strategy"]["matrix"]["part"] == list(parts)
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [words for words in commands if words[0] != "pip"]
    assert scripts == [[".ci/run"], [".ci/slow", "${{", "matrix.part", "}}"]]
    assert all(os.access(ROOT / words[0], os.X_OK) for words in scripts)


@pytest.mark.codegen_is_slow("lowered")
def test_graphs_are_lowered_without_code(request: pytest.FixtureRequest) -> None:
    from torch._inductor.utils import run_and_get_code

    x = torch.randn(4, 8)
    compiled = torch.compile(lambda x: torch.ops.fused.bias_act(x, None, None, "relu") + 1)
    result, code = run_and_get_code(compiled, x)
    torch.testing.assert_close(result, x.relu() + 1)
    assert len(code) == (request.node.callspec.params["inductor_code"] == "generated")
    tfo.register_activation("sorted_for_the_suite", lambda x: x.unsqueeze(-1).cumsum(-1).squeeze(-1))
    with pytest.raises(Exception, match="cannot be part of an activation"):
        torch.compile(lambda x: torch.ops.fused.bias_act(x, None, None, "sorted_for_the_suite"))(x)
