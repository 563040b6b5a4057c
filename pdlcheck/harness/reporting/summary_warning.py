"""Warnings added to pytest's summary; warning filters do not apply to them, so they are never errors."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["record_config_warning", "record_warning"]


def record_config_warning(config: pytest.Config, warning: Warning) -> None:
    """Add ``warning`` to the warnings of the session in pytest's summary."""
    message = warnings.WarningMessage(warning, type(warning), __file__, 1)
    config.hook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": message, "nodeid": "", "when": "config", "location": None}
    )


def record_warning(item: pytest.Item, warning: warnings.WarningMessage) -> None:
    """Add ``warning`` to the warnings of ``item`` in pytest's summary."""
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": warning, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
