"""Processor time, of this process and of those it waited for: what the suite costs on any machine, busy or not.

A default test that takes more than ``LIMIT`` seconds is named at the end of the run, unless a mark says why it may:
``@pytest.mark.seconds("the one whole model of the default suite")``. It fails where times are asked for
(``--processor-time``); in any other run only beyond ``ELSEWHERE`` times that, since a slow or busy machine is no fault
of the test. Time is counted from the test's setup on, without the setup of fixtures that several tests share and
without imports, which whichever test comes first would pay.
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 5.0
ELSEWHERE = 4.0


def seconds(*whose: int) -> float:
    """Processor time so far, by default of this process and of its children."""
    used = (resource.getrusage(who) for who in whose or (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Meter:
    """In every process that runs tests: each report carries the processor time of its phase, and long tests fail.

    Args:
        limit: seconds that a test may take without a word.
        last: seconds beyond which it fails.
    """

    def __init__(self, limit: float, last: float) -> None:
        self.limit, self.last = limit, last
        self.since = 0.0
        self.spent = 0.0  # by the test that runs, for itself
        self.shared = 0.0  # of the phase: what belongs to several tests

    def pytest_runtest_logstart(self) -> None:
        self.since, self.spent, self.shared = seconds(), 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)  # type: ignore[misc]
        began = seconds()
        try:
            return (yield)  # type: ignore[misc]
        finally:
            self.shared += seconds() - began

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: pytest.TestReport = yield  # type: ignore[misc, assignment]
        now = seconds()
        report.processor_seconds = now - self.since  # type: ignore[attr-defined]
        self.spent += now - self.since - self.shared
        self.since, self.shared = now, 0.0
        may = any(item.get_closest_marker(name) for name in ("slow", "seconds"))
        if report.when == "call" and report.passed and self.spent > self.limit and not may:
            report.dear_seconds = self.spent  # type: ignore[attr-defined]
            if self.spent > self.last:
                report.outcome = "failed"
                report.longrepr = (
                    f"{self.spent:.1f} s of processor time; a default test has {self.limit:g}. Make it cheaper, mark "
                    'it slow, or say why it must be: @pytest.mark.seconds("why") (see CONTRIBUTING.md)'
                )
        return report  # type: ignore[return-value]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["processor_seconds"] = seconds()


class Table:
    """In the process that hears of all tests: the sum of all processes, and, if asked for, a file of each test's."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.tests: dict[str, float] = defaultdict(float)
        self.dear: dict[str, float] = {}
        self.workers = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        if hasattr(report, "dear_seconds"):
            self.dear[report.nodeid] = report.dear_seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers += getattr(node, "workeroutput", {}).get("processor_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        # Workers say what they took: as this process's children they may have been waited for by now, or not.
        whole = self.workers + seconds(resource.RUSAGE_SELF) if self.workers else seconds()
        tests = sum(self.tests.values())
        terminalreporter.write_line(
            f"processor time: {whole:.0f} s, {tests:.0f} s of it in tests, the rest in imports and in collecting them"
        )
        for name, spent in sorted(self.dear.items(), key=lambda pair: -pair[1]):
            terminalreporter.write_line(f"  above its limit: {spent:.1f} s, {name}")
        if self.file:
            dearest = sorted(self.tests.items(), key=lambda pair: -pair[1])
            Path(self.file).write_text(json.dumps({name: round(spent, 3) for name, spent in dearest}, indent=0) + "\n")
