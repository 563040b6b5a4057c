"""The messages between the controller and the agent of a launched process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Absent",
    "AsksHowLong",
    "Bye",
    "Ended",
    "Fork",
    "Hello",
    "IsStopped",
    "Link",
    "Output",
    "Rewind",
    "Signal",
    "Started",
    "Stopped",
    "WaitedForCores",
    "Written",
]


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of an agent.

    Args:
        rank: rank of the launched process.
        software: versions that must be equal in all processes, name -> version.
        variables: environment variables of the ranks that the agent forks.
        cores: number of cores that the process may use.
        host: name of its machine.
        address: address of its machine.
    """

    rank: int
    software: dict[str, str]
    variables: dict[str, str]
    cores: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The first message of a launched process that has no session and cannot serve; ``why`` is the reason in words."""

    rank: int
    host: str
    why: str


@dataclass(frozen=True, slots=True)
class Link:
    """The first message of each further connection; it declares the purpose of the connection.

    Args:
        rank: rank of the launched process.
        fork: number of the ``Fork`` request that it belongs to.
        is_pipe: True for the pipe of the rank, False for the connection about its process.
    """

    rank: int
    fork: int
    is_pipe: bool


# -- controller to agent ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fork:
    """A request to fork a rank, and to connect its pipe and a connection about its process."""

    fork: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The end of the session; the agent ends with this exit code."""

    exitcode: int


# -- about one process, both ways ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The ``pid`` of the new process; -1 if there is none, with the reason in ``trouble``."""

    pid: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the process; ``exitcode`` is minus the signal if a signal ended it."""

    exitcode: int
    went_with: str


@dataclass(frozen=True, slots=True)
class Signal:
    """A request to send a signal to the process."""

    signo: int


@dataclass(frozen=True, slots=True)
class IsStopped:
    """A request to report whether a signal keeps the process from running."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer to :class:`IsStopped`."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class AsksHowLong:
    """A request to report how long the main thread of the process has waited for a core."""


@dataclass(frozen=True, slots=True)
class WaitedForCores:
    """The answer to :class:`AsksHowLong`; None if the system does not report it."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Output:
    """A request for the output of the process since the last request."""


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to :class:`Output`."""

    out: str
    err: str
    journal: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """A request to free the memory of output that was sent, while the rank is idle."""
