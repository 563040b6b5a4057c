"""The events of a run, and the observers that subscribe to them when it begins.

The engine posts, matches and delivers. All else that follows an operation is an observer: traffic, the buffers of
pending operations, faults, the trace of the clock and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from pdlcheck.errors import PdlcheckError
from pdlcheck.worlds.observe import Operation, Signature
from pdlcheck.worlds.simulated.schedules.access import Post

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Observer", "Subscriptions"]

_WorkEvent = tuple[Callable[["SimulatedWork"], None], ...]


class Subscriptions:
    """The methods to call at each event: only those of observers that implement it, in the order of the observers."""

    # an operation, from the post to the moment when its rank has the results
    before_post: tuple[Callable[[Operation, Post], None], ...] = ()
    posting: tuple[Callable[[Signature], None], ...] = ()
    posted: _WorkEvent = ()
    pending: _WorkEvent = ()
    matched: tuple[Callable[[Sequence[SimulatedWork]], None], ...] = ()
    waits: _WorkEvent = ()
    waited: _WorkEvent = ()
    polled: _WorkEvent = ()
    future_taken: _WorkEvent = ()
    finished: _WorkEvent = ()
    # other acts of a rank
    accumulates: tuple[Callable[[int, Tensor], None], ...] = ()
    backward_ended: tuple[Callable[[int], None], ...] = ()
    computed: tuple[Callable[[int, float], None], ...] = ()
    future_waited: tuple[Callable[[int], None], ...] = ()
    reads: tuple[Callable[[int, Tensor, str], None], ...] = ()
    rank_ended: tuple[Callable[[int], None], ...] = ()
    # the run
    stuck: tuple[Callable[[], bool], ...] = ()

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        mine = self.__dict__
        for observer in observers:
            for event in observer.events:
                mine[event] = (*mine.get(event, ()), getattr(observer, event))


class Observer:
    """The base of observers. A subclass implements the events that it needs; no other method is called in a run."""

    events: ClassVar[tuple[str, ...]] = ()  # those that the class implements

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.events = tuple(e for e in _EVENTS if getattr(cls, e) is not getattr(Observer, e))

    # -- an operation ------------------------------------------------------------------------------

    def before_post(self, operation: Operation, post: Post) -> None:
        """Observe that a rank is about to post. It may give up its turn before it does."""

    def posting(self, signature: Signature) -> None:
        """Observe that a rank posts now. An exception keeps the operation from the engine."""

    def posted(self, work: SimulatedWork) -> None:
        """Observe that a rank has posted. The operation has not been matched yet, even if its partners are there."""

    def pending(self, work: SimulatedWork) -> None:
        """Observe that the rank goes on before its operation is complete: it was posted by an asynchronous call."""

    def matched(self, works: Sequence[SimulatedWork]) -> None:
        """Observe that these operations belong together. No data has moved yet."""

    def waits(self, work: SimulatedWork) -> None:
        """Observe that a rank waits for an operation, or finds in a poll that it is complete."""

    def waited(self, work: SimulatedWork) -> None:
        """Observe that a wait has succeeded."""

    def polled(self, work: SimulatedWork) -> None:
        """Observe that a rank polls an operation."""

    def future_taken(self, work: SimulatedWork) -> None:
        """Observe that a rank takes the future of an operation, for the first time."""

    def finished(self, work: SimulatedWork) -> None:
        """Observe that a rank has the results of its operation."""

    # -- other acts of a rank ----------------------------------------------------------------------

    def accumulates(self, rank: int, parameter: Tensor) -> None:
        """Observe that a rank is about to add to the gradient of ``parameter``."""

    def backward_ended(self, rank: int) -> None:
        """Observe that a backward pass of a rank has ended."""

    def computed(self, rank: int, seconds: float) -> None:
        """Observe that a rank computes for ``seconds`` on the virtual clock."""

    def future_waited(self, rank: int) -> None:
        """Observe that a rank waits for a future, which may be made of others."""

    def reads(self, rank: int, tensor: Tensor, by: str) -> None:
        """Observe that a rank reads a tensor past torch's dispatcher."""

    def rank_ended(self, rank: int) -> None:
        """Observe that a rank has ended."""

    # -- the run -----------------------------------------------------------------------------------

    def stuck(self) -> bool:
        """Change something, because no rank can go on; return False if there is nothing to change."""
        return False

    def verdict(self) -> PdlcheckError | None:
        """Return the error for what the ranks left behind, once all have returned; None if there is nothing."""
        return None

    def warning(self) -> UserWarning | None:
        """Return a warning about the run, once it has ended; None if there is none."""
        return None


_EVENTS = tuple(name for name in Subscriptions.__annotations__)
