"""Compilation by numba, with a cache on disk wherever a folder for it is writable."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

__all__ = ["compiled", "private_folder"]

F = TypeVar("F", bound=Callable[..., Any])


def compiled(**options: Any) -> Callable[[F], F]:
    """Return a decorator that compiles a function with ``numba.njit``; the function releases the GIL.

    As usual with numba, the machine code is kept beside the source, in the user's cache folder, or in
    ``NUMBA_CACHE_DIR``. If none of them is writable, it is kept in a temporary folder that only this user can read. If
    there is no such folder either, each process compiles for itself.

    Args:
        options: further options of ``numba.njit``.
    """

    def decorate(function: F) -> F:
        try:
            return _njit(function, cache=True, **options)
        except RuntimeError:  # numba found no folder for its cache
            folder = private_folder()
        if folder is None:
            return _njit(function, cache=False, **options)
        config: Any = numba.config
        before = config.CACHE_DIR
        config.CACHE_DIR = str(folder)  # numba reads it while it decorates; other functions keep their own folder
        try:
            return _njit(function, cache=True, **options)
        except RuntimeError:
            return _njit(function, cache=False, **options)
        finally:
            config.CACHE_DIR = before

    return decorate


def _njit(function: F, **options: Any) -> F:
    decorated: F = numba.njit(nogil=True, **options)(function)
    return decorated


def private_folder() -> Path | None:
    """Return this user's temporary folder, created if needed; ``None`` if it is missing or open to other users.

    numba unpickles the files in its cache, so a folder that another user can write to is not safe.
    """
    try:
        folder = Path(tempfile.gettempdir(), f"pdlcheck-numba-{os.geteuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return folder if mine and os.access(folder, os.W_OK | os.X_OK) else None
