"""``gather``: the tensors of all ranks on the root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.operations.forms import (
    OPTIONS,
    ROOT,
    Forms,
    list_of_one,
    list_of_tensors,
    lists_of_one,
    lists_of_tensors,
)
from pdlcheck.operations.gloo import refuse_copies_with_grad
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.rounds import Payload, Round, nbytes_of_inputs, one_by_one

__all__ = ["GATHER"]


class _Gather(Collective):
    """The root receives from one rank after the other: a rank sends B bytes, in (N-1) (a + B / b) seconds."""

    name = "gather"
    algorithm = "one by one"
    lists = ("outputs",)

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        values = [part.inputs[0].detach().clone() for part in parts]
        return [list(zip(part.outputs, values, strict=True)) if rank == root else [] for rank, part in enumerate(parts)]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        root = signature.members.index(signature.root)
        for part in operation.parts:
            value = mpi.source(part.inputs[0])
            is_root = signature.root == signature.rank
            room = mpi.raw_vector(mpi.targets(part.outputs), part.outputs) if is_root else None
            mpi.begun(mpi.communicator.Igatherv(mpi.raw(value), room, root))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of one rank's tensor."""
        return (nbytes_of_inputs(operations[0]),)

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        return iter([[(place, root, payload[0])] for place in one_by_one(n, root)])


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    outputs = [list(out) for out in outputs]
    parts = [Part(inputs, outputs[0] if outputs else [])]
    return group.post_collective(method, parts, (outputs, inputs, options), compare=inputs, root=options.rootRank)


GATHER = _Gather(
    Method(
        "gather",
        Forms(
            "gather",
            c10d.GatherOptions,
            {"output_tensors": lists_of_tensors, "input_tensors": list_of_tensors} | OPTIONS,
            {"output_tensors": lists_of_one, "input_tensor": list_of_one} | ROOT,
        ),
        _post,
        copies=True,
        check_grad_on_gloo=refuse_copies_with_grad,
    )
)
