"""The MPI library, through mpi4py: imported without side effects, started when it is needed, ended at exit."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable

import mpi4py

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import MPI_ERRORS_S
from pdlcheck.worlds.mpi.ending import Ending, note_ending

_initialize = mpi4py.rc.initialize
mpi4py.rc.initialize = False  # a fork server imports this module, and only its children may start MPI
try:
    from mpi4py import MPI
except RuntimeError as error:  # mpi4py is installed, but no MPI library is
    raise ImportError(str(error)) from error
finally:
    mpi4py.rc.initialize = _initialize

__all__ = ["MPI", "at_exit", "start"]

_before_the_end: list[Callable[[], None]] = []
_is_ready = False


def start() -> None:
    """Initialise MPI, unless it is initialised already.

    MPI starts only once in a process. A program that starts MPI itself, as ``from mpi4py import MPI`` does, must do so
    before this call. A later ``MPI.Init`` raises an error that names the cure.

    From then on, a program that ends by an exception, or by ``sys.exit`` with a code other than 0, ends the whole job.
    Otherwise the other ranks would wait for it forever.

    Raises:
        WorldUnavailable: other code has initialised MPI for a single thread, or MPI has ended.
    """
    if MPI.Is_finalized():
        raise WorldUnavailable(
            "MPI has ended in this process (MPI.Finalize), and cannot start a second time; "
            "leave the end to the process group, which ends MPI at exit",
            world="mpi",
            cure="do not call MPI.Finalize",
        )
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    _prepare()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise WorldUnavailable(
            "MPI was initialised for a single thread before the process group, which calls it in two; "
            "start MPI with MPI.Init_thread(MPI.THREAD_MULTIPLE), leave mpi4py.rc.thread_level as it is, "
            "or leave the start to init_process_group",
            world="mpi",
            cure="mpi4py.rc.thread_level = 'multiple'",
        )


@functools.cache
def _prepare() -> None:
    """Register the end of MPI at exit, and make a second start raise an error; only the first call has an effect."""
    grace = _Grace()
    atexit.register(_end, os.getpid(), note_ending(grace.prepare), grace)
    for name in ("Init", "Init_thread"):
        setattr(MPI, name, _refused(name))


def _refused(name: str) -> Callable[..., object]:
    """Return a function that raises an error with a cure; MPI's own message is only ``known error not in list``."""

    def refuse(*args: object) -> object:
        raise RuntimeError(
            f"MPI.{name}: MPI has started in this process, and starts only once; remove the call, or make it before "
            "init_process_group('pdlcheck_mpi'), which starts MPI where nobody has"
        )

    return refuse


def at_exit(function: Callable[[], None]) -> None:
    """Call ``function`` at exit, before MPI ends."""
    _before_the_end.append(function)


def _end(process: int, ending: Ending, grace: _Grace) -> None:
    if os.getpid() != process:  # this process is a fork, and MPI belongs to its parent
        return
    for function in _before_the_end:
        function()
    if MPI.Is_finalized():
        return
    if ending.code and MPI.COMM_WORLD.Get_size() > 1:
        grace.finalize(ending)
    else:
        MPI.Finalize()


class _Grace:
    """The end of MPI, with a time limit, in a rank whose program ends with an error.

    If the other ranks end too, MPI ends as usual. If they wait for this rank, this process exits all the same, and
    the launcher then ends the job. The job takes the exit code of the first process that exits before MPI has ended.

    ``MPI_Finalize`` has no time limit, so a thread watches it. It is called through ctypes, because mpi4py's
    ``MPI.Finalize`` keeps the other Python threads from running.
    """

    def __init__(self) -> None:
        self._watch: threading.Thread | None = None
        self._begins, self._has_ended = threading.Event(), threading.Event()
        self._said = ""
        self._code = 0

    def prepare(self) -> None:
        """Start the watching thread; a function that is called at exit cannot start threads (Python 3.12)."""
        if self._watch is None:
            self._watch = threading.Thread(target=self._leave, name="pdlcheck mpi end", daemon=True)
            self._watch.start()

    def finalize(self, ending: Ending) -> None:
        assert self._watch is not None
        self._code = ending.code
        self._said = (
            f"pdlcheck_mpi: rank {MPI.COMM_WORLD.Get_rank()} ended by {ending.reason}, and others had not ended "
            f"{MPI_ERRORS_S:g} s later: the job ends with exit code {ending.code}"
        )
        self._begins.set()
        ctypes.CDLL(MPI.__file__).MPI_Finalize()
        self._has_ended.set()
        self._watch.join()  # a thread that wakes while the interpreter shuts down may crash

    def _leave(self) -> None:
        self._begins.wait()
        if self._has_ended.wait(MPI_ERRORS_S):
            return
        print(self._said, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._code)
