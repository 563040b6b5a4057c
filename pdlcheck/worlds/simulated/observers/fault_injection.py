"""The effects of the faults of a run: which operation meets one, and what its rank and the survivors observe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from pdlcheck.errors import PdlcheckError, RankDied, RankStalled
from pdlcheck.faults import Absent, Corrupt, Kill, Stall
from pdlcheck.operations.kind import Write
from pdlcheck.worlds.observe import Operation, Part, Signature
from pdlcheck.worlds.simulated.engine.connections import needs
from pdlcheck.worlds.simulated.engine.engine import SimulatedEngine
from pdlcheck.worlds.simulated.engine.gloo_errors import connection_closed, operation_timeout, rendezvous_timeout
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork
from pdlcheck.worlds.simulated.schedules.access import Post
from pdlcheck.worlds.simulated.scheduling.scheduler import RankGone

__all__ = ["FaultInjector", "faults_of"]

_FEWER = "the rank posts fewer operations"


class FaultInjector(Observer):
    """The faults of one run.

    Args:
        faults: the faults, except those that act on the virtual clock.
        engine: carries out the operations of the run.

    Attributes:
        gone: rank -> the error that states what a fault did to it.
        loses_ranks: whether there are faults that take a rank from its group.
        absent: ranks that never came.
        why_not: fault -> why it changed nothing; a fault that came about is not in it.
        patient: ranks that wait for one that has given up, until it ends or no other rank can go on.
        over: whether only stalled ranks are left, or no rank can go on: their threads end.
    """

    def __init__(self, faults: Sequence[Absent | Corrupt | Kill | Stall], engine: SimulatedEngine) -> None:
        self.faults = faults
        self.gone: dict[int, PdlcheckError] = {}
        self.why_not = dict.fromkeys(faults, _FEWER)
        self.absent = sorted({fault.rank for fault in faults if isinstance(fault, Absent)})
        for rank in self.absent:
            self.why_not[Absent(rank)] = "no other rank asks for a process group"
            self.gone[rank] = RankDied(
                f"rank {rank} never came to init_process_group: a fault dropped it", rank=rank, exitcode=None, stderr=""
            )
        self.loses_ranks = any(isinstance(fault, Kill | Stall) for fault in faults)
        self.patient: set[int] = set()
        self.over = False
        self._engine = engine
        self._stalled: set[int] = set()
        self._damages: Sequence[Corrupt] = ()  # of the operation that is posted now
        self._counts: Counter[int] = Counter()
        self._given: dict[object, Sequence[Tensor]] = {}  # the inputs of a rank's last operation of each form

    def check_rendezvous(self, rank: int, timeout: timedelta | None = None, *, unasked: bool = False) -> None:
        """Check that no rank is absent, because ``rank`` needs the default group.

        Args:
            rank: the rank that needs the group.
            timeout: the time limit of its call.
            unasked: the rank takes for granted that the world has made the group.

        Raises:
            RuntimeError: a rank is absent.
        """
        if not self.absent:
            return
        for absent in self.absent:
            self.why_not.pop(Absent(absent), None)
        error = rendezvous_timeout(rank, len(self._engine.scheduler.ranks), self.absent, timeout)
        if unasked:
            faults = ", ".join(str(Absent(absent)) for absent in self.absent)
            raise type(error)(f"{error}\n  there is no default group, as the world has the fault {faults}")
        raise error

    def why(self, fault: Absent | Corrupt | Kill | Stall) -> str:
        """Return why a fault that did not come about changed nothing."""
        reason, count = self.why_not[fault], self._counts[fault.rank]
        if reason != _FEWER:
            return reason
        return f"{reason}: {f'{count}, numbered from 0' if count else 'none'}"

    def before_post(self, operation: Operation, post: Post) -> None:
        """Record for the schedule whether the rank is killed at the operation that it is about to post."""
        if self.loses_ranks:
            rank = operation.signature.rank
            number = self._counts[rank]
            post.kills = any(isinstance(f, Kill) and (f.rank, f.operation) == (rank, number) for f in self.faults)

    def posting(self, signature: Signature) -> None:
        """Apply the faults that this operation meets, and the effects of earlier ones.

        Raises:
            RankGone: the rank is killed or stalled now, or was taken earlier.
            RuntimeError: the operation needs a rank that is gone.
        """
        self._damages = self._meet(signature)
        if signature.rank in self._stalled:
            try:
                self._engine.scheduler.wait_until(lambda: self.over, f"{signature} (stalled by a fault)")
            finally:
                raise RankGone
        self._engine.last[signature.rank] = signature
        self._engine.connections.check(signature, self.gone.keys() - self._stalled)

    def posted(self, work: SimulatedWork) -> None:
        """Damage the operation, and keep its input for a fault that gives it again."""
        for fault in self._damages:
            self._damage(fault, work)
        self._remember(work.operation)

    def _meet(self, signature: Signature) -> list[Corrupt]:
        """Count an operation that is about to be posted, and return the faults that damage it.

        Raises:
            RankGone: the rank is killed now, or was taken earlier.
        """
        self.check_rendezvous(signature.rank, unasked=True)  # the group may have been there before the run
        rank, number = signature.rank, self._counts[signature.rank]
        self._counts[rank] += 1
        if rank in self.gone:
            raise RankGone
        met = [f for f in self.faults if not isinstance(f, Absent) and (f.rank, f.operation) == (rank, number)]
        for fault in met:
            if isinstance(fault, Kill):
                self._take(
                    fault,
                    RankDied(
                        f"rank {rank} was killed by a fault when it was about to post {signature}",
                        rank=rank,
                        exitcode=-9,
                        stderr="",
                    ),
                )
                self._engine.connections.lose(
                    lambda other: other.rank != rank and needs(other, rank), lambda _: connection_closed(rank)
                )
                raise RankGone
            if isinstance(fault, Stall):
                self._take(
                    fault,
                    RankStalled(
                        f"rank {rank} was stalled by a fault when it was about to post {signature}, and never went on",
                        rank=rank,
                        operation=str(signature),
                    ),
                )
                self._stalled.add(rank)
        return [fault for fault in met if isinstance(fault, Corrupt)]

    def stuck(self) -> bool:
        """Let the time limits of operations that need a stalled rank elapse, because no rank can go on.

        Returns:
            True if something has changed.
        """
        if self.patient:
            self.patient.clear()
            return True
        if not self._stalled or self.over:
            return False
        stalled, connections = self._stalled, self._engine.connections
        lost = connections.lose(
            lambda s: s.rank not in stalled and any(needs(s, rank) for rank in stalled), operation_timeout
        )
        self.over = not lost
        connections.close((signature.group, signature.rank) for signature in lost)
        return True

    def _damage(self, fault: Corrupt, work: SimulatedWork) -> None:
        """Damage the input of an operation now, or its output when it is delivered."""
        operation = work.operation
        kind = operation.method.kind
        tensors = kind.reads(operation) if fault.where == "input" else kind.writes(operation)
        given = self._given.get(_form(operation))
        if error := _unfit(fault, tensors, given):
            self.why_not[fault] = f"{operation.signature} {error}"
            return
        if fault.where == "input":
            self.why_not.pop(fault, None)
            if fault.how == "stale" and given is not None:
                hurt = {id(now): before for now, before in zip(tensors, given, strict=True)}
            else:
                place, element = _place(tensors, fault.element)
                hurt = {id(tensors[place]): _damaged(fault, tensors[place], element)}
            pairs = zip(operation.parts, work.parts, strict=True)  # the inputs of the second may be copies
            work.parts = [
                Part([hurt.get(id(x), y) for x, y in zip(given.inputs, own.inputs, strict=True)], own.outputs)
                for given, own in pairs
            ]
            return
        self.why_not[fault] = f"nobody waited for {operation.signature}"
        before = {id(tensor): tensor.detach().clone() for tensor in tensors}  # before it is poisoned
        place, element = _place(tensors, fault.element)

        def deliver(writes: Sequence[Write]) -> Sequence[Write]:
            if fault.how == "stale":
                if all(_same(value, before[id(output)]) for output, value in writes):
                    self.why_not[fault] = f"{operation.signature} gets what its output held before"
                else:
                    self.why_not.pop(fault, None)
                return [(output, before[id(output)]) for output, _ in writes]
            self.why_not.pop(fault, None)
            return [(o, _damaged(fault, v, element) if o is tensors[place] else v) for o, v in writes]

        work.deliver = deliver

    def _remember(self, operation: Operation) -> None:
        """Keep the input of an operation, for a fault that gives it again."""
        rank = operation.signature.rank
        if any(isinstance(f, Corrupt) and (f.rank, f.how, f.where) == (rank, "stale", "input") for f in self.faults):
            self._given[_form(operation)] = [
                tensor.detach().clone() for tensor in operation.method.kind.reads(operation)
            ]

    def _take(self, fault: Kill | Stall, error: PdlcheckError) -> None:
        self.gone[fault.rank] = error
        self.why_not.pop(fault, None)


def faults_of(engine: SimulatedEngine) -> FaultInjector:
    """Return the faults of the run under way; a run without faults has an empty set."""
    return engine.observer(FaultInjector) or FaultInjector((), engine)


def _form(operation: Operation) -> object:
    """Return a key that is equal for operations of one rank that can take each other's input."""
    signature = operation.signature
    return (
        signature.rank,
        signature.op,
        *((tensor.shape, tensor.dtype) for tensor in operation.method.kind.reads(operation)),
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _unfit(fault: Corrupt, tensors: Sequence[Tensor], given: Sequence[Tensor] | None) -> str | None:
    if not tensors:
        return f"has no {fault.where} on this rank"
    if fault.how == "stale":
        if fault.where == "output":
            return None
        if given is None:
            return "has none of its kind, shapes and dtypes before it on this rank"
        return "gives what the one before it gave" if all(map(_same, tensors, given)) else None
    total = sum(tensor.numel() for tensor in tensors)
    if fault.element >= total:
        return f"has {total} elements in its {fault.where}; element {fault.element} is none of them"
    hit = tensors[_place(tensors, fault.element)[0]]
    if fault.how == "nan" and not (hit.is_floating_point() or hit.is_complex()):
        return f"carries {str(hit.dtype).removeprefix('torch.')}, which has no NaN; use how='bit_flip'"
    bits = 1 if hit.dtype == torch.bool else 8 * hit.element_size()
    if fault.how == "bit_flip" and hit.dtype != torch.bool and not -bits <= fault.bit < bits:
        return f"has elements of {bits} bits; bit {fault.bit} is none of them"
    return None


def _place(tensors: Sequence[Tensor], element: int) -> tuple[int, int]:
    """Return (number of the tensor, number of the element in it)."""
    for place, tensor in enumerate(tensors):
        if element < tensor.numel():
            return place, element
        element -= tensor.numel()
    raise IndexError(element)


def _damaged(fault: Corrupt, tensor: Tensor, element: int) -> Tensor:
    hurt = tensor.detach().clone(memory_format=torch.contiguous_format)
    if fault.how == "nan":
        hurt.view(-1)[element] = float("nan")
        return hurt
    size = hurt.element_size()
    bit = 0 if hurt.dtype == torch.bool else fault.bit % (8 * size)
    hurt.view(-1).view(torch.uint8)[element * size + bit // 8] ^= 1 << bit % 8  # little-endian
    return hurt
