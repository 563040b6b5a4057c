"""Every exception that pdlcheck raises on purpose, with the data of its message, and every warning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "CHECK_FIELDS",
    "BufferHazard",
    "CheckFailed",
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
    "RanksDiffer",
    "RanksDifferWarning",
    "ScheduleNotFollowed",
    "SetOrderWarning",
    "SharedTensorWarning",
    "UnseededImportWarning",
    "Unsupported",
    "WorldTooSmall",
    "WorldUnavailable",
]


class PdlcheckError(Exception):
    """The base class of all errors of this package; ``fields`` survive pickling between processes."""

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
    """A state in which no rank can continue.

    Fields: ``ranks``, one line for each rank; ``cycle``, the ranks that wait for one another.
    """

    ranks: Sequence[str]
    cycle: Sequence[int]


class Livelock(Deadlock):
    """A state in which ranks poll forever for something that never comes.

    Fields: ``ranks``, one line for each rank; ``polls``, the number of polls in a row.
    """

    polls: int
    cycle: Sequence[int] = ()


class CollectiveMismatch(PdlcheckError):
    """A collective that ranks entered with different arguments, or a message that does not fit its receive.

    Fields: ``ranks``, one line for each rank; ``what``, the argument that differs; ``odd``, the ranks in the minority,
    empty if no side is smaller than every other one.
    """

    ranks: Sequence[str]
    what: str
    odd: Sequence[int]


class BufferHazard(PdlcheckError):
    """An access to a buffer of an operation that the rank had not waited for.

    Fields: ``rank``; ``access``, ``"read"`` or ``"write"``; ``buffer``, ``"input"`` or ``"output"`` of the operation;
    ``operation``, in words; ``posted``, the line that posted it; ``touched``, the line that read or wrote the buffer.
    """

    rank: int
    access: str
    buffer: str
    operation: str
    posted: str
    touched: str


class CheckFailed(AssertionError):
    """A property that a check found broken.

    The message is for people. The fields are for tools; a field is None where the check does not know it. All of them
    survive pickling.

    Args:
        message: the whole message, of several lines.
        subject: the name of the function under test.
        rank: the first rank that is wrong.
        step: the step of the training, or the call, that is wrong, from 1.
        tensor: the name of the first wrong tensor.
        index: the index of its first wrong element.
        found: the value of that element.
        expected: the right value.
        cause: the likely cause; None if no known cause fits.
        evidence: what the cause rests on.
        case: the facts that reproduce the case.
        replay: the command that repeats the case.
    """

    def __init__(
        self,
        message: str = "",
        *,
        subject: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        tensor: str | None = None,
        index: tuple[int, ...] | None = None,
        found: object = None,
        expected: object = None,
        cause: str | None = None,
        evidence: str | None = None,
        case: str | None = None,
        replay: str | None = None,
    ) -> None:
        super().__init__(message)
        self.subject = subject
        self.rank = rank
        self.step = step
        self.tensor = tensor
        self.index = index
        self.found = found
        self.expected = expected
        self.cause = cause
        self.evidence = evidence
        self.case = case
        self.replay = replay

    @property
    def fields(self) -> dict[str, Any]:
        """Return every field by its name, in the order of the arguments."""
        return {name: getattr(self, name) for name in CHECK_FIELDS}


CHECK_FIELDS = (
    "subject",
    "rank",
    "step",
    "tensor",
    "index",
    "found",
    "expected",
    "cause",
    "evidence",
    "case",
    "replay",
)


class CheckpointError(PdlcheckError):
    """A checkpoint that could not be written, or that is refused because its content is not what was written.

    Fields: ``path``; ``reason``, what is wrong; ``previous``, the newest older intact checkpoint, or None; ``rank``,
    the first rank that detected it.
    """

    path: str
    reason: str
    previous: str | None
    rank: int


class LeakedWork(PdlcheckError):
    """A run in which all ranks returned and left operations that no rank waited for.

    Fields: ``ranks``, one line for each such operation; ``posted``, the lines that posted them, in the same order.
    """

    ranks: Sequence[str]
    posted: Sequence[str]


class PeerFailed(PdlcheckError):
    """The exception that ends a rank whose peers are gone, so that it stops waiting; it is never the first cause."""


class RankFailed(PdlcheckError):
    """An exception of a rank that cannot be pickled and sent to the controller. Fields: ``rank``, ``traceback``."""

    rank: int
    traceback: str


class RankDied(PdlcheckError):
    """A rank process that ended without a result.

    Fields: ``rank``; ``exitcode``, the negated signal number if negative; ``stderr``, what the process wrote there.
    """

    rank: int
    exitcode: int | None
    stderr: str


class RankStalled(PdlcheckError):
    """A rank that a fault stalled and that never continued.

    Fields: ``rank``; ``operation``, in words, which the rank did not post.
    """

    rank: int
    operation: str


class RankTimeout(PdlcheckError):
    """A run whose ranks did not finish in time.

    Fields: ``timeout_s``; ``ranks``, one line for each rank; ``stacks``.
    """

    timeout_s: float
    ranks: Sequence[str]
    stacks: Sequence[str]


class RanksDiffer(PdlcheckError):
    """A state of a training that differs between ranks, found by ``pdlcheck.watch``; every rank raises the same.

    Fields: ``step``, the number of steps taken, 0 before the first; ``kind``, such as ``"parameters"``; ``tensor``, the
    name of the first tensor or setting that differs, or None; ``rank``, the first rank that differs from the most;
    ``cause``, the likely cause.
    """

    step: int
    kind: str
    tensor: str | None
    rank: int
    cause: str


class ScheduleNotFollowed(PdlcheckError):
    """A recorded choice that could not be made: the program, its input or its world size differs from the recording."""


class Inconclusive(PdlcheckError):
    """A check that could not decide; such a check never passes by default."""


class Unsupported(PdlcheckError):
    """An operation that the simulated world does not offer; the message names a world that does."""


class WorldUnavailable(PdlcheckError):
    """A world whose requirements this machine does not meet.

    Fields: ``world``; ``cure``, the command that installs what is missing.
    """

    world: str
    cure: str


class WorldTooSmall(WorldUnavailable):
    """A run with more ranks than the world has places for.

    Fields: ``world_size``, the number that was requested; ``available``, the number of places.
    """

    world_size: int
    available: int


class RanksDifferWarning(UserWarning):
    """A training whose ranks hold different states; ``pdlcheck.watch(..., on_violation="warn")`` gives it."""


class SetOrderWarning(UserWarning):
    """Simulated ranks communicate in the iteration order of one set; each process would have an order of its own."""


class SharedTensorWarning(UserWarning):
    """Simulated ranks share a tensor and write to it; each process would have a tensor of its own."""


class UnseededImportWarning(UserWarning):
    """Simulated ranks share random numbers that a module drew unseeded at import; each process would draw its own."""
