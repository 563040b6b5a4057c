"""How this program ends: whether by an exception or by ``sys.exit``, and with which code.

``sys.excepthook`` hears of every exception but SystemExit, and what is called at exit is told nothing. But the
interpreter reads the ``code`` of the SystemExit that ends the program, with no Python frame below, which a handler in
the program has. So ``sys.exit`` raises a SystemExit here that notes such a reading. What the program raises itself, by
``raise SystemExit(3)``, is not seen.
"""

from __future__ import annotations

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


def note_ending(noted: Callable[[], object]) -> Ending:
    """Return what is filled in when the main thread ends by an exception, and ``noted`` called; to be called once."""
    ending = Ending()
    sys.excepthook = _noting(sys.excepthook, ending, noted)

    class NotedExit(SystemExit):
        """Raised by ``sys.exit``."""

        @property
        def code(self) -> Any:  # type: ignore[override]  # it is only read
            found = super().code
            if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
                ending.code, ending.reason = _status(found), f"SystemExit({found!r})"
                noted()
            return found

    # in a report it is what the user's code has raised
    NotedExit.__name__ = NotedExit.__qualname__ = SystemExit.__name__
    NotedExit.__module__ = SystemExit.__module__

    def exit(status: Any = None, /) -> NoReturn:
        __tracebackhide__ = True
        raise NotedExit(*[] if status is None else [status])

    sys.exit = exit
    return ending


def _noting(hook: Hook, ending: Ending, noted: Callable[[], object]) -> Hook:
    """Torch puts hooks of its own around this one, which print at their end: so the job is ended later, at exit."""

    def note(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        ending.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        ending.reason = kind.__name__
        noted()
        hook(kind, error, tb)

    return note


def _status(code: Any) -> int:
    """What the operating system makes of it."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
