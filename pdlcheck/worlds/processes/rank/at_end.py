"""What an idle rank still does when it ends: what user code registered with ``atexit``.

A rank that does not serve another call is killed instead; what is to be kept by then is in ``after_calls``.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["after_calls", "end", "end_call", "finalizers"]

after_calls: list[Callable[[], object]] = []

_TORCH = "torch.library"


def finalizers() -> list[Any]:
    """Of ``weakref.finalize``, those that run at the end of the process; not those of torch's operators.

    torch takes each of its operators back in nearly half a millisecond, and there are hundreds.
    """
    alive: Any = getattr(weakref.finalize, "_registry", {})  # no public name; empty where Python has another one
    return [one for one in list(alive) if one.atexit and not _is_torchs(one)]


def end_call() -> None:
    """Call ``after_calls``: a function of the user's has ended, and nobody has been told so yet."""
    for callback in after_calls:
        with suppress(Exception):  # it comes once more at the end, if it can
            callback()


def end() -> NoReturn:
    """Call them, and end the process."""
    alive: Any = getattr(weakref.finalize, "_registry", {})
    for one in list(alive):
        if _is_torchs(one):
            one.atexit = False
    atexit._run_exitfuncs()
    os._exit(0)


def _is_torchs(finalizer: Any) -> bool:
    known = finalizer.peek()
    return known is not None and getattr(known[1], "__module__", None) == _TORCH
