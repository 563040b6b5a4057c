"""A private /dev/shm for a run, if this process may create one, because other programs use the common one meanwhile."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from pathlib import Path

from fault_campaign.leftovers import SHARED_MEMORY

__all__ = ["can_enter", "enter"]

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 1 << 18


def enter(folder: Path) -> None:
    """Make ``folder`` the /dev/shm of this process and its children.

    Raises:
        OSError: this process lacks the rights.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(bytes(folder), bytes(SHARED_MEMORY), None, _MS_BIND, None))


@functools.cache
def can_enter() -> bool:
    """Return whether :func:`enter` works here; a child process tries it."""
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            try:
                enter(Path(folder))
            except (AttributeError, OSError):  # not Linux, or not root
                os._exit(1)
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
