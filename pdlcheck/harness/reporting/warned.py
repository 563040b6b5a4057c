"""A warning in pytest's summary that no filter makes an error: it was filtered before, or the test is not to blame."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["record_warning"]


def record_warning(item: pytest.Item, warning: warnings.WarningMessage) -> None:
    """Tell it as pytest tells those of this test."""
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": warning, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
