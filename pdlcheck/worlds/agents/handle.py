"""An agent as the controller sees it, and the ranks that it has forked."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import LAUNCHED_ANSWER_S, SERVER_ANSWER_S
from pdlcheck.worlds.agents.agent import software
from pdlcheck.worlds.agents.messages import (
    AsksHowLong,
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
from pdlcheck.worlds.processes.controller.exits import FORKER

__all__ = ["Agent", "AgentProcess", "require_same_software"]

_Answer = TypeVar("_Answer", Stopped, WaitedForCores, Written)


class Agent:
    """An agent that has said ``Hello``.

    Args:
        control: the connection on which it did.
        hello: its first message.
        lost: returns the error for an agent that does not answer.

    Attributes:
        is_silent: it has failed to answer; the controller does not wait for it again.
    """

    def __init__(self, control: Connection[Any, Any], hello: Hello, lost: Callable[[Hello], WorldUnavailable]) -> None:
        self.control = control
        self.hello = hello
        self.is_silent = False
        self._lost = lost
        self._forks = 0

    @property
    def machine(self) -> tuple[str, str]:
        """The name and the address of its machine."""
        return self.hello.host, self.hello.address

    def fork(self, accept: Callable[[float, Connection[Any, Any]], Connection[Any, Any]]) -> AgentProcess:
        """Let the agent fork a rank.

        Args:
            accept: waits for a connection, like :meth:`Door.accept`.

        Raises:
            WorldUnavailable: the agent does not answer.
        """
        if self.is_silent:
            raise self.lost()
        self._forks += 1
        try:
            self.control.send(Fork(self._forks))
            pipe, about = self._links(accept)
        except (OSError, EOFError) as error:
            self.is_silent = True
            raise self.lost() from error
        return AgentProcess(pipe, about, self)

    def lost(self) -> WorldUnavailable:
        """Return the error for an agent that does not answer."""
        return self._lost(self.hello)

    def _links(
        self, accept: Callable[[float, Connection[Any, Any]], Connection[Any, Any]]
    ) -> tuple[Connection[Any, Any], Connection[Any, Any]]:
        links: dict[bool, Connection[Any, Any]] = {}
        until = time.monotonic() + LAUNCHED_ANSWER_S
        while len(links) < 2:
            connection = accept(until, self.control)
            link = connection.recv()
            if link == Link(self.hello.rank, self._forks, link.is_pipe):
                links[link.is_pipe] = connection
            else:  # the connection belongs to an abandoned fork
                connection.close()
        return links[True], links[False]


def require_same_software(hello: Hello, world: str) -> None:
    """Raise ``WorldUnavailable`` if an agent has other versions than this process."""
    ours = software()
    for name, found in hello.software.items():
        if found != ours.get(name):
            raise WorldUnavailable(
                f"rank {hello.rank} on {hello.host} has {name} {found}, rank 0 has {ours.get(name)}; "
                "install the same versions on every host",
                world=world,
                cure=f"pip install {name}=={ours.get(name)}",
            )


class AgentProcess:
    """A rank that an agent has forked; a ``RankProcess``."""

    def __init__(self, pipe: Connection[Any, Any], about: Connection[Any, Any], agent: Agent) -> None:
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
            message = self._receive(SERVER_ANSWER_S)
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
        while (message := self._receive(LAUNCHED_ANSWER_S)) is not None:
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
