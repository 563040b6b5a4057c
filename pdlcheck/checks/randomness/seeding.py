"""Detection of calls that set the state of a global generator of NumPy or Python.

Without it, draws before such a call would be lost, because only states are compared.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["told_of_seeding"]

Listener = Callable[[], object]

_SETTERS = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))
_OUR_OWN = str(Path(__file__).parents[2])  # this package sets the states when simulated ranks switch

_listeners: dict[int, tuple[Listener, Listener]] = {}  # by thread; in a simulated world each rank is a thread
_originals: list[Any] = []
_lock = threading.Lock()


@contextmanager
def told_of_seeding(before: Listener, after: Listener) -> Iterator[None]:
    """Call ``before`` and ``after`` around each call of this thread that sets the state of a global generator."""
    me = threading.get_ident()
    with _lock:
        if not _listeners:
            for module, name in _SETTERS:
                _originals.append(getattr(module, name))
                setattr(module, name, _telling(_originals[-1]))
        _listeners[me] = before, after
    try:
        yield
    finally:
        with _lock:
            del _listeners[me]
            if not _listeners:
                for module, name in reversed(_SETTERS):
                    setattr(module, name, _originals.pop())


def _telling(setter: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(setter)
    def tell(*args: Any, **kwargs: Any) -> Any:
        listener = _listeners.get(threading.get_ident())
        if listener is None or sys._getframe(1).f_code.co_filename.startswith(_OUR_OWN):
            return setter(*args, **kwargs)
        before, after = listener
        before()
        try:
            return setter(*args, **kwargs)
        finally:
            after()

    return tell
