"""What each rank did, in its own order and without times: the input of :mod:`pdlcheck.clock.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlcheck.clock.rounds import Payload

__all__ = ["Act", "Compute", "Exchange", "Post", "Trace", "Wait"]


@dataclass(eq=False, slots=True)
class Act:
    """One rank's part in an operation.

    Args:
        op: ``send``, ``recv``, ``all_reduce``, ...
        what: the operation in words.
        where: the user's source line.
        nbytes: of the tensors that the rank gives, or takes in a receive.
        buffered: a send that ends without its receive.
    """

    rank: int
    op: str
    what: str
    where: str
    nbytes: int
    buffered: bool = False
    waited: bool = False
    completed: bool = False  # the wait has ended well
    run: Trace | None = None  # in which it was posted
    exchange: Exchange | None = None  # once all partners are there
    posted_s: float = 0.0  # filled in by the replay


@dataclass(eq=False, slots=True)
class Exchange:
    """Acts that belong together: a send and its receive, or those of a collective in group order."""

    acts: Sequence[Act]
    root: int = 0
    payload: Payload = ()


@dataclass(eq=False, slots=True)
class Compute:
    """The rank computes."""

    seconds: float
    where: str


@dataclass(eq=False, slots=True)
class Post:
    """The rank posts an operation and goes on."""

    act: Act


@dataclass(eq=False, slots=True)
class Wait:
    """The rank waits until the operation is complete."""

    act: Act


@dataclass
class Trace:
    """The program of each rank as it ran.

    ``by_schedule``: why it might run otherwise under another schedule, such as a receive from any rank.
    """

    world_size: int
    programs: list[list[Compute | Post | Wait]] = field(init=False)
    by_schedule: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.programs = [[] for _ in range(self.world_size)]

    def compute(self, rank: int, seconds: float, where: str) -> None:
        self.programs[rank].append(Compute(seconds, where))

    def post(self, act: Act) -> None:
        act.run = self
        self.programs[act.rank].append(Post(act))

    def wait(self, act: Act) -> None:
        if act.run is self and not act.waited:
            act.waited = True
            self.programs[act.rank].append(Wait(act))

    def meet(self, acts: Sequence[Act], root: int, payload: Payload) -> None:
        if all(act.run is self for act in acts):  # else a part of it was left over by an earlier run
            exchange = Exchange(acts, root, payload)
            for act in acts:
                act.exchange = exchange
