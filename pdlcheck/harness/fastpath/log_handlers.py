"""A fast search for the loggers that need handlers; torch alone has dozens of loggers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse, repeat
from operator import attrgetter, delitem

import pytest

from pdlcheck.compat.pytest.logging import (
    ATTACHES_TO_ALL_LOGGERS,
    LoggingPlugin,
    handler_key,
    has_generator_phases,
    log_phases,
    logging_plugin,
    records_key,
    set_log_phases,
)
from pdlcheck.harness.collection import cases
from pdlcheck.harness.fastpath.switch import is_plain
from pdlcheck.worlds.registry import is_simulated

__all__ = ["Destinations", "all_have", "attach_quickly"]

_propagates, _handlers_of = attrgetter("propagate"), attrgetter("handlers")

_is_quick = pytest.StashKey[bool]()
_found = pytest.StashKey[list[logging.Logger]]()


class Destinations:
    """The root logger and, if pytest attaches handlers to them, the loggers that do not propagate to it.

    There are many loggers, and each test looks at them several times, so the loops over them here and below run in C.
    """

    def __init__(self) -> None:
        self._known: Sequence[object] = ()
        self._loggers: list[logging.Logger] = []

    def now(self) -> list[logging.Logger]:
        """Return the loggers that exist now."""
        root = logging.getLogger()
        if not ATTACHES_TO_ALL_LOGGERS:
            return [root]
        known = list(root.manager.loggerDict.values())
        if known != self._known:  # the comparison is by identity, in C
            self._known = known
            self._loggers = [logger for logger in known if isinstance(logger, logging.Logger) and logger is not root]
        return [root, *filterfalse(_propagates, self._loggers)]


def all_have(handler: logging.Handler, loggers: Iterable[logging.Logger]) -> bool:
    """Return whether the handler is attached to each of the loggers."""
    return all(map(list.__contains__, map(_handlers_of, loggers), repeat(handler)))


def attach_quickly(config: pytest.Config) -> None:
    """Attach pytest's handlers in one pass to tests with ranks, in the controller, from its next phase on.

    pytest looks through all loggers twice in each phase, which is half the time of a small test on simulated ranks. If
    processes run the test, no user code runs here between its phases, so one search at set-up is enough.
    """
    plugin = logging_plugin(config)
    if plugin is None or is_plain(config) or _is_quick in config.stash or has_generator_phases(plugin):
        return
    config.stash[_is_quick] = True
    set_log_phases(plugin, _Quick(plugin).runtest_for)


class _Quick:
    def __init__(self, plugin: LoggingPlugin) -> None:
        self._plugin = plugin
        self._pytests = log_phases(plugin)
        self._destinations = Destinations()

    @contextmanager
    def runtest_for(self, item: pytest.Item, when: str) -> Iterator[None]:
        """Replace pytest's ``LoggingPlugin._runtest_for``."""
        case = cases.case_of(item)
        if case is None:
            with self._pytests(item, when):
                yield
            return
        captured, reported, level = self._plugin.caplog_handler, self._plugin.report_handler, self._plugin.log_level
        if when == "setup" or is_simulated(case.world) or _found not in item.stash:
            item.stash[_found] = self._destinations.now()
        with _attached([captured, reported], item.stash[_found], level):
            captured.reset()
            reported.reset()
            item.stash[records_key][when] = captured.records
            item.stash[handler_key] = captured
            try:
                yield
            finally:
                item.add_report_section(when, "log", reported.stream.getvalue().strip())


@contextmanager
def _attached(handlers: list[logging.Handler], loggers: list[logging.Logger], level: int | None) -> Iterator[None]:
    root = loggers[0]
    before = root.level
    attached = list(map(_handlers_of, loggers))
    _exhaust(map(list.extend, attached, repeat(handlers)))
    if level is not None:
        for handler in handlers:
            handler.setLevel(level)
        root.setLevel(min(before, level))
    try:
        yield
    finally:
        if level is not None:
            root.setLevel(before)
        tail = slice(-len(handlers), None)
        if all(map(handlers.__eq__, map(list.__getitem__, attached, repeat(tail)))):
            _exhaust(map(delitem, attached, repeat(tail)))
        else:  # the test has attached or removed handlers
            for logger in loggers:
                for handler in handlers:
                    logger.removeHandler(handler)


def _exhaust(calls: Iterable[object]) -> None:
    deque(calls, maxlen=0)
