"""What the controller and a rank say to each other through the rank's pipe.

``call`` numbers the calls of a pool, so that a late message of an earlier call is recognised. What belongs
to the user (functions, arguments, results, exceptions) travels as bytes inside a message: reading a message
imports nothing.
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
    "AreYouThere",
    "Asks",
    "Call",
    "Changes",
    "Command",
    "DefaultGroup",
    "Done",
    "Ending",
    "Failed",
    "Grant",
    "HalfFull",
    "Halted",
    "Here",
    "Message",
    "Posted",
    "Prepare",
    "Prepared",
    "Ready",
    "Refuse",
    "Report",
    "Stack",
    "Start",
    "Stop",
    "Unwatch",
    "WhereAreYou",
    "packed",
    "put",
]


DefaultGroup = Literal["kept", "new", "none"]


def put(connection: Connection[Any, Any], message: Any) -> None:
    """Send a message; its reader calls ``recv``."""
    connection.send_bytes(packed(message))


def packed(message: Any) -> bytes:
    """A message as ``recv`` reads it."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


class Message:
    """Pickled as the class and its values: a dataclass would look its fields up each time."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


# -- controller to rank ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start(Message):
    """The first message: who the rank is.

    Rank 0 hosts the store at ``host`` and ``port``; ``variables`` are the rank's own environment variables;
    ``device`` is ``cpu`` or ``cuda``; ``board``: the ranks share memory, see ``board.py``.
    ``take_turns``: see ``taking_turns.py``. ``comm_wrappers``: modules whose callers reports show. ``cuda_as_cpu``:
    CUDA code runs on the CPU.
    """

    rank: int
    world_size: int
    backend: str
    threads: int
    host: str
    port: int
    variables: Mapping[str, str]
    watch: bool
    take_turns: bool
    board: bool
    device: str
    comm_wrappers: tuple[str, ...] = ()
    cuda_as_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Prepare(Message):
    """The only message to a template: be what ``start`` says, but for its group, and call these functions.

    Each of ``calls`` is (fn, args, kwargs), the last one user code; the random streams start from ``seed`` before each.
    """

    start: Start
    changes: Changes
    calls: tuple[bytes, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Changes(Message):
    """What has changed around the controller's code since the last call, to change around the rank's.

    Only changes are sent: what the rank's own code did to its surroundings stays.
    """

    path: tuple[str, ...] | None = None
    arguments: tuple[str, ...] | None = None
    directory: str | None = None
    set: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call(Message):
    """Call a function. ``payload`` is (fn, args, kwargs); ``modules``: names and files of modules to import before.

    With a ``seed``, the rank first takes the ``settings``, in place of what earlier calls have left, and seeds its
    random streams. The default ``group`` is the one that is there, or a new one, after the rank has left its groups, or
    none, in this call and those that follow. ``ears``: what becomes of its warnings, see ``heard.py``.
    """

    call: int
    payload: bytes
    modules: tuple[tuple[str, str], ...]
    seed: int | None
    group: DefaultGroup
    changes: Changes
    ears: tuple[bytes, bool] | None = None
    settings: Settings = AS_TORCH_BEGINS


@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Another rank has failed: come to an end."""

    call: int


@dataclass(frozen=True, slots=True)
class WhereAreYou(Message):
    """Send a :class:`Stack`."""

    call: int


@dataclass(frozen=True, slots=True)
class AreYouThere(Message):
    """Send a :class:`Here`."""


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """Every member has announced a fitting operation: make the call on the real group.

    ``source``: of a message, the rank that it comes from.
    """

    operation: int
    source: int = -1


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """No operation of this call goes on; whoever waits for one raises ``error``."""

    call: int
    error: Exception


# -- rank to controller ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """The default group is up. ``missing``: preloaded modules that could not be imported, with the reason."""

    missing: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prepared(Message):
    """Of a template: it forks ranks from now on; or ``unfit``, why it must not, and it has ended."""

    unfit: str


@dataclass(frozen=True, slots=True)
class Aftermath(Message):
    """What a function left behind in the rank.

    Args:
        default_group: it is still the one that the rank started with, and no operation has failed under way.
        groups_made: number of groups made so far; it must agree between ranks, as torch names groups by it.
        groups: number of groups that exist.
        withdrawn: operations that it posted and that this rank will never launch.
        left_open: it posted others that this rank launches only if the controller says so.
    """

    default_group: bool
    groups_made: int
    groups: int
    withdrawn: tuple[int, ...] = ()
    left_open: bool = False


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The function returned; ``payload`` is its result. ``heard``: what it warned of, if somebody records."""

    call: int
    payload: bytes
    after: Aftermath
    heard: bytes = b""


@dataclass(frozen=True, slots=True)
class Failed(Message):
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
class Ending(Message):
    """The rank was told to stop, and may end the call by itself yet."""

    call: int


@dataclass(frozen=True, slots=True)
class Halted(Message):
    """The rank was told to stop; ``where`` is the call that it is in. Without ``after`` it is still in it."""

    call: int
    where: str
    after: Aftermath | None = None


@dataclass(frozen=True, slots=True)
class Stack(Message):
    """Where the rank's main thread is, in one line and in full."""

    call: int
    where: str
    stack: str


@dataclass(frozen=True, slots=True)
class Here(Message):
    """The process lives and is not stopped."""


@dataclass(frozen=True, slots=True)
class Posted(Message):
    """The rank has posted an operation, and this is not on the board."""

    call: int
    operation: int
    signature: Any


@dataclass(frozen=True, slots=True)
class HalfFull(Message):
    """The rank has written half of its log since it said so last: read it, to make room.

    ``begun``: nothing more will be asked about its operations below this number.
    """

    call: int
    begun: int


@dataclass(frozen=True, slots=True)
class Asks(Message):
    """The rank goes on with this operation when it is granted; ``waits``: and does nothing else until then."""

    call: int
    operation: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Unwatch(Message):
    """Several threads of this rank communicate, so that a waiting one does not mean a waiting rank."""

    call: int


Command = Start | Call | Stop | WhereAreYou | AreYouThere | Grant | Refuse
Report = Ready | Done | Ending | Failed | Halted | Stack | Here | Posted | HalfFull | Asks | Unwatch
