"""What ranks have sent becomes objects again, in the controller: that runs code of users' classes."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pdlcheck.worlds.exceptions import text_of

__all__ = ["Unreadable", "load_sent"]


class Unreadable(Exception):
    """What was sent cannot be unpickled; the message names what was raised."""


def load_sent(data: bytes) -> Any:
    """Unpickle a result or an exception of a rank, in the controller. A Ctrl-C meanwhile is raised afterwards.

    Raises:
        Unreadable: a class has raised something, which may be SystemExit or KeyboardInterrupt.
    """
    try:
        return pickle.loads(data)
    except KeyboardInterrupt:  # of a class, or of a person?
        with _ctrl_c_waits():
            _load(data)
        raise
    except BaseException as error:
        raise _unreadable(error) from error


def _load(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except BaseException as error:
        raise _unreadable(error) from error


def _unreadable(error: BaseException) -> Unreadable:
    return Unreadable(f"{type(error).__name__}: {text_of(error)}")


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """What raises KeyboardInterrupt in the block is the code that it runs."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *at: pressed.append(at))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])
