"""The ears of a rank's pytest session: what plugins there would show or record is noted for the controller.

Each note has its counterpart in ``rank_output``, which tells it to the controller's pytest.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.logging import LogCaptureHandler, LoggingPlugin, caplog_handler_key, caplog_records_key

from pdlcheck.harness.loggers import Destinations, all_have
from pdlcheck.worlds.processes.journal import note

__all__ = ["RankHooks", "StandingHandlers", "journal_log", "note_properties"]

_noted = pytest.StashKey[int]()


class RankHooks:
    """A pytest plugin of the session in a rank."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.not_collected: list[str] = []
        self.collected: list[pytest.Item] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """A hook that selects by what the whole session has would select something else here, of one file."""
        self.collected = list(items)
        result = yield
        self.collected += items  # those that it has put in their place
        return result

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        category = warning_message.category
        note(
            "warning",
            {
                "text": str(warning_message.message),
                "module": category.__module__,
                "category": category.__qualname__,
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
            },
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Only subtests report here; the phases of an item do not come by this way."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        if data is not None:
            note("report", data)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.not_collected.append(report.longreprtext)


def note_properties(item: pytest.Item) -> None:
    """Note what ``record_property`` added since the last time."""
    start = item.stash.get(_noted, 0)
    for name, value in item.user_properties[start:]:
        note("property", [name, value])
    item.stash[_noted] = len(item.user_properties)


def journal_log(config: pytest.Config) -> StandingHandlers | None:
    """Note what is logged, in the format and from the level on that pytest was asked for; None if it has no log."""
    plugin: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
    if plugin is None:
        return None
    journal = _Journal()
    journal.setFormatter(plugin.formatter)
    if plugin.log_level is not None:
        journal.setLevel(plugin.log_level)
        plugin.caplog_handler.setLevel(plugin.log_level)
    handlers = StandingHandlers(plugin, journal)
    plugin._runtest_for = handlers.runtest_for  # type: ignore[method-assign]
    return handlers


class StandingHandlers:
    """pytest's handlers, attached for good.

    pytest attaches two handlers anew in every phase, to the root and to each logger that does not propagate, of which
    torch has dozens: a seventh of what a small test costs in a rank. Here, a phase attaches what is missing; with
    ``once``, only the first one looks.
    """

    def __init__(self, plugin: LoggingPlugin, journal: _Journal) -> None:
        self._plugin = plugin
        self._handlers = (plugin.caplog_handler, journal)
        self.once = False
        self._destinations = Destinations()
        self._attached: list[logging.Logger] = []

    @contextmanager
    def runtest_for(self, item: pytest.Item, when: str) -> Iterator[None]:
        """In the place of pytest's ``LoggingPlugin._runtest_for``."""
        if when == "setup" or not self.once:
            self._attach()
        captured = self._plugin.caplog_handler
        captured.reset()
        item.stash[caplog_records_key][when] = captured.records
        item.stash[caplog_handler_key] = captured
        root, level = logging.getLogger(), self._plugin.log_level
        if level is None:
            yield
            return
        before = root.level
        root.setLevel(min(before, level))
        try:
            yield
        finally:
            root.setLevel(before)

    def _attach(self) -> None:
        loggers = self._destinations.now()
        if loggers != self._attached:
            for logger in self._attached:
                if logger not in loggers:  # it propagates again
                    for handler in self._handlers:
                        logger.removeHandler(handler)
            self._attached = loggers
        for handler in self._handlers:
            if not all_have(handler, loggers):
                for logger in loggers:
                    logger.addHandler(handler)  # unless it is there


class _Journal(LogCaptureHandler):
    """Shown in the report of the controller, whose pytest takes the notes."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("c10d-") and record.levelno == logging.DEBUG:
            return  # torch tells of every exception in a collective: the report does so better
        try:
            text: Any = self.format(record)
        except Exception:  # a wrong call of logging: pytest's own handler raises it where it was made
            return
        note("log", text)
