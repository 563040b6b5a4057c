"""Ranks forked on this machine."""

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
    """Forks every rank from the server or its twin; a ``Placement``."""

    host = "127.0.0.1"
    shares_memory = True

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.environment: Mapping[str, str] = server.environment

    def check(self, world_size: int) -> None:
        """There is always room."""

    def ranks_here(self, world_size: int) -> int:
        return world_size

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> LocalProcess:
        return fork(self._server.of_rank(rank), fds)

    def place_template(self, rank: int) -> LocalProcess:
        """Start a process that becomes a template; see ``template.py``."""
        return fork(self._server.of_rank(rank), (), TEMPLATE)

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "NCCL_SOCKET_IFNAME": loopback,
        }

    def threads(self, rank: int, world_size: int) -> int:
        return max(1, usable_cores() // world_size)


def fork(server: Forker, more: Sequence[int], kind: int = RANK) -> LocalProcess:
    """A fork of that process, and the pipe to it; it gets the descriptors ``more`` besides."""
    ours, theirs = Pipe(duplex=True)
    with theirs:
        try:
            return LocalProcess(server, ours, theirs, more, kind)
        except BaseException:
            ours.close()
            raise


class LocalProcess:
    """A forked rank, a ``RankProcess``. Files for stdout, stderr and the journal have no name: nothing is left behind.

    Args:
        server: forks it.
        ours: the controller's end of the pipe, if the controller is this process; closed with the process, and the
            caller's if that cannot be made.
        theirs: the rank's end.
        more: descriptors that the rank gets besides.
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
        return self._child.status

    @property
    def exitcode(self) -> int | None:
        return self._child.exitcode

    @property
    def went_with(self) -> str:
        return self._child.went_with

    def started(self) -> int:
        return self._child.started()

    def has_started(self) -> bool:
        return self._child.has_started()

    def ended(self, timeout_s: float) -> bool:
        return self._child.ended(timeout_s)

    def signal(self, signo: int) -> None:
        with contextlib.suppress(WorldUnavailable):  # it could not be started
            if self.has_started() and not (signo == STACK_SIGNAL and would_end(self.started(), signo)):
                self._server.signal(self.started(), signo)

    def is_well(self) -> bool:
        return is_well(self.started())

    def is_stopped(self) -> bool:
        return is_stopped(self.started())

    def waited_for_cores(self) -> float | None:
        return waited_for_cores(self.started())

    def output(self) -> tuple[str, str, str]:
        out, err, journal = (file.take() for file in self._files)
        return out, err, journal

    def bound_output(self) -> None:
        for file in self._files:
            file.bound()

    def rewind(self) -> None:
        for file in self._files:
            file.rewind()

    def close(self) -> None:
        self.connection.close()
        for fd in (*(file.fd for file in self._files), self._child.status):
            os.close(fd)
