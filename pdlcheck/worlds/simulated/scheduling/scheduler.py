"""The scheduler of simulated ranks: they are threads, one of which runs at a time. A schedule chooses the next one.

A rank gives up its turn only at a switch point (an operation is posted, waited for, or polled). A run is therefore a
function of the schedule. Each rank owns one lock. A switch releases the lock of the next rank and acquires the rank's
own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from time import perf_counter
from typing import Any

from pdlcheck.errors import Livelock, PdlcheckError, PeerFailed, Unsupported, WorldTooSmall
from pdlcheck.operations.words import in_common
from pdlcheck.time_budgets import POLLS_S, SIMULATED_INTERRUPT_S, SLEEPERS_S
from pdlcheck.worlds.cuda_as_cpu.hint import hint_about_cuda, note_once
from pdlcheck.worlds.exceptions import add_note, shorten, text_of
from pdlcheck.worlds.forked import forked_children_end
from pdlcheck.worlds.observe import FROM_CALLBACK, end_at_user_line, user_line
from pdlcheck.worlds.outcome import Outcome, Raised, Returned, Stopped, cure_of_exit, stopped_by_nobody
from pdlcheck.worlds.rank_devices import RankDevices
from pdlcheck.worlds.simulated.schedules.protocol import Schedule, SwitchPoint
from pdlcheck.worlds.simulated.scheduling.cpu_affinity import pinned_to_one_core, use_batch_policy
from pdlcheck.worlds.simulated.scheduling.rank_state import Isolation, RankState
from pdlcheck.worlds.simulated.scheduling.rank_threads import raise_in, rank_behind, started_at
from pdlcheck.worlds.simulated.scheduling.timeout_report import interrupt_note, timeout_error
from pdlcheck.worlds.simulated.scheduling.timers import Timers
from pdlcheck.worlds.site import site_of

__all__ = ["ARE_THREADS", "RankGone", "RankThread", "Scheduler", "current_rank", "running_rank"]

ARE_THREADS = "simulated ranks are threads: run this on processes, with --world gloo"
# the texts of Python, and of torch, whose rpc has one worker in a process
_OF_A_PROCESS = ("signal only works in main thread", "Container is already initialized with worker_id")
_MAX_POLLS = 20_000  # in a row, of all ranks together, without another event: about a tenth of a second


class _Local(threading.local):
    """The simulated rank of a thread."""

    rank: RankThread | None = None


_local = _Local()


def current_rank() -> RankThread | None:
    """Return the simulated rank of this thread; None if the thread is not a rank."""
    return _local.rank


class _GivenUp(BaseException):
    """The exception that ends a rank in the middle of its own code.

    It is not an ``Exception``, so that neither the user's code nor pytest catches it.
    """


class RankGone(BaseException):
    """The exception that ends the thread of a rank that a fault took; ``except Exception`` does not catch it."""


class RankThread:
    """One rank: its thread, its turn, what it waits for, and its per-rank state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state: RankState
        self.body: Callable[[], Any] | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self.ready: Callable[[], bool] | None = None  # None: can run; else: blocked until it returns True
        self.waits_for: Any = None  # describes the wait in reports
        self.on_resume: list[Callable[[], None]] = []  # completions that must run in this rank's thread
        self.acted = False  # whether, since its turn began, it did or saw something that concerns other ranks
        self.asked = False  # whether it has polled since it last slept
        self.outcome: Outcome | None = None
        self.c10d: dict[str, Any] = {}  # the state of torch.distributed for this rank
        self.joined: dict[str, Any] = {}  # that state just after the rank had got its default group
        self.engine: Any = None  # the engine of its process groups
        self.devices: RankDevices | None = None  # if its CUDA code runs on the CPU

    def begin(self, body: Callable[[], Any]) -> None:
        """Give the rank a function to run."""
        self.body = body
        self.outcome = self.ready = self.waits_for = None
        self.acted = self.asked = False


