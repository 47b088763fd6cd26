"""Mutation tests: remove or invert a check that a correct rewrite needs. A default test must then fail.

``mutants.txt`` is the table. By default only its rows are checked: each still fits its file. ``.ci/slow mutants``
applies each mutant in a copy of the tree. It runs the row's default tests, then the tests of the file's section, up to
the first failure. If all of them pass, the mutant survives, and its case fails.
"""

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    original: list[str]
    mutated: list[str]
    tests: list[list[str]]  # tests of the row, then tests of the section
    equivalent: str

    def __str__(self) -> str:
        return f"{Path(self.file).stem}: {' '.join(map(str.strip, self.mutated or ['not', *self.original]))}"

    def apply(self, source: str) -> str:
        """Return the file's text with the mutated lines. It must have the original lines exactly once."""
        lines, original = source.splitlines(keepends=True), [line.strip() for line in self.original]
        stripped, n = [line.strip() for line in lines], len(original)
        places = [i for i in range(len(lines)) if stripped[i : i + n] == original]
        assert len(places) == 1, f"{self.file} has these lines {len(places)} times: {original}"
        (i,) = places
        indent = lines[i][: -len(lines[i].lstrip())]
        return "".join([*lines[:i], *(f"{indent}{line}\n" for line in self.mutated), *lines[i + n :]])


def table() -> list[Mutant]:
    mutants: list[Mutant] = []
    for block in re.split(r"\n{2,}", (ROOT / "tests" / "mutants.txt").read_text().strip()):
        kinds: dict[str, list[str]] = {kind: [] for kind in "#>@-+="}
        for line in block.splitlines():
            kinds[line[0]].append(line[2:])
        tests = [f"tests/{name}" for name in kinds["@"]]
        if kinds[">"]:
            (file,), related = kinds[">"], tests
        if kinds["-"]:
            mutants.append(Mutant(file, kinds["-"], kinds["+"], [tests, related], " ".join(kinds["="])))
    return mutants


MUTANTS = table()
CHECKED = sorted({mutant.file for mutant in MUTANTS})


@pytest.mark.parametrize("file", CHECKED)
def test_every_row_fits_its_file(file: str) -> None:
    """The file has the original lines once, no two rows give the same text, and the tests exist."""
    source, mutants = (ROOT / file).read_text(), [mutant for mutant in MUTANTS if mutant.file == file]
    assert len({source, *(mutant.apply(source) for mutant in mutants)}) == len(mutants) + 1
    for mutant in mutants:
        assert mutant.equivalent or mutant.tests[0], f"{mutant}: no test is named"
        for test in itertools.chain(*mutant.tests):
            path, _, name = test.partition("[")[0].partition("::")
            assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{test} does not exist"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tree. A process that starts in the copy imports the package from it."""
    folder = tmp_path_factory.mktemp("mutants") / "tree"
    hidden = shutil.ignore_patterns(".git", ".environments", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=hidden)
    (folder / "tmp").mkdir()
    where = run(folder, "-c", "import torch_fused_ops; print(torch_fused_ops.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(folder), where
    return folder


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TORCHINDUCTOR_CACHE"))}
    env |= {"PYTHONPATH": str(folder), "TMPDIR": str(folder / "tmp")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )


def fails(folder: Path, tests: list[str]) -> str:
    """Return the first default test that fails, or "" if all pass."""
    done = run(folder, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "--tb=no", *tests)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-3000:]
    return "" if done.returncode == 0 else next(line for line in done.stdout.splitlines() if line.startswith("FAILED"))


@pytest.fixture
def mutated(tree: Path, mutant: Mutant) -> Iterator[Path]:
    """Put the mutant into the tree's file, and remove bytecode of the original file."""
    file = tree / mutant.file
    source = file.read_text()
    for text in (mutant.apply(source), source):
        file.write_text(text)
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
        if text is not source:
            yield tree


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if not mutant.equivalent], ids=str)
def test_a_default_test_fails_with_the_mutant(mutant: Mutant, mutated: Path) -> None:
    killer = next((test for tests in mutant.tests if tests and (test := fails(mutated, tests))), "")
    assert killer, f"survives: {mutant}"


@pytest.mark.slow
@pytest.mark.parametrize("file", CHECKED)
def test_without_mutants_these_tests_pass(file: str, tree: Path) -> None:
    tests = {test: None for mutant in MUTANTS if mutant.file == file for test in mutant.tests[0]}
    assert not fails(tree, list(tests))
