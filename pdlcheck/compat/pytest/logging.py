"""pytest's log capture: its handlers, and how a phase attaches them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.private import take, uses

__all__ = [
    "ATTACHES_TO_ALL_LOGGERS",
    "LogCaptureHandler",
    "LoggingPlugin",
    "handler_key",
    "has_generator_phases",
    "log_phases",
    "logging_plugin",
    "records_key",
    "set_log_phases",
    "shows_live_log",
]

_LOST = "log records of tests on ranks"

if TYPE_CHECKING:
    from _pytest.logging import LogCaptureHandler, LoggingPlugin
else:
    LogCaptureHandler = take("_pytest.logging.LogCaptureHandler", "log records of rank processes", lost=_LOST)
    LoggingPlugin = Any

handler_key = take("_pytest.logging.caplog_handler_key", "the records of caplog on each rank", lost=_LOST)
records_key = take("_pytest.logging.caplog_records_key", "the records of caplog on each rank", lost=_LOST)
_catching_logs = take("_pytest.logging.catching_logs", "the loggers to which pytest attaches its handlers", lost=_LOST)

# pytest 8 attaches its handlers only to the root
ATTACHES_TO_ALL_LOGGERS = "attached_loggers" in dir(_catching_logs)


def logging_plugin(config: pytest.Config) -> LoggingPlugin | None:
    """Return pytest's plugin for log records; None with ``-p no:logging``."""
    plugin: LoggingPlugin | None = config.pluginmanager.getplugin("logging-plugin")
    return plugin


@uses("_pytest.logging.LoggingPlugin._log_cli_enabled", lost="log records of rank processes in the live log")
def shows_live_log(plugin: LoggingPlugin) -> bool:
    """Return whether pytest shows log records while tests run."""
    return plugin._log_cli_enabled()


@uses("_pytest.logging.LoggingPlugin._runtest_for", lost="log records of tests on rank processes")
def log_phases(plugin: LoggingPlugin) -> Any:
    """Return the function in which pytest runs each phase of a test to capture its log records."""
    return plugin._runtest_for


def has_generator_phases(plugin: LoggingPlugin) -> bool:
    """Return whether that function is a generator, as in pytest 8; later it is a context manager."""
    return inspect.isgeneratorfunction(type(plugin)._runtest_for)


def set_log_phases(plugin: LoggingPlugin, runtest_for: Any) -> None:
    """Replace that function by a context manager."""
    if has_generator_phases(plugin):
        runtest_for = partial(runtest_for.__wrapped__, runtest_for.__self__)
    plugin._runtest_for = runtest_for  # type: ignore[method-assign]
