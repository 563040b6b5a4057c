"""``barrier``: every rank waits for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.operations.forms import LIMIT, OPTIONS, Forms
from pdlcheck.operations.kind import OperationKind
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation
from pdlcheck.operations.rounds import Payload, Round

__all__ = ["BARRIER"]


class _Barrier(OperationKind):
    """Dissemination: a rank sends ceil(log2 N) empty messages, in ceil(log2 N) a seconds on equal links."""

    name = "barrier"
    algorithm = "dissemination"
    is_ordered = False

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        mpi.begun(mpi.communicator.Ibarrier())

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        step = 1
        while step < n:
            yield [(place, (place + step) % n, 0) for place in range(n)]
            step *= 2


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    return group.post_collective(method, [], tuple(arguments))


BARRIER = _Barrier(Method("barrier", Forms("barrier", c10d.BarrierOptions, OPTIONS, LIMIT), _post))
