"""The handle of an operation on simulated ranks, from the post to the moment when its results are there to be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.simulated.network.collectives import (
    Order,
    Write,
    moves,
    read_by,
    write,
    writes_as_user,
    written_by,
)
from pdlcheck.worlds.simulated.network.losses import too_late
from pdlcheck.worlds.simulated.network.memory import memories, storage_of
from pdlcheck.worlds.simulated.network.origin import Origin
from pdlcheck.worlds.simulated.network.poison import poison
from pdlcheck.worlds.simulated.network.shared import version_of
from pdlcheck.worlds.simulated.schedules.access import Post
from pdlcheck.worlds.simulated.turns.scheduler import RankThread, current_rank
from pdlcheck.worlds.watch import Operation, Part, WatchedWork, is_limit, refuse_future, user_call, user_line

if TYPE_CHECKING:
    from pdlcheck.clock.trace import Act
    from pdlcheck.worlds.simulated.network.network import Network

__all__ = ["SimulatedWork", "Transfer"]

_networks_own = torch._C._DisableTorchDispatch  # what the network does to tensors, no mode of a rank sees


@uncompiled
class SimulatedWork(WatchedWork):
    """An operation is posted, then *matched* when its partners are there, then *finished* by its rank.

    A rank that waits finishes a matched operation: results are delivered and the buffers belong to the rank again.
    Polls and futures do so once the operation is *visible*, which the semantics may delay.
    """

    # what most operations never change
    holds_back = False  # results stay out of the outputs until this rank has waited
    matched = False
    visible = False
    finished = False
    transfer: Transfer | None = None
    results: Sequence[Write] = ()
    act: Act | None = None  # what the recorder of times knows it by
    deliver: Callable[[Sequence[Write]], Sequence[Write]] | None = None  # a fault damages what arrives
    _waited = False
    _gave_future = False
    _elapsed = False
    _lost: RuntimeError | None = None  # a rank is gone without which there is no end

    def __init__(self, network: Network, operation: Operation, origin: Origin, post: Post) -> None:
        super().__init__(operation)
        self._post = post
        self._call = user_call() if network.scheduler.every_post else None
        self.origin = origin
        self.parts = operation.parts
        self.version = version_of(operation)
        self.owner: RankThread | None = current_rank()
        self._network = network

    def protect(self, poisoned: bool) -> None:
        """Copy the inputs that lie in outputs, and poison the outputs, if wanted."""
        outputs = written_by(self.operation) if poisoned else ()
        if not outputs:
            return
        self.holds_back = True
        with _networks_own():
            if read_by(self.operation):
                storages = {storage_of(memory) for tensor in outputs for memory in memories(tensor)}
                self.parts = [Part([_apart(x, storages) for x in p.inputs], p.outputs) for p in self.parts]
            for output in outputs:
                poison(output)

    def buffer(self) -> None:
        """A send that need not wait: its data is taken along now."""
        with _networks_own():
            self.parts = [Part([x.detach().clone() for x in part.inputs], part.outputs) for part in self.parts]
        self.matched = self.visible = True

    def match(self, transfer: Transfer) -> None:
        """All partners are there; called by the rank that came last."""
        self.transfer, self.matched = transfer, True

    def came_from(self, source: int) -> None:
        """The message is from this place in the group."""
        self._source = source

    def show(self) -> None:
        """Polls and futures learn that the operation is complete."""
        self.visible = True
        if self._future is not None and self.owner is not None and not self.finished:
            # callbacks of the future belong in the thread of the rank that owns it
            self.owner.on_resume.append(self.finish)

    def finish(self) -> None:
        """Deliver the results; called by the owning rank."""
        if not self.finished:
            self.finished = self.visible = True
            if self.transfer is not None:
                self.transfer.move()
            self._network.finished(self)
            if self.results:
                with _networks_own():
                    write(self.results, as_user=writes_as_user(self.operation))
                self.results = ()
            if self._leaves_partial_sums():
                with _networks_own():
                    for tensor in read_by(self.operation):
                        poison(tensor)
        if self._future is not None:
            self._settle_future()

    def _leaves_partial_sums(self) -> bool:
        """A reduce on ranks that are not its destination: of what gloo leaves there nobody can make use."""
        signature, semantics = self.operation.signature, self._network.semantics
        return (
            signature.op == "reduce"
            and signature.root != signature.rank
            and self.transfer is not None
            and semantics.poison
            and semantics.messages != "in_order"  # NCCL leaves what was there
        )

    def lose(self, error: RuntimeError) -> None:
        """The operation will never be complete; ``error`` says why."""
        self._lost = error
        if self._future is not None and self.owner is not None:
            self.owner.on_resume.append(self._settle_future)

    def wait(self, timeout: Any = None) -> bool:
        __tracebackhide__ = True
        again = self._waited and self._lost is None and not self._gave_future  # whose wait is one of ours, too
        if again and self._may("second_wait") == "blocks":
            self._network.wait(lambda: False, f"a second wait, at {user_line()}, for {self.operation.signature}")
        if self._network.recorder is not None:
            self._network.recorder.wait(self)
        if self._call is not None:
            self._post.blocks_in_call = self._call == user_call()
            self._call = None
        if is_limit(timeout):
            self._wait_within(timeout)
        else:
            self._network.wait(self.may_go_on, self.operation.signature)
        self._waited = True
        if self._lost is not None:
            raise RuntimeError(str(self._lost))  # each wait its own traceback
        if self._network.recorder is not None:
            self._network.recorder.waited(self)
        self.finish()
        if self._network.semantics.waits == "earlier":
            self._network.finish_earlier(self.operation.signature)
        return True

    def may_go_on(self) -> bool:
        """Whoever waits need not wait any longer."""
        return self.matched or self._lost is not None or self._elapsed

    @property
    def is_lost(self) -> bool:
        """It will never be complete."""
        return self._lost is not None

    def elapse(self) -> None:
        """The limit of the wait that is under way has come."""
        self._elapsed = True

    def _wait_within(self, limit: timedelta) -> None:
        """As gloo: a collective can be waited for again, after a message nothing of the group reaches this rank."""
        __tracebackhide__ = True
        signature = self.operation.signature
        self._network.wait_for(self, limit.total_seconds())
        elapsed, self._elapsed = self._elapsed, False
        if elapsed and not self.matched and self._lost is None:
            if not signature.is_p2p:
                raise RuntimeError(f"Operation timed out! {limit.total_seconds():g} s have passed in {signature}")
            self._network.close(signature)
            raise too_late(signature, round(1000 * limit.total_seconds()))

    def _may(self, what: str) -> str:
        """What the semantics say of messages; of collectives, gloo is strange about polls of one alone."""
        signature = self.operation.signature
        concerned = signature.is_p2p or (what == "polls" and signature.op == "reduce_scatter")
        return str(getattr(self._network.semantics, what)) if concerned else ""

    def is_completed(self) -> bool:
        self._network.poll(self.operation.signature)
        if self._may("polls") == "after_wait" and not self._waited:
            return False
        if (recorder := self._network.recorder) is not None:
            recorder.poll(self)
            if self.visible:
                recorder.wait(self)
        if self.visible:
            self.finish()
        return self.finished or self._lost is not None

    def get_future(self) -> torch.futures.Future[Any]:
        if self._network.semantics.messages != "in_order":
            refuse_future(self.operation.signature)
        if self._network.recorder is not None and not self._gave_future:
            self._network.recorder.future(self)
        self._gave_future = True
        return super().get_future()

    def is_success(self) -> bool:
        return self.visible and (self._waited or self._may("polls") != "after_wait")

    def exception(self) -> None:
        return None

    def _is_settled(self) -> bool:
        if self.visible:
            self.finish()
        return self.finished or self._lost is not None

    def _settle_future(self) -> None:
        future, self._future = self._future, None  # which knows this work: another circle
        if future is None:
            return
        if self._lost is not None:
            future.set_exception(RuntimeError(str(self._lost)))
        else:
            future.set_result(self.result())


class Transfer:
    """The data of one match: read from the inputs at some moment, then held for ranks that have not waited yet."""

    def __init__(self, works: Sequence[SimulatedWork], order: Order) -> None:
        self._works = works
        self._order = order
        self.moved = False

    def move(self) -> None:
        """Read all inputs, and write the outputs that are not held back."""
        if self.moved:
            return
        self.moved = True
        works, self._works = self._works, ()  # which know this one: circles are left to the garbage collector
        with _networks_own():
            results = moves([work.operation for work in works], [work.parts for work in works], self._order)
            for work, undamaged in zip(works, results, strict=True):
                writes = undamaged if work.deliver is None else work.deliver(undamaged)
                if not work.holds_back:
                    write(writes, as_user=writes_as_user(work.operation))
                elif work.operation.signature.is_p2p:
                    work.results = [(output, value.clone()) for output, value in writes]
                else:
                    work.results = list(writes)


def _apart(tensor: Any, storages: set[int]) -> Any:
    """A copy of an input that shares memory with an output; the poison would reach it."""
    return tensor.data.clone() if any(storage_of(memory) in storages for memory in memories(tensor)) else tensor
