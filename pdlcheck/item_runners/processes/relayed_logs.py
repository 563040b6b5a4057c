"""Log records of ranks: in the controller's live log at once, and in its log file in the order of time."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pdlcheck.compat.pytest.logging import logging_plugin, shows_live_log

__all__ = ["hears_records", "is_live", "show", "write"]


def is_live(config: pytest.Config) -> bool:
    """Return whether pytest shows log records while tests run."""
    plugin = logging_plugin(config)
    return plugin is not None and shows_live_log(plugin)


def hears_records(config: pytest.Config) -> bool:
    """Return whether log records are also needed outside of the reports of tests: in the live log or the log file."""
    plugin = logging_plugin(config)
    has_file = plugin is not None and getattr(plugin.log_file_handler.stream, "name", os.devnull) != os.devnull
    return has_file or is_live(config)


def show(config: pytest.Config, rank: int, noted: Mapping[str, Any]) -> None:
    """Write a rank's record to the live log."""
    plugin = logging_plugin(config)
    if plugin is not None:
        _hand(plugin.log_cli_handler, rank, noted)


def write(config: pytest.Config, noted: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """Write records of ranks to the log file."""
    plugin = logging_plugin(config)
    if plugin is not None:
        for rank, fields in sorted(noted, key=lambda one: one[1]["created"]):
            _hand(plugin.log_file_handler, rank, fields)


def _hand(handler: logging.Handler, rank: int, fields: Mapping[str, Any]) -> None:
    record = logging.makeLogRecord({**fields, "msg": f"[rank {rank}] {fields['msg']}"})
    if record.levelno >= handler.level:
        handler.handle(record)
