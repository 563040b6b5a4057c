"""The actions of each rank, in its own order and without times: the input of :mod:`pdlcheck.clock.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlcheck.operations.rounds import Payload

__all__ = ["Act", "Compute", "Exchange", "Post", "Trace", "Wait"]


@dataclass(eq=False, slots=True)
class Act:
    """One rank's part in an operation.

    Args:
        rank: the rank.
        op: ``send``, ``recv``, ``all_reduce``, ...
        what: a description of the operation.
        where: the user's source line.
        nbytes: bytes of the tensors that the rank passes in, or of the tensor of a receive.
        buffered: a send that returns before its receive is posted.
        waited: the rank waits for the operation.
        completed: the wait has ended without an error.
        run: the trace in which it was posted.
        exchange: the matched acts, once all partners are there.
        posted_s: the time of the post; the replay sets it.
    """

    rank: int
    op: str
    what: str
    where: str
    nbytes: int
    buffered: bool = False
    waited: bool = False
    completed: bool = False
    run: Trace | None = None
    exchange: Exchange | None = None
    posted_s: float = 0.0


@dataclass(eq=False, slots=True)
class Exchange:
    """Acts that belong together: a send and its receive, or the acts of a collective in group order."""

    acts: Sequence[Act]
    root: int = 0
    payload: Payload = ()


@dataclass(eq=False, slots=True)
class Compute:
    """A computation of the rank."""

    seconds: float
    where: str


@dataclass(eq=False, slots=True)
class Post:
    """The post of an operation; the rank continues."""

    act: Act


@dataclass(eq=False, slots=True)
class Wait:
    """A wait of the rank until the operation is complete."""

    act: Act


@dataclass
class Trace:
    """The program of each rank as it ran.

    ``by_schedule``: the reasons why it might run otherwise under another schedule, such as a receive from any rank.
    """

    world_size: int
    programs: list[list[Compute | Post | Wait]] = field(init=False)
    by_schedule: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = [[] for _ in range(self.world_size)]

    def compute(self, rank: int, seconds: float, where: str) -> None:
        """Record a computation."""
        self.programs[rank].append(Compute(seconds, where))

    def post(self, act: Act) -> None:
        """Record the post of an operation."""
        act.run = self
        self.programs[act.rank].append(Post(act))

    def wait(self, act: Act) -> None:
        """Record the first wait for an operation of this trace."""
        if act.run is self and not act.waited:
            act.waited = True
            self.programs[act.rank].append(Wait(act))

    def meet(self, acts: Sequence[Act], root: int, payload: Payload) -> None:
        """Record that the acts belong together."""
        if all(act.run is self for act in acts):  # an act may be left over from an earlier run
            exchange = Exchange(acts, root, payload)
            for act in acts:
                act.exchange = exchange
