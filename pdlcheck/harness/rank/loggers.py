"""The loggers at which records arrive, found at less cost than pytest's own way; torch alone has dozens of them."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import filterfalse, repeat
from operator import attrgetter, delitem

import pytest
from _pytest.logging import LoggingPlugin, caplog_handler_key, caplog_records_key, catching_logs

from pdlcheck.harness.collection import cases

__all__ = ["Destinations", "all_have", "attach_quickly"]

_propagates, _handlers_of = attrgetter("propagate"), attrgetter("handlers")

_hears_all = hasattr(catching_logs, "attached_loggers")  # pytest 8 attaches its handlers to the root alone

_is_quick = pytest.StashKey[bool]()
_found = pytest.StashKey[list[logging.Logger]]()


class Destinations:
    """The root and, where pytest hears them, the loggers that do not propagate to it.

    There are many, and several looks at them in each test, so here and below loops over them run in C.
    """

    def __init__(self) -> None:
        self._known: Sequence[object] = ()
        self._loggers: list[logging.Logger] = []

    def now(self) -> list[logging.Logger]:
        """Those of this moment."""
        root = logging.getLogger()
        if not _hears_all:
            return [root]
        known = list(root.manager.loggerDict.values())
        if known != self._known:  # they are compared by identity, in C
            self._known = known
            self._loggers = [logger for logger in known if isinstance(logger, logging.Logger) and logger is not root]
        return [root, *filterfalse(_propagates, self._loggers)]


def all_have(handler: logging.Handler, loggers: Iterable[logging.Logger]) -> bool:
    """Whether the handler is attached to each of them."""
    return all(map(list.__contains__, map(_handlers_of, loggers), repeat(handler)))


def attach_quickly(config: pytest.Config) -> None:
    """In the controller, from its next phase on: pytest's handlers are attached in one pass where a test has ranks.

    pytest looks through all loggers twice in each phase, half of what a small test on simulated ranks costs. Where
    processes run it, no code of the user's runs here between its phases, so one look at its set-up is enough.
    """
    plugin: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
    if plugin is None or _is_quick in config.stash or inspect.isgeneratorfunction(type(plugin)._runtest_for):
        return  # pytest 8 delegates to a generator
    config.stash[_is_quick] = True
    plugin._runtest_for = _Quick(plugin).runtest_for  # type: ignore[method-assign]


class _Quick:
    def __init__(self, plugin: LoggingPlugin) -> None:
        self._plugin = plugin
        self._pytests = plugin._runtest_for
        self._destinations = Destinations()

    @contextmanager
    def runtest_for(self, item: pytest.Item, when: str) -> Iterator[None]:
        """In the place of pytest's ``LoggingPlugin._runtest_for``."""
        case = cases.case_of(item)
        if case is None:
            with self._pytests(item, when):
                yield
            return
        captured, reported, level = self._plugin.caplog_handler, self._plugin.report_handler, self._plugin.log_level
        if when == "setup" or case.world == "sim" or _found not in item.stash:
            item.stash[_found] = self._destinations.now()
        with _attached([captured, reported], item.stash[_found], level):
            captured.reset()
            reported.reset()
            item.stash[caplog_records_key][when] = captured.records
            item.stash[caplog_handler_key] = captured
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
        else:  # somebody has attached or removed some
            for logger in loggers:
                for handler in handlers:
                    logger.removeHandler(handler)


def _exhaust(calls: Iterable[object]) -> None:
    deque(calls, maxlen=0)
