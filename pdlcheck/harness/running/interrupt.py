"""The handling of Ctrl-C, which ends the run at once: a pytest plugin.

``item_hooks`` registers it before files with ranks are imported. pytest parses the sources of all frames, including
those of torch and its own, and then shows one line. Without the other frames it shows the same line, seconds earlier.

Libraries may lose a Ctrl-C that arrives while they are imported: C code that checks whether numpy is present drops any
exception of the import. Such a Ctrl-C is raised again before tests run. The worlds add the positions of the ranks to
the exception as notes.
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
    """Record a Ctrl-C, unless another handler is installed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _DEFAULT:
        _pressed.clear()
        signal.signal(signal.SIGINT, _press)


def give_back() -> None:
    """Restore Python's handler of Ctrl-C, as it was before the session."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _press:
        signal.signal(signal.SIGINT, _DEFAULT)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Raise a Ctrl-C that an import has lost, give Ctrl-C back to Python, and show the notes of worlds at a Ctrl-C."""
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
            notes.clear()  # pytest would print them in the line that names the exception
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Keep only the frame that pytest shows: the last one, or the last with a line number.

    A Ctrl-C between two lines gives a frame without one.
    """
    frames = excinfo.traceback.filter(excinfo)
    while frames and not _has_line(frames[-1]):
        frames = frames[:-1]
    if frames:
        excinfo.traceback = frames[-1:]


def _has_line(frame: Any) -> bool:
    try:
        return frame.lineno >= 0  # type: ignore[no-any-return]
    except TypeError:  # Python has no line number for some instructions, and pytest would fail
        return False
