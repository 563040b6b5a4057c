"""``reduce_scatter``: each rank gets its piece of the sum, maximum, ... of the ranks' tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from pdlcheck.operations.flat import does_not_fit
from pdlcheck.operations.forms import (
    OP,
    OPTIONS,
    Forms,
    list_of_one,
    list_of_tensors,
    lists_of_one,
    lists_of_tensors,
    tensor,
)
from pdlcheck.operations.gloo import refuse_copies_with_grad
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.memory_order import refuse_mixed_lists
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order, reduced
from pdlcheck.operations.rounds import Payload, Round, nbytes_of, ring

__all__ = ["REDUCE_SCATTER"]


class _ReduceScatter(Collective):
    """A ring: a rank sends (N-1)/N B bytes, in (N-1) (a + B / (N b)) seconds on equal links."""

    name = "reduce_scatter"
    algorithm = "ring"
    one_order = True
    lists = ("inputs",)
    pieces = "own"
    has_future = False

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        totals = [reduced([part.inputs[i] for part in parts], reduce_op, order) for i in range(len(parts))]
        return [[(part.outputs[0], total)] for part, total in zip(parts, totals, strict=True)]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        for part in operation.parts:
            output = part.outputs[0]
            how = mpi.reduction(output.dtype, operation.reduce_op)
            if how.prepare is None:
                values = mpi.sources(part.inputs)
            else:
                values = mpi.sources([mpi.prepared(piece, how).reshape(-1) for piece in part.inputs])
            room = mpi.result(how, output)
            values = mpi.apart(values, room)
            counts = [piece.numel() for piece in part.inputs]
            mpi.begun(mpi.communicator.Ireduce_scatter(how.numbers(values), how.numbers(room), counts, how.op))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of the piece of each rank."""
        inputs = [part.inputs for part in operations[0].parts]
        return tuple([sum(map(nbytes_of, piece)) for piece in zip(*inputs, strict=True)])

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        return ring(n, payload, 1)


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    inputs = [list(tensors) for tensors in inputs]
    parts = [Part(tensors, [out]) for tensors, out in zip(inputs, outputs, strict=True)]
    args = (outputs, inputs, options)
    compare = [piece for tensors in inputs for piece in tensors]
    return group.post_collective(method, parts, args, compare=compare, reduce_op=options.reduceOp)


def _post_flat(group: Group, method: Method, arguments: Any) -> dist.Work:
    output, input, options = arguments
    parts = _parts(group, [output], [input])
    args = (output, input, options)
    return group.post_collective(method, parts, args, compare=[input], reduce_op=options.reduceOp)


def _post_flat_coalesced(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    parts = _parts(group, outputs, inputs)
    args = (outputs, inputs, options)
    return group.post_collective(method, parts, args, compare=inputs, reduce_op=options.reduceOp)


def _parts(group: Group, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Part]:
    size = group.size()
    for x, out in zip(inputs, outputs, strict=True):
        if x.numel() != size * out.numel():
            raise does_not_fit(group, "reduce_scatter_tensor", out, x, "an input")
    return [
        Part([piece.view(out.shape) for piece in x.reshape(size, *out.shape).unbind(0)], [out])
        for x, out in zip(inputs, outputs, strict=True)
    ]


REDUCE_SCATTER = _ReduceScatter(
    Method(
        "reduce_scatter",
        Forms(
            "reduce_scatter",
            c10d.ReduceScatterOptions,
            {"output_tensors": list_of_tensors, "input_tensors": lists_of_tensors} | OPTIONS,
            {"output": list_of_one, "input": lists_of_one} | OP,
        ),
        _post,
        copies=True,
        check=refuse_mixed_lists,
        check_grad_on_gloo=refuse_copies_with_grad,
    ),
    *(
        Method(
            name,
            Forms(name, c10d.ReduceScatterOptions, {"outputTensor": tensor, "inputTensor": tensor} | OPTIONS),
            _post_flat,
            copies=True,
            check_grad_on_gloo=refuse_copies_with_grad,
            dispatcher_op="_reduce_scatter_base_",
        )
        for name in ("reduce_scatter_single", "_reduce_scatter_base")  # the name since torch 2.13, and the earlier one
    ),
    *(
        Method(
            name,
            Forms(name, c10d.ReduceScatterOptions, {"outputs": list_of_tensors, "inputs": list_of_tensors} | OPTIONS),
            _post_flat_coalesced,
            copies=True,
            check_grad_on_gloo=refuse_copies_with_grad,
            dispatcher_op="reduce_scatter_tensor_coalesced_",
        )
        for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
    ),
)
