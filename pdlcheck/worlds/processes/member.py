"""The controller's handle on one rank: its process, its pipe, what it wrote."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes.forkserver import Child, ForkServer
from pdlcheck.worlds.processes.messages import Command, Report

__all__ = ["Died", "Member"]

_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process has ended; ``exitcode`` is minus the signal if one ended it.

    ``orphaned``: it was ended because the fork server had been.
    """

    exitcode: int
    orphaned: bool = False


class Member:
    """One rank of a pool. Files for stdout and stderr have no name, so nothing can be left behind."""

    def __init__(self, rank: int, server: ForkServer, listening: socket.socket | None) -> None:
        self.rank = rank
        self._server = server
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe(duplex=True)
        self._files = [_nameless_file(), _nameless_file()]
        fds = [theirs.fileno(), *self._files]
        if listening is not None:
            fds.append(listening.fileno())
        try:
            self._child: Child = server.fork(fds)
        except BaseException:
            self.connection.close()
            for file in self._files:
                os.close(file)
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Of the rank's process."""
        return self._child.started()

    def await_start(self) -> None:
        """Wait until the process exists."""
        self._child.started()

    @property
    def status(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._child.status

    def send(self, message: Command) -> None:
        """Send; a rank that has gone is noticed when it is read from."""
        try:
            self.connection.send(message)
        except OSError:
            return

    def receive(self) -> Report | None:
        """The next message; None at the end of the pipe."""
        try:
            return self.connection.recv()  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None

    def last_words(self) -> list[Report | Died]:
        """Everything that a process which has ended, or is about to, still had to say."""
        words: list[Report | Died] = []
        while self.connection.poll() and (message := self.receive()) is not None:
            words.append(message)
        if not self._child.ended(_DRAIN_S):  # alive, but its pipe is closed: of no use any more
            self.signal(signal.SIGKILL)
            self._child.ended(_DRAIN_S)
        exitcode = self._child.exitcode if self._child.exitcode is not None else -signal.SIGKILL
        words.append(Died(exitcode, self._child.orphaned))
        return words

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False where there is no /proc."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches what the process has started."""
        with contextlib.suppress(WorldUnavailable):  # it could not be started
            if self._child.has_started():
                self._server.signal(self.pid, signo)

    def output(self) -> tuple[str, str]:
        """Return what was written to stdout and stderr since the last time."""
        return _take(self._files[0]), _take(self._files[1])

    def hang_up(self) -> None:
        """Close the pipe: an idle rank then ends by itself."""
        self.connection.close()

    def wait_ended(self, timeout_s: float) -> bool:
        """True once the process has ended, or if there is none yet: that one finds its pipe closed."""
        try:
            return not self._child.has_started() or self._child.ended(timeout_s)
        except WorldUnavailable:  # it could not be started
            return True

    def close(self) -> None:
        """Give back the descriptors."""
        self.connection.close()
        for fd in (*self._files, self._child.status):
            os.close(fd)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pdlcheck output")
    else:
        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.dup(file.fileno())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


def _take(fd: int) -> str:
    size = os.fstat(fd).st_size
    if not size:
        return ""
    data = os.pread(fd, size, 0)
    os.ftruncate(fd, 0)
    return data.decode(errors="replace")
