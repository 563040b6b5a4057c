"""Where the processes of a pool come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

__all__ = ["Placement", "RankProcess"]


class RankProcess(Protocol):
    """The process of one rank, on this machine or another."""

    @property
    def connection(self) -> Connection[Any, Any]:
        """The controller's end of the rank's pipe."""

    @property
    def status(self) -> int:
        """A descriptor that becomes readable when the process has ended; after :meth:`started`."""

    @property
    def exitcode(self) -> int | None:
        """Minus the signal where one ended it; None as long as :meth:`ended` has not seen the end."""

    @property
    def went_with(self) -> str:
        """The process because of whose end it has ended, in words; empty if it ended by itself."""

    def started(self) -> int:
        """Wait until the process exists; return its pid."""

    def has_started(self) -> bool:
        """Whether the process exists by now."""

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of a process that has started."""

    def is_well(self) -> bool:
        """True if it is certain that the process runs and that no signal is about to end or stop it."""

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False where there is no /proc."""

    def waited_for_cores(self) -> float | None:
        """For how many seconds its threads have waited for a core; None where the system does not tell."""

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches what the process has started.

        ``STACK_SIGNAL`` is not sent to a process that it would end, as the user's code has taken its handler away.
        """

    def output(self) -> tuple[str, str, str]:
        """Return what was written to stdout, stderr and the journal since the last time."""

    def bound_output(self) -> None:
        """Let what the rank has written take little memory, however much it is; called now and then while it runs."""

    def rewind(self) -> None:
        """Give back the memory of what was read, while the rank is idle."""

    def close(self) -> None:
        """Give back the descriptors."""


class Placement(Protocol):
    """Starts ranks.

    Args:
        host: the address on which rank 0 hosts the store of a pool; rank 0 runs on the controller's machine.
        environment: the variables that the controller saw when the ranks' surroundings were fixed.
        shares_memory: all ranks are on the controller's machine.
    """

    host: str
    shares_memory: bool

    @property
    def environment(self) -> Mapping[str, str]: ...

    def check(self, world_size: int) -> None:
        """Raise ``WorldTooSmall`` if there is no place for so many ranks."""

    def ranks_here(self, world_size: int) -> int:
        """How many of so many ranks run on the controller's machine."""

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> RankProcess:
        """Start a rank, and give it what ``main`` of ``rank.py`` wants besides its own pipe and files."""

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Environment variables of that rank besides ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``."""

    def threads(self, rank: int, world_size: int) -> int:
        """Threads that a rank may use so that all of a machine's ranks share its cores."""
