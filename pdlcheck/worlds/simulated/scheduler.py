"""Ranks as threads of which one runs at a time, and the seeded choice of the next one.

A rank gives up its turn only at a switch point (an operation is posted, waited for, or polled), so a run is a function
of the seed. Each rank owns one lock; a switch releases the lock of the next rank and acquires the own one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from pdlcheck.errors import PdlcheckError, PeerFailed
from pdlcheck.worlds.outcome import Outcome, Raised, Returned, Stopped
from pdlcheck.worlds.simulated.isolation import RankState, isolated_controller

__all__ = ["RankThread", "Scheduler", "current_rank"]

_local = threading.local()


def current_rank() -> RankThread | None:
    """The simulated rank that this thread is, if it is one."""
    return getattr(_local, "rank", None)


class RankThread:
    """One rank: its thread, its turn, what it waits for, and the torch state that belongs to it alone."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank = rank
        self.state = RankState(rank, world_size, seed)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ready: Callable[[], bool] | None = None  # None: can run; else: blocked until it returns True
        self.waits_for: Any = None  # what a report says about the wait
        self.on_resume: list[Callable[[], None]] = []  # completions that must run in this rank's thread
        self.outcome: Outcome | None = None
        self.c10d: dict[str, Any] = {}  # what torch.distributed keeps for this rank
        self.network: Any = None  # the engine of its process groups

    def is_runnable(self) -> bool:
        return self.outcome is None and (self.ready is None or self.ready())


class Scheduler:
    """Run one function on every rank to the end, or to the point where nobody can go on.

    Args:
        world_size: number of ranks.
        seed: chooses the schedule; the same seed gives the same schedule.
        stuck: makes the error for ranks that all wait, from (waiting ranks, all ranks).
    """

    def __init__(
        self,
        world_size: int,
        *,
        seed: int,
        stuck: Callable[[Sequence[RankThread], Sequence[RankThread]], PdlcheckError],
    ) -> None:
        self.ranks = [RankThread(rank, world_size, seed) for rank in range(world_size)]
        self._choices = random.Random(seed)
        self._stuck = stuck
        self._failures = 0
        self._all_done = threading.Event()
        self.error: PdlcheckError | None = None  # a verdict about the whole world; every rank raises it
        self._stopping = False

    def run(self, bodies: Sequence[Callable[[], Any]], name: str = "sim") -> list[Outcome]:
        """Call ``bodies[r]()`` as rank r; return how each rank ended."""
        threads = [
            threading.Thread(target=self._main, args=(rank, body), name=f"{name} rank {rank.rank}", daemon=True)
            for rank, body in zip(self.ranks, bodies, strict=True)
        ]
        with isolated_controller():
            for thread in threads:
                thread.start()
            self._pass_turn(None)
            try:
                self._all_done.wait()
            except BaseException:
                self._stopping = True  # each rank ends at its next switch point
                raise
        for thread in threads:
            thread.join()
        return [rank.outcome for rank in self.ranks if rank.outcome is not None]

    def switch(self) -> None:
        """Let the schedule choose who goes on; called by the running rank."""
        self._yield(_me())

    def wait_until(self, ready: Callable[[], bool], waits_for: Any) -> None:
        """Block the running rank until ``ready()``; ``waits_for`` is what a report says about it."""
        me = _me()
        if ready():
            self._check(me)
            return
        me.ready, me.waits_for = ready, waits_for
        try:
            self._yield(me)
        finally:
            me.ready = None
        me.waits_for = None  # kept when the wait ends by an error: it is where the rank was stopped

    def fail(self, error: PdlcheckError) -> None:
        """Give a verdict about the whole world: every rank raises it at its next switch point."""
        if self.error is None:
            self.error = error

    # -- turns -------------------------------------------------------------------------------------

    def _main(self, me: RankThread, body: Callable[[], Any]) -> None:
        me.turn.acquire()
        _local.rank = me
        me.state.enter()
        try:
            self._check(me)
            me.outcome = Returned(me.rank, body())
        except PeerFailed:
            where = f"in {me.waits_for}" if me.waits_for is not None else ""
            me.outcome = Stopped(me.rank, where)
        except BaseException as error:
            self._failures += 1
            me.outcome = Raised(me.rank, error, order=self._failures)
        finally:
            me.state.leave()
            _local.rank = None
            self._pass_turn(me)

    def _yield(self, me: RankThread) -> None:
        following = self._choose()
        if following is not me:
            me.state.save()
            following.turn.release()
            me.turn.acquire()
            me.state.restore()
        self._check(me)

    def _pass_turn(self, me: RankThread | None) -> None:
        if all(rank.outcome is not None for rank in self.ranks):
            self._all_done.set()
            return
        self._choose().turn.release()

    def _choose(self) -> RankThread:
        runnable = [rank for rank in self.ranks if rank.is_runnable()]
        if not runnable:
            waiting = [rank for rank in self.ranks if rank.outcome is None]
            if self.error is None and not self._stopping:
                if self._failures:
                    self._stopping = True
                else:
                    self.error = self._stuck(waiting, self.ranks)
            return waiting[0]
        return runnable[0] if len(runnable) == 1 else self._choices.choice(runnable)

    def _check(self, me: RankThread) -> None:
        while me.on_resume:
            me.on_resume.pop(0)()
        if self.error is not None:
            raise copy(self.error)  # each rank its own traceback
        if self._stopping:
            raise PeerFailed("another rank failed")


def _me() -> RankThread:
    rank = current_rank()
    if rank is None:
        raise RuntimeError("this thread is not a simulated rank; start no threads that communicate in a rank")
    return rank
