"""The agent: a process that forks ranks for the controller, and reports how they are.

The agent itself never computes and joins no process group. So a killed rank can be replaced, and a pool of fewer ranks
has its own default group.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

from pdlcheck.errors import WorldUnavailable
from pdlcheck.time_budgets import OUTPUT_BOUND_S
from pdlcheck.worlds.agents.messages import (
    AsksHowLong,
    Bye,
    Ended,
    Fork,
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
from pdlcheck.worlds.processes.controller.forkserver import ForkServer
from pdlcheck.worlds.processes.controller.local import LocalProcess

__all__ = ["fork_ranks", "own_address", "software"]


def fork_ranks(
    rank: int,
    control: Connection[Any, Any],
    connections: Iterator[Connection[Any, Any]],
    server: Callable[[], ForkServer],
) -> int:
    """Fork a rank for each request of the controller, until the controller says ``Bye``; return its exit code.

    Args:
        rank: the rank of the processes that this agent forks.
        control: the connection on which the agent has said ``Hello``.
        connections: yields further connections to the controller.
        server: returns the running fork server; a new one if the old one has ended.

    Raises:
        EOFError, OSError: the controller has ended.
    """
    while True:
        match control.recv():
            case Fork(fork=fork):
                _fork(rank, fork, server, connections)
            case Bye(exitcode=exitcode):
                return exitcode


def software() -> dict[str, str]:
    """Return the versions that must agree between the controller and its agents."""
    names = ("pdlcheck", "torch", "numpy", "pytest", "hypothesis", "cloudpickle")
    python = ".".join(platform.python_version_tuple()[:2])  # messages are compatible within one minor version
    return {"python": python, **{name: version(name) for name in names}}


def own_address(connection: Connection[Any, Any]) -> str:
    """Return the address of this machine on a connection to the controller."""
    with socket.socket(fileno=os.dup(connection.fileno())) as connected:
        return str(connected.getsockname()[0])


def _fork(rank: int, fork: int, server: Callable[[], ForkServer], connections: Iterator[Connection[Any, Any]]) -> None:
    pipe = next(connections)
    pipe.send(Link(rank, fork, is_pipe=True))
    about = next(connections)
    about.send(Link(rank, fork, is_pipe=False))
    with pipe:
        try:
            process = LocalProcess(server(), about, pipe, ())
        except WorldUnavailable as error:
            with about:
                about.send(Started(-1, str(error)))
            return
    threading.Thread(target=_attend, args=(process, about), daemon=True).start()


def _attend(process: LocalProcess, about: Connection[Any, Any]) -> None:
    """Report one process to the controller, and carry out the controller's requests about it."""
    try:
        try:
            about.send(Started(process.started()))
        except WorldUnavailable as error:
            about.send(Started(-1, str(error)))
            return
        while True:
            watched = [about.fileno(), *([process.status] if process.exitcode is None else [])]
            readable, _, _ = select.select(watched, [], [], OUTPUT_BOUND_S)
            process.bound_output()
            if process.status in readable and process.ended(0):
                exitcode = process.exitcode if process.exitcode is not None else -signal.SIGKILL
                about.send(Ended(exitcode, process.went_with))
            if about.fileno() in readable:
                match about.recv():
                    case Signal(signo=signo):
                        process.signal(signo)
                    case IsStopped():
                        about.send(Stopped(process.is_stopped()))
                    case AsksHowLong():
                        about.send(WaitedForCores(process.waited_for_cores()))
                    case Output():
                        about.send(Written(*process.output()))
                    case Rewind():
                        process.rewind()
    except (EOFError, OSError):  # the controller has abandoned this rank
        process.signal(signal.SIGKILL)
    finally:
        process.close()
