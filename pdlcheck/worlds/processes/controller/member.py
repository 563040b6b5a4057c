"""The controller's handle on one rank: its process and its pipe."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes.controller.exits import how_it_ended
from pdlcheck.worlds.processes.controller.message_pipe import MessagePipe, NoMessage, report_of
from pdlcheck.worlds.processes.controller.placement import RankProcess
from pdlcheck.worlds.processes.exchange.messages import Command, Report, packed
from pdlcheck.worlds.processes.exchange.own_time import OwnTime

__all__ = ["Died", "Member", "Written"]

_DRAIN_S = 2.0  # seconds of the process's own time
_LOOK_S = 0.1
_NOT_ITS_OWN = "code that runs in it uses a descriptor that it did not open, or has closed"


@dataclass(frozen=True, slots=True)
class Died:
    """The rank's process has ended; ``exitcode`` is minus the signal if one ended it.

    ``went_with``: the process whose end was the rank's, in words. ``killed_as``: what it did, for which it was killed.
    """

    exitcode: int
    went_with: str = ""
    killed_as: str = ""

    @property
    def how(self) -> str:
        """In words: what the rank did, or suffered."""
        if self.killed_as:
            return f"was killed by pdlcheck, as it {self.killed_as}"
        return f"went down with {self.went_with}" if self.went_with else how_it_ended(self.exitcode)


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote since the last look, by Python and by descriptor; see ``journal.py`` for the third."""

    rank: int
    out: str
    err: str
    journal: str


class Member:
    """One rank of a pool, wherever its process is."""

    def __init__(self, rank: int, process: RankProcess) -> None:
        self.rank = rank
        self.connection = process.connection
        self.reader: Callable[[Written], None] | None = None  # also receives whatever is taken
        self._process = process
        self._pipe = MessagePipe(process.connection)
        self._spoiled: NoMessage | None = None

    @property
    def pid(self) -> int:
        """Of the rank's process."""
        return self._process.started()

    def await_start(self) -> None:
        """Wait until the process exists."""
        self._process.started()

    @property
    def status(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._process.status

    def send(self, message: Command) -> None:
        """Send; a rank that has gone is noticed when it is read from."""
        self._pipe.send(packed(message))

    def send_packed(self, data: bytes) -> None:
        """Send a message that is the same for several ranks."""
        self._pipe.send(data)

    @property
    def is_behind(self) -> bool:
        """Whether the rank has still to take a part of what was sent: :meth:`flush` when its pipe can be written to."""
        return self._pipe.is_behind

    def flush(self) -> None:
        """Send on."""
        self._pipe.flush()

    def receive(self) -> Report | None:
        """The next message; None as long as a part of it is missing.

        Raises:
            NoMessage: what came is none.
            EOFError: the end of the pipe.
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
        """Everything that a process which has ended, or is about to, still had to say."""
        words: list[Report | Died] = []
        killed_as = ""
        try:
            while (message := self.receive()) is not None:
                words.append(message)
        except NoMessage as error:
            killed_as = f"wrote {error.begin!r} into its pipe to the controller: {_NOT_ITS_OWN}"
        except EOFError:
            pass
        if killed_as or not self.ends_within(_DRAIN_S):  # alive, but of no use any more
            self.signal(signal.SIGKILL)
            self.ends_within(_DRAIN_S)
            killed_as = killed_as or f"closed its pipe to the controller and did not end: {_NOT_ITS_OWN}"
        exitcode = self._process.exitcode if self._process.exitcode is not None else -signal.SIGKILL
        words.append(Died(exitcode, self._process.went_with, killed_as if exitcode == -signal.SIGKILL else ""))
        return words

    def is_well(self) -> bool:
        """True if it is certain that the process runs and that no signal is about to end or stop it."""
        return self._process.is_well()

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False where there is no /proc."""
        return self._process.is_stopped()

    def own_time(self) -> OwnTime:
        """A clock of the rank's process that begins now."""
        return OwnTime(self._process.waited_for_cores)

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches what the process has started."""
        self._process.signal(signo)

    def output(self) -> tuple[str, str]:
        """Return what was written to stdout and stderr since the last time."""
        out, err, journal = self._process.output()
        if self.reader is not None and (out or err or journal):
            self.reader(Written(self.rank, out, err, journal))
        return out, err

    def bound_output(self) -> None:
        """Let what it has written take little memory."""
        self._process.bound_output()

    def rewind(self) -> None:
        """Give back the memory of what was read. The rank must be idle: what it writes meanwhile can be lost."""
        self._process.rewind()

    def hang_up(self) -> None:
        """Close the pipe: an idle rank then ends by itself."""
        self.connection.close()

    def wait_ended(self, timeout_s: float) -> bool:
        """True once the process has ended, or if there is none yet: that one finds its pipe closed."""
        try:
            return not self._process.has_started() or self._process.ended(timeout_s)
        except WorldUnavailable:  # it could not be started
            return True

    def ends_within(self, own_s: float) -> bool:
        """The same, for so many seconds of the process's own time."""
        own: OwnTime | None = None
        while not self.wait_ended(_LOOK_S):
            own = own or self.own_time()
            if own.spent() >= own_s:
                return False
        return True

    def close(self) -> None:
        """Give back the descriptors."""
        self._process.close()
