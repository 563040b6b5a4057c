"""A pytest plugin that writes the outcome and the world of each test: ``-p systems_table.outcomes --outcomes FILE``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdlcheck.harness.collection.cases import world_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcomes") is not None:
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            verified = [name for marker in item.iter_markers("verifies") for name in marker.args]
            self._tests[item.nodeid] = {"world": world_of(item) or "", "verifies": verified, "outcome": "passed"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests[report.nodeid]
        if report.failed or (report.skipped and test["outcome"] == "passed"):
            test["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if self._tests:  # empty in an agent of a launched session
            self._file.write_text(json.dumps(self._tests))
