"""The slow run: each test file is in one part of .ci/slow, and the workflow runs every part."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_the_workflow_runs_every_part(parts: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["slow"]["strategy"]["matrix"]["part"] == list(parts)
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = [words for words in commands if words[0] != "pip"]
    assert scripts == [[".ci/run"], [".ci/slow", "${{", "matrix.part", "}}"]]
    assert all(os.access(ROOT / words[0], os.X_OK) for words in scripts)
