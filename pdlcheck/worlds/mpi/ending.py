"""The end of this program: by an exception or by ``sys.exit``, and with which exit code.

``sys.excepthook`` gets every exception except SystemExit, and a function that runs at exit gets no information. But the
interpreter reads the ``code`` of the SystemExit that ends the program. There is no Python frame below that read, unlike
a read by a handler in the program. So ``sys.exit`` raises here a SystemExit that detects such a read. A SystemExit that
the program raises itself, by ``raise SystemExit(3)``, is not detected.
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
    """The reason why the program ends; ``code`` is the exit code that its parent process will see."""

    code: int = 0
    reason: str = ""


def note_ending(noted: Callable[[], object]) -> Ending:
    """Return an ``Ending`` that is filled in when the main thread ends by an exception; call this function once.

    ``noted`` is called after that.
    """
    ending = Ending()
    sys.excepthook = _noting(sys.excepthook, ending, noted)

    class NotedExit(SystemExit):
        """The exception that ``sys.exit`` raises."""

        @property
        def code(self) -> Any:  # type: ignore[override]  # it is only read
            found = super().code
            if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
                ending.code, ending.reason = _status(found), f"SystemExit({found!r})"
                noted()
            return found

    # A report must show the exception under the name that the user's code raised.
    NotedExit.__name__ = NotedExit.__qualname__ = SystemExit.__name__
    NotedExit.__module__ = SystemExit.__module__

    def exit(status: Any = None, /) -> NoReturn:
        __tracebackhide__ = True
        raise NotedExit(*[] if status is None else [status])

    sys.exit = exit
    return ending


def _noting(hook: Hook, ending: Ending, noted: Callable[[], object]) -> Hook:
    """Return a hook that records the exception and then calls ``hook``.

    Torch puts its own hooks around this one, and they print after it returns. So the job is ended later, at exit.
    """

    def note(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        ending.code = 130 if issubclass(kind, KeyboardInterrupt) else 1
        ending.reason = kind.__name__
        noted()
        hook(kind, error, tb)

    return note


def _status(code: Any) -> int:
    """Return the exit status that the operating system makes of ``code``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
