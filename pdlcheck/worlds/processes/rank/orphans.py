"""The processes that ranks have started and left behind: on Linux they are found and ended, in any session.

A process whose parent ends becomes a child of the nearest ancestor that adopts orphans. Ranks adopt orphans, and so do
the processes that fork ranks. So the descendants of a rank stay below it while it lives. When the rank ends, they
become children of the process that forked it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator

__all__ = ["SERVER", "adopt_orphans", "are_found", "children", "end_marked", "end_orphans"]

SERVER = "PDLCHECK_FORK_SERVER"  # set in the environment of a fork server and its descendants; identifies it

_PR_SET_CHILD_SUBREAPER = 36
# These delete what a process leaves in shared memory, and end by themselves after the process.
_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent ends from now on; no effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def are_found() -> bool:
    """Return whether the system lists the children of a process; if not, only process groups can be ended."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children(pid: int) -> set[int]:
    """Return the pids of the children of a process that it has not waited for."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.update(map(int, file.read().split()))
    return found


def end_orphans(own: Collection[int]) -> bool:
    """Kill the orphans of ranks that have ended, and wait for the dead ones.

    Args:
        own: pids of the children that are not orphans; they are left alone.

    Returns:
        True if orphans are left that must end; their own children become children of this process next.
    """
    left = False
    for pid in children(os.getpid()).difference(own):
        if not _is_cleaner(pid):
            _kill(pid)
        with contextlib.suppress(ChildProcessError):
            left |= os.waitpid(pid, os.WNOHANG)[0] == 0 and not _is_cleaner(pid)
    return left


def end_marked(value: str) -> None:
    """Kill every process of this user that has :data:`SERVER` with this value in its environment."""
    mark = f"{SERVER}={value}".encode()
    for pid in _processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if mark in file.read().split(b"\0") and not _is_cleaner(pid):
                _kill(pid)


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError):  # there is no /proc
        yield from (int(name) for name in os.listdir("/proc") if name.isdigit())


def _is_cleaner(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read(4096)
        return any(word in command for word in _CLEANERS)
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
