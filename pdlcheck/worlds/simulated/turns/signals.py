"""Handlers of signals that a simulated rank sets are its own, as a process has its own.

Python keeps handlers for the whole process and lets only the main thread set them. A handler of a rank is called where
that rank sends the signal to its own process: ``signal.raise_signal``, ``os.kill(os.getpid(), ...)``. Signals from
outside go to the controller. Those of timers do too, so a rank is still refused a handler for ``signal.alarm``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from pdlcheck.worlds.simulated.c10d.rebinding import rebind
from pdlcheck.worlds.simulated.turns.scheduler import ARE_THREADS, RankThread, current_rank

__all__ = ["signals_of_ranks"]

_real = (signal.signal, signal.getsignal, signal.raise_signal, os.kill)  # in a tuple: `rebind` leaves it
_OF_NOBODY = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
_OF_TIMERS = {getattr(signal, name, None) for name in ("SIGALRM", "SIGVTALRM", "SIGPROF")}
_HARMLESS = {0} | {getattr(signal, name, None) for name in ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH")}
_NO_HANDLER = "signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object"


def _rank() -> RankThread | None:
    """The simulated rank that asks; None in a process that it has forked, where it is the main thread."""
    rank = current_rank()
    return None if rank is None or threading.current_thread() is threading.main_thread() else rank


@wraps(signal.signal)
def _signal(signalnum: Any, handler: Any, /) -> Any:
    rank = _rank()
    if rank is None:
        return _real[0](signalnum, handler)
    before = _getsignal(signalnum)
    if not callable(handler) and handler not in tuple(signal.Handlers):
        raise TypeError(_NO_HANDLER)
    if signalnum in _OF_NOBODY:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if handler == before:
        return before
    if signalnum in _OF_TIMERS:
        return _real[0](signalnum, handler)  # which Python refuses
    rank.state.signal_handlers[int(signalnum)] = handler if callable(handler) else signal.Handlers(handler)
    return before


@wraps(signal.getsignal)
def _getsignal(signalnum: Any, /) -> Any:
    rank, everybodys = _rank(), _real[1](signalnum)
    return everybodys if rank is None else rank.state.signal_handlers.get(int(signalnum), everybodys)


@wraps(signal.raise_signal)
def _raise_signal(signalnum: Any, /) -> None:
    if not _was_received(signalnum, sys._getframe(1)):
        _real[2](signalnum)


@wraps(os.kill)
def _kill(pid: int, signalnum: Any, /) -> None:
    if pid != os.getpid() or not _was_received(signalnum, sys._getframe(1)):
        _real[3](pid, signalnum)


def _was_received(signalnum: Any, frame: FrameType) -> bool:
    """By the rank that has sent the signal to itself; else it is for the whole process."""
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


def signals_of_ranks() -> None:
    """See to it, unless a program has put something of its own in the place of one of these functions."""
    ours: tuple[Callable[..., Any], ...] = (_signal, _getsignal, _raise_signal, _kill)
    for real, own, home in zip(_real, ours, (signal, signal, signal, os), strict=True):
        if getattr(home, own.__name__) is real:
            rebind(real, own, but=__name__)
