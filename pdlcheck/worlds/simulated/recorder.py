"""Writes down what the ranks of a simulated run do, for :mod:`pdlcheck.clock.replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from pdlcheck.clock.trace import Act, Trace
from pdlcheck.worlds.simulated.network.work import SimulatedWork
from pdlcheck.worlds.watch import Signature, user_line
from pdlcheck.worlds.watch.traffic import nbytes_of, payload_of

__all__ = ["Recorder"]


class Recorder:
    """Keeps the trace of one run.

    Args:
        slow: for some ranks, the factor by which they compute longer.
    """

    def __init__(self, world_size: int, slow: Mapping[int, float]) -> None:
        self.trace = Trace(world_size)
        self.slowed: set[int] = set()  # ranks that have computed slowly
        self._slow = slow
        self._futures: dict[int, list[Act]] = {}  # by rank: those whose future somebody has

    def compute(self, rank: int, seconds: float) -> None:
        """The rank computes."""
        if rank in self._slow and seconds:
            self.slowed.add(rank)
        self.trace.compute(rank, seconds * self._slow.get(rank, 1.0), user_line())

    def post(self, work: SimulatedWork) -> None:
        """The rank posts an operation."""
        operation, signature = work.operation, work.operation.signature
        parts = operation.parts
        given = [tensor for part in parts for tensor in (part.outputs if signature.op == "recv" else part.inputs)]
        act = Act(
            signature.rank, signature.op, _words(signature), signature.where, sum(map(nbytes_of, given)), work.matched
        )
        work.act = act
        self.trace.post(act)
        if signature.op == "recv" and signature.peer < 0:
            self.trace.by_schedule[f"receive from any rank, at {signature.where}"] = None

    def meet(self, works: Sequence[SimulatedWork]) -> None:
        """The operations have found one another."""
        signature = works[0].operation.signature
        root = signature.members.index(signature.root) if signature.root >= 0 else 0
        payload = () if signature.is_p2p else payload_of([work.operation for work in works])
        self.trace.meet([work.act for work in works if work.act is not None], root, payload)

    def wait(self, work: SimulatedWork) -> None:
        """The rank waits for an operation."""
        if work.act is not None:
            self.trace.wait(work.act)

    def waited(self, work: SimulatedWork) -> None:
        """The wait has ended well."""
        if work.act is not None:
            work.act.completed = True

    def poll(self, work: SimulatedWork) -> None:
        """The rank asks whether an operation is complete; how often it has to depends on the schedule."""
        self.trace.by_schedule[f"is_completed of {work.operation.signature}"] = None

    def future(self, work: SimulatedWork) -> None:
        """Somebody takes the operation's future.

        In a backward pass that is DDP's reducer, which waits for it at the end of the pass, in C++. Where the operation
        is complete by then, as it may be under one schedule and not under another, no call tells of that wait.
        """
        if work.act is None:
            return
        self._futures.setdefault(work.act.rank, []).append(work.act)
        if torch._C._current_graph_task_id() != -1:
            if torch._C._current_autograd_node() is None:  # the pass is over: its callbacks run
                self.wait(work)
            else:
                torch.autograd.Variable._execution_engine.queue_callback(partial(self.wait, work))

    def wait_for_futures(self, rank: int) -> None:
        """The rank waits for a future made of others: for all whose futures were taken, as nobody can tell which."""
        for act in self._futures.pop(rank, ()):
            self.trace.wait(act)
            act.completed = True


def _words(signature: Signature) -> str:
    """``send to rank 1 of float32 (3,)``."""
    call, of, tensors = signature.kind.partition(" of ")
    if signature.op == "send":
        call += f" to rank {signature.peer}"
    elif signature.op == "recv":
        call += f" from rank {signature.peer}" if signature.peer >= 0 else " from any rank"
    return call + of + tensors
