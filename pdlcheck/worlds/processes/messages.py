"""What the controller and a rank say to each other through the rank's pipe.

``call`` numbers the calls of a pool, so that a late message of an earlier call is recognised. What belongs
to the user (functions, arguments, results, exceptions) travels as bytes inside a message: reading a message
imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Aftermath",
    "AreYouThere",
    "Call",
    "Changes",
    "Command",
    "Done",
    "Failed",
    "Grant",
    "Halted",
    "Here",
    "Posted",
    "Ready",
    "Refuse",
    "Report",
    "Stack",
    "Start",
    "Stop",
    "Unwatch",
    "Waits",
    "WhereAreYou",
]

# -- controller to rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: who the rank is.

    Rank 0 hosts the store at ``host`` and ``port``; ``variables`` are the rank's own environment variables;
    ``device`` is ``cpu`` or ``cuda``.
    """

    rank: int
    world_size: int
    backend: str
    threads: int
    host: str
    port: int
    variables: Mapping[str, str]
    watch: bool
    device: str


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed around the controller's code since the last call, to change around the rank's.

    Only changes are sent: what the rank's own code did to its surroundings stays.
    """

    path: tuple[str, ...] | None = None
    directory: str | None = None
    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function. ``payload`` is (fn, args, kwargs); ``module`` the name and file of fn's module.

    With a ``seed``, the rank first forgets the settings of earlier calls and seeds its random streams; with ``rejoin``
    it first leaves its groups and joins a new default group.
    """

    call: int
    payload: bytes
    module: tuple[str, str] | None
    seed: int | None
    rejoin: bool
    changes: Changes


@dataclass(frozen=True, slots=True)
class Stop:
    """Another rank has failed: come to an end."""

    call: int


@dataclass(frozen=True, slots=True)
class WhereAreYou:
    """Send a :class:`Stack`."""

    call: int


@dataclass(frozen=True, slots=True)
class AreYouThere:
    """Send a :class:`Here`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Every member has announced a fitting operation: make the call on the real group.

    ``source``: of a message, the rank that it comes from.
    """

    operation: int
    source: int = -1


@dataclass(frozen=True, slots=True)
class Refuse:
    """No operation of this call goes on; whoever waits for one raises ``error``."""

    call: int
    error: Exception


# -- rank to controller ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """The default group is up. ``missing``: preloaded modules that could not be imported, with the reason."""

    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What a function left behind in the rank.

    Args:
        default_group: the default group is still the one that the rank started with.
        groups_made: number of groups made so far; it must agree between ranks, as torch names groups by it.
        groups: number of groups that exist.
    """

    default_group: bool
    groups_made: int
    groups: int


@dataclass(frozen=True, slots=True)
class Done:
    """The function returned; ``payload`` is its result."""

    call: int
    payload: bytes
    after: Aftermath


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised.

    ``error`` is the pickled exception, None if it cannot travel; ``kind``, ``text`` and ``words`` (the
    attributes that are strings) describe it in any case. ``site``: the user's line that raised it.
    ``consequence``: it only says that a peer has gone.
    """

    call: int
    error: bytes | None
    kind: str
    text: str
    words: Mapping[str, str]
    traceback: str
    site: str
    consequence: bool
    after: Aftermath


@dataclass(frozen=True, slots=True)
class Halted:
    """The rank was told to stop; ``where`` is the call that it is in. Without ``after`` it is still in it."""

    call: int
    where: str
    after: Aftermath | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Where the rank's main thread is, in one line and in full."""

    call: int
    where: str
    stack: str


@dataclass(frozen=True, slots=True)
class Here:
    """The process lives and is not stopped."""


@dataclass(frozen=True, slots=True)
class Posted:
    """The rank wants to take part in an operation; ``signature`` says in which."""

    call: int
    operation: int
    signature: Any


@dataclass(frozen=True, slots=True)
class Waits:
    """The rank does nothing else until this operation is granted."""

    call: int
    operation: int


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Several threads of this rank communicate, so that a waiting one does not mean a waiting rank."""

    call: int


Command = Start | Call | Stop | WhereAreYou | AreYouThere | Grant | Refuse
Report = Ready | Done | Failed | Halted | Stack | Here | Posted | Waits | Unwatch
