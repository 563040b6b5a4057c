"""The placement of ranks in processes that a function starts, wherever it likes."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import LOOK_S, REMOTE_END_S, REMOTE_JOIN_S, REMOTE_LOOK_S
from pdlcheck.worlds.agents.door import Door
from pdlcheck.worlds.agents.handle import Agent, AgentProcess, require_same_software
from pdlcheck.worlds.agents.interfaces import outward_address
from pdlcheck.worlds.agents.messages import Bye, Hello
from pdlcheck.worlds.remote.ticket import Ticket

__all__ = ["RankJob", "RemotePlacement"]

_BACKLOG = 64


class RankJob(Protocol):
    """The process of a rank as its starter sees it; ``subprocess.Popen`` has these methods."""

    def poll(self) -> int | None:
        """Return None while the process runs or waits for its start, and then its exit code."""

    def kill(self) -> None:
        """End the process at once."""


class RemotePlacement:
    """A ``Placement`` with one agent for each rank, in a process that ``start`` starts on first use and after a loss.

    Args:
        name: the name of the world, for messages.
        start: starts the process of a rank; see :class:`RemoteWorld`.
        reserve: ``reserve(world_size)`` makes room before the first process of a world size is started.
        host: the address of this machine at which the processes reach it; default: that of the default route.
        seed: the hash seeds of the ranks are derived from it.
    """

    shares_memory = False
    hosts_store = True

    def __init__(
        self,
        name: str,
        start: Callable[[int, dict[str, str]], RankJob],
        *,
        reserve: Callable[[int], object] = lambda world_size: None,
        host: str | None = None,
        seed: int = 0,
    ) -> None:
        self.host = host or outward_address() or "127.0.0.1"
        self.environment: Mapping[str, str] = dict(os.environ)
        self._name = name
        self._start = start
        self._reserve = reserve
        self._seed = seed
        self._door: Door | None = None
        self._jobs: dict[int, RankJob] = {}
        self._agents: dict[int, Agent] = {}

    def check(self, world_size: int) -> None:
        """Make room for ``world_size`` processes, or raise an error if there is none."""
        self._reserve(world_size)

    def ranks_here(self, world_size: int) -> int:
        """Return 0: the processes have devices of their own."""
        return 0

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> AgentProcess:
        """Start a rank in the process of the same number."""
        if rank == 0:
            self._join(range(world_size))  # all at once: each of them imports torch
        assert self._door is not None
        return self._agents[rank].fork(self._door.accept)

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Return the rank's environment variables besides ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``."""
        beside = self._beside(rank, world_size)
        local = {"LOCAL_RANK": str(beside.index(rank)), "LOCAL_WORLD_SIZE": str(len(beside))}
        return {**self._agents[rank].hello.variables, **local}

    def threads(self, rank: int, world_size: int) -> int:
        """Return the number of threads for a rank, so that all ranks of its machine share the cores."""
        return max(1, self._agents[rank].hello.cores // len(self._beside(rank, world_size)))

    def close(self) -> None:
        """End all processes. They are started again when they are needed."""
        for agent in self._agents.values():
            with contextlib.suppress(OSError):  # it has ended
                agent.control.send(Bye(0))
            agent.control.close()
        for job in self._jobs.values():
            job.kill()
        self._await_ends()
        self._agents.clear()
        self._jobs.clear()
        if self._door is not None:
            self._door.close()
            self._door = None

    def _await_ends(self) -> None:
        until = time.monotonic() + REMOTE_END_S
        while any(job.poll() is None for job in self._jobs.values()) and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _join(self, ranks: Sequence[int]) -> None:
        """Start the processes that do not run, and wait until each of them has said ``Hello``."""
        if self._door is None:
            self._key = secrets.token_bytes(32)
            self._door = Door(self.host, self._key, _BACKLOG)
        missing = [rank for rank in ranks if not self._serves(rank)]
        for rank in missing:
            self._forget(rank)
            ticket = Ticket(rank, self.host, self._door.port, self._key.hex(), self._seed)
            self._jobs[rank] = self._start(rank, ticket.variables())
        until = time.monotonic() + REMOTE_JOIN_S
        while missing := [rank for rank in ranks if rank not in self._agents]:
            self._require_jobs(missing)
            with contextlib.suppress(TimeoutError, EOFError):
                connection = self._door.accept(time.monotonic() + REMOTE_LOOK_S)
                hello = connection.recv()
                if isinstance(hello, Hello):
                    require_same_software(hello, self._name)
                    self._agents[hello.rank] = Agent(connection, hello, self._lost)
            if time.monotonic() > until:
                raise self._unavailable(f"ranks {missing} did not come to {self.host} within {REMOTE_JOIN_S:g} s")

    def _serves(self, rank: int) -> bool:
        agent = self._agents.get(rank)
        return agent is not None and not agent.is_silent and self._jobs[rank].poll() is None

    def _forget(self, rank: int) -> None:
        if (agent := self._agents.pop(rank, None)) is not None:
            agent.control.close()
        if (job := self._jobs.pop(rank, None)) is not None:
            job.kill()

    def _require_jobs(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            code = self._jobs[rank].poll()
            if code is not None:
                raise self._unavailable(
                    f"the process of rank {rank} ended with exit code {code} before it reached {self.host}"
                )

    def _beside(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks below ``world_size`` that run on the machine of this rank."""
        machine = self._agents[rank].machine
        return [other for other in range(world_size) if self._agents[other].machine == machine]

    def _unavailable(self, what: str) -> WorldUnavailable:
        return WorldUnavailable(
            f"ranks of world {self._name} cannot start: {what}; read the output of that process, and check that this "
            "machine accepts its connections",
            world=self._name,
        )

    def _lost(self, hello: Hello) -> WorldUnavailable:
        return WorldUnavailable(
            f"the process of rank {hello.rank} on {hello.host} does not answer: it has ended, or a signal (SIGSTOP) "
            "has stopped it",
            world=self._name,
        )
