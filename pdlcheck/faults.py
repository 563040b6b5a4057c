"""The faults that a simulated cluster can suffer: plain data for ``SimulatedWorld(faults=[...])``."""

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
    """A rank that never joins: none of its code runs, and no rank gets a default group.

    Its peers get the error that torch raises from ``init_process_group`` when the time limit of that call elapses. It
    costs no time. It is ``DistStoreError: Timed out after 1801 seconds waiting for clients. 2/3 clients joined`` on
    rank 0 and ``wait timeout after 1800000ms`` on the others, or ``DistNetworkError`` if rank 0 itself is absent. A
    program that leaves ``init_process_group`` to the world gets the same error when it first uses the default group.
    """

    rank: int

    def __post_init__(self) -> None:
        _check_number(self, "rank")


@dataclass(frozen=True)
class _AtOperation:
    """A fault of a rank at the moment when it posts its k-th operation, counted from 0 in each run."""

    rank: int
    operation: int

    def __post_init__(self) -> None:
        _check_number(self, "rank")
        _check_number(self, "operation")


@dataclass(frozen=True)
class Kill(_AtOperation):
    """A rank that ends without an error when it is about to post its k-th operation, counted from 0 in each run.

    Every collective, message and ``new_group`` of the rank is an operation, including those that torch posts (DDP).

    Its peers observe the same as on gloo. Operations that need the rank raise ``RuntimeError: Connection closed by
    peer``, ``monitored_barrier`` names the lost rank, and operations among the survivors continue. The survivors can
    create a group of their own: where ranks may be lost, the members of a new group wait only for one another. Unlike a
    process, the rank's thread unwinds: its ``finally`` blocks run, but communication in them does not.
    """


@dataclass(frozen=True)
class Stall(_AtOperation):
    """A rank that stops forever when it is about to post its k-th operation, as under SIGSTOP.

    Ranks that do not need it continue. When no rank can continue, operations that need the stalled rank raise the error
    of gloo's time limit, ``RuntimeError: Timed out waiting 1800000ms for recv operation to complete``, at no cost in
    time. The rank that gets this error loses its connections in that group, as on gloo (``Application timeout caused
    pair closure``); its other groups keep working. A collective needs all its members, although some collectives of
    gloo complete without one: a broadcast may reach the others. The thread unwinds at the end of the run, as with
    ``Kill``.
    """


@dataclass(frozen=True)
class Corrupt(_AtOperation):
    """Damage to the input or the output of a rank's k-th operation; the rank's own input tensor stays as it is.

    Args:
        how: ``nan``, one element becomes NaN; ``bit_flip``, one bit of one element is flipped; ``stale``, the output
            keeps its previous content (a result that never arrived), or the input is that of the rank's previous
            operation with the same kind, shapes and dtypes.
        where: ``output``, the data that only this rank gets; ``input``, the data that it sends, so that every receiver
            gets the damage.
        element: index of the element, through all tensors that the operation reads (or writes) on the rank.
        bit: for ``bit_flip``; 0 is the lowest bit, negative numbers count from the top. -2 is the highest bit of a
            float's exponent.

    Raises:
        ValueError: a value is not one of those named here.
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
    """A straggler: on the virtual clock, the rank's ``pdlcheck.clock.compute`` takes ``factor`` times as long.

    Its links keep their speed; use ``Topology(links=...)`` for slower links.

    Raises:
        ValueError: ``factor`` is not positive, or is infinite.
    """

    rank: int
    factor: float

    def __post_init__(self) -> None:
        _check_number(self, "rank")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"factor must be positive and finite, got {self.factor!r}; pass 2.0 for half the speed")


Fault = Absent | Corrupt | Kill | Slow | Stall


class DrawnFaults(tuple[Fault, ...]):
    """Faults that a generator draws, most often Hypothesis.

    Args:
        faults: the faults.
        reject: called instead of a failure after a run in which one of the faults did not happen; it raises.
    """

    reject: Callable[[], object]

    def __new__(cls, faults: Iterable[Fault], reject: Callable[[], object]) -> DrawnFaults:
        """Return the faults, with the function that rejects an example."""
        drawn = super().__new__(cls, faults)
        drawn.reject = reject
        return drawn

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)  # rank processes suffer no faults, so a plain tuple is enough

    def __deepcopy__(self, memo: object) -> DrawnFaults:
        return self

    def __repr__(self) -> str:
        return repr(list(self))
