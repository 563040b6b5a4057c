"""``reduce``: the sum, maximum, ... of the ranks' tensors on the root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pdlcheck.operations.forms import OPTIONS, ROOT_OP, Forms, list_of_one, list_of_tensors
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order, reduced
from pdlcheck.operations.rounds import Payload, Round, binomial_tree, nbytes_of_inputs

__all__ = ["REDUCE"]


class _Reduce(Collective):
    """A binomial tree: all ranks together send (N-1) B bytes, in ceil(log2 N) (a + B / b) seconds on equal links."""

    name = "reduce"
    algorithm = "binomial tree"
    one_order = True
    leaves_partial_sums = True

    def writes(self, operation: Operation) -> list[Tensor]:
        signature = operation.signature
        return super().writes(operation) if signature.root == signature.rank else []

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        total = reduced([part.inputs[0] for part in parts], reduce_op, order)
        return [[(part.outputs[0], total)] if rank == root else [] for rank, part in enumerate(parts)]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        root = signature.members.index(signature.root)
        for part in operation.parts:
            how = mpi.reduction(part.inputs[0].dtype, operation.reduce_op)
            if signature.root == signature.rank:
                room = mpi.contribution(part.inputs[0], how, part.outputs[0])
                request = mpi.communicator.Ireduce(mpi.in_place, how.numbers(room), how.op, root)
            else:
                values = mpi.prepared(part.inputs[0], how)
                request = mpi.communicator.Ireduce(how.numbers(values), None, how.op, root)
            mpi.begun(request)

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the tensor."""
        return (nbytes_of_inputs(operations[0]),)

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        for messages in reversed(list(binomial_tree(n, root, payload[0]))):
            yield [(dst, src, nbytes) for src, dst, nbytes in messages]


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    tensors, options = arguments
    parts = [Part([tensor], [tensor]) for tensor in tensors]
    args = (tensors, options)
    return group.post_collective(
        method, parts, args, compare=tensors, reduce_op=options.reduceOp, root=options.rootRank
    )


REDUCE = _Reduce(
    Method(
        "reduce",
        Forms("reduce", c10d.ReduceOptions, {"tensors": list_of_tensors} | OPTIONS, {"tensor": list_of_one} | ROOT_OP),
        _post,
    )
)
