"""The controller's handle on one rank: its process, its pipe, what it wrote."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes.forkserver import Child, ForkServer
from pdlcheck.worlds.processes.messages import Command, Report

__all__ = ["Died", "Member", "Written"]

_DRAIN_S = 2.0
_KEPT_BYTES = 1 << 20  # of what was read already


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process has ended; ``exitcode`` is minus the signal if one ended it."""

    exitcode: int


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote since the last look, by Python and by descriptor; see ``journal.py`` for the third."""

    rank: int
    out: str
    err: str
    journal: str


class Member:
    """One rank of a pool. Files for stdout, stderr and the journal have no name, so nothing can be left behind."""

    def __init__(self, rank: int, server: ForkServer, listening: socket.socket | None) -> None:
        self.rank = rank
        self._server = server
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe(duplex=True)
        self._files = [_File(), _File(), _File()]
        self.reader: Callable[[Written], None] | None = None  # also receives whatever is taken
        fds = [theirs.fileno(), *(file.fd for file in self._files)]
        if listening is not None:
            fds.append(listening.fileno())
        try:
            self._child: Child = server.fork(fds)
        except BaseException:
            self.connection.close()
            for file in self._files:
                os.close(file.fd)
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
        words.append(Died(self._child.exitcode if self._child.exitcode is not None else -signal.SIGKILL))
        return words

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches what the process has started."""
        with contextlib.suppress(WorldUnavailable):  # it was never started
            self._server.signal(self.pid, signo)

    def output(self) -> tuple[str, str]:
        """Return what was written to stdout and stderr since the last time."""
        out, err, journal = [file.take() for file in self._files]
        if self.reader is not None and (out or err or journal):
            self.reader(Written(self.rank, out, err, journal))
        return out, err

    def rewind(self) -> None:
        """Give back the memory of what was read. The rank must be idle: what it writes meanwhile can be lost."""
        for file in self._files:
            file.rewind()

    def hang_up(self) -> None:
        """Close the pipe: an idle rank then ends by itself."""
        self.connection.close()

    def wait_ended(self, timeout_s: float) -> bool:
        """True once the process has ended."""
        return self._child.ended(timeout_s)

    def close(self) -> None:
        """Give back the descriptors."""
        self.connection.close()
        for fd in (*(file.fd for file in self._files), self._child.status):
            os.close(fd)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pdlcheck output")
    else:
        with tempfile.TemporaryFile(buffering=0) as file:
            fd = os.dup(file.fileno())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
    return fd


class _File:
    """A file without a name; reading does not disturb the rank that writes to it."""

    def __init__(self) -> None:
        self.fd = _nameless_file()
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self) -> str:
        size = os.fstat(self.fd).st_size
        if size <= self._read:
            return ""
        data = os.pread(self.fd, size - self._read, self._read)
        self._read += len(data)
        return self._decoder.decode(data)

    def rewind(self) -> None:
        if self._read > _KEPT_BYTES and os.fstat(self.fd).st_size == self._read:
            os.ftruncate(self.fd, 0)
            self._read = 0
