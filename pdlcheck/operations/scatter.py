"""``scatter``: one tensor of the root on each rank."""

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
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.memory_order import refuse_gaps, refuse_mixed_lists
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.rounds import Payload, Round, nbytes_of, one_by_one
from pdlcheck.operations.signature import Signature

__all__ = ["SCATTER"]


class _Scatter(Collective):
    """The root sends to one rank after the other: (N-1) B bytes, in (N-1) (a + B / b) seconds."""

    name = "scatter"
    algorithm = "one by one"
    root_name = "src"
    one_order = True
    lists = ("inputs",)
    reads_late = True

    def only_sends(self, signature: Signature) -> bool:
        return signature.root == signature.rank

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        values = [value.detach().clone() for value in parts[root].inputs]
        return [[(part.outputs[0], value)] for part, value in zip(parts, values, strict=True)]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        root = signature.members.index(signature.root)
        for part in operation.parts:
            is_root = signature.root == signature.rank
            values = mpi.raw_vector(mpi.sources(part.inputs), part.inputs) if is_root else None
            mpi.begun(mpi.communicator.Iscatterv(values, mpi.raw(mpi.target(part.outputs[0])), root))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the tensor of each rank."""
        return (sum([nbytes_of(part.outputs[0]) for part in operations[0].parts]),) * len(operations)

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        return iter([[(root, place, payload[place])] for place in one_by_one(n, root)])


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    inputs = [list(tensors) for tensors in inputs]
    parts = [Part(inputs[0] if inputs else [], outputs)]
    return group.post_collective(method, parts, (outputs, inputs, options), compare=outputs, root=options.rootRank)


def _refuse_memory(operation: Operation) -> None:
    """Check the memory of the outputs, and of the inputs, which gloo sends as they lie."""
    refuse_mixed_lists(operation)
    for part in operation.parts:
        refuse_gaps(operation.signature.op, part.inputs)


SCATTER = _Scatter(
    Method(
        "scatter",
        Forms(
            "scatter",
            c10d.ScatterOptions,
            {"output_tensors": list_of_tensors, "input_tensors": lists_of_tensors} | OPTIONS,
            {"output_tensor": list_of_one, "input_tensors": lists_of_one} | ROOT,
        ),
        _post,
        check=_refuse_memory,
    )
)
