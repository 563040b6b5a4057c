"""The recorder of a simulated run: its trace is the input of :mod:`pdlcheck.clock.replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from pdlcheck.clock.trace import Act, Trace
from pdlcheck.compat.torch.autograd import call_after_backward, current_node, in_backward
from pdlcheck.operations.rounds import nbytes_of
from pdlcheck.worlds.observe import Signature, user_line
from pdlcheck.worlds.observe.traffic import payload_of
from pdlcheck.worlds.simulated.engine.observer import Observer
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Recorder"]


class Recorder(Observer):
    """The recorder of one run.

    Args:
        world_size: number of ranks.
        slow: for some ranks, the factor by which they compute longer.
    """

    def __init__(self, world_size: int, slow: Mapping[int, float]) -> None:
        self.trace = Trace(world_size)
        self.slowed: set[int] = set()  # ranks that have computed slowly
        self._slow = slow
        self._acts: dict[int, Act] = {}  # by id of the work; a later work at the same address has replaced it
        self._futures: dict[int, list[Act]] = {}  # by rank: the acts whose future was taken

    def computed(self, rank: int, seconds: float) -> None:
        """Record that the rank computes for ``seconds``, times its factor if it is slow."""
        if rank in self._slow and seconds:
            self.slowed.add(rank)
        self.trace.compute(rank, seconds * self._slow.get(rank, 1.0), user_line())

    def posted(self, work: SimulatedWork) -> None:
        """Record that a rank posts an operation."""
        operation, signature = work.operation, work.operation.signature
        parts = operation.parts
        given = [tensor for part in parts for tensor in (part.outputs if signature.op == "recv" else part.inputs)]
        act = Act(
            signature.rank, signature.op, _words(signature), signature.where, sum(map(nbytes_of, given)), work.matched
        )
        self._acts[id(work)] = act
        self.trace.post(act)
        if signature.op == "recv" and signature.peer < 0:
            self.trace.by_schedule[f"receive from any rank, at {signature.where}"] = None

    def matched(self, works: Sequence[SimulatedWork]) -> None:
        """Record that operations have matched."""
        signature = works[0].operation.signature
        root = signature.members.index(signature.root) if signature.root >= 0 else 0
        payload = () if signature.is_p2p else payload_of([work.operation for work in works])
        self.trace.meet([act for work in works if (act := self._acts.get(id(work))) is not None], root, payload)

    def waits(self, work: SimulatedWork) -> None:
        """Record that a rank waits for an operation."""
        if (act := self._acts.get(id(work))) is not None:
            self.trace.wait(act)

    def waited(self, work: SimulatedWork) -> None:
        """Record that the wait for an operation has succeeded."""
        if (act := self._acts.get(id(work))) is not None:
            act.completed = True

    def polled(self, work: SimulatedWork) -> None:
        """Record that the rank polls an operation, because the number of polls depends on the schedule."""
        self.trace.by_schedule[f"is_completed of {work.operation.signature}"] = None
        if work.visible:
            self.waits(work)

    def future_taken(self, work: SimulatedWork) -> None:
        """Record that a caller takes the operation's future.

        In a backward pass the caller is DDP's reducer, which waits for the future at the end of the pass, in C++. The
        operation may be complete by then under one schedule and not under another. If it is complete, no call reports
        that wait. It is therefore recorded at the end of the pass.
        """
        if (act := self._acts.get(id(work))) is None:
            return
        self._futures.setdefault(act.rank, []).append(act)
        if in_backward():
            if current_node() is None:  # the pass is over, and its callbacks run
                self.waits(work)
            else:
                call_after_backward(partial(self.waits, work))

    def future_waited(self, rank: int) -> None:
        """Record that the rank waits for a future made of others.

        The others are unknown, so this counts as a wait for every operation of the rank whose future was taken.
        """
        for act in self._futures.pop(rank, ()):
            self.trace.wait(act)
            act.completed = True


def _words(signature: Signature) -> str:
    """Return a text such as ``send to rank 1 of float32 (3,)``."""
    call, of, tensors = signature.kind.partition(" of ")
    if signature.op == "send":
        call += f" to rank {signature.peer}"
    elif signature.op == "recv":
        call += f" from rank {signature.peer}" if signature.peer >= 0 else " from any rank"
    return call + of + tensors
