"""The engine of the simulated world: it matches the operations of the ranks and moves their data.

:class:`pdlcheck.worlds.semantics.Semantics` decides what the rules of ``torch.distributed`` leave open.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pdlcheck.errors import CollectiveMismatch, PdlcheckError, PeerFailed, Unsupported
from pdlcheck.faults import Corrupt, Fault, Slow
from pdlcheck.operations.rounds import nbytes_of
from pdlcheck.worlds.modes import are_left_on
from pdlcheck.worlds.observe import (
    Callers,
    Match,
    Matcher,
    Operation,
    Signature,
    Traffic,
    WatchedGroup,
    deadlock,
    refuse,
    validate_for_gloo,
)
from pdlcheck.worlds.semantics import Semantics
from pdlcheck.worlds.simulated.c10d.foreign_groups import Ended, require_member_of_this_world
from pdlcheck.worlds.simulated.c10d.install import is_pristine, rebind_to_world
from pdlcheck.worlds.simulated.c10d.simulated_stores import forget_servers
from pdlcheck.worlds.simulated.c10d.store import SimulatedStore
from pdlcheck.worlds.simulated.network.buffer_hazards import HazardDetector
from pdlcheck.worlds.simulated.network.fault_injection import FaultInjector, RankGone
from pdlcheck.worlds.simulated.network.leaks import leaked
from pdlcheck.worlds.simulated.network.ordered_p2p import OrderedP2PMatcher
from pdlcheck.worlds.simulated.network.origin import origin
from pdlcheck.worlds.simulated.network.set_order import SetOrder
from pdlcheck.worlds.simulated.network.tensor_sharing import Shared
from pdlcheck.worlds.simulated.network.work import SimulatedWork, Transfer
from pdlcheck.worlds.simulated.schedules.access import Post, Question, StoreAccess
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, Scheduler, current_rank, running_rank

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.recorder import Recorder

__all__ = ["Network"]

_PATIENCE = 10_000  # turns of other ranks


class Network:
    """The engine that links the ranks of a simulated cluster: an ``Engine`` for their process groups."""

    def __init__(self, world_size: int) -> None:
        self.recorder: Recorder | None = None  # of the run under way, if its times are requested
        self.scheduler = Scheduler(world_size, stuck=self._stuck, elapse=self._elapse)
        self.store = SimulatedStore(self.scheduler)
        self.worn = False  # whether a rank has left something behind that the next world's ranks would find
        self._claims = [HazardDetector(self._describe) for _ in range(world_size)]
        self._seed = 0
        self._forget()

    def serve(self, seed: int, semantics: Semantics) -> None:
        """Reuse these rank threads for another world; only its seed and semantics differ."""
        self.semantics = semantics
        self._seed = seed
        self.scheduler.seed(seed)
        self.store.clear()
        for rank in self.scheduler.ranks:
            if rank.c10d:
                rebind_to_world(rank)

    def reset(self) -> None:
        """Forget everything, after ranks failed in the middle of an operation.

        Each rank makes its default group anew.
        """
        self.worn = True
        forget_servers()
        self.store = SimulatedStore(self.scheduler)
        for rank in self.scheduler.ranks:
            for group in self._groups(rank):
                group.end(Ended())
            rank.c10d = {}
        self._forget()

    def break_off(self) -> None:
        """Forget everything except the groups, which may still be torn down.

        The groups may be complete on some ranks only.
        """
        self.worn = True
        forget_servers()
        self._forget()

    def _forget(self) -> None:
        self._matcher = Matcher()
        self._lanes = OrderedP2PMatcher()
        self._posted: dict[int, SimulatedWork] = {}  # not matched yet
        self._open: dict[int, SimulatedWork] = {}  # asynchronous, and not waited for yet
        self._unmoved: list[Transfer] = []  # data that moves at a random moment
        self._unseen: list[SimulatedWork] = []  # matched, and not visible yet
        self.last: dict[int, Signature] = {}  # rank -> its last operation
        self._ended: dict[tuple[int, str], Signature] = {}  # rank, group -> the last collective that has ended
        self.begin()

    def begin(self, faults: Sequence[Fault] = ()) -> None:
        """Start a run with these faults. Operations are counted from 0."""
        self.last.clear()
        self.callers = Callers()
        self.shared = Shared()
        self.set_order = SetOrder()
        for rank in self.scheduler.ranks:
            for group in self._groups(rank):
                group.count_anew()
        self.suffering = FaultInjector(
            [fault for fault in faults if not isinstance(fault, Slow)], len(self.scheduler.ranks)
        )
        self.traffic = Traffic(len(self.scheduler.ranks))
        self._random = random.Random(self._seed)

    @staticmethod
    def _groups(rank: RankThread) -> list[WatchedGroup]:
        return [group for group in rank.c10d.get("pg_map", ()) if isinstance(group, WatchedGroup)]

    def _suffer(self, signature: Signature) -> list[Corrupt]:
        """Apply the faults that this operation meets, and the effects of earlier ones; return how to damage it."""
        damages = self.suffering.meet(signature, self._posted)
        if self.suffering.is_stalled(signature.rank):
            try:
                self.scheduler.wait_until(lambda: self.suffering.over, f"{signature} (stalled by a fault)")
            finally:
                raise RankGone
        self.last[signature.rank] = signature
        self.suffering.check(signature)
        return damages

    def _elapse(self) -> bool:
        """Let time limits elapse, the shortest first, because no rank can go on."""
        return self.scheduler.elapsing.elapse() or self.suffering.elapse(self._posted)

    def leave(self, rank: int) -> None:
        """Release what the running rank holds, because it has ended."""
        self._claims[rank].clear()
        self.worn = self.worn or not is_pristine() or are_left_on()

    def rest(self) -> bool:
        """Drop everything that belongs to the last run; return False if the ranks are not as those of a new network."""
        if self.worn:
            forget_servers()
            return False
        self._forget()
        self.scheduler.rest()
        return True

    def leaks(self) -> PdlcheckError | None:
        """Return the error for what the ranks left behind, once all have returned; None if there is nothing."""
        return leaked(self._posted.values(), self._open.values(), self._describe) if self.semantics.leaks else None

    def _describe(self, signature: Signature) -> tuple[str, str]:
        """Return the text of a pending operation, and that of a later collective of its group that has ended or ''."""
        later = None if signature.is_p2p else self._ended.get((signature.rank, signature.group))
        is_later = later is not None and later.seq > signature.seq
        return self.callers.told(signature), f"{later.op}, collective {later.seq}" if later and is_later else ""

    # -- operations --------------------------------------------------------------------------------

    def post(self, operation: Operation) -> SimulatedWork:
        """Post an operation of the running rank. It completes when its partners are there."""
        refuse(operation)
        validate_for_gloo(operation, with_grad=self.semantics.messages != "in_order")  # NCCL writes below autograd
        require_member_of_this_world(operation, self)
        signature = operation.signature
        self.set_order.look(signature)
        post = Post(signature)
        if self.suffering.loses_ranks:
            post.kills = self.suffering.kills_next(signature.rank)
        self.scheduler.post(post)
        if self._unmoved or self._unseen:
            self._let_things_happen()
        self.callers.note(signature)
        damages = () if self.suffering.is_whole else self._suffer(signature)
        self.last[signature.rank] = signature
        work = SimulatedWork(self, operation, origin(operation), post)
        if self.suffering.faults:
            for fault in damages:
                self.suffering.damage(fault, work)
            self.suffering.remember(operation)
        self._posted[id(work)] = work
        if signature.op == "send" and self.semantics.buffers(nbytes_of(operation.parts[0].inputs[0])):
            work.buffer()
        if self.recorder is not None:
            self.recorder.post(work)
        self._protect(work)
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

        with suppress(PeerFailed), self.scheduler.elapsing.limit(0.0, signature.rank, lambda: elapsed.append(True)):
            self.scheduler.wait_until(is_over, signature)
        if error := self._matcher.verdict():
            raise error

    def _complete(self, match: Match) -> None:
        works = [self._posted.pop(key) for key in match.keys]  # type: ignore[call-overload]
        self.traffic.count([work.operation for work in works])
        self.shared.compare(works)
        if self.recorder is not None:
            self.recorder.meet(works)
        transfer = Transfer(works, self._order)
        for work in works:
            work.match(transfer)
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

    # -- buffers -----------------------------------------------------------------------------------

    def _protect(self, work: SimulatedWork) -> None:
        """Protect the buffers of an operation until the rank waits for it.

        Operations that torch itself posts (DDP's reducer, functional collectives) are poisoned and not watched.
        Watching costs time, and torch waits before it hands out a result.
        """
        operation, origin = work.operation, work.origin
        kind = operation.method.kind
        claims = self._claims[operation.signature.rank]
        if claims.held:
            for tensor in kind.reads(operation):
                claims.check(tensor, "read", operation.signature)
            for tensor in kind.writes(operation):
                claims.check(tensor, "write", operation.signature)
        if origin.blocking:
            return
        work.protect(self.semantics.poison)
        self._open[id(work)] = work
        if self.semantics.hazards and not origin.torchs_own:
            claims.hold(work, operation.signature, kind.reads(operation), kind.writes(operation))

    def finished(self, work: SimulatedWork) -> None:
        """Record that the rank has waited for the operation, and release its buffers."""
        signature = work.operation.signature
        if (last := self._ended.get(key := (signature.rank, signature.group))) is None or last.seq < signature.seq:
            self._ended[key] = signature
        if not work.origin.blocking:
            self._open.pop(id(work), None)
            self._claims[signature.rank].release(work)

    def finish_earlier(self, waited: Signature) -> None:
        """Finish earlier collectives of the running rank on the group, because it has waited for a later one."""
        for work in [] if waited.is_p2p else list(self._open.values()):
            one = work.operation.signature
            same = one.rank == waited.rank and one.group == waited.group and not one.is_p2p
            if same and one.seq < waited.seq and work.may_go_on() and not work.is_lost:
                work.finish()

    def reads(self, rank: int, tensor: Tensor, by: str) -> None:
        """Check a read of the running rank that no dispatch mode sees."""
        self._claims[rank].check(tensor, "read", by)

    def after_backward(self, rank: int) -> None:
        """Watch the rank's pending operations again, because a backward pass has ended."""
        self._claims[rank].resume()

    # -- time --------------------------------------------------------------------------------------

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
        with self.scheduler.elapsing.limit(limit_s, work.operation.signature.rank, work.elapse):
            self.wait(work.may_go_on, work.operation.signature)

    def wait_in_store(self, ready: Callable[[], bool], waits_for: str, access: StoreAccess, limit_s: float) -> bool:
        """Block the running rank until ``ready()`` returns True; return False if ``limit_s`` elapses before.

        Limits elapse as in :meth:`wait_for`.
        """
        elapsed: list[bool] = []
        with self.scheduler.elapsing.limit(limit_s, running_rank().rank, lambda: elapsed.append(True)):
            self.scheduler.wait_until(lambda: bool(elapsed) or ready(), waits_for, access)
        return ready()

    def missing(self, signature: Signature) -> tuple[int, ...]:
        """Return the ranks that an operation still waits for."""
        return self._matcher.missing(signature)

    def close(self, signature: Signature) -> None:
        """Close the connections of a rank that has given up waiting for a message; see :meth:`FaultInjector.close`."""
        self.suffering.close(signature, self._posted)
        self._open = {key: work for key, work in self._open.items() if not work.is_lost}

    def poll(self, waits_for: Signature) -> None:
        """Give up the turn, because the running rank asks whether an operation is complete."""
        self._let_things_happen()
        self.scheduler.poll(waits_for, Question(waits_for))

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

    def _stuck(self, waiting: Sequence[RankThread], ranks: Sequence[RankThread]) -> PdlcheckError:
        return deadlock(
            waiting={rank.rank: rank.waits_for or "its own code" for rank in waiting},
            ended={rank.rank: self.last.get(rank.rank) for rank in ranks if rank.outcome is not None},
            missing={
                rank.rank: self.missing(rank.waits_for) for rank in waiting if isinstance(rank.waits_for, Signature)
            },
        )
