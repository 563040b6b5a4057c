"""The hooks of a rank's pytest session: they note for the controller what plugins would show or record.

``RankOutput`` in ``reporting/rank_output.py`` reads each kind of note and reports it to the controller's pytest.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pdlcheck.compat.pytest.items import report_sections
from pdlcheck.compat.pytest.logging import (
    LogCaptureHandler,
    LoggingPlugin,
    handler_key,
    logging_plugin,
    records_key,
    set_log_phases,
)
from pdlcheck.compat.pytest.reports import TerminalWriter, require_text, xml_key
from pdlcheck.harness.fastpath.log_handlers import Destinations, all_have
from pdlcheck.harness.reporting.rank_benchmarks import note_benchmarks
from pdlcheck.item_runners.processes.rank.outside_root import keep_node_ids
from pdlcheck.worlds.journal import note

__all__ = ["RankHooks", "StandingHandlers", "journal_log", "note_additions", "note_for_xml", "note_shown_fixtures"]

_noted = pytest.StashKey[tuple[int, int]]()


class RankHooks:
    """A pytest plugin of the session in a rank.

    Args:
        config: configuration of the rank's session.
        outside: paths of the command line, if some of them are outside of the root folder; see ``outside_root``.
    """

    def __init__(self, config: pytest.Config, outside: tuple[str, ...]) -> None:
        self._config = config
        self._outside = outside
        self.not_collected: list[str] = []
        self.skipped: list[str] = []
        self.collected: list[pytest.Item] = []
        self._folders: dict[tuple[type, Path], pytest.Collector] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collect_directory(self, path: Path) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
        """Share the folders of files that are collected one by one, so that their fixtures are set up once."""
        found = yield
        return None if found is None else self._folders.setdefault((type(found), path), found)

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Let node ids begin where those of the controller begin."""
        if isinstance(collector, pytest.Session):
            keep_node_ids(collector, self._outside)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Keep all items of a file, whatever a user's hook selects.

        A hook that selects items by the whole session would select others here, because a rank collects one file at a
        time.
        """
        self.collected = list(items)
        result = yield
        self.collected += items  # the items that the hook has added or exchanged
        return result

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        """Note a warning."""
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
        """Note the report of a subtest; only subtests are reported through this hook, not the phases of an item."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        if data is not None:
            note("subtest", data)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the reason why a file was skipped or could not be collected."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped.append(report.longrepr[2].removeprefix("Skipped: "))
        elif not report.passed:
            self.not_collected.append(report.longreprtext)


def note_additions(item: pytest.Function) -> None:
    """Note what the test added to its report since the last call: properties, sections, benchmarks."""
    properties, sections = item.stash.get(_noted, (0, 0))
    for name, value in item.user_properties[properties:]:
        note("property", [name, value])
    own = report_sections(item)
    for section in own[sections:]:
        note("section", section)
    item.stash[_noted] = len(item.user_properties), len(own)
    note_benchmarks(item)


def note_for_xml(config: pytest.Config) -> None:
    """Note the data that pytest's fixtures record for ``--junit-xml``."""
    xml: Any = _Xml(config)
    config.stash[xml_key] = xml


class _Xml:
    """A stand-in for pytest's writer of the XML file."""

    def __init__(self, config: pytest.Config) -> None:
        self.family = config.getini("junit_family")

    def node_reporter(self, report: object) -> _Xml:
        return self

    def add_attribute(self, name: str, value: object) -> None:
        note("attribute", [str(name), str(value)])

    def add_global_property(self, name: str, value: object) -> None:
        require_text("name", name)
        note("suite property", [name, str(value)])


def note_shown_fixtures(config: pytest.Config) -> None:
    """Note the output of ``--setup-show``.

    pytest 8 also requests a terminal writer for the colours of comparisons, so a rank always has one.
    """
    shows = config.getoption("setupshow", False)
    config.get_terminal_writer = _Shown if shows else _unseen  # type: ignore[method-assign, assignment]


def _unseen() -> TerminalWriter:
    return TerminalWriter(StringIO())


class _Shown:
    """A terminal writer that notes the lines of ``--setup-show``."""

    def __init__(self) -> None:
        self._writer = _unseen()
        self._text = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def line(self) -> None:
        self._text = ""

    def write(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        note("fixture", self._text)


def journal_log(config: pytest.Config, *, records: bool) -> StandingHandlers | None:
    """Note log records, in the format and from the level that pytest uses; return None if pytest has no log plugin.

    Args:
        config: configuration of the rank's session.
        records: also note each record itself, of every level, for the live log and the log file.
    """
    plugin = logging_plugin(config)
    if plugin is None:
        return None
    journal = _Journal()
    journal.setFormatter(plugin.formatter)
    if plugin.log_level is not None:
        journal.setLevel(plugin.log_level)
        plugin.caplog_handler.setLevel(plugin.log_level)
    handlers = StandingHandlers(plugin, [journal, _Records()] if records else [journal])
    set_log_phases(plugin, handlers.runtest_for)
    return handlers


class StandingHandlers:
    """pytest's log handlers, attached permanently.

    pytest attaches two handlers anew in every phase, to the root and to each logger that does not propagate; torch has
    dozens of those. This takes a seventh of the time of a small test in a rank. Here, a phase attaches only the missing
    handlers; with ``once``, only the set-up phase looks for them.
    """

    def __init__(self, plugin: LoggingPlugin, others: list[logging.Handler]) -> None:
        self._plugin = plugin
        self._handlers = (plugin.caplog_handler, *others)
        levels = (plugin.log_level, plugin.log_cli_level, plugin.log_file_level)
        self._level = min((level for level in levels if level is not None), default=None)
        for handler in others:
            handler.addFilter(_is_no_story_of_torchs)
        self.once = False
        self._destinations = Destinations()
        self._attached: list[logging.Logger] = []

    @contextmanager
    def runtest_for(self, item: pytest.Item, when: str) -> Iterator[None]:
        """Replace pytest's ``LoggingPlugin._runtest_for``."""
        if when == "setup" or not self.once:
            self._attach()
        captured = self._plugin.caplog_handler
        captured.reset()
        item.stash[records_key][when] = captured.records
        item.stash[handler_key] = captured
        root, level = logging.getLogger(), self._level
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
                if logger not in loggers:  # such a logger propagates again
                    for handler in self._handlers:
                        logger.removeHandler(handler)
            self._attached = loggers
        for handler in self._handlers:
            if not all_have(handler, loggers):
                for logger in loggers:
                    logger.addHandler(handler)  # addHandler ignores a handler that is already attached


def _is_no_story_of_torchs(record: logging.LogRecord) -> bool:
    """Return False for torch's debug records about exceptions in collectives; the report describes them better."""
    return record.levelno != logging.DEBUG or not record.name.startswith("c10d-")


class _Journal(LogCaptureHandler):
    """The handler that notes formatted records; the controller's pytest shows them in its report."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text: Any = self.format(record)
        except Exception:  # a wrong logging call: pytest's own handler raises the error at the call
            return
        note("log", text)


class _Records(logging.Handler):
    """The handler that notes whole records for the controller's live log and log file, which have their own formats."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # see _Journal
            return
        without = dict.fromkeys(("args", "exc_info", "exc_text", "stack_info"))
        note("record", vars(record) | without | {"msg": text})
