"""The messages between the controller and a rank, through the rank's pipe.

``call`` numbers the calls of a pool, so that a late message of an earlier call is recognised. User data (functions,
arguments, results, exceptions) travels as bytes inside a message, so reading a message imports nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from pdlcheck.worlds.processes.exchange.settings import AS_TORCH_BEGINS, Settings

__all__ = [
    "Aftermath",
    "Asks",
    "Call",
    "Changes",
    "Command",
    "DefaultGroup",
    "Done",
    "Ending",
    "Failed",
    "Grant",
    "Halted",
    "LogHalfFull",
    "Message",
    "Ping",
    "Pong",
    "Posted",
    "Prepare",
    "Prepared",
    "Ready",
    "Refuse",
    "Report",
    "Stack",
    "Start",
    "Stop",
    "StopMatching",
    "WhereAreYou",
    "packed",
    "put",
]


DefaultGroup = Literal["kept", "new", "none"]


def put(connection: Connection[Any, Any], message: Any) -> None:
    """Send a message; its reader calls ``recv``."""
    connection.send_bytes(packed(message))


def packed(message: Any) -> bytes:
    """Return a message as the bytes that ``recv`` reads."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Message:
    """The base class of messages.

    A message is pickled as its class and its values, because a dataclass would look up its fields each time.
    """

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


# -- controller to rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(Message):
    """The first message: the place and the settings of the rank.

    ``hosts_store`` is True if this rank hosts the store at ``host`` and ``port``: rank 0, or no rank. ``variables`` are
    the rank's own environment variables. ``device`` is ``cpu`` or ``cuda``. ``board`` is True if the ranks share
    memory, see ``board.py``. ``take_turns`` is explained in ``batch_scheduling.py``. ``comm_wrappers`` are modules
    whose callers reports show. ``cuda_as_cpu`` is True if CUDA code runs on the CPU.
    """

    rank: int
    world_size: int
    backend: str
    threads: int
    host: str
    port: int
    hosts_store: bool
    variables: Mapping[str, str]
    watch: bool
    take_turns: bool
    board: bool
    device: str
    comm_wrappers: tuple[str, ...] = ()
    cuda_as_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """The only message to a template: take the place that ``start`` describes, without a group, and call ``calls``.

    Each of ``calls`` is (fn, args, kwargs); the last one is user code. The random streams start from ``seed`` before
    each of them.
    """

    start: Start
    changes: Changes
    calls: tuple[bytes, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Changes(Message):
    """The changes of the controller's surroundings since the last call, which the rank adopts.

    Only changes are sent, so the rank's own changes of its surroundings stay.
    """

    path: tuple[str, ...] | None = None
    arguments: tuple[str, ...] | None = None
    directory: str | None = None
    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call(Message):
    """A request to call a function.

    ``payload`` is (fn, args, kwargs). ``modules`` are the names and files of modules to import before.

    With a ``seed``, the rank first replaces the settings that earlier calls left by ``settings``, and seeds its random
    streams. ``group`` selects the default group for this call and those that follow: ``kept``, the present one;
    ``new``, a new one after the rank has left its groups; ``none``, no group. ``filters`` controls the warnings, see
    ``warning_relay.py``.
    """

    call: int
    payload: bytes
    modules: tuple[tuple[str, str], ...]
    seed: int | None
    group: DefaultGroup
    changes: Changes
    filters: tuple[bytes, bool] | None = None
    settings: Settings = AS_TORCH_BEGINS


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """A request to end the call, because another rank has failed."""

    call: int


@dataclass(frozen=True, slots=True)
class WhereAreYou(Message):
    """A request for a :class:`Stack`."""

    call: int


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """A request for a :class:`Pong`."""


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """The permission to call the real group, because every member has announced a matching operation.

    ``source`` is the rank that a message comes from.
    """

    operation: int
    source: int = -1


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """The end of all operations of this call; a rank that waits for one raises ``error``."""

    call: int
    error: Exception


# -- rank to controller ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The report that the default group exists; ``missing``: preloaded modules that failed to import, with reasons."""

    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """The answer of a template: it forks ranks from now on. Or it has ended, and ``unfit`` is the reason."""

    unfit: str


@dataclass(frozen=True, slots=True)
class Aftermath(Message):
    """The state that a function left behind in the rank.

    Args:
        default_group: True if it is still the one that the rank started with, and no operation has failed under way.
        groups_made: number of groups made so far; it must agree between ranks, because torch names groups by it.
        groups: number of groups that exist.
        withdrawn: operations that the rank posted and will never launch.
        left_open: True if the rank posted other operations, which it launches only if the controller grants them.
    """

    default_group: bool
    groups_made: int
    groups: int
    withdrawn: tuple[int, ...] = ()
    left_open: bool = False


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The report that the function returned ``payload``; ``heard``: its warnings, if the controller records them."""

    call: int
    payload: bytes
    after: Aftermath
    heard: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """The report that the function raised an exception.

    ``error`` is the pickled exception, None if it cannot be sent. ``kind`` and ``text`` describe it in any case.
    ``site`` is the user's line that raised it. ``consequence`` is True if the exception only reports that a peer has
    ended.
    """

    call: int
    error: bytes | None
    kind: str
    text: str
    traceback: str
    site: str
    consequence: bool
    after: Aftermath


@dataclass(frozen=True, slots=True)
class Ending(Message):
    """The report of a rank that was told to stop, and may still end the call by itself."""

    call: int


@dataclass(frozen=True, slots=True)
class Halted(Message):
    """The report of a rank that was told to stop. ``where`` is its present call, unfinished without ``after``."""

    call: int
    where: str
    after: Aftermath | None = None


@dataclass(frozen=True, slots=True)
class Stack(Message):
    """The position of the rank's main thread, in one line and in full."""

    call: int
    where: str
    stack: str


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """The report that the process lives and is not stopped."""


@dataclass(frozen=True, slots=True)
class Posted(Message):
    """The report of a posted operation that is not on the board."""

    call: int
    operation: int
    signature: Any


@dataclass(frozen=True, slots=True)
class LogHalfFull(Message):
    """A request to read the log, because the rank has filled half of it since the last such request.

    ``begun``: the rank will not ask about its operations below this number.
    """

    call: int
    begun: int


@dataclass(frozen=True, slots=True)
class Asks(Message):
    """A request to grant an operation; with ``waits``, the rank does nothing else until then."""

    call: int
    operation: int
    waits: bool


@dataclass(frozen=True, slots=True)
class StopMatching(Message):
    """The report that several threads of this rank communicate: a waiting thread does not mean a waiting rank."""

    call: int


Command = Start | Call | Stop | WhereAreYou | Ping | Grant | Refuse
Report = Ready | Done | Ending | Failed | Halted | Stack | Pong | Posted | LogHalfFull | Asks | StopMatching
