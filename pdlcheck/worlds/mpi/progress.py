"""The progress of posted operations: the calls to MPI, and the steps after completion.

MPI moves data only while a thread calls it. A rank that waits does so. For all other operations there is a thread, so
that they complete without a wait and their futures are resolved. One thread at a time is inside MPI.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from time import sleep
from typing import Any

from pdlcheck.time_budgets import MPI_FUTURE_S, MPI_IDLE_S, MPI_NAP_S, MPI_SPIN_S
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.mpi.call import MpiCall, begin
from pdlcheck.worlds.mpi.library import MPI, at_exit
from pdlcheck.worlds.observe import Operation, WatchedWork

__all__ = ["MpiWork", "Progress"]


_LIKELY = (
    "; likely another rank sent more than this one has room for, as its tensors are larger: "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL shows what each rank called"
)


class Progress:
    """All operations of this process that are posted to MPI and not complete."""

    def __init__(self) -> None:
        self._inside = threading.Lock()
        self._pending: list[MpiWork] = []
        self._something = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False

    def begin(self, communicator: MPI.Intracomm, operation: Operation, timeout: timedelta) -> MpiWork:
        """Post an operation; return its handle at once."""
        with self._inside:
            work = MpiWork(self, operation, begin(communicator, operation), timeout)
            self._pending.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdlcheck mpi progress", daemon=True)
                self._thread.start()
                at_exit(self._stop)
        self._something.set()
        return work

    def poll(self) -> None:
        """Ask MPI about all pending operations, and conclude the complete ones."""
        with self._inside:
            complete = [work for work in self._pending if work.ask()]
            if complete:
                self._pending = [work for work in self._pending if work not in complete]
        for work in complete:
            work.conclude()  # may run callbacks of the user, which may communicate

    def call(self, function: Any, *args: Any) -> Any:
        """Call an MPI function that involves other ranks."""
        with self._inside:
            return function(*args)

    def _run(self) -> None:
        while not self._ends:
            if not self._pending:
                self._something.clear()
                if not self._pending:  # no operation was posted in between
                    self._something.wait()
            sleep(MPI_FUTURE_S if any(work.has_future for work in self._pending) else MPI_IDLE_S)
            if not self._ends:
                self.poll()

    def _stop(self) -> None:
        self._ends = True
        self._something.set()
        if self._thread is not None:
            self._thread.join()


@uncompiled
class MpiWork(WatchedWork):
    """The handle of an operation that MPI carries out."""

    def __init__(self, progress: Progress, operation: Operation, call: MpiCall, timeout: timedelta) -> None:
        super().__init__(operation)
        self._progress = progress
        self._call = call
        self._timeout = timeout
        self._status = MPI.Status()
        self._error: Exception | None = None
        self._is_complete = threading.Event()
        self._resolving = threading.Lock()

    # -- from Progress -----------------------------------------------------------------------------

    @property
    def has_future(self) -> bool:
        """Return whether the operation has a future."""
        return self._future is not None

    def ask(self) -> bool:
        """Return whether MPI has nothing left to do, by success or by an error."""
        requests = self._call.requests
        try:
            if self.operation.signature.is_p2p:
                return requests[0].Test(self._status)
            return MPI.Request.Testall(requests)
        except MPI.Exception as error:
            self._error = RuntimeError(f"{error} in {self.operation.signature}{_LIKELY}")
            return True

    def conclude(self) -> None:
        """Move the result to its place, and release the waiting threads."""
        signature = self.operation.signature
        try:
            if self._error is None:
                if signature.op == "recv":
                    self._take(signature.numel * self.operation.parts[0].outputs[0].element_size())
                for finish in self._call.finish:
                    finish()
        except Exception as error:  # the waiting rank raises it
            self._error = error
        self._call.release()
        self._is_complete.set()
        self._settle_future()

    def _take(self, expected: int) -> None:
        self._source = self._status.Get_source()
        found = self._status.Get_count(MPI.BYTE)
        if found != expected:
            raise RuntimeError(f"a message of {found} bytes came to {self.operation.signature}, of {expected} bytes")

    # -- what torch and users call -----------------------------------------------------------------

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the operation is complete; raise its error if it failed."""
        limit = timeout if isinstance(timeout, timedelta) and timeout > timedelta(0) else self._timeout
        begin_s = time.monotonic()
        while not self._is_complete.is_set():
            self._progress.poll()
            waited_s = time.monotonic() - begin_s
            if waited_s < MPI_SPIN_S:
                os.sched_yield()
            elif waited_s < limit.total_seconds():
                self._is_complete.wait(MPI_NAP_S)
            else:
                raise RuntimeError(f"timed out after {limit.total_seconds():g} s in {self.operation.signature}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete."""
        if not self._is_complete.is_set():
            self._progress.poll()
        return self._is_complete.is_set()

    def is_success(self) -> bool:
        """Return whether the operation is complete without an error."""
        return self._is_complete.is_set() and self._error is None

    def exception(self) -> Any:
        """Return the error of the operation; None if there is none."""
        return self._error

    # -- the future --------------------------------------------------------------------------------

    def _is_settled(self) -> bool:
        return self._is_complete.is_set()

    def _settle_future(self) -> None:
        future = self._future
        if future is None:
            return
        # The completing thread and a thread that asks for the future may both come here.
        with self._resolving:
            if future.done():
                return
            if self._error is None:
                future.set_result(self.result())
            else:
                future.set_exception(self._error)
