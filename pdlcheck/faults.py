"""What a simulated cluster can be made to suffer: plain data for ``SimulatedWorld(faults=[...])``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Absent", "Corrupt", "DrawnFaults", "Fault", "Kill", "Slow", "Stall"]


def _check_number(fault: Any, name: str) -> None:
    value = getattr(fault, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{type(fault).__name__}: {name} is counted from 0, got {value!r}; pass an int of at least 0")


@dataclass(frozen=True)
class Absent:
    """The rank never comes: nothing of it runs, and there is no default group.

    Its peers get from ``init_process_group`` what torch raises when the time limit of that call elapses, at no cost in
    time: ``DistStoreError: Timed out after 1801 seconds waiting for clients. 2/3 clients joined`` on rank 0, ``wait
    timeout after 1800000ms`` on the others, ``DistNetworkError`` where rank 0 itself is absent. A program that leaves
    that call to the world gets the same error when it first asks for the default group.
    """

    rank: int

    def __post_init__(self) -> None:
        _check_number(self, "rank")


@dataclass(frozen=True)
class _AtOperation:
    """Happens to a rank when it posts its operation of that number, counted from 0 in each run."""

    rank: int
    operation: int

    def __post_init__(self) -> None:
        _check_number(self, "rank")
        _check_number(self, "operation")


@dataclass(frozen=True)
class Kill(_AtOperation):
    """The rank ends without a word when it is about to post its operation of that number, counted from 0 in each run.

    Every collective, message and ``new_group`` of the rank is an operation, also those that torch posts (DDP).

    Its peers see what they see on gloo: operations that need the rank raise ``RuntimeError: Connection closed by
    peer``, ``monitored_barrier`` says which rank was lost, operations among survivors go on. They can make a group of
    their own: where ranks may be lost, members of a new group wait for one another alone. Unlike a process, the rank's
    thread unwinds: ``finally`` blocks run, communication in them does not.
    """


@dataclass(frozen=True)
class Stall(_AtOperation):
    """The rank stops for ever when it is about to post its operation of that number, as under SIGSTOP.

    Ranks that do not need it go on. When nobody can, operations that need it raise what gloo raises when its time
    limit elapses, ``RuntimeError: Timed out waiting 1800000ms for recv operation to complete``, at no cost in time. The
    rank that met it has lost its connections in that group, as on gloo (``Application timeout caused pair closure``);
    other groups are well. A collective needs all its members, though some of gloo's go on without one: a broadcast may
    reach the others. The thread unwinds at the end of the run, as with ``Kill``.
    """


@dataclass(frozen=True)
class Corrupt(_AtOperation):
    """What the rank gives to its operation of that number, or gets out of it, is damaged; its own input stays as it is.

    Args:
        how: ``nan``, one element is NaN; ``bit_flip``, one bit of one element is flipped; ``stale``, the output keeps
            what it held before (a result that never landed), the input is what the rank gave to its operation before
            of the same kind, shapes and dtypes.
        where: ``output``, what this rank alone gets; ``input``, what it sends, so that all receivers get the damage.
        element: number of the element, through all tensors that the operation reads (or writes) on the rank.
        bit: of ``bit_flip``, 0 the lowest; negative from the top. -2 is the highest bit of a float's exponent.

    Raises:
        ValueError: a value is none of those named here.
    """

    how: str = "nan"
    where: str = "output"
    element: int = 0
    bit: int = -2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_number(self, "element")
        for name, choices in (("how", ("nan", "bit_flip", "stale")), ("where", ("input", "output"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Corrupt: {name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        if isinstance(self.bit, bool) or not isinstance(self.bit, int):
            raise ValueError(f"Corrupt: bit is counted from 0, or from -1 from the top; got {self.bit!r}; pass an int")


@dataclass(frozen=True)
class Slow:
    """The rank's ``pdlcheck.clock.compute`` takes ``factor`` times as long, on the virtual clock: a straggler.

    Its links are as fast as before; ``Topology(links=...)`` makes some slower.

    Raises:
        ValueError: ``factor`` is not positive, or infinite.
    """

    rank: int
    factor: float

    def __post_init__(self) -> None:
        _check_number(self, "rank")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive and finite, got {self.factor!r}; pass 2.0 for half the speed")


Fault = Absent | Corrupt | Kill | Slow | Stall


class DrawnFaults(tuple[Fault, ...]):
    """Faults that somebody else draws, Hypothesis above all.

    Args:
        reject: called after a run in which one of them did not come about, instead of a failure; it raises.
    """

    reject: Callable[[], object]

    def __new__(cls, faults: Iterable[Fault], reject: Callable[[], object]) -> DrawnFaults:
        drawn = super().__new__(cls, faults)
        drawn.reject = reject
        return drawn

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)  # for rank processes, which suffer none

    def __deepcopy__(self, memo: object) -> DrawnFaults:
        return self

    def __repr__(self) -> str:
        return repr(list(self))