class Scheduler:
    """The scheduler of one cluster: runs a function on every rank to its end, or until no rank can go on.

    The rank threads live from the first run until :meth:`close`, because torch keeps part of a group's state by thread.

    Args:
        world_size: number of ranks.
        isolation: keeps the state of the ranks apart.
        stuck: returns the error for a deadlock, given (waiting ranks, all ranks).
        elapse: called when no rank can go on and no sleeping rank wakes first; returns True if it changed something.
    """

    def __init__(
        self,
        world_size: int,
        isolation: Isolation,
        *,
        stuck: Callable[[Sequence[RankThread], Sequence[RankThread]], PdlcheckError],
        elapse: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ranks = [RankThread(rank) for rank in range(world_size)]
        self.error: PdlcheckError | None = None  # the verdict of the whole run; every rank raises it
        self.given_up = False  # whether an interrupt ended a run: nothing further can run on these ranks
        self.timers = Timers()
        self._isolation = isolation
        self._stuck = stuck
        self._elapse = elapse
        self._pending: list[Any] = [None] * world_size
        self._threads: list[threading.Thread] = []
        self._running: RankThread | None = None
        self._turn_began = 0.0
        self._polls = 0  # the number of polls in a row
        self._slept: float | None = None  # when a rank began to sleep between polls
        self._all_done = threading.Event()

    def seed(self, seed: int) -> None:
        """Start the ranks' random streams from ``seed`` in every run, until a set-up run moves that start."""
        for rank in self.ranks:
            rank.state = self._isolation.state_of(rank.rank, len(self.ranks), seed)

    def run(
        self, bodies: Sequence[Callable[[], Any]], schedule: Schedule, limit_s: float | None = None
    ) -> list[Outcome]:
        """Call ``bodies[r]()`` as rank r, and return the outcome of each rank.

        Raises:
            RankTimeout: a rank is busy after ``limit_s`` seconds. Nothing further can run on these ranks.
        """
        __tracebackhide__ = True
        self._schedule = schedule
        self.every_step = schedule.every_step
        self.every_post = schedule.every_post
        schedule.begin(len(self.ranks))
        self._pending[:] = [None] * len(self.ranks)
        self._failures = 0
        self.timers = Timers()
        self.progress()
        self._stopping = False
        self.error = None
        self._refused: Unsupported | None = None
        self._schedule_error: BaseException | None = None
        self._all_done.clear()
        for rank, body in zip(self.ranks, bodies, strict=True):
            rank.begin(body)
        with self._isolation.controller(), pinned_to_one_core():
            if not self._threads:
                self._start()
            try:
                self._pass_turn("begin", -1)
                if not self._all_done.wait(limit_s):
                    assert limit_s is not None
                    self._end_late(limit_s)
            except BaseException as interrupt:
                self._give_up(interrupt)
                raise
        if self._schedule_error is not None:
            raise self._schedule_error
        return [rank.outcome for rank in self.ranks if rank.outcome is not None]

    def _end_late(self, limit_s: float) -> None:
        """Raise the error that states where the ranks are, or wait without a limit if a debugger has stopped one."""
        __tracebackhide__ = True
        running, turn_s = self._running, perf_counter() - self._turn_began
        error = timeout_error(limit_s, self.ranks, self._threads, running, turn_s) if running is not None else None
        if error is not None:
            raise error
        self._all_done.wait()

    def _give_up(self, interrupt: BaseException) -> None:
        """End the ranks: each at its next switch point, and the running one at its next line.

        A rank that computes in C may have no next line. It is left behind.
        """
        self._stopping = self.given_up = True
        if (running := self._running) is None:
            return
        if isinstance(interrupt, KeyboardInterrupt):
            interrupt.add_note(interrupt_note(self.ranks, self._threads, running))
        raise_in(self._threads[running.rank], _GivenUp)
        if not self._all_done.wait(SIMULATED_INTERRUPT_S) and (running := self._running) is not None:
            interrupt.add_note(f"rank {running.rank} does not stop and is left behind; what follows has fresh ranks")
        for rank in self.ranks:
            rank.state.take_back()

    def rest(self) -> None:
        """Drop everything that belongs to the last run. Call :meth:`seed` before the next run."""
        for rank in self.ranks:
            rank.body = rank.outcome = None
            del rank.state

    def close(self) -> None:
        """End the rank threads."""
        for rank in self.ranks:
            rank.body = None
            rank.turn.release()
        for thread in self._threads:
            thread.join(timeout=1.0)  # a rank that computes for ever is left behind as a daemon thread

    def _start(self) -> None:
        self._isolation.prepare()
        for rank in self.ranks:
            thread = threading.Thread(target=self._main, args=(rank,), name=f"rank {rank.rank}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system starts no more threads
                self.given_up = True
                self.close()
                raise _too_many(len(self.ranks), len(self._threads), error) from None
            self._threads.append(thread)

    def switch(self, pending: Any = None) -> None:
        """Let the schedule choose the next rank.

        Args:
            pending: what the running rank does when it has its turn again.
        """
        me = running_rank()
        self._yield(me, "post", pending)
        me.acted = True

    def post(self, pending: Any) -> None:
        """Do the same as :meth:`switch`, for a rank that is about to post an operation.

        If the post is the first act of the turn that concerns other ranks, there is nothing to choose. Every rank that
        could go first now could also go first when the turn was given.
        """
        __tracebackhide__ = True
        me = running_rank()
        if me.acted or self.every_post:
            self._yield(me, "post", pending)
        else:
            self._check(me)
        me.acted = True
        self.progress()

    def wait_until(self, ready: Callable[[], bool], waits_for: Any, pending: Any = None) -> None:
        """Block the running rank until ``ready()`` returns True. ``waits_for`` describes the wait in reports."""
        __tracebackhide__ = True
        me = running_rank()
        if ready():
            self._check(me)
            return
        me.ready, me.waits_for = ready, waits_for
        try:
            while True:
                self._yield(me, "wait", pending)
                if ready():
                    break
        finally:
            me.ready = None
        me.waits_for = None  # an error leaves it set, to report where the rank was stopped

    def poll(self, waits_for: Any, pending: Any = None) -> None:
        """Do the same as :meth:`switch`, for a rank that polls.

        The run fails with ``Livelock`` if ranks poll too often in a row and nothing else happens.
        """
        __tracebackhide__ = True
        me = running_rank()
        me.waits_for = waits_for
        me.asked = True
        self._polls += 1
        if self._polls > _MAX_POLLS and self._elapse():
            self._polls = 0
        if self._polls > _MAX_POLLS and (self._slept is None or perf_counter() - self._slept > POLLS_S):
            self.fail(self._livelock())
        if self._polls % (2 * len(self.ranks)) == 0:
            self.timers.wake_sleepers()
        self._yield(me, "poll", pending)
        me.waits_for = None
        me.acted = True

    def sleep(self, seconds: float) -> None:
        """Let the other ranks go on for ``seconds``: until none of them can, or until those that can only poll."""
        __tracebackhide__ = True
        me = running_rank()
        if not me.asked:  # without polls, the rank waits for something outside the run
            self.progress()
        elif self._slept is None:
            self._slept = perf_counter()
        me.asked = False
        with self.timers.sleep(seconds, me.rank) as awake:
            self.wait_until(awake, f"time.sleep({seconds:g})")

    def progress(self) -> None:
        """Reset the count of polls, because something has happened that a rank may be polling for."""
        self._polls = 0
        self._slept = None

    def fail(self, error: PdlcheckError) -> None:
        """Set the verdict of the whole run: every rank raises it at its next switch point. The first verdict counts."""
        if self.error is None:
            self.error = error

    def refuse(self, error: Unsupported) -> None:
        """End the run because of an act of a rank's thread. Ranks raise the error when they return, at the latest."""
        self._refused = error
        self.fail(error)

    # -- turns -------------------------------------------------------------------------------------

    def _main(self, me: RankThread) -> None:
        _local.rank = me
        use_batch_policy()
        with suppress(_GivenUp):  # it may come after the body has ended
            while not self.given_up:
                me.turn.acquire()
                if me.body is None:
                    return
                me.outcome = self._call(me, me.body)
                if self.error is None and not self._stopping:
                    self._pending[me.rank] = None
                self.progress()
                self._pass_turn("end", me.rank)

    def _call(self, me: RankThread, body: Callable[[], Any]) -> Outcome:
        __tracebackhide__ = True
        if self.given_up:
            return Stopped(me.rank)
        try:
            value = self._as_rank(me, body)
            if self._refused is not None:
                raise copy(self._refused)
            return Returned(me.rank, value)
        except PeerFailed as error:
            if self._stopping or self.error is not None:
                return Stopped(me.rank, f"in {me.waits_for}" if me.waits_for is not None else "")
            self._fails(within_s=SLEEPERS_S)
            own = stopped_by_nobody(me.rank, text_of(error)).with_traceback(error.__traceback__)
            return Raised(me.rank, own, order=self._failures, site=site_of(error))
        except BaseException as error:
            self._fails(within_s=math.inf if isinstance(error, RankGone) else SLEEPERS_S)
            if self.error is not None and text_of(error).startswith(FROM_CALLBACK):  # torch wraps the verdict
                error = copy(self.error).with_traceback(error.__traceback__)
            if isinstance(error, PdlcheckError):
                end_at_user_line(error)
            elif isinstance(error, ValueError | RuntimeError) and text_of(error).startswith(_OF_A_PROCESS):
                add_note(error, ARE_THREADS)
            elif isinstance(error, SystemExit) and not error.code:
                add_note(error, cure_of_exit(error))
            elif hint := hint_about_cuda(error, is_on=me.devices is not None):
                note_once(error, hint)
            shorten(error)
            return Raised(me.rank, error, order=self._failures, site=site_of(error))

    def _fails(self, within_s: float) -> None:
        self._failures += 1
        self.timers.cap(within_s)

    def _as_rank(self, me: RankThread, body: Callable[[], Any]) -> Any:
        __tracebackhide__ = True
        me.state.enter()
        try:
            self._check(me)
            with forked_children_end():
                return me.state.context.run(body)
        finally:
            if not self.given_up:  # after an interrupt, a rank must not change the process
                me.state.leave()

    def _yield(self, me: RankThread, kind: str, pending: Any) -> None:
        __tracebackhide__ = True
        if self.error is None and not self._stopping:  # otherwise the rank only has to end
            self._pending[me.rank] = pending
        following = self._choose(kind, me.rank)
        me.acted = False
        if following is not me:
            me.state.save()
            self._running, self._turn_began = following, perf_counter()
            following.turn.release()
            me.turn.acquire()
            if not self.given_up:  # after an interrupt, the process is the controller's
                me.state.restore()
        self._check(me)

    def _pass_turn(self, kind: str, current: int) -> None:
        if all(rank.outcome is not None for rank in self.ranks):
            self._running = None
            self._all_done.set()
            return
        following = self._choose(kind, current)
        self._running, self._turn_began = following, perf_counter()
        following.turn.release()

    def _choose(self, kind: str, current: int) -> RankThread:
        runnable = _runnable(self.ranks)
        while (
            not runnable
            and self.error is None
            and not self._stopping
            and (self.timers.wake_sleepers() or self._elapse())
        ):
            runnable = _runnable(self.ranks)
        if not runnable:
            waiting = [rank for rank in self.ranks if rank.outcome is None]
            if self.error is None and not self._stopping:
                if self._failures:
                    self._stopping = True
                else:
                    self.error = self._stuck(waiting, self.ranks)
            return waiting[0]
        if self.error is not None or self._stopping:
            return runnable[0]  # the ranks only have to end, so there is nothing to choose
        if len(runnable) == 1 and not self.every_step:
            return runnable[0]
        point = SwitchPoint(kind, current, tuple([rank.rank for rank in runnable]), self._pending)
        try:
            return self.ranks[self._schedule.choose(point)]
        except BaseException as error:  # raised in the controller; here it would end a thread that others wait for
            self._schedule_error = error
            self._stopping = True
            return runnable[0]

    def _call_back(self, me: RankThread, callback: Callable[[], None]) -> None:
        """Run a callback of a future in the middle of a wait.

        The callback may communicate. Reports then show what the callback waits for.
        """
        __tracebackhide__ = True
        ready, waits_for = me.ready, me.waits_for
        me.ready = me.waits_for = None
        try:
            callback()
        finally:
            me.ready = ready
        me.waits_for = waits_for  # not restored after an error, to report where the callback was stopped

    def _livelock(self) -> Livelock:
        waiting = [rank for rank in self.ranks if rank.outcome is None]
        words = {rank.rank: _is_doing(rank) for rank in waiting}
        lines = [f"rank {rank}: {said}" for rank, said in words.items()]
        head = f"no rank makes progress: they have asked {_MAX_POLLS} times in a row for something that does not come"
        return Livelock("\n  ".join([head, *in_common(words)]), ranks=lines, polls=_MAX_POLLS)

    def _check(self, me: RankThread) -> None:
        __tracebackhide__ = True
        while me.on_resume:
            self._call_back(me, me.on_resume.pop(0))
        if self.error is not None:
            raise copy(self.error)  # a copy, so that each rank has its own traceback
        if self._stopping:
            raise PeerFailed("another rank failed")


def _too_many(world_size: int, available: int, error: RuntimeError) -> WorldTooSmall:
    cure = f"ask for world_size={max(available, 1)}"
    return WorldTooSmall(
        f"needs {world_size} simulated ranks, each a thread, and the system started {available} ({error}): raise its "
        f"limit of processes (ulimit -u, or that of the container) or of memory (ulimit -v), or {cure}",
        world="sim",
        cure=cure,
        world_size=world_size,
        available=available,
    )


def _runnable(ranks: Sequence[RankThread]) -> list[RankThread]:
    return [r for r in ranks if r.outcome is None and (r.ready is None or r.on_resume or r.ready())]


def _is_doing(rank: RankThread) -> str:
    if rank.waits_for is None:
        return "runs its own code"
    return f"blocked in {rank.waits_for}" if rank.ready is not None else f"asks for {rank.waits_for}"


def running_rank() -> RankThread:
    """Return the simulated rank of this thread.

    Raises:
        Unsupported: the thread is not a rank. If a rank has started the thread, the run ends.
    """
    me = _local.rank
    if me is not None:
        return me
    rank = rank_behind()
    error = Unsupported(
        f"a thread that {'simulated code' if rank is None else f'rank {rank.rank}'} started communicates, at "
        f"{user_line() or started_at()}; a simulated rank is one thread: communicate in the rank itself, or test this "
        "on processes, with --world gloo"
    )
    if rank is not None:
        rank.engine.scheduler.refuse(error)
    raise error
