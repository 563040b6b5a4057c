"""Unpickling of data from ranks in the controller; it runs code of the users' classes."""

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
    """The error for data that cannot be unpickled; the message names the exception."""


def load_sent(data: bytes) -> Any:
    """Unpickle a result or an exception of a rank, in the controller. A Ctrl-C meanwhile is raised afterwards.

    Raises:
        Unreadable: a class has raised an exception, which may be SystemExit or KeyboardInterrupt.
    """
    try:
        return pickle.loads(data)
    except KeyboardInterrupt:  # raised by a class, or by Ctrl-C?
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
    """Delay Ctrl-C until the end of the block, so that only the code in the block can raise KeyboardInterrupt."""
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
