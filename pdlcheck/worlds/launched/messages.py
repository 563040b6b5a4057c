"""What the controller and the agent of a launched process say to each other."""

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
        rank: of the launched process.
        software: versions that must be equal everywhere, name -> version.
        variables: environment variables of ranks that are forked there.
        cores: that the process may use.
        host: name of its machine.
        address: of its machine.
    """

    rank: int
    software: dict[str, str]
    variables: dict[str, str]
    cores: int
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The first message of a launched process that has no session and cannot serve; ``why`` in words."""

    rank: int
    host: str
    why: str


@dataclass(frozen=True, slots=True)
class Link:
    """The first message of each further connection: what it is for. ``fork`` numbers the forks of an agent."""

    rank: int
    fork: int
    is_pipe: bool


# -- controller to agent ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork a rank; connect its pipe and a connection about its process."""

    fork: int


@dataclass(frozen=True, slots=True)
class Bye:
    """The session is over; end with this exit code."""

    exitcode: int


# -- about one process, both ways ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """``pid`` of the new process; -1 if there is none, with the reason."""

    pid: int
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The process has ended; ``exitcode`` is minus the signal where one ended it."""

    exitcode: int
    went_with: str


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to the process."""

    signo: int


@dataclass(frozen=True, slots=True)
class IsStopped:
    """Say whether a signal keeps the process from running."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer to :class:`IsStopped`."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class AsksHowLong:
    """Say for how long the threads of the process have waited for a core."""


@dataclass(frozen=True, slots=True)
class WaitedForCores:
    """The answer to :class:`AsksHowLong`; None where the system does not tell."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Output:
    """Send what the process wrote since the last time."""


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to :class:`Output`."""

    out: str
    err: str
    journal: str


@dataclass(frozen=True, slots=True)
class Rewind:
    """The rank is idle: give back the memory of what was sent."""
