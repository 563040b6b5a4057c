"""The plugin object of one run: it shows progress, and keeps rows, skips and failures for the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pdlcheck.report.measured import seconds_text

__all__ = ["Follower"]


class Follower:
    """Prints a line for each benchmark as it ends, with the time that is left.

    Args:
        console: where progress goes.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0
        self._done = 0
        self._seen = 0  # rows of pytest-benchmark
        self._begin = time.perf_counter()
        self.is_silent = True  # until there is something to run in this process
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.sentences: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Give pytest's own reporter nowhere to write: other plugins ask it for its settings."""
        self._config = config
        config.pluginmanager.unregister(name="terminalreporter")
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  # closed in pytest_unconfigure
        config.pluginmanager.register(pytest.TerminalReporter(config, self._nowhere), "terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._nowhere.close()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_silent = False
            self.failures.append((report.nodeid, report.longreprtext))

    def pytest_internalerror(self, excrepr: object) -> None:
        self.is_silent = False
        self.failures.append(("pytest", f"it stopped with an error of its own:\n{excrepr}"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._number = len(session.items)

    def pytest_runtest_logstart(self) -> None:
        self.is_silent = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            self._done += 1
            self._take_rows(report.nodeid)

    def _take_rows(self, nodeid: str) -> None:
        """What the benchmark that ends has measured, from the session of pytest-benchmark."""
        session: Any = getattr(self._config, "_benchmarksession", None)
        seen, all_rows = len(self.rows), [] if session is None else session.benchmarks
        new, self._seen = all_rows[self._seen :], len(all_rows)
        for row in new:
            if row.has_error or not row:  # of a failed test
                continue
            facts = dict(row.extra_info)
            if "median_s" not in facts:
                facts |= {"median_s": row.stats.median, "median_low_s": row.stats.q1, "median_high_s": row.stats.q3}
            self.rows.append((row.name, facts))
            if "row" in facts:
                self.sentences.append(facts["row"])
        last = ", ".join(seconds_text(facts["median_s"]) for _, facts in self.rows[seen:])
        left = (time.perf_counter() - self._begin) / self._done * (self._number - self._done)
        words = f"[{self._done}/{self._number}, {left:.0f} s left] {nodeid.rpartition('::')[2]}  {last}"
        self._console.print(Text(words), soft_wrap=True)
