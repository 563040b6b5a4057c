"""The placement of ranks in the processes of a launch: rank 0 beside the controller, the others through agents."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pdlcheck.cores import usable_cores
from pdlcheck.errors import WorldTooSmall, WorldUnavailable
from pdlcheck.worlds.launched.agent import software, variables
from pdlcheck.worlds.launched.environment import INSIDE, Launch
from pdlcheck.worlds.launched.meeting import Listener
from pdlcheck.worlds.launched.messages import (
    Absent,
    AsksHowLong,
    Bye,
    Ended,
    Fork,
    Hello,
    IsStopped,
    Link,
    Output,
    Rewind,
    Signal,
    Started,
    Stopped,
    WaitedForCores,
    Written,
)
from pdlcheck.worlds.launched.waiting import reported
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.exits import FORKER
from pdlcheck.worlds.processes.controller.local import LocalPlacement
from pdlcheck.worlds.processes.controller.placement import RankProcess

__all__ = ["AgentProcess", "LaunchedPlacement"]

_JOIN_S = 300.0
_REPORT_S = 5.0
_ANSWER_S = 10.0
_Answer = TypeVar("_Answer", Stopped, WaitedForCores, Written)
_kept: list[Connection[Any, Any]] = []  # open until this process ends, because the agents wait for that


class LaunchedPlacement:
    """A ``Placement`` that starts rank r in the launched process r. Only rank 0 of the launch makes one.

    Args:
        launch: this process's place in the launch.

    Raises:
        WorldUnavailable: the launched processes do not find each other, or their software differs.
    """

    shares_memory = False  # the ranks may be on different machines

    def __init__(self, launch: Launch) -> None:
        os.environ[INSIDE] = "1"
        self.launch = launch
        forkserver.retain(self)
        others = f"the other {launch.world_size - 1} at {launch.init_method}"
        with reported(lambda: f"{self._name()} waits for {others}", first_s=_REPORT_S):
            self._listener = Listener(launch)
        self.host = self._listener.host
        self._agents: dict[int, _Agent] = {}
        self._absent: dict[int, tuple[Connection[Any, Any], Absent]] = {}
        self._join_until: float | None = None
        self._forks = 0

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
        self._forks += 1
        agent = self._agents[rank]
        if agent.is_silent:
            raise agent.lost()
        try:
            agent.control.send(Fork(self._forks))
            pipe, about = self._links(rank)
        except (OSError, EOFError) as error:
            agent.is_silent = True
            raise agent.lost() from error
        return AgentProcess(pipe, about, agent)

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
            self._join_until = time.monotonic() + _JOIN_S
        if self._missing():
            waits = lambda: f"{self._name()} waits for ranks {self._missing()} at {self.host}"  # noqa: E731
            with reported(waits, first_s=_REPORT_S):
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
                    f"within {_JOIN_S:g} s; start all of them with the same command{self._listener.strangers()}",
                    world="launched",
                    cure="start all ranks with the same command",
                ) from error
            if isinstance(hello, Absent):
                self._absent[hello.rank] = (connection, hello)
                continue
            self._agents[hello.rank] = _Agent(connection, hello, self.launch.launcher)
            self._compare(hello)

    def _missing(self) -> list[int]:
        return sorted(set(range(1, self.launch.world_size)) - self._agents.keys() - self._absent.keys())

    def _name(self) -> str:
        return f"rank 0 of {self.launch.world_size} ({self.launch.launcher})"

    def _compare(self, hello: Hello) -> None:
        ours = software()
        for name, found in hello.software.items():
            if found != ours.get(name):
                raise WorldUnavailable(
                    f"rank {hello.rank} on {hello.host} has {name} {found}, rank 0 has {ours.get(name)}; "
                    "install the same versions on every host",
                    world="launched",
                    cure=f"pip install {name}=={ours.get(name)}",
                )

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
        hello = self._agents[rank].hello
        return hello.host, hello.address

    def _links(self, rank: int) -> tuple[Connection[Any, Any], Connection[Any, Any]]:
        links: dict[bool, Connection[Any, Any]] = {}
        until = time.monotonic() + _ANSWER_S
        while len(links) < 2:
            connection = self._listener.accept(until, self._agents[rank].control)
            link = connection.recv()
            if link == Link(rank, self._forks, link.is_pipe):
                links[link.is_pipe] = connection
            else:  # the connection belongs to an abandoned fork
                connection.close()
        return links[True], links[False]


@dataclass(slots=True)
class _Agent:
    """A launched process, as rank 0 sees it.

    ``is_silent`` is True once the process has failed to answer; rank 0 does not wait for it again.
    """

    control: Connection[Any, Any]
    hello: Hello
    launcher: str
    is_silent: bool = False

    def lost(self) -> WorldUnavailable:
        return WorldUnavailable(
            f"launched process {self.hello.rank} on {self.hello.host} does not answer: it has ended, or a signal "
            f"(SIGSTOP) has stopped it; see what {self.launcher} says of it",
            world="launched",
            cure="launch again",
        )


class AgentProcess:
    """A rank that an agent has forked; a ``RankProcess``."""

    def __init__(self, pipe: Connection[Any, Any], about: Connection[Any, Any], agent: _Agent) -> None:
        self.connection = pipe
        self._about = about
        self._agent = agent
        self._pid = 0
        self.exitcode: int | None = None
        self.went_with = ""

    @property
    def status(self) -> int:
        """Return the descriptor of the connection about the process."""
        return self._about.fileno()

    def started(self) -> int:
        """Wait until the process exists; return its pid."""
        if not self._pid:
            message = self._receive(_ANSWER_S)
            if not isinstance(message, Started) or message.pid < 0:
                trouble = getattr(message, "trouble", "") or "its agent does not answer"
                raise WorldUnavailable(f"a rank could not be started: {trouble}", world="launched", cure="launch again")
            self._pid = message.pid
        return self._pid

    def has_started(self) -> bool:
        """Return whether the process exists by now."""
        return self._pid > 0 or (self._about.poll(0) and self.started() > 0)

    def is_well(self) -> bool:
        """Return False, because the state of a process on another machine is never certain."""
        return False

    def is_stopped(self) -> bool:
        """Return whether a signal keeps the process from running."""
        answer = self._answer(IsStopped(), Stopped)
        return answer is not None and answer.stopped

    def waited_for_cores(self) -> float | None:
        """Return the seconds that its main thread has waited for a core; None if they are unknown."""
        answer = self._answer(AsksHowLong(), WaitedForCores)
        return None if answer is None else answer.seconds

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        until = time.monotonic() + timeout_s
        while self.exitcode is None:
            if self._receive(max(until - time.monotonic(), 0.0)) is None:
                break
        return self.exitcode is not None

    def signal(self, signo: int) -> None:
        """Send a signal to the process."""
        self._ask(Signal(signo))

    def output(self) -> tuple[str, str, str]:
        """Return the text written to stdout, stderr and the journal since the last call."""
        written = self._answer(Output(), Written)
        return ("", "", "") if written is None else (written.out, written.err, written.journal)

    def bound_output(self) -> None:
        """Do nothing, because the agent bounds the output."""

    def rewind(self) -> None:
        """Free the memory of output that was read, while the rank is idle."""
        self._ask(Rewind())

    def close(self) -> None:
        """Close the connections."""
        self.connection.close()
        self._about.close()

    def _answer(self, request: Any, kind: type[_Answer]) -> _Answer | None:
        """Send a request to the agent and return its answer; None if the agent or the process has ended.

        Raises:
            WorldUnavailable: the agent does not answer.
        """
        if self._agent.is_silent:
            raise self._agent.lost()
        if not self._ask(request):
            return None
        while (message := self._receive(_ANSWER_S)) is not None:
            if isinstance(message, kind):
                return message
        if self.exitcode is not None:
            return None
        self._agent.is_silent = True
        raise self._agent.lost()

    def _ask(self, request: Any) -> bool:
        try:
            self._about.send(request)
        except OSError:
            return False
        return True

    def _receive(self, timeout_s: float) -> Any:
        """Return the next message; None if no message comes in time, or ever."""
        try:
            message = self._about.recv() if self._about.poll(timeout_s) else None
        except (EOFError, OSError):  # the agent has ended, and its ranks with it
            if self.exitcode is None:
                self.exitcode, self.went_with = -signal.SIGKILL, FORKER
            return None
        if isinstance(message, Ended):
            self.exitcode, self.went_with = message.exitcode, message.went_with
        return message
