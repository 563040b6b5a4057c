"""The plugin object of one run: it repeats the benchmarks, shows progress, and collects skips and failures."""

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

from pdlcheck.compat.pytest_benchmark import session_of
from pdlcheck.harness.running.open_worlds import close_worlds
from pdlcheck.report.measured import seconds_text

__all__ = ["Follower", "facts_of"]


def facts_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns of a row of the JSON; add the times to rows of pytest-benchmark's own fixture."""
    facts, stats = row["extra_info"], row["stats"]
    if "median_s" in facts:
        return facts  # type: ignore[no-any-return]  # a dictionary of JSON
    return {**facts, "median_s": stats["median"], "median_low_s": stats["q1"], "median_high_s": stats["q3"]}


class Follower:
    """A plugin that runs all benchmarks in several passes and prints a line when each ends, with the remaining time.

    A pass has ranks of its own: new processes here, or new forks of its processes under a launcher.

    Args:
        console: the console for progress.
        passes: the number of passes.
    """

    def __init__(self, console: Console, passes: int) -> None:
        self._console = console
        self._passes = passes
        self._ended = 0  # completed passes
        self._done = 0
        self._seen = 0  # rows of pytest-benchmark that were printed
        self._begin = time.perf_counter()
        self.is_silent = True  # until this process has something to run
        self.is_interrupted = False
        self.skipped: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Redirect pytest's own reporter to nowhere; it must exist because other plugins read its settings."""
        self._config = config
        config.pluginmanager.unregister(name="terminalreporter")
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115  # closed in pytest_unconfigure
        config.pluginmanager.register(pytest.TerminalReporter(config, self._nowhere), "terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Close the file of the redirected reporter."""
        self._nowhere.close()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a failure of the collection."""
        if report.failed:
            self.is_silent = False
            self.failures.append((report.nodeid, report.longreprtext))

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep an internal error of pytest."""
        self.is_silent = False
        self.failures.append(("pytest", f"it stopped with an error of its own:\n{excrepr}"))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Record that the user pressed Ctrl-C."""
        self.is_interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)  # Interrupted is pytest's own

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run the items as pytest does, in several passes; worlds that fixtures hold are closed after each pass."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest reports the reason
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
        """Show the results of this process, because it runs tests."""
        self.is_silent = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep failures and skips, and print a line when a benchmark ends."""
        if report.failed:
            self.failures.append((report.nodeid, report.longreprtext))
        elif report.skipped and not self._ended:  # each pass has the same skips
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.skipped[reason.removeprefix("Skipped: ")] += 1
        if report.when == "teardown":
            self._done += 1
            self._tell(report.nodeid)

    def _tell(self, nodeid: str) -> None:
        """Print the measured seconds of the benchmark that ends, from the session of pytest-benchmark."""
        session = session_of(self._config)
        rows = [] if session is None else session.benchmarks
        new, self._seen = rows[self._seen :], len(rows)
        last = ", ".join(seconds_text(row.stats.median) for row in new if row and not row.has_error)
        left = (time.perf_counter() - self._begin) / self._done * (self._number - self._done)
        words = f"[{self._done}/{self._number}, {left:.0f} s left] {nodeid.rpartition('::')[2]}  {last}"
        self._console.print(Text(words), soft_wrap=True)
