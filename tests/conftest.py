"""What every test gets: compile caches of the tests' own, and the activation table as it was."""

import json
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# So that no run is served what another run compiled.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_fused_ops_tests_")

from torch_fused_ops import activations


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite, plain ``pytest``, runs in up to four processes: most of it waits for compilers of its own."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and config.pluginmanager.hasplugin("xdist") and config.getoption("numprocesses") is None:
        processors = os.cpu_count() or 1
        config.option.numprocesses = workers = min(processors, 4)
        config.option.dist = "worksteal"
        os.environ.setdefault("OMP_NUM_THREADS", str(processors // workers))  # for the workers: threads spin


# ---- docs/compatibility.json, from which docs/generate.py writes the table of docs/compatibility.md -----------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """--record-compatibility: note what passes on this torch."""
    parser.addoption("--record-compatibility", action="store_true", help="write what passes to docs/compatibility.json")


class _Record:
    """Counts (passed, failed, skipped) for each file."""

    def __init__(self, tests: Path) -> None:
        self.tests = tests
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            place = ("passed", "failed", "skipped").index(report.outcome)
            self.counts[report.nodeid.partition("::")[0].removeprefix("tests/")][place] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Adds to what is there for other versions; files that did not run now keep their counts."""
        import torch

        numbers = torch.__version__.partition("+")[0]
        python = ".".join(platform.python_version_tuple()[:2])
        file = self.tests.parent / "docs" / "compatibility.json"
        record = json.loads(file.read_text()) if file.exists() else {}
        ran = record.setdefault(f"torch {numbers}, Python {python}", {})
        slow = "slow" in session.config.option.markexpr and "not slow" not in session.config.option.markexpr
        for name, counts in self.counts.items():
            ran[name] = [a + b for a, b in zip(ran.get(name, [0, 0, 0]), counts, strict=True)] if slow else counts
        file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """In the process that hears of all tests."""
    if config.getoption("--record-compatibility") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Record(Path(__file__).parent), "record-compatibility")


@pytest.fixture(autouse=True)
def activation_table() -> Iterator[None]:
    """Takes out what a test registers, so that no other test recognises it. Names must still differ between tests."""
    before = dict(activations._TABLE)
    yield
    if before != activations._TABLE:
        activations._TABLE.clear()
        activations._TABLE.update(before)
        for notify in activations._on_change:
            notify()
