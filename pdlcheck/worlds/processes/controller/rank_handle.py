"""The controller's handle of one rank: its process and its pipe."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import DRAIN_S, LOOK_S
from pdlcheck.worlds.processes.controller.exits import how_it_ended
from pdlcheck.worlds.processes.controller.message_pipe import MessagePipe, NoMessage, report_of
from pdlcheck.worlds.processes.controller.placement import RankProcess
from pdlcheck.worlds.processes.exchange.messages import Command, Report, packed
from pdlcheck.worlds.processes.exchange.own_time import OwnTime

__all__ = ["Died", "Member", "Written"]

_NOT_ITS_OWN = "code that runs in it uses a descriptor that it did not open, or has closed"


@dataclass(frozen=True, slots=True)
class Died:
    """The end of a rank's process; ``exitcode`` is minus the signal if a signal ended it.

    ``went_with`` names the process whose end caused this one. ``killed_as`` is the reason why pdlcheck killed the
    process.
    """

    exitcode: int
    went_with: str = ""
    killed_as: str = ""

    @property
    def how(self) -> str:
        """Return in words how the process ended."""
        if self.killed_as:
            return f"was killed by pdlcheck, as it {self.killed_as}"
        return f"went down with {self.went_with}" if self.went_with else how_it_ended(self.exitcode)


@dataclass(frozen=True, slots=True)
class Written:
    """The output of a rank since the last read, of Python and of native code; for ``journal`` see ``journal.py``."""

    rank: int
    out: str
    err: str
    journal: str


class Member:
    """One rank of a pool, on any machine.

    Attributes:
        reader: gets all output that is read.
        died: how the process ended; None until :meth:`last_words` has found that out.
    """

    def __init__(self, rank: int, process: RankProcess) -> None:
        self.rank = rank
        self.connection = process.connection
        self.reader: Callable[[Written], None] | None = None
        self.died: Died | None = None
        self._process = process
        self._pipe = MessagePipe(process.connection)
        self._spoiled: NoMessage | None = None

    @property
    def pid(self) -> int:
        """Return the id of the rank's process."""
        return self._process.started()

    def await_start(self) -> None:
        """Wait until the process exists."""
        self._process.started()

    @property
    def status(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""
        return self._process.status

    def send(self, message: Command) -> None:
        """Send a message; a rank that has ended is detected when its pipe is read."""
        self._pipe.send(packed(message))

    def send_packed(self, data: bytes) -> None:
        """Send a packed message, which may go to several ranks."""
        self._pipe.send(data)

    @property
    def is_behind(self) -> bool:
        """Return whether the rank has not read all data yet; then call :meth:`flush` when its pipe is writable."""
        return self._pipe.is_behind

    def flush(self) -> None:
        """Send more of the unsent data."""
        self._pipe.flush()

    def receive(self) -> Report | None:
        """Return the next message; None while a part of it is missing.

        Raises:
            NoMessage: the data is not a message.
            EOFError: the pipe has ended.
        """
        if self._spoiled is not None:
            raise self._spoiled
        try:
            data = self._pipe.receive()
            return None if data is None else report_of(data)
        except NoMessage as error:
            self._spoiled = error
            raise

    def last_words(self) -> list[Report | Died]:
        """Return the last messages of a process that has ended or is about to end, and how it ended."""
        words: list[Report] = []
        killed_as = ""
        try:
            while (message := self.receive()) is not None:
                words.append(message)
        except NoMessage as error:
            killed_as = f"wrote {error.begin!r} into its pipe to the controller: {_NOT_ITS_OWN}"
        except EOFError:
            pass
        if killed_as or not self.ends_within(DRAIN_S):  # alive, but no longer usable
            self.signal(signal.SIGKILL)
            self.ends_within(DRAIN_S)
            killed_as = killed_as or f"closed its pipe to the controller and did not end: {_NOT_ITS_OWN}"
        exitcode = self._process.exitcode if self._process.exitcode is not None else -signal.SIGKILL
        self.died = Died(exitcode, self._process.went_with, killed_as if exitcode == -signal.SIGKILL else "")
        return [*words, self.died]

    def is_well(self) -> bool:
        """Return whether it is certain that the process runs and that no signal is about to end or stop it."""
        return self._process.is_well()

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False without /proc."""
        return self._process.is_stopped()

    def own_time(self) -> OwnTime:
        """Return a clock of the rank's process that starts now."""
        return OwnTime(self._process.waited_for_cores)

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches the processes that it has started."""
        self._process.signal(signo)

    def output(self) -> tuple[str, str]:
        """Return the text written to stdout and stderr since the last call."""
        out, err, journal = self._process.output()
        if self.reader is not None and (out or err or journal):
            self.reader(Written(self.rank, out, err, journal))
        return out, err

    def bound_output(self) -> None:
        """Bound the memory that the rank's output takes."""
        self._process.bound_output()

    def rewind(self) -> None:
        """Free the memory of output that was read. The rank must be idle, because output can be lost meanwhile."""
        self._process.rewind()

    def hang_up(self) -> None:
        """Close the pipe; an idle rank then ends by itself."""
        self.connection.close()

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended or does not exist yet.

        A process that does not exist yet will find its pipe closed.
        """
        try:
            return not self._process.has_started() or self._process.ended(timeout_s)
        except WorldUnavailable:  # it could not be started
            return True

    def ends_within(self, own_s: float) -> bool:
        """Wait like :meth:`wait_ended`, up to ``own_s`` seconds of the process's own time."""
        own: OwnTime | None = None
        while not self.wait_ended(LOOK_S):
            own = own or self.own_time()
            if own.spent() >= own_s:
                return False
        return True

    def close(self) -> None:
        """Close the descriptors."""
        self._process.close()
