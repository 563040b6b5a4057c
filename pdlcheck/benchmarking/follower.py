"""The plugin object of one run: it repeats the benchmarks, shows progress, and keeps skips and failures for the end."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from pdlcheck.harness.running.open_worlds import close_worlds
from pdlcheck.report.measured import seconds_text

__all__ = ["Follower", "facts_of"]


def facts_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a row of the JSON; those of pytest-benchmark's own fixture get the times, too."""
    facts, stats = row["extra_info"], row["stats"]
    if "median_s" in facts:
        return facts  # type: ignore[no-any-return]  # a dictionary of JSON
    return {**facts, "median_s": stats["median"], "median_low_s": stats["q1"], "median_high_s": stats["q3"]}


class Follower:
    """Runs all benchmarks in several passes, and prints a line for each as it ends, with the time that is left.

    A pass has ranks of its own: new processes here, new forks of its processes under a launcher.

    Args:
        console: where progress goes.
        passes: how often each benchmark runs.
    """

    def __init__(self, console: Console, passes: int) -> None:
        self._console = console
        self._passes = passes
        self._ended = 0  # passes
        self._done = 0
        self._seen = 0  # rows of pytest-benchmark
        self._begin = time.perf_counter()
        self.is_silent = True  # until there is something to run in this process
        self.is_interrupted = False
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

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.is_interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)  # which is pytest's own

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the items as pytest does, several times; what fixtures hold ends with each pass."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest says why
        self._number = len(session.items) * self._passes
        for ended in range(self._passes):
            self._ended = ended
            for item, following in zip_longest(session.items, session.items[1:]):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            close_worlds(session.config)
        return True

    def pytest_runtest_logstart(self) -> None:
        self.is_silent = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))
        elif report.skipped and not self._ended:  # each pass skips the same
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            self._done += 1
            self._tell(report.nodeid)

    def _tell(self, nodeid: str) -> None:
        """Print what the benchmark that ends has measured, from the session of pytest-benchmark."""
        session: Any = getattr(self._config, "_benchmarksession", None)
        rows = [] if session is None else session.benchmarks
        new, self._seen = rows[self._seen :], len(rows)
        last = ", ".join(seconds_text(row.stats.median) for row in new if row and not row.has_error)
        left = (time.perf_counter() - self._begin) / self._done * (self._number - self._done)
        words = f"[{self._done}/{self._number}, {left:.0f} s left] {nodeid.rpartition('::')[2]}  {last}"
        self._console.print(Text(words), soft_wrap=True)
