"""The engine of the simulated world: it matches the operations of the ranks and moves their data.

:class:`pdlcheck.worlds.semantics.Semantics` decides what the rules of ``torch.distributed`` leave open. Whatever else
follows an operation is the work of observers (``observer.py``), of which the engine knows only the events.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from pdlcheck.errors import CollectiveMismatch, PdlcheckError, PeerFailed, Unsupported
from pdlcheck.operations.rounds import nbytes_of
from pdlcheck.worlds.observe import Match, Matcher, Operation, Signature, deadlock, refuse, validate_for_gloo
from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.engine.connections import Connections
from pdlcheck.worlds.simulated.engine.observer import Observer, Subscriptions
from pdlcheck.worlds.simulated.engine.ordered_p2p import OrderedP2PMatcher
from pdlcheck.worlds.simulated.engine.origin import origin
from pdlcheck.worlds.simulated.engine.transfer import Transfer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork
from pdlcheck.worlds.simulated.schedules.access import Post, Question
from pdlcheck.worlds.simulated.scheduling.rank_state import Isolation
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, Scheduler, current_rank

__all__ = ["SimulatedEngine"]

_PATIENCE = 10_000  # turns of other ranks
_Kind = TypeVar("_Kind", bound=Observer)


class SimulatedEngine:
    """The engine that links the ranks of a simulated cluster: an ``Engine`` for their process groups.

    Args:
        world_size: number of ranks.
        isolation: keeps the state of the ranks apart.

    Attributes:
        events: the methods of the observers to call.
        last: rank -> its last operation.
        posted: the operations that are not matched yet.
        unwaited: the asynchronous operations that no rank has waited for yet.
    """

    def __init__(self, world_size: int, isolation: Isolation) -> None:
        self.scheduler = Scheduler(world_size, isolation, stuck=self._deadlock, elapse=self._elapse)
        self.semantics = Semantics()
        self._seed = 0
        self.forget()

    def serve(self, seed: int, semantics: Semantics) -> None:
        """Reuse these rank threads for another world; only its seed and semantics differ."""
        self.semantics = semantics
        self._seed = seed
        self.scheduler.seed(seed)

    def forget(self, observers: Iterable[Observer] = ()) -> None:
        """Forget all operations, and have only these observers."""
        self._matcher = Matcher()
        self._lanes = OrderedP2PMatcher()
        self._unmoved: list[Transfer] = []  # data that moves at a random moment
        self._unseen: list[SimulatedWork] = []  # matched, and not visible yet
        self.posted: dict[int, SimulatedWork] = {}
        self.unwaited: dict[int, SimulatedWork] = {}
        self.last: dict[int, Signature] = {}
        self.begin(observers)

    def begin(self, observers: Iterable[Observer]) -> None:
        """Start a run with these observers."""
        self.last.clear()
        self._matcher.begin()
        self.observers = tuple(observers)
        self.events = Subscriptions(self.observers)
        self.connections = Connections(self.posted)
        self._random = random.Random(self._seed)

    def observer(self, kind: type[_Kind]) -> _Kind | None:
        """Return the observer of this class; None if the run has none."""
        return next((one for one in self.observers if isinstance(one, kind)), None)

    def verdict(self) -> PdlcheckError | None:
        """Return the error of an observer, once all ranks have returned; None if there is none."""
        return next((error for one in self.observers if (error := one.verdict()) is not None), None)

    def warnings(self) -> list[UserWarning]:
        """Return the warnings of the observers about the run that has ended."""
        return [warning for one in self.observers if (warning := one.warning()) is not None]

    def _elapse(self) -> bool:
        """Let time limits elapse, the shortest first, because no rank can go on."""
        return self.scheduler.timers.fire_next() or any(change() for change in self.events.stuck)

    # -- operations --------------------------------------------------------------------------------

    def post(self, operation: Operation) -> SimulatedWork:
        """Post an operation of the running rank. It completes when its partners are there."""
        events = self.events
        refuse(operation)
        validate_for_gloo(operation, with_grad=self.semantics.messages != "in_order")  # NCCL writes below autograd
        signature = operation.signature
        post = Post(signature)
        for before_post in events.before_post:
            before_post(operation, post)
        self.scheduler.post(post)
        if self._unmoved or self._unseen:
            self._let_things_happen()
        for on_posting in events.posting:
            on_posting(signature)
        self.last[signature.rank] = signature
        if self.connections.closed:
            self.connections.check(signature)
        work = SimulatedWork(self, operation, origin(operation), post)
        self.posted[id(work)] = work
        if signature.op == "send" and self.semantics.buffers(nbytes_of(operation.parts[0].inputs[0])):
            work.buffer()
        for on_posted in events.posted:
            on_posted(work)
        if not work.origin.blocking:
            self.unwaited[id(work)] = work
            for on_pending in events.pending:
                on_pending(work)
        try:
            for match in self._matches(work):
                self._complete(match)
            if self._matcher.is_mismatched(signature):
                self._await_the_others(signature)
        except CollectiveMismatch as error:
            self.scheduler.fail(error)
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # raised by torch midway: no rank completes it
            failed = Unsupported(f"simulated ranks cannot carry out {signature}: {error}")
            self.scheduler.fail(failed)
            raise failed from error
        return work

    def _matches(self, work: SimulatedWork) -> Iterable[Match]:
        signature = work.operation.signature
        if signature.is_p2p and self.semantics.messages == "in_order":
            return self._lanes.post(signature, id(work), work.origin.batch)
        match = self._matcher.post(signature, id(work))
        return () if match is None else (match,)

    def _await_the_others(self, signature: Signature) -> None:
        """Wait for the remaining ranks, because the running rank has met others in a collective with a mismatch.

        Raises:
            CollectiveMismatch: the remaining ranks are there, or cannot come, or have not come in a long time.
        """
        __tracebackhide__ = True
        elapsed: list[bool] = []
        turns = iter(range(_PATIENCE))

        def is_over() -> bool:
            return bool(elapsed) or self._matcher.is_complete(signature) or next(turns, None) is None

        with suppress(PeerFailed), self.scheduler.timers.limit(0.0, signature.rank, lambda: elapsed.append(True)):
            self.scheduler.wait_until(is_over, signature)
        if error := self._matcher.verdict():
            raise error

    def _complete(self, match: Match) -> None:
        works = [self.posted.pop(key) for key in match.keys]  # type: ignore[call-overload]
        for observe in self.events.matched:
            observe(works)
        transfer = Transfer(works, self._order)
        for work in works:
            work.match(transfer.move)
        if match.signatures[0].is_p2p:
            for work, source in zip(works, reversed(match.signatures), strict=True):
                work.came_from(source.members.index(source.rank))  # torch reads the rank in the group
        if self.semantics.data == "at_once":
            transfer.move()
        elif self.semantics.data == "random":
            self._unmoved.append(transfer)
        for work in works:
            if self.semantics.completion == "in_order" or work.owner is None or work.owner.ready is not None:
                work.show()
            else:
                self._unseen.append(work)

    def _order(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.semantics.reduce == "rank_order":
            return values
        if self.semantics.reduce == "reversed":
            return values[::-1]
        places = list(range(len(values)))
        random.Random(f"reduce {self._seed}").shuffle(places)  # the same order at every call, as on real backends
        return [values[place] for place in places]

    # -- calls of operations -----------------------------------------------------------------------

    def finished(self, work: SimulatedWork) -> None:
        """Record that the rank has the results of the operation."""
        if not work.origin.blocking:
            self.unwaited.pop(id(work), None)
        if work.origin.batch is not None and self.semantics.messages == "in_order":
            self._lanes.finish(work.operation.signature, work.origin.batch)
        for observe in self.events.finished:
            observe(work)

    def finish_earlier(self, waited: SimulatedWork) -> None:
        """Finish earlier collectives of the running rank on the group, because it has waited for a later one."""
        later = waited.operation.signature
        for work in [] if later.is_p2p else list(self.unwaited.values()):
            one = work.operation.signature
            same = one.rank == later.rank and one.group == later.group and not one.is_p2p
            if same and one.seq < later.seq and work.may_go_on() and not work.is_lost:
                work.finish()

    def close(self, work: SimulatedWork) -> None:
        """Close the connections of a rank that has given up waiting for a message."""
        signature = work.operation.signature
        self.connections.close([(signature.group, signature.rank)])
        self.unwaited = {key: one for key, one in self.unwaited.items() if not one.is_lost}

    def poll(self, work: SimulatedWork) -> None:
        """Give up the turn, because the running rank asks whether an operation is complete."""
        signature = work.operation.signature
        self._let_things_happen()
        self.scheduler.poll(signature, Question(signature))

    def wait(self, ready: Callable[[], bool], waits_for: Any) -> None:
        """Block the running rank until ``ready()`` returns True."""
        __tracebackhide__ = True
        if self._unmoved or self._unseen:
            self._let_things_happen()
            self._show(of=current_rank())
        self.scheduler.wait_until(ready, waits_for)

    def wait_for(self, work: SimulatedWork, limit_s: float) -> None:
        """Block the running rank until it may go on with ``work``, or until its time limit elapses.

        Ranks have no clock of their own. A limit therefore elapses only when no other rank can go on, and the shortest
        of several limits elapses.
        """
        with self.scheduler.timers.limit(limit_s, work.operation.signature.rank, work.elapse):
            self.wait(work.may_go_on, work.operation.signature)

    def missing(self, signature: Signature) -> tuple[int, ...]:
        """Return the ranks that an operation still waits for."""
        return self._matcher.missing(signature)

    def _let_things_happen(self) -> None:
        """Let some of the events happen that the semantics leave open."""
        if self._unmoved:
            for transfer in self._unmoved:
                if self._random.random() < 0.5:
                    transfer.move()
            self._unmoved = [transfer for transfer in self._unmoved if not transfer.moved]
        if self._unseen:
            self._show(of=None)

    def _show(self, of: RankThread | None) -> None:
        """Make some operations visible, and all those of the rank ``of``, because it is about to block."""
        if self._unseen:
            chosen = [work for work in self._unseen if work.owner is of or self._random.random() < 0.5]
            self._unseen = [work for work in self._unseen if work not in chosen]
            self._random.shuffle(chosen)
            for work in chosen:
                work.show()

    def _deadlock(self, waiting: Sequence[RankThread], ranks: Sequence[RankThread]) -> PdlcheckError:
        now = {rank.rank: rank.waits_for if rank in waiting else None for rank in ranks}
        return deadlock(
            waiting={rank.rank: rank.waits_for or "its own code" for rank in waiting},
            ended={rank.rank: self.last.get(rank.rank) for rank in ranks if rank.outcome is not None},
            missing={
                rank.rank: self.missing(rank.waits_for) for rank in waiting if isinstance(rank.waits_for, Signature)
            },
            parted=self._matcher.parted(
                {rank: one for rank, one in now.items() if one is None or isinstance(one, Signature)}
            ),
        )
