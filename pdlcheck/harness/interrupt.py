"""Ctrl-C ends the run at once: a pytest plugin that ``pdlcheck.plugin`` registers.

pytest parses the sources of all frames, those of torch and its own among them, and then shows one line. With the
other frames gone it shows the same line, seconds earlier.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["pytest_keyboard_interrupt"]


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Leave the frame that pytest shows: the last one, unless Ctrl-C came between two lines of it."""
    frames = excinfo.traceback.filter(excinfo)
    while frames and not _has_line(frames[-1]):
        frames = frames[:-1]
    if frames:
        excinfo.traceback = frames[-1:]


def _has_line(frame: Any) -> bool:
    try:
        return frame.lineno >= 0  # type: ignore[no-any-return]
    except TypeError:  # Python has none for some instructions, and pytest would stumble over it
        return False
