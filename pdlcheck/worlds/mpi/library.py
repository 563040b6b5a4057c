"""The MPI library, through mpi4py: imported without side effects, started when it is needed, ended at exit."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

import mpi4py

from pdlcheck.errors import WorldUnavailable

_initialize = mpi4py.rc.initialize
mpi4py.rc.initialize = False  # an import must not start MPI: a fork server imports this, and only its children may
try:
    from mpi4py import MPI
except RuntimeError as error:  # mpi4py is there, an MPI library is not
    raise ImportError(str(error)) from error
finally:
    mpi4py.rc.initialize = _initialize

__all__ = ["MPI", "at_exit", "start"]

_before_the_end: list[Callable[[], None]] = []
_is_ready = False
_has_failed = False


def start() -> None:
    """Initialise MPI, unless that was done.

    MPI starts once in a process. A program that starts it itself, as ``from mpi4py import MPI`` does, does so first; a
    second ``MPI.Init`` is refused by MPI. From then on a program that ends by an exception takes the job with it: the
    others would wait for it for ever.

    Raises:
        WorldUnavailable: MPI was started by somebody else for one thread alone, or has ended.
    """
    global _is_ready
    if MPI.Is_finalized():
        raise WorldUnavailable(
            "MPI has ended in this process (MPI.Finalize), and cannot start a second time; "
            "leave the end to the process group, which ends MPI at exit",
            world="mpi",
            cure="do not call MPI.Finalize",
        )
    if _is_ready:
        return
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldUnavailable(
            "MPI was initialised for a single thread, and a process group waits in several; "
            "call MPI.Init_thread(MPI.THREAD_MULTIPLE), which is mpi4py's default",
            world="mpi",
            cure="mpi4py.rc.thread_level = 'multiple'",
        )
    atexit.register(_end)
    sys.excepthook = _noting(sys.excepthook)
    _is_ready = True


def at_exit(function: Callable[[], None]) -> None:
    """Have ``function`` called before MPI ends."""
    _before_the_end.append(function)


def _end() -> None:
    for function in _before_the_end:
        function()
    if MPI.Is_finalized():
        return
    if _has_failed and MPI.COMM_WORLD.Get_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    MPI.Finalize()


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def _noting(hook: Hook) -> Hook:
    """Torch puts hooks of its own around this one, which print at their end: so the job is aborted later, at exit."""

    def note(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        global _has_failed
        _has_failed = True
        hook(kind, error, tb)

    return note
