"""Warnings added to pytest's summary; warning filters do not apply to them, so they are never errors."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["record_warning"]


def record_warning(item: pytest.Item, warning: warnings.WarningMessage) -> None:
    """Add ``warning`` to the warnings of ``item`` in pytest's summary."""
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": warning, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
