"""The capture of a ``capsys`` fixture, suspended and resumed."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import uses

__all__ = ["is_captured_by", "resume", "suspend"]

_LOST = "capsys and capfd on simulated ranks"


@uses("_pytest.capture.CaptureManager._capture_fixture", lost=_LOST)
def is_captured_by(manager: Any, fixture: Any) -> bool:
    """Return whether a fixture captures now; otherwise it has been torn down."""
    return manager._capture_fixture is fixture


@uses("_pytest.capture.CaptureFixture._is_started", "_pytest.capture.CaptureFixture._suspend", lost=_LOST)
def suspend(fixture: Any) -> bool:
    """Suspend the capture of a fixture; return whether it was on, and not in a block of ``disabled()``."""
    was_on: bool = fixture._is_started()
    fixture._suspend()
    return was_on


@uses(
    "_pytest.capture.CaptureFixture._capture",
    "_pytest.capture.CaptureFixture._start",
    "_pytest.capture.CaptureFixture._resume",
    lost=_LOST,
)
def resume(fixture: Any, *, was_on: bool) -> None:
    """Resume the capture of a fixture, or start it if it has ended."""
    if fixture._capture is None:
        fixture._start()
    elif was_on:
        fixture._resume()
