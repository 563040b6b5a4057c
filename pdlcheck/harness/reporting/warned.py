"""Add a warning to pytest's summary. Warning filters do not apply, so it is never an error."""

from __future__ import annotations

import warnings

import pytest

__all__ = ["record_warning"]


def record_warning(item: pytest.Item, warning: warnings.WarningMessage) -> None:
    """Show ``warning`` among the warnings of ``item``."""
    item.ihook.pytest_warning_recorded.call_historic(
        kwargs={"warning_message": warning, "nodeid": item.nodeid, "when": "runtest", "location": None}
    )
