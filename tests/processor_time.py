"""Measure the processor time of tests, in this process and its children. Unlike time, it hardly depends on the load.

A test's count starts with its setup. Imports and the setup of shared fixtures do not count, because the first test
would pay for all tests.
"""

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def seconds(*processes: int) -> float:
    """Return the processor time so far, by default of this process and its children."""
    used = (resource.getrusage(who) for who in processes or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Meter:
    """Adds the processor time of a phase to its report, in every process that runs tests."""

    def __init__(self) -> None:
        self.since = 0.0
        self.shared = 0.0  # seconds of the phase spent in shared fixtures

    def pytest_runtest_logstart(self) -> None:
        self.since, self.shared = seconds(), 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        began = seconds()
        try:
            return (yield)  # type: ignore[misc]
        finally:
            self.shared += (seconds() - began) * (fixturedef.scope != "function")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[misc, assignment]
        now = seconds()
        report.processor_seconds = now - self.since - self.shared  # type: ignore[attr-defined]
        self.since, self.shared = now, 0.0
        return report  # type: ignore[return-value]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["processor_seconds"] = seconds()


class Table:
    """Prints the sum over all processes, and optionally writes each test's time to a file. Runs in the main process."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.tests: dict[str, float] = defaultdict(float)
        self.workers = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers += getattr(node, "workeroutput", {}).get("processor_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        # Workers report their own time, since this process may not have waited for them yet.
        total = self.workers + seconds(resource.RUSAGE_SELF) if self.workers else seconds()
        dearest = sorted(self.tests.items(), key=lambda pair: -pair[1])
        terminalreporter.write_line(
            f"processor time: {total:.0f} s, {sum(self.tests.values()):.0f} s of it in tests, the rest in imports and "
            f"in collecting them; the dearest: {dearest[0][1]:.1f} s, {dearest[0][0]}"
        )
        if self.file:
            Path(self.file).write_text(json.dumps({name: round(spent, 3) for name, spent in dearest}, indent=0) + "\n")
