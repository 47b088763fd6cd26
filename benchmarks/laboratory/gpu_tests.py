"""A pytest plug-in for a GPU that is there for minutes.

    pytest -p torch_fused_ops.benchmarks.laboratory.gpu_tests --gpu-report FILE

Every result is a line of FILE as soon as it is known, so that a run which is cut leaves what it had. A test that takes
the device along (an illegal address: CUDA then refuses everything until the process ends) ends its process; under
pytest-xdist another takes its place, and the tests that are left run there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

LOST = "the device was lost in this test: its process ended, another went on"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-report", metavar="FILE", help="write each test's result to FILE, a line of JSON each")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--gpu-report")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_LeavesWithTheDevice(), "leaves-with-the-device")
    elif file:
        config.pluginmanager.register(_Reporter(Path(file)), "gpu-reporter")


class _Reporter:
    """Where all results come together."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.collected = 0
        file.write_text("")

    def note(self, **entry: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.note(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        if not self.collected:
            self.collected = len(ids)
            self.note(collected=len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = ""
            if report.outcome == "failed":
                crash = getattr(report.longrepr, "reprcrash", None)
                text = str(crash.message if crash else report.longrepr)
                reason = LOST if "crashed while running" in text else next(iter(text.strip().splitlines()), "")[:300]
            self.note(test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 2), reason=reason)


class _LeavesWithTheDevice:
    """In a process of pytest-xdist's that runs tests."""

    @pytest.hookimpl(trylast=True)  # behind xdist's own, which has sent the test's result by then
    def pytest_runtest_logfinish(self) -> None:
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except Exception:
                os._exit(1)


def read(file: Path) -> dict[str, Any]:
    """What a run left in its file: how many were collected, passed, skipped; which failed, with their reasons."""
    collected = 0
    outcomes: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        entry = json.loads(line)
        collected = max(collected, entry.get("collected", 0))
        if "test" in entry:
            before = outcomes.get(entry["test"])
            if before is None or before["outcome"] == "passed" or before["reason"] == LOST:
                outcomes[entry["test"]] = entry
            elif entry["reason"] == LOST:  # its own reason says more
                before["reason"] += f"; {LOST}"
    counts = {kind: sum(e["outcome"] == kind for e in outcomes.values()) for kind in ("passed", "failed", "skipped")}
    failures = [{"test": e["test"], "reason": e["reason"]} for e in outcomes.values() if e["outcome"] == "failed"]
    slowest = sorted(outcomes.values(), key=lambda e: -e["seconds"])[:5]
    return {
        "collected": collected,
        **counts,
        "not_run": max(0, collected - len(outcomes)),
        "failures": failures,
        "slowest": [{"test": e["test"], "seconds": e["seconds"]} for e in slowest],
    }
