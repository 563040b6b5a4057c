"""Signal handlers of simulated ranks: each rank has its own, as a process has its own.

Python keeps handlers for the whole process, and only the main thread may set them. A rank's handler is called if that
rank sends the signal to its own process: ``signal.raise_signal``, ``os.kill(os.getpid(), ...)``. Signals from outside
go to the controller. Signals of timers go there too, so a rank that sets a handler for ``signal.alarm`` still gets
Python's error.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from functools import wraps
from types import FrameType
from typing import Any

from pdlcheck.compat.patches import Patch
from pdlcheck.worlds.simulated.scheduling.scheduler import ARE_THREADS, RankThread, current_rank

__all__ = ["PATCHES"]

_real_signal, _real_getsignal, _real_raise_signal, _real_kill = _REAL = (
    signal.signal,
    signal.getsignal,
    signal.raise_signal,
    os.kill,
)
_OF_NOBODY = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_OF_TIMERS = {getattr(signal, name, None) for name in ("SIGALRM", "SIGVTALRM", "SIGPROF")}
_HARMLESS = {0} | {getattr(signal, name, None) for name in ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH")}
_NO_HANDLER = "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"


def _rank() -> RankThread | None:
    """Return the calling rank; None in a process that the rank has forked, where the rank is the main thread."""
    rank = current_rank()
    return None if rank is None or threading.current_thread() is threading.main_thread() else rank


@wraps(signal.signal)
def _signal(signalnum: Any, handler: Any, /) -> Any:
    rank = _rank()
    if rank is None:
        return _real_signal(signalnum, handler)
    before = _getsignal(signalnum)
    if not callable(handler) and handler not in tuple(signal.Handlers):
        raise TypeError(_NO_HANDLER)
    if signalnum in _OF_NOBODY:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if handler == before:
        return before
    if signalnum in _OF_TIMERS:
        return _real_signal(signalnum, handler)  # Python raises: this is not the main thread
    rank.state.signal_handlers[int(signalnum)] = handler if callable(handler) else signal.Handlers(handler)
    return before


@wraps(signal.getsignal)
def _getsignal(signalnum: Any, /) -> Any:
    rank, everybodys = _rank(), _real_getsignal(signalnum)
    return everybodys if rank is None else rank.state.signal_handlers.get(int(signalnum), everybodys)


@wraps(signal.raise_signal)
def _raise_signal(signalnum: Any, /) -> None:
    if not _was_received(signalnum, sys._getframe(1)):
        _real_raise_signal(signalnum)


@wraps(os.kill)
def _kill(pid: int, signalnum: Any, /) -> None:
    if pid != os.getpid() or not _was_received(signalnum, sys._getframe(1)):
        _real_kill(pid, signalnum)


def _was_received(signalnum: Any, frame: FrameType) -> bool:
    """Return whether the rank that sent the signal to itself has received it; otherwise it is for the whole process.

    Raises:
        RuntimeError: the signal would end or stop the process.
    """
    __tracebackhide__ = True
    rank = _rank()
    if rank is None or signalnum in _HARMLESS - rank.state.signal_handlers.keys():
        return False
    handler = _getsignal(signalnum)
    if handler is signal.SIG_DFL:
        name = getattr(signalnum, "name", f"signal {signalnum}")
        raise RuntimeError(f"{name} would end or stop this process with all its ranks; {ARE_THREADS}")
    if int(signalnum) not in rank.state.signal_handlers:
        return False
    if handler is not signal.SIG_IGN:
        handler(int(signalnum), frame)
    return True


def _unless_replaced(ours: Any) -> Any:
    """Return a function that makes the stand-in, except where a program has put a function of its own."""
    return lambda present: ours if present in _REAL else present


PATCHES = tuple(
    Patch(owner, name, _unless_replaced(ours), "a simulated rank has signal handlers of its own", everywhere=True)
    for owner, name, ours in (
        (signal, "signal", _signal),
        (signal, "getsignal", _getsignal),
        (signal, "raise_signal", _raise_signal),
        (os, "kill", _kill),
    )
)
