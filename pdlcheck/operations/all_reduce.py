"""``all_reduce``: the sum, maximum, ... of the ranks' tensors on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.operations.forms import OP, OPTIONS, Forms, list_of_one, list_of_tensors
from pdlcheck.operations.gloo import refuse_copies_with_grad
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order, reduced
from pdlcheck.operations.rounds import Payload, Round, nbytes_of_inputs, ring

__all__ = ["ALL_REDUCE"]


class _AllReduce(Collective):
    """A ring: a rank sends 2 (N-1)/N B bytes, in 2 (N-1) (a + B / (N b)) seconds on equal links."""

    name = "all_reduce"
    algorithm = "ring"
    one_order = True
    takes_sparse = True

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        total = reduced([part.inputs[0] for part in parts], reduce_op, order)
        return [[(part.outputs[0], total)] for part in parts]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        for part in operation.parts:
            how = mpi.reduction(part.inputs[0].dtype, operation.reduce_op)
            room = mpi.contribution(part.inputs[0], how, part.outputs[0])
            mpi.begun(mpi.communicator.Iallreduce(mpi.in_place, how.numbers(room), how.op))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the tensor and of one element.

        In a sum of sparse tensors, ranks may have different numbers of elements; the number of the first rank counts.
        """
        first = operations[0]
        return nbytes_of_inputs(first), first.parts[0].inputs[0].element_size()

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        nbytes, element = payload
        short, longer = divmod(nbytes // element, n)
        pieces = [(short + (place < longer)) * element for place in range(n)]  # the sizes of tensor_split
        yield from ring(n, pieces, 1)
        yield from ring(n, pieces, 0)


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    tensors, options = arguments
    parts = [Part([tensor], [tensor]) for tensor in tensors]
    return group.post_collective(method, parts, (tensors, options), compare=tensors, reduce_op=options.reduceOp)


_MANY = {"tensors": list_of_tensors}
ALL_REDUCE = _AllReduce(
    Method(
        "allreduce",
        Forms("allreduce", c10d.AllreduceOptions, _MANY | OPTIONS, _MANY | OP, {"tensor": list_of_one} | OP),
        _post,
    ),
    Method(
        "allreduce_coalesced",
        Forms("allreduce_coalesced", c10d.AllreduceCoalescedOptions, _MANY | OPTIONS),
        _post,
        copies=True,
        check_grad_on_gloo=refuse_copies_with_grad,
    ),
)
