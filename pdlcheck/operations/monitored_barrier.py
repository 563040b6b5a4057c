"""``monitored_barrier``: a barrier that names the ranks which do not come; torch has it for gloo alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.operations.kind import OperationKind
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.rounds import Payload, Round, one_by_one

__all__ = ["MONITORED_BARRIER", "post_monitored_barrier"]


class _MonitoredBarrier(OperationKind):
    """All ranks report to rank 0, which answers: N-1 empty messages of rank 0, one of the others, in 2 (N-1) a s."""

    name = "monitored_barrier"
    algorithm = "through rank 0"

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        yield from ([(place, 0, 0)] for place in one_by_one(n, 0))
        yield from ([(0, place, 0)] for place in one_by_one(n, 0))


def _refuse(group: Group, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Raise: since 2.14 torch does not check the backend's name first, so this call reaches any group."""
    raise ValueError(f"monitored_barrier is only implemented for GLOO, not for {group.name()}; call barrier")


MONITORED_BARRIER = _MonitoredBarrier(Method("monitored_barrier", function=_refuse))
_BARRIER = Method("barrier")  # the call of a group that carries out an ordinary barrier
_BARRIER.kind = MONITORED_BARRIER


def post_monitored_barrier(group: Group) -> dist.Work:
    """Post a barrier that matches only barriers of its kind."""
    options = c10d.BarrierOptions()
    options.asyncOp = False
    return group.post_collective(_BARRIER, [], (options,))
