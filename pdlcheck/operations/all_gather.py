"""``all_gather``: the tensors of all ranks on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pdlcheck.operations.flat import parts_of_output
from pdlcheck.operations.forms import (
    FLAT,
    LIMIT,
    OPTIONS,
    Forms,
    list_of_one,
    list_of_tensors,
    lists_of_one,
    lists_of_tensors,
)
from pdlcheck.operations.gloo import refuse_copies_with_grad, refuse_views_with_grad
from pdlcheck.operations.kind import Collective, Moved
from pdlcheck.operations.method import Group, Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order
from pdlcheck.operations.rounds import Payload, Round, nbytes_of_inputs, ring

__all__ = ["ALL_GATHER"]

_Options: type = c10d.AllgatherOptions  # type: ignore[attr-defined]  # public, but not in its __all__


class _AllGather(Collective):
    """A ring: a rank sends (N-1) B bytes, in (N-1) (a + B / b) seconds on equal links."""

    name = "all_gather"
    algorithm = "ring"
    lists = ("outputs",)

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        values = [part.inputs[0].detach().clone() for part in parts]
        return [list(zip(part.outputs, values, strict=True)) for part in parts]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        for part in operation.parts:
            value = mpi.source(part.inputs[0])
            room = mpi.targets(part.outputs)
            value = mpi.apart(value, room)  # the input is often a view of the output
            mpi.begun(mpi.communicator.Iallgatherv(mpi.raw(value), mpi.raw_vector(room, part.outputs)))

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of one rank's tensor."""
        return (nbytes_of_inputs(operations[0]),)

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        return ring(n, payload * n, 0)


def _post(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    outputs = [list(out) for out in outputs]
    parts = [Part([x], out) for x, out in zip(inputs, outputs, strict=True)]
    return group.post_collective(method, parts, (outputs, inputs, options), compare=inputs)


def _post_coalesced(group: Group, method: Method, arguments: Any) -> dist.Work:
    lists, inputs, options = arguments  # one list for each member, with one tensor for each input
    parts = [Part([x], [out[i] for out in lists]) for i, x in enumerate(inputs)]
    return group.post_collective(method, parts, (lists, inputs, options), compare=inputs)


def _post_flat(group: Group, method: Method, arguments: Any) -> dist.Work:
    output, input, options = arguments
    parts = [Part([input], parts_of_output(group, output, input, "all_gather_into_tensor"))]
    return group.post_collective(method, parts, (output, input, options), compare=[input])


def _post_flat_coalesced(group: Group, method: Method, arguments: Any) -> dist.Work:
    outputs, inputs, options = arguments
    parts = [
        Part([x], parts_of_output(group, out, x, "all_gather_into_tensor"))
        for x, out in zip(inputs, outputs, strict=True)
    ]
    return group.post_collective(method, parts, (outputs, inputs, options), compare=inputs)


ALL_GATHER = _AllGather(
    Method(
        "allgather",
        Forms(
            "allgather",
            _Options,
            {"output_tensors": lists_of_tensors, "input_tensors": list_of_tensors} | OPTIONS,
            {"output_tensors": lists_of_one, "input_tensor": list_of_one} | LIMIT,
        ),
        _post,
        copies=True,
        check_grad_on_gloo=refuse_copies_with_grad,
    ),
    Method(
        "allgather_coalesced",
        Forms(
            "allgather_coalesced",
            _Options,
            {"output_lists": lists_of_tensors, "input_list": list_of_tensors} | OPTIONS,
        ),
        _post_coalesced,
        copies=True,
        check_grad_on_gloo=refuse_copies_with_grad,
    ),
    *(
        Method(
            name,
            Forms(name, _Options, FLAT | OPTIONS),
            _post_flat,
            copies=True,
            check_grad_on_gloo=refuse_views_with_grad,
            dispatcher_op="_allgather_base_",
        )
        for name in ("all_gather_single", "_allgather_base")  # the name since torch 2.13, and the earlier one
    ),
    *(
        Method(
            name,
            Forms(name, _Options, {"outputs": list_of_tensors, "inputs": list_of_tensors} | OPTIONS),
            _post_flat_coalesced,
            copies=True,
            check_grad_on_gloo=refuse_views_with_grad,
            dispatcher_op="allgather_into_tensor_coalesced_",
        )
        for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
    ),
)
