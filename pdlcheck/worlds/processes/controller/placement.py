"""The protocols of a rank's process, and of the place where it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

__all__ = ["Placement", "RankProcess"]


class RankProcess(Protocol):
    """The process of one rank, on this machine or another."""

    @property
    def connection(self) -> Connection[Any, Any]:
        """Return the controller's end of the rank's pipe."""

    @property
    def status(self) -> int:
        """Return a descriptor that becomes readable when the process has ended; valid after :meth:`started`."""

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, or minus the signal; None until :meth:`ended` has seen the end."""

    @property
    def went_with(self) -> str:
        """Return in words the process whose end caused this one; empty if it ended by itself."""

    def started(self) -> int:
        """Wait until the process exists; return its pid."""

    def has_started(self) -> bool:
        """Return whether the process exists by now."""

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of a process that has started; return whether it has ended."""

    def is_well(self) -> bool:
        """Return whether it is certain that the process runs and that no signal is about to end or stop it."""

    def is_stopped(self) -> bool:
        """Return whether a signal (SIGSTOP, SIGTSTP) keeps the process from running; False without /proc."""

    def waited_for_cores(self) -> float | None:
        """Return the seconds that its main thread has waited for a core; None if the system does not report them."""

    def signal(self, signo: int) -> None:
        """Send a signal to the process; SIGKILL also reaches the processes that it has started.

        ``STACK_SIGNAL`` is not sent if it would end the process, because the user's code has removed its handler.
        """

    def output(self) -> tuple[str, str, str]:
        """Return the text written to stdout, stderr and the journal since the last call."""

    def bound_output(self) -> None:
        """Bound the memory that the rank's output takes; called repeatedly while the rank runs."""

    def rewind(self) -> None:
        """Free the memory of output that was read, while the rank is idle."""

    def close(self) -> None:
        """Close the descriptors."""


class Placement(Protocol):
    """The place where the ranks of a pool are started.

    Args:
        host: the address of the controller's machine at which a pool has its store.
        hosts_store: True if the controller hosts the store; False if rank 0 does, which then runs on its machine.
        shares_memory: True if all ranks are on the controller's machine.
    """

    host: str
    hosts_store: bool
    shares_memory: bool

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the controller's variables at the moment when the ranks' surroundings were fixed."""

    def check(self, world_size: int) -> None:
        """Raise ``WorldTooSmall`` if there is no room for ``world_size`` ranks."""

    def ranks_here(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks run on the controller's machine."""

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> RankProcess:
        """Start a rank with ``fds``, the descriptors that it needs besides its pipe and files; see ``rank/main.py``."""

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Return the rank's environment variables besides ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``."""

    def threads(self, rank: int, world_size: int) -> int:
        """Return the number of threads for a rank, so that all ranks of a machine share its cores."""
