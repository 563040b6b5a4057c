"""``broadcast``: the root's tensor on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pdlcheck.operations.forms import OPTIONS, ROOT, Forms, list_of_one, list_of_tensors
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.rounds import Payload, Round, binomial_tree, nbytes_of_inputs
from pdlcheck.operations.signature import Signature

__all__ = ["BROADCAST"]


class _Broadcast(Collective):
    """A binomial tree: all ranks together send (N-1) B bytes, in ceil(log2 N) (a + B / b) seconds on equal links."""

    name = "broadcast"
    algorithm = "binomial tree"
    root_name = "src"
    one_order = True

    def reads(self, operation: Operation) -> list[Tensor]:
        return super().reads(operation) if _is_root(operation.signature) else []

    def writes(self, operation: Operation) -> list[Tensor]:
        return [] if _is_root(operation.signature) else super().writes(operation)

    def only_sends(self, signature: Signature) -> bool:
        return _is_root(signature)

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        value = parts[root].inputs[0].detach().clone()
        return [[(part.outputs[0], value)] if rank != root else [] for rank, part in enumerate(parts)]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        signature = operation.signature
        root = signature.members.index(signature.root)
        for part in operation.parts:
            value = mpi.source(part.inputs[0]) if _is_root(signature) else mpi.target(part.outputs[0])
            mpi.begun(mpi.communicator.Ibcast(mpi.raw(value), root))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the tensor."""
        return (nbytes_of_inputs(operations[0]),)

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        return binomial_tree(n, root, payload[0])


def _is_root(signature: Signature) -> bool:
    return signature.root == signature.rank


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    tensors, options = arguments
    parts = [Part([tensor], [tensor]) for tensor in tensors]
    return group.post_collective(method, parts, (tensors, options), compare=tensors, root=options.rootRank)


BROADCAST = _Broadcast(
    Method(
        "broadcast",
        Forms(
            "broadcast", c10d.BroadcastOptions, {"tensors": list_of_tensors} | OPTIONS, {"tensor": list_of_one} | ROOT
        ),
        _post,
    )
)
