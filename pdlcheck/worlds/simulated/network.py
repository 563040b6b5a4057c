"""The engine of the simulated world: pairs the operations of the ranks and moves their data.

Sends are rendezvous, as gloo's are: a send is complete when its receive has been posted and the data has moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pdlcheck.errors import CollectiveMismatch, PdlcheckError
from pdlcheck.faults import Kill
from pdlcheck.worlds.simulated.collectives import execute
from pdlcheck.worlds.simulated.scheduler import RankThread, Scheduler, current_rank
from pdlcheck.worlds.simulated.schedules.access import Post, Question
from pdlcheck.worlds.watch import Matcher, Operation, Signature, WatchedWork, deadlock, user_call

__all__ = ["Network", "RankKilled"]

_CLOSED = "[sim] Connection closed by peer [rank {}]. This is typically caused by a remote worker crashing."


class Network:
    """Links the ranks of a simulated cluster; an ``Engine`` for their process groups."""

    def __init__(self, world_size: int, seed: int, faults: Sequence[Kill] = ()) -> None:
        self._faults = faults
        self.scheduler = Scheduler(world_size, seed=seed, stuck=self._stuck)
        self.reset()

    def reset(self) -> None:
        """Forget what is under way, after ranks failed in the middle of it."""
        self._matcher = Matcher()
        self._posted: dict[int, tuple[Operation, SimulatedWork]] = {}
        self.last: dict[int, Signature] = {}  # rank -> its last operation
        self.begin()

    def begin(self) -> None:
        """A run starts: operations are counted from 0."""
        self.last.clear()
        self.killed: dict[int, Signature] = {}  # rank -> the operation that it did not get to post
        self._counts: Counter[int] = Counter()

    def _suffer(self, signature: Signature) -> None:
        """Apply the faults that this operation meets, and what earlier ones leave of it."""
        rank = signature.rank
        number = self._counts[rank]
        self._counts[rank] += 1
        if rank in self.killed:
            raise RankKilled
        if any(fault.rank == rank and fault.operation == number for fault in self._faults):
            self.killed[rank] = signature
            for key, (operation, work) in list(self._posted.items()):
                if operation.signature.rank != rank and _needs(operation.signature, rank):
                    del self._posted[key]
                    work.lose(rank)
            raise RankKilled
        for lost in self.killed:
            if _needs(signature, lost):
                self.last[rank] = signature
                raise RuntimeError(_CLOSED.format(lost))

    def post(self, operation: Operation) -> SimulatedWork:
        """Take an operation of the running rank; it completes when its partners are there."""
        post = Post(operation.signature)
        self.scheduler.switch(post)
        self.scheduler.progress()
        if self._faults:
            self._suffer(operation.signature)
        self.last[operation.signature.rank] = operation.signature
        work = SimulatedWork(self.scheduler, operation, post)
        key = id(work)
        self._posted[key] = (operation, work)
        try:
            match = self._matcher.post(operation.signature, key)
        except CollectiveMismatch as error:
            self.scheduler.fail(error)
            raise
        if match is not None:
            operations, works = zip(*(self._posted.pop(k) for k in match.keys), strict=True)  # type: ignore[call-overload]
            execute(operations)
            for done, source in zip(works, reversed(match.signatures), strict=False):
                done.complete(source.members.index(source.rank))  # torch asks for the number in the group
        return work

    def _stuck(self, waiting: Sequence[RankThread], ranks: Sequence[RankThread]) -> PdlcheckError:
        return deadlock(
            waiting={rank.rank: rank.waits_for or "its own code" for rank in waiting},
            ended={rank.rank: "has returned" for rank in ranks if rank.outcome is not None},
            missing={
                rank.rank: self._matcher.missing(rank.waits_for)
                for rank in waiting
                if isinstance(rank.waits_for, Signature)
            },
        )


class RankKilled(BaseException):
    """Ends the thread of a rank that a fault kills; no ``except Exception`` of the user's stops it."""


def _needs(signature: Signature, rank: int) -> bool:
    """Can the operation not do without this rank? A receive from any source can, as on gloo."""
    return signature.peer == rank if signature.is_p2p else rank in signature.members


class SimulatedWork(WatchedWork):
    """The handle of an operation; waiting for it gives other ranks their turn."""

    def __init__(self, scheduler: Scheduler, operation: Operation, post: Post) -> None:
        super().__init__(operation)
        self._post = post
        self._call = user_call() if scheduler.every_step else None
        self._scheduler = scheduler
        self._owner: RankThread | None = current_rank()
        self._done = False
        self._lost: int | None = None  # a rank that is gone, and without which there is no end

    def lose(self, rank: int) -> None:
        """The operation will never be complete, as ``rank`` is gone."""
        self._lost = rank

    def complete(self, source: int) -> None:
        """Called by the rank that brought the last missing part."""
        self._done = True
        self._source = source
        if self._future is not None and self._owner is not None:
            # callbacks of the future belong in the thread of the rank that owns it
            self._owner.on_resume.append(self._settle_future)

    def _is_settled(self) -> bool:
        return self._done

    def _settle_future(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(self.result())

    def wait(self, timeout: Any = None) -> bool:
        if self._call is not None:
            self._post.blocks_in_call = self._call == user_call()
            self._call = None
        self._scheduler.wait_until(lambda: self._done or self._lost is not None, self._operation.signature)
        if self._lost is not None:
            raise RuntimeError(_CLOSED.format(self._lost))
        self._settle_future()
        return True

    def is_completed(self) -> bool:
        self._scheduler.poll(self._operation.signature, Question(self._operation.signature))
        return self._done or self._lost is not None

    def is_success(self) -> bool:
        return self._done

    def exception(self) -> None:
        return None
