"""The handle of an operation on simulated ranks, from the post to the moment when its results can be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from pdlcheck.compat.torch.modes import DisableTorchDispatch
from pdlcheck.operations.kind import Write
from pdlcheck.operations.reductions import Order
from pdlcheck.uncompiled import uncompiled
from pdlcheck.worlds.observe import Operation, Part, WatchedWork, is_limit, refuse_future, user_call, user_line
from pdlcheck.worlds.simulated.network.delivery import write
from pdlcheck.worlds.simulated.network.gloo_errors import operation_timeout
from pdlcheck.worlds.simulated.network.memory import memories, storage_of
from pdlcheck.worlds.simulated.network.origin import Origin
from pdlcheck.worlds.simulated.network.poison import poison
from pdlcheck.worlds.simulated.network.tensor_sharing import version_of
from pdlcheck.worlds.simulated.schedules.access import Post
from pdlcheck.worlds.simulated.scheduling.scheduler import RankThread, current_rank

if TYPE_CHECKING:
    from pdlcheck.clock.trace import Act
    from pdlcheck.worlds.simulated.network.network import Network

__all__ = ["SimulatedWork", "Transfer"]

_networks_own = DisableTorchDispatch  # hides the network's work on tensors from the modes of ranks


@uncompiled
class SimulatedWork(WatchedWork):
    """An operation that is posted, then *matched* when its partners are there, then *finished* by its rank.

    A rank that waits finishes a matched operation: results are delivered, and the buffers belong to the rank again.
    Polls and futures do so once the operation is *visible*, which the semantics may delay.
    """

    # class attributes, because most operations never change them
    holds_back = False  # results stay out of the outputs until this rank has waited
    matched = False
    visible = False
    finished = False
    transfer: Transfer | None = None
    results: Sequence[Write] = ()
    act: Act | None = None  # the entry of the operation in the recorded trace
    deliver: Callable[[Sequence[Write]], Sequence[Write]] | None = None  # set by a fault that damages the results
    _waited = False
    _gave_future = False
    _elapsed = False
    _lost: RuntimeError | None = None  # set if a rank is gone that the operation needs

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
        """Copy the inputs that share memory with outputs, and poison the outputs, if ``poisoned``."""
        kind = self.operation.method.kind
        outputs = kind.writes(self.operation) if poisoned else ()
        if not outputs:
            return
        self.holds_back = True
        with _networks_own():
            if kind.reads(self.operation):
                storages = {storage_of(memory) for tensor in outputs for memory in memories(tensor)}
                self.parts = [Part([_apart(x, storages) for x in p.inputs], p.outputs) for p in self.parts]
            for output in outputs:
                poison(output)

    def buffer(self) -> None:
        """Copy the data of a send now, because the send need not wait."""
        with _networks_own():
            self.parts = [Part([x.detach().clone() for x in part.inputs], part.outputs) for part in self.parts]
        self.matched = self.visible = True

    def match(self, transfer: Transfer) -> None:
        """Record that all partners are there. The rank that came last calls this."""
        self.transfer, self.matched = transfer, True

    def came_from(self, source: int) -> None:
        """Record the source of the message, as a place in the group."""
        self._source = source

    def show(self) -> None:
        """Make the operation visible to polls and futures."""
        self.visible = True
        if self._future is not None and self.owner is not None and not self.finished:
            # callbacks of the future must run in the thread of the rank that owns it
            self.owner.on_resume.append(self.finish)

    def finish(self) -> None:
        """Deliver the results. The owning rank calls this."""
        if not self.finished:
            self.finished = self.visible = True
            if self.transfer is not None:
                self.transfer.move()
            self._network.finished(self)
            if self.results:
                with _networks_own():
                    write(self.results, as_user=self.operation.method.copies)
                self.results = ()
            if self._leaves_partial_sums():
                with _networks_own():
                    for tensor in self.operation.method.kind.reads(self.operation):
                        poison(tensor)
        if self._future is not None:
            self._settle_future()

    def _leaves_partial_sums(self) -> bool:
        """Return whether this is a reduce on a rank that is not its destination.

        gloo leaves partial sums there, which no program can use.
        """
        signature, semantics = self.operation.signature, self._network.semantics
        return (
            self.operation.method.kind.leaves_partial_sums
            and signature.root != signature.rank
            and self.transfer is not None
            and semantics.poison
            and semantics.messages != "in_order"  # NCCL leaves the tensor unchanged
        )

    def lose(self, error: RuntimeError) -> None:
        """Record that the operation will never be complete, because of ``error``."""
        self._lost = error
        if self._future is not None and self.owner is not None:
            self.owner.on_resume.append(self._settle_future)

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the operation is complete, and deliver its results.

        Raises:
            RuntimeError: ``timeout`` has elapsed, or a rank is gone that the operation needs.
        """
        __tracebackhide__ = True
        again = self._waited and self._lost is None and not self._gave_future  # its future also waits by this method
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
            raise RuntimeError(str(self._lost))  # a new error, so that each wait has its own traceback
        if self._network.recorder is not None:
            self._network.recorder.waited(self)
        self.finish()
        if self._network.semantics.waits == "earlier":
            self._network.finish_earlier(self.operation.signature)
        return True

    def may_go_on(self) -> bool:
        """Return whether a rank that waits need not wait any longer."""
        return self.matched or self._lost is not None or self._elapsed

    @property
    def is_lost(self) -> bool:
        """Return whether the operation will never be complete."""
        return self._lost is not None

    def elapse(self) -> None:
        """Record that the limit of the present wait has elapsed."""
        self._elapsed = True

    def _wait_within(self, limit: timedelta) -> None:
        """Wait with a time limit, as gloo does.

        After the limit, a collective can be waited for again. After the limit of a message, no operation of the group
        reaches this rank any more.

        Raises:
            RuntimeError: the limit has elapsed.
        """
        __tracebackhide__ = True
        signature = self.operation.signature
        self._network.wait_for(self, limit.total_seconds())
        elapsed, self._elapsed = self._elapsed, False
        if elapsed and not self.matched and self._lost is None:
            if not signature.is_p2p:
                raise RuntimeError(f"Operation timed out! {limit.total_seconds():g} s have passed in {signature}")
            self._network.close(signature)
            raise operation_timeout(signature, round(1000 * limit.total_seconds()))

    def _may(self, what: str) -> str:
        """Return the semantics of messages in this respect; empty for a collective.

        Polls of a ``reduce_scatter`` count as those of a message, because gloo treats that collective differently.
        """
        signature = self.operation.signature
        concerned = signature.is_p2p or (what == "polls" and not self.operation.method.kind.has_future)
        return str(getattr(self._network.semantics, what)) if concerned else ""

    def is_completed(self) -> bool:
        """Return whether the operation is complete, and finish it if it is visible."""
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
        """Return the future of the operation."""
        if self._network.semantics.messages != "in_order":
            refuse_future(self.operation)
        if self._network.recorder is not None and not self._gave_future:
            self._network.recorder.future(self)
        self._gave_future = True
        return super().get_future()

    def is_success(self) -> bool:
        """Return whether the operation is complete, without giving up the turn."""
        return self.visible and (self._waited or self._may("polls") != "after_wait")

    def exception(self) -> None:
        """Return None, because :meth:`wait` raises the error."""
        return None  # noqa: RET501 - torch's method returns an exception or None

    def _is_settled(self) -> bool:
        if self.visible:
            self.finish()
        return self.finished or self._lost is not None

    def _settle_future(self) -> None:
        future, self._future = self._future, None  # it refers to this work: breaks a reference cycle
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
        works, self._works = self._works, ()  # they refer to this transfer: breaks a reference cycle
        with _networks_own():
            operations, parts = [work.operation for work in works], [work.parts for work in works]
            results = operations[0].method.kind.moves(operations, parts, self._order)
            for work, undamaged in zip(works, results, strict=True):
                writes = undamaged if work.deliver is None else work.deliver(undamaged)
                if not work.holds_back:
                    write(writes, as_user=work.operation.method.copies)
                elif work.operation.signature.is_p2p:
                    work.results = [(output, value.clone()) for output, value in writes]
                else:
                    work.results = list(writes)


def _apart(tensor: Any, storages: set[int]) -> Any:
    """Return a copy of an input that shares memory with an output, because the poison would overwrite it.

    Return any other input itself.
    """
    return tensor.data.clone() if any(storage_of(memory) in storages for memory in memories(tensor)) else tensor
