"""Ranks that are forked on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes.controller.forkserver import Child, Forker, ForkServer
from pdlcheck.worlds.processes.controller.output_file import OutputFile
from pdlcheck.worlds.processes.controller.process_state import is_stopped, is_well, would_end
from pdlcheck.worlds.processes.exchange.own_time import waited_for_cores
from pdlcheck.worlds.processes.rank.server import RANK, STACK_SIGNAL, TEMPLATE

__all__ = ["LocalPlacement", "LocalProcess", "fork"]


class LocalPlacement:
    """A ``Placement`` that forks every rank from the server or its twin.

    Args:
        server: the server.
        one_hash_seed: fork all ranks from the server itself, so that they hash alike.
    """

    host = "127.0.0.1"
    hosts_store = False
    shares_memory = True

    def __init__(self, server: ForkServer, *, one_hash_seed: bool = False) -> None:
        self._server = server
        self._one_hash_seed = one_hash_seed
        self.environment: Mapping[str, str] = server.environment

    def check(self, world_size: int) -> None:
        """Accept every world size."""

    def ranks_here(self, world_size: int) -> int:
        """Return ``world_size``, because all ranks run on the controller's machine."""
        return world_size

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> LocalProcess:
        """Fork a rank."""
        return fork(self._server if self._one_hash_seed else self._server.of_rank(rank), fds)

    def place_template(self, rank: int) -> LocalProcess:
        """Start a process that becomes a template; see ``template.py``."""
        return fork(self._server.of_rank(rank), (), TEMPLATE)

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Return the rank's environment variables besides ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``."""
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NCCL_SOCKET_IFNAME": loopback,
        }

    def threads(self, rank: int, world_size: int) -> int:
        """Return the number of threads for a rank, so that all ranks share the cores."""
        return max(1, usable_cores() // world_size)


def fork(server: Forker, more: Sequence[int], kind: int = RANK) -> LocalProcess:
    """Fork ``server`` and return the new process with its pipe; it also gets the descriptors ``more``."""
    ours, theirs = Pipe(duplex=True)
    with theirs:
        try:
            return LocalProcess(server, ours, theirs, more, kind)
        except BaseException:
            ours.close()
            raise


class LocalProcess:
    """A forked rank; a ``RankProcess``.

    The files for stdout, stderr and the journal have no name, so no file is left behind.

    Args:
        server: the process that forks the rank.
        ours: the controller's end of the pipe, if this process is the controller. It is closed with the process. If the
            process cannot be made, the caller closes it.
        theirs: the rank's end of the pipe.
        more: further descriptors for the rank.
        kind: ``RANK`` or ``TEMPLATE``.
    """

    def __init__(
        self,
        server: Forker,
        ours: Connection[Any, Any],
        theirs: Connection[Any, Any],
        more: Sequence[int],
        kind: int = RANK,
    ) -> None:
        self._server = server
        self.connection = ours
        self._files = [OutputFile(), OutputFile(), OutputFile(is_whole=True)]
        fds = [theirs.fileno(), *(file.fd for file in self._files), *more]
        try:
            self._child: Child = server.fork(fds, kind)
        except BaseException:
            for file in self._files:
                os.close(file.fd)
            raise

    @property
    def status(self) -> int:
        """Return the pipe that reports the end of the process."""
        return self._child.status

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, or minus the signal; None until :meth:`ended` has seen the end."""
        return self._child.exitcode

    @property
    def went_with(self) -> str:
        """Return in words the process whose end caused this one; empty if it ended by itself."""
        return self._child.went_with

    def started(self) -> int:
        """Wait until the process exists; return its pid."""
        return self._child.started()

    def has_started(self) -> bool:
        """Return whether the process exists by now."""
        return self._child.has_started()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        return self._child.ended(timeout_s)

    def signal(self, signo: int) -> None:
        """Send a signal to the process, except a stack signal that would end it."""
        with contextlib.suppress(WorldUnavailable):  # it could not be started
            if self.has_started() and not (signo == STACK_SIGNAL and would_end(self.started(), signo)):
                self._server.signal(self.started(), signo)

    def is_well(self) -> bool:
        """Return whether it is certain that the process runs."""
        return is_well(self.started())

    def is_stopped(self) -> bool:
        """Return whether a signal keeps the process from running."""
        return is_stopped(self.started())

    def waited_for_cores(self) -> float | None:
        """Return the seconds that its main thread has waited for a core; None if they are unknown."""
        return waited_for_cores(self.started())

    def output(self) -> tuple[str, str, str]:
        """Return the text written to stdout, stderr and the journal since the last call."""
        out, err, journal = (file.take() for file in self._files)
        return out, err, journal

    def bound_output(self) -> None:
        """Bound the memory that the output takes."""
        for file in self._files:
            file.bound()

    def rewind(self) -> None:
        """Free the memory of output that was read, while the rank is idle."""
        for file in self._files:
            file.rewind()

    def close(self) -> None:
        """Close the pipe and the descriptors."""
        self.connection.close()
        for fd in (*(file.fd for file in self._files), self._child.status):
            os.close(fd)
