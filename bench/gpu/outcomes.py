"""A pytest plugin that writes each test's outcome when it is known, so that a run that is ended leaves what it found.

    FXPASSES_OUTCOMES=FILE python -m pytest -p bench.gpu.outcomes …

Lines of JSON: `{"collected": [names]}`, then `{"test": name, "outcome": "passed", "why": "", "seconds": 1.5}` for each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FXPASSES_OUTCOMES"


class Outcomes:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.collected: set[str] = set()

    def write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def collect(self, names: list[str]) -> None:
        if new := [name for name in names if name not in self.collected]:
            self.collected.update(new)
            self.write({"collected": new})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collect(list(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write({"test": report.nodeid, "outcome": "failed", "why": why(report), "seconds": 0.0})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # a set-up that skips or fails is the outcome
            known = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self.write(known | {"why": why(report)})


def why(report: Any) -> str:
    """The first line of what went wrong; "" where nothing did."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # of a test that is skipped: file, line, reason
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]


def pytest_configure(config: pytest.Config) -> None:
    # Processes of pytest-xdist report to the one that started them, which writes.
    if os.environ.get(VARIABLE) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(os.environ[VARIABLE])))
