"""The line at the end of a session that shows how many tests ran on each world. Does not import torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

__all__ = ["WorldCounts", "mark"]

_WORLD, _RAN = "pdlcheck_world", "pdlcheck_ran"  # attributes of a report; pytest-xdist sends them


def mark(report: pytest.TestReport, world: str) -> None:
    """Store the world of a test in one of its reports, and whether its body ran."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        setattr(report, _WORLD, world)
        setattr(report, _RAN, report.when == "call" and (not report.skipped or hasattr(report, "wasxfail")))


class WorldCounts:
    """A plugin of the session that counts tests by world."""

    def __init__(self) -> None:
        self._ran: Counter[str] = Counter()
        self._not_run: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a marked report."""
        world = getattr(report, _WORLD, None)
        if world is not None:
            (self._ran if getattr(report, _RAN) else self._not_run)[world] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the line."""
        if line := self._line():
            terminalreporter.write_line(line)

    def _line(self) -> str:
        worlds = list(dict.fromkeys([*self._ran, *self._not_run]))
        counts = [f"{self._ran[world]} on {world}{self._left_out(world)}" for world in worlds]
        return f"pdlcheck: tests that ran on ranks: {', '.join(counts)}" if counts else ""

    def _left_out(self, world: str) -> str:
        return f" ({self._not_run[world]} not run)" if self._not_run[world] else ""
