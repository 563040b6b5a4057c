"""How this program ends: whether by an exception or by ``sys.exit``, and with which code.

``sys.excepthook`` hears of every exception but SystemExit, whose ``code`` the interpreter reads before it leaves.
Nothing tells an ``atexit`` function about it, and a wrapper of ``sys.exit`` would not see ``raise SystemExit(3)``. So
it is that reading which is noted: the interpreter's has no Python frame below it, a handler's has. Before Python 3.12
the interpreter's ``sys.exit`` makes no exception to read from, so there it is replaced by one in Python; what is not
seen there is one that was imported earlier (``from sys import exit``).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

__all__ = ["Ending", "note_ending"]

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass(slots=True)
class Ending:
    """Why the program ends; ``code`` is what its parent process will see."""

    code: int = 0
    reason: str = ""


def note_ending() -> Ending:
    """Return what is filled in when the main thread ends by an exception; to be called once."""
    ending = Ending()
    sys.excepthook = _noting(sys.excepthook, ending)
    _read_through(_NotedCode(ending))
    if sys.version_info < (3, 12):
        sys.exit = _exit
    return ending


def _exit(status: Any = None, /) -> NoReturn:
    raise SystemExit(status)


def _noting(hook: Hook, ending: Ending) -> Hook:
    """Torch puts hooks of its own around this one, which print at their end: so the job is ended later, at exit."""

    def note(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        ending.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        ending.reason = kind.__name__
        hook(kind, error, tb)

    return note


class _NotedCode:
    """``SystemExit.code`` as it was, and a note when it is the interpreter that reads it."""

    def __init__(self, ending: Ending) -> None:
        self._code: Any = SystemExit.__dict__["code"]
        self._ending = ending
        self._main = threading.main_thread().ident

    def __get__(self, error: SystemExit | None, kind: type | None = None) -> Any:
        if error is None:
            return self
        code = self._code.__get__(error, kind)
        if sys._getframe().f_back is None and threading.get_ident() == self._main:
            self._ending.code = _status(code)
            self._ending.reason = f"SystemExit({code!r})"
        return code

    def __set__(self, error: SystemExit, code: Any) -> None:
        self._code.__set__(error, code)

    def __delete__(self, error: SystemExit) -> None:
        self._code.__delete__(error)


def _status(code: Any) -> int:
    """What the operating system makes of it."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _read_through(noted: _NotedCode) -> None:
    """Types of the interpreter cannot be assigned to, but their attributes are in a dict like those of others."""
    for attributes in gc.get_referents(SystemExit.__dict__):
        if isinstance(attributes, dict) and "code" in attributes:
            attributes["code"] = noted
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))
