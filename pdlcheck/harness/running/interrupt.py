"""Ctrl-C ends the run at once: a pytest plugin that ``item_hooks`` registers before files with ranks are imported.

pytest parses the sources of all frames, those of torch and its own among them, and then shows one line. With the
other frames gone it shows the same line, seconds earlier. And libraries lose a Ctrl-C that comes while they are
imported (code in C that asks whether numpy is there drops whatever the import raised): it is raised again before
tests run. Where the ranks were is what their worlds note at the exception.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

__all__ = ["give_back", "keep", "pytest_keyboard_interrupt", "pytest_runtestloop"]

_DEFAULT = signal.default_int_handler
_pressed = threading.Event()


def _press(signo: int, frame: FrameType | None) -> None:
    __tracebackhide__ = True
    _pressed.set()
    _DEFAULT(signo, frame)


def keep() -> None:
    """Remember a Ctrl-C, unless somebody else handles it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _DEFAULT:
        _pressed.clear()
        signal.signal(signal.SIGINT, _press)


def give_back() -> None:
    """Leave Ctrl-C to Python, as it was before the session."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _press:
        signal.signal(signal.SIGINT, _DEFAULT)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Raise the Ctrl-C that an import has lost; from here on it is Python's to handle. Show what worlds note at one."""
    if signal.getsignal(signal.SIGINT) is _press:
        signal.signal(signal.SIGINT, _DEFAULT)
        if _pressed.is_set():
            raise KeyboardInterrupt
    try:
        return (yield)
    except KeyboardInterrupt as interrupt:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and (notes := getattr(interrupt, "__notes__", None)):
            reporter.ensure_newline()
            for note in notes:
                reporter.write_line(note)
            notes.clear()  # pytest would put them into the line that names the exception
        raise


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
