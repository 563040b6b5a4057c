"""A /dev/shm of its own for a run, where this process may give it one: others on this machine use theirs meanwhile."""

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
    """From now on, ``folder`` is /dev/shm for this process and its children.

    Raises:
        OSError: that takes rights that this process lacks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(bytes(folder), bytes(SHARED_MEMORY), None, _MS_BIND, None))


@functools.cache
def can_enter() -> bool:
    """Whether :func:`enter` works here; tried in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            try:
                enter(Path(folder))
            except (AttributeError, OSError):  # not Linux, not root
                os._exit(1)
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
