"""``all_to_all``: each rank sends a piece to every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pdlcheck.operations.forms import FLAT, LIMIT, OPTIONS, Forms, list_of_tensors, numbers, row_counts
from pdlcheck.operations.gloo import is_channels_last, layout_of, refuse_copies_with_grad
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.memory_order import refuse_mixed_orders
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.rounds import Payload, Round, nbytes_of
from pdlcheck.operations.signature import Signature

__all__ = ["ALL_TO_ALL"]


class _AllToAll(Collective):
    """A pairwise exchange: a rank sends all pieces but its own, in (N-1) (a + B / (N b)) seconds on equal links."""

    name = "all_to_all"
    algorithm = "pairwise exchange"
    lists = ("inputs", "outputs")
    pieces = "none"
    reads_late = True
    compares_pairs = True

    def results(self, operation: Operation) -> list[Tensor]:
        whole = operation.args[0]  # the outputs are its pieces
        return [whole] if isinstance(whole, Tensor) else super().results(operation)

    def disagreement(self, one: Signature, other: Signature) -> tuple[str, str] | None:
        """Return the first piece whose size differs between its sender and its receiver."""
        if any(len(splits) != len(signature.members) for signature in (one, other) for splits in signature.splits):
            return None  # torch raises on the rank itself
        for sender, receiver in ((one, other), (other, one)):
            sent = sender.splits[0][sender.members.index(receiver.rank)]
            taken = receiver.splits[1][receiver.members.index(sender.rank)]
            if sent != taken:
                words = (
                    f"rank {sender.rank} sends {sent} elements to rank {receiver.rank} in all_to_all, "
                    f"rank {receiver.rank} has room for {taken}"
                )
                return words, "the split"
        return None

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        values = [[value.detach().clone() for value in part.inputs] for part in parts]
        return [
            [(output, row[rank].reshape(output.shape)) for output, row in zip(part.outputs, values, strict=True)]
            for rank, part in enumerate(parts)
        ]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        for part in operation.parts:
            values, room = mpi.sources(part.inputs), mpi.targets(part.outputs)
            values = mpi.apart(values, room)
            sent, taken = mpi.raw_vector(values, part.inputs), mpi.raw_vector(room, part.outputs)
            mpi.begun(mpi.communicator.Ialltoallv(sent, taken))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the pieces that rank 0 gives, then of those of rank 1, ..."""
        return tuple([nbytes_of(piece) for operation in operations for piece in operation.parts[0].inputs])

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        for step in range(1, n):
            yield [(place, to, payload[place * n + to]) for place in range(n) for to in [(place + step) % n]]


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    return group.post_collective(
        method, [Part(inputs, outputs)], (outputs, inputs, options), splits=_splits(inputs, outputs)
    )


def _post_flat(group: Group, method: Method, arguments: Any) -> dist.Work:
    output, input, out_rows, in_rows, options = arguments
    out_rows, in_rows = numbers(out_rows), numbers(in_rows)
    inputs, outputs = _pieces(group, input, in_rows), _pieces(group, output, out_rows)
    return group.post_collective(
        method,
        [Part(inputs, outputs)],
        (output, input, out_rows, in_rows, options),
        splits=_splits(inputs, outputs),
    )


def _splits(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple([x.numel() for x in inputs]), tuple([out.numel() for out in outputs])


def _pieces(group: Group, tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Return the piece of ``tensor`` for each rank: by rows, or evenly by elements if there are no splits."""
    if rows:
        return list(torch.split(tensor, list(rows)))
    size = group.size()
    if tensor.numel() % size:
        raise RuntimeError(
            f"all_to_all_single without split sizes deals a tensor out evenly: {tensor.numel()} elements, shape "
            f"{tuple(tensor.shape)}, do not divide equally across {size} ranks"
        )
    whole = tensor if tensor.dim() and tensor.shape[0] % size == 0 else tensor.view(-1)
    return list(torch.split(whole, [whole.shape[0] // size] * size))


def _refuse_permuted(operation: Operation) -> None:
    refuse_mixed_orders(operation.signature.op, [operation.args[0]], or_permuted=True)


def _refuse_strided(operation: Operation) -> None:
    tensor = operation.args[1]
    if not tensor.is_contiguous() and not is_channels_last(tensor):
        raise ValueError(
            f"all_to_all_single: Tensors must be contiguous, got an input of {layout_of(tensor)}; call .contiguous() "
            "first"
        )


_SPLIT = FLAT | {"output_split_sizes": row_counts, "input_split_sizes": row_counts}
ALL_TO_ALL = _AllToAll(
    Method(
        "alltoall",
        Forms(
            "alltoall",
            c10d.AllToAllOptions,
            {"output_tensors": list_of_tensors, "input_tensors": list_of_tensors} | OPTIONS,
        ),
        _post,
        copies=True,
        check_grad_on_gloo=refuse_copies_with_grad,
    ),
    *(
        Method(
            name,
            Forms(name, c10d.AllToAllOptions, _SPLIT | OPTIONS, _SPLIT | LIMIT),
            _post_flat,
            check=_refuse_permuted,
            check_on_gloo=_refuse_strided,
            dispatcher_op="alltoall_base_",
        )
        for name in ("all_to_all_single", "alltoall_base")  # the name since torch 2.13, and the earlier one
    ),
)
