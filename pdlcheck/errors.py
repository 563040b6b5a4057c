"""Every exception that pdlcheck raises on purpose, with the data that its message was made from, and its warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "BufferHazard",
    "CheckpointError",
    "CollectiveMismatch",
    "Deadlock",
    "Inconclusive",
    "LeakedWork",
    "Livelock",
    "PdlcheckError",
    "PeerFailed",
    "RankDied",
    "RankFailed",
    "RankStalled",
    "RankTimeout",
    "ScheduleNotFollowed",
    "SetOrderWarning",
    "SharedTensorWarning",
    "UnseededImportWarning",
    "Unsupported",
    "WorldTooSmall",
    "WorldUnavailable",
]


class PdlcheckError(Exception):
    """Base of all errors of this package; ``fields`` survive pickling between processes."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields: dict[str, Any] = self.__dict__.get("fields", {})
        try:
            return fields[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.fields), self.__dict__


def _rebuild(cls: type[PdlcheckError], message: str, fields: dict[str, Any]) -> PdlcheckError:
    return cls(message, **fields)


class Deadlock(PdlcheckError):
    """No rank can go on. Fields: ``ranks``, one line for each rank; ``cycle``, the ranks that wait for one another."""

    ranks: Sequence[str]
    cycle: Sequence[int]


class Livelock(Deadlock):
    """Ranks ask for ever for what never comes. Fields: ``ranks``, one line for each; ``polls``, how often in a row."""

    polls: int
    cycle: Sequence[int] = ()


class CollectiveMismatch(PdlcheckError):
    """Ranks met in one collective with different arguments, or a message does not fit.

    Fields: ``ranks``, one line for each; ``what`` differs; ``odd``, those ranks that differ from more others than there
    are of them, empty where it is one against one.
    """

    ranks: Sequence[str]
    what: str
    odd: Sequence[int]


class BufferHazard(PdlcheckError):
    """A rank touched a buffer of an operation that it had not waited for.

    Fields: ``rank``; ``access``, ``"read"`` or ``"write"``; ``buffer``, ``"input"`` or ``"output"`` of the operation;
    ``operation``, in words; ``posted``, the line that posted it; ``touched``, the line that read or wrote.
    """

    rank: int
    access: str
    buffer: str
    operation: str
    posted: str
    touched: str


class CheckpointError(PdlcheckError):
    """A checkpoint could not be written, or is refused because it is not what was written.

    Fields: ``path``; ``reason``, what is wrong; ``previous``, the newest older intact one, or None; ``rank``, the
    first that met it.
    """

    path: str
    reason: str
    previous: str | None
    rank: int


class LeakedWork(PdlcheckError):
    """All ranks returned and left operations behind.

    Fields: ``ranks``, one line for each such operation; ``posted``, the lines that posted them, in the same order.
    """

    ranks: Sequence[str]
    posted: Sequence[str]


class PeerFailed(PdlcheckError):
    """Raised inside a rank whose peers are gone, so that it stops waiting; never the first cause."""


class RankFailed(PdlcheckError):
    """A rank raised an exception that cannot travel between processes. Fields: ``rank``, ``traceback``."""

    rank: int
    traceback: str


class RankDied(PdlcheckError):
    """A rank's process ended without a result.

    Fields: ``rank``; ``exitcode``, minus the signal where negative; ``stderr``, what it wrote.
    """

    rank: int
    exitcode: int | None
    stderr: str


class RankStalled(PdlcheckError):
    """A fault stalled a rank, and it never went on. Fields: ``rank``; ``operation``, in words, that it did not post."""

    rank: int
    operation: str


class RankTimeout(PdlcheckError):
    """The ranks did not finish in time. Fields: ``timeout_s``, ``ranks``, one line for each; ``stacks``."""

    timeout_s: float
    ranks: Sequence[str]
    stacks: Sequence[str]


class ScheduleNotFollowed(PdlcheckError):
    """A recorded choice could not be made: the program, its input or its world size is not what was recorded."""


class Inconclusive(PdlcheckError):
    """A check could not decide; it never passes by default."""


class Unsupported(PdlcheckError):
    """The simulated world does not offer this operation; the message says what does."""


class WorldUnavailable(PdlcheckError):
    """This machine lacks what a world needs. Fields: ``world``; ``cure``, the command that brings what is missing."""

    world: str
    cure: str


class WorldTooSmall(WorldUnavailable):
    """There is no place for so many ranks. Fields: ``world_size``, asked for; ``available``."""

    world_size: int
    available: int


class SetOrderWarning(UserWarning):
    """Simulated ranks communicate in the order of a set, of which each process has one of its own."""


class SharedTensorWarning(UserWarning):
    """Simulated ranks share a tensor and write it, of which each process would have its own."""


class UnseededImportWarning(UserWarning):
    """Simulated ranks share numbers that a module drew unseeded at its import; each process would draw its own."""
