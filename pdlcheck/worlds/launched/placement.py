"""The placement of ranks in the processes of a launch: rank 0 beside the controller, the others through agents."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.launch.environment import INSIDE, Launch
from pdlcheck.launch.waiting import reported
from pdlcheck.time_budgets import JOIN_NOTICE_S, LAUNCHED_JOIN_S
from pdlcheck.worlds.agents.handle import Agent, require_same_software
from pdlcheck.worlds.agents.messages import Absent, Bye, Hello
from pdlcheck.worlds.launched.agent import variables
from pdlcheck.worlds.launched.meeting import Listener
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.local import LocalPlacement
from pdlcheck.worlds.processes.controller.placement import RankProcess

__all__ = ["LaunchedPlacement"]

_kept: list[Connection[Any, Any]] = []  # open until this process ends, because the agents wait for that


class LaunchedPlacement:
    """A ``Placement`` that starts rank r in the launched process r. Only rank 0 of the launch makes one.

    Args:
        launch: this process's place in the launch.

    Raises:
        WorldUnavailable: the launched processes do not find each other, or their software differs.
    """

    hosts_store = False
    shares_memory = False  # the ranks may be on different machines

    def __init__(self, launch: Launch) -> None:
        os.environ[INSIDE] = "1"
        self.launch = launch
        forkserver.retain(self)
        others = f"the other {launch.world_size - 1} at {launch.init_method}"
        with reported(lambda: f"{self._name()} waits for {others}", first_s=JOIN_NOTICE_S):
            self._listener = Listener(launch)
        self.host = self._listener.host
        self._agents: dict[int, Agent] = {}
        self._absent: dict[int, tuple[Connection[Any, Any], Absent]] = {}
        self._join_until: float | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the variables that the fork server fixed."""
        return forkserver.retain(self).environment  # a new server if the old one has ended

    def check(self, world_size: int) -> None:
        """Raise ``WorldTooSmall`` if the launch has fewer than ``world_size`` processes."""
        if world_size > self.launch.world_size:
            cure = f"launch {world_size} processes"
            raise WorldTooSmall(
                f"needs {world_size} ranks, {self.launch.launcher} launched {self.launch.world_size}: "
                f"{cure}, or ask for world_size={self.launch.world_size}",
                world="launched",
                cure=cure,
                world_size=world_size,
                available=self.launch.world_size,
            )

    def ranks_here(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks run on the controller's machine."""
        if self.launch.local_world_size is not None:
            return min(world_size, self.launch.local_world_size)
        self.join()
        return len(self._beside(0, world_size))

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> RankProcess:
        """Start a rank in the launched process of the same number."""
        self.join()
        if rank == 0:
            return LocalPlacement(forkserver.retain(self)).place(rank, world_size, fds)
        return self._agents[rank].fork(self._listener.accept)

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Return the rank's environment variables besides ``RANK``, ``WORLD_SIZE`` and ``MASTER_*``."""
        own, beside = self._variables(rank), self._beside(rank, world_size)
        local = {"LOCAL_RANK": own.get("LOCAL_RANK", str(beside.index(rank)))}
        return {**own, **local, "LOCAL_WORLD_SIZE": str(self._ranks_beside(rank, world_size))}

    def threads(self, rank: int, world_size: int) -> int:
        """Return the number of threads for a rank, so that all ranks of its machine share the cores."""
        available = self._agents[rank].hello.cores if rank else usable_cores()
        return max(1, available // self._ranks_beside(rank, world_size))

    def close(self, exitcode: int) -> None:
        """Send this exit code to every launched process; each one ends with it once this process has ended."""
        with contextlib.suppress(WorldUnavailable):  # the launcher ends processes that did not join
            self.join()
        controls = [agent.control for agent in self._agents.values()]
        controls += [control for control, _ in self._absent.values()]
        for control in controls:
            with contextlib.suppress(OSError):  # the agent has ended
                control.send(Bye(exitcode))
        _kept.extend(controls)
        self._agents.clear()
        self._absent.clear()
        self._listener.close()
        forkserver.release(self)

    def join(self) -> None:
        """Wait, at most 300 s over all calls, until every launched process has sent ``Hello`` or ``Absent``.

        Raises:
            WorldUnavailable: a process did not come, could not start its session, or has other software versions.
        """
        if self._join_until is None:
            self._join_until = time.monotonic() + LAUNCHED_JOIN_S
        if self._missing():
            waits = lambda: f"{self._name()} waits for ranks {self._missing()} at {self.host}"  # noqa: E731
            with reported(waits, first_s=JOIN_NOTICE_S):
                self._meet(self._join_until)
        self._listener.all_are_here()
        if self._absent:
            said = [message for _, message in self._absent.values()]
            whys = sorted(f"rank {absent.rank} on {absent.host}: {absent.why}" for absent in said)
            raise WorldUnavailable(
                f"launched processes could not start their session, {'; '.join(whys)}",
                world="launched",
                cure="make pytest start in every launched process",
            )

    def _meet(self, until: float) -> None:
        while missing := self._missing():
            try:
                connection = self._listener.accept(until)
                hello = connection.recv()
            except (TimeoutError, EOFError, OSError) as error:
                raise WorldUnavailable(
                    f"ranks {missing} of {self.launch.world_size} did not join rank 0 at {self.host} "
                    f"within {LAUNCHED_JOIN_S:g} s; start all of them with the same command"
                    f"{self._listener.strangers()}",
                    world="launched",
                    cure="start all ranks with the same command",
                ) from error
            if isinstance(hello, Absent):
                self._absent[hello.rank] = (connection, hello)
                continue
            self._agents[hello.rank] = Agent(connection, hello, self._lost)
            require_same_software(hello, "launched")

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self.launch.world_size)) - self._agents.keys() - self._absent.keys())

    def _name(self) -> str:
        return f"rank 0 of {self.launch.world_size} ({self.launch.launcher})"

    def _ranks_beside(self, rank: int, world_size: int) -> int:
        """Return how many of ``world_size`` ranks run on the node of this rank, itself included."""
        number = len(self._beside(rank, world_size))
        return min(number, int(self._variables(rank).get("LOCAL_WORLD_SIZE", number)))  # nodes may share a machine

    def _beside(self, rank: int, world_size: int) -> list[int]:
        """Return the ranks below ``world_size`` that run on the machine of this rank."""
        return [other for other in range(world_size) if self._machine(other) == self._machine(rank)]

    def _variables(self, rank: int) -> Mapping[str, str]:
        return self._agents[rank].hello.variables if rank else variables(self.launch, self.host)

    def _machine(self, rank: int) -> tuple[str, str]:
        if rank == 0:
            return platform.node(), self.host
        return self._agents[rank].machine

    def _lost(self, hello: Hello) -> WorldUnavailable:
        return WorldUnavailable(
            f"launched process {hello.rank} on {hello.host} does not answer: it has ended, or a signal "
            f"(SIGSTOP) has stopped it; see what {self.launch.launcher} says of it",
            world="launched",
            cure="launch again",
        )
