"""The non-blocking MPI calls of each operation, and the steps that follow their completion.

Tensors whose memory layout fits MPI are used in place. Others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdlcheck.worlds.mpi.datatypes import Reduction, raw, reduction
from pdlcheck.worlds.mpi.library import MPI
from pdlcheck.worlds.observe import Operation, refuse

__all__ = ["Begun", "begin"]


@dataclass(slots=True)
class Begun:
    """A posted operation.

    ``kept`` lives until all ``requests`` are complete. Then the functions in ``finish`` must be called.
    """

    requests: list[MPI.Request] = field(default_factory=list)
    finish: list[Callable[[], object]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


def begin(communicator: MPI.Intracomm, operation: Operation) -> Begun:
    """Post an operation of the group that ``communicator`` spans.

    Raises:
        NotImplementedError: a tensor is sparse.
        ValueError: a tensor is not on the CPU, or the reduce-op is not defined for its dtype.
        RuntimeError: the tensors do not fit one another.
    """
    begun = Begun()
    refuse(operation)
    for part in operation.parts:
        for tensor in (*part.inputs, *part.outputs):
            _check(tensor)
    with torch.no_grad():
        _BEGIN[operation.signature.op](communicator, operation, begun)
    return begun


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"the mpi backend moves dense tensors, got layout {tensor.layout}; call .to_dense() first"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"the mpi backend moves tensors of the CPU, got one on {tensor.device}; call .cpu() first")


# -- tensors as MPI needs them ---------------------------------------------------------------------


def _source(tensor: Tensor, begun: Begun) -> Tensor:
    """Return the values of ``tensor``, contiguous, for MPI to read."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    begun.kept.append(flat)
    return flat


def _target(tensor: Tensor, begun: Begun) -> Tensor:
    """Return contiguous memory whose content becomes ``tensor``."""
    data = tensor.detach()
    if data.is_contiguous() and not data.is_conj() and not data.is_neg():
        begun.kept.append(data)
        return data
    room = torch.empty(data.shape, dtype=data.dtype)
    begun.kept.append(room)
    begun.finish.append(lambda: data.data.copy_(room))
    return room


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return one flat tensor over the memory of ``tensors``; None if they do not lie side by side."""
    if not tensors:
        return None
    first = tensors[0]
    position, numel = first.data_ptr(), 0
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        there = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == position
        if not (tensor.numel() == 0 or there) or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.dtype != first.dtype:
            return None
        position += tensor.numel() * tensor.element_size()
        numel += tensor.numel()
    if first.numel() == 0:  # an empty first tensor does not define where the others are
        return None
    return first.detach().as_strided((numel,), (1,))


def _sources(tensors: Sequence[Tensor], begun: Begun) -> Tensor:
    flat = _joined(tensors)
    if flat is None:
        values = [tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors]
        flat = torch.cat(values)
    begun.kept.append(flat)
    return flat


def _targets(tensors: Sequence[Tensor], begun: Begun) -> Tensor:
    flat = _joined(tensors)
    if flat is None:
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype)
        pieces = torch.split(flat, _counts(tensors))
        for tensor, piece in zip(tensors, pieces, strict=True):
            begun.finish.append(partial(tensor.detach().data.copy_, piece.view(tensor.shape)))
    begun.kept.append(flat)
    return flat


def _counts(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _raw_vector(flat: Tensor, counts: Sequence[int]) -> list[Any]:
    buffer, _, datatype = raw(flat)
    displacements, position = [], 0
    for count in counts:
        displacements.append(position)
        position += count
    return [buffer, (list(counts), displacements), datatype]


def _root(operation: Operation) -> int:
    signature = operation.signature
    return signature.members.index(signature.root)


# -- collectives -----------------------------------------------------------------------------------


def _all_reduce(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    for part in operation.parts:
        how = reduction(part.inputs[0].dtype, operation.reduce_op, communicator.Get_size())
        room = _contribution(part.inputs[0], how, part.outputs[0], begun)
        begun.requests.append(communicator.Iallreduce(MPI.IN_PLACE, how.numbers(room), how.op))


def _reduce(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    root = _root(operation)
    for part in operation.parts:
        how = reduction(part.inputs[0].dtype, operation.reduce_op, communicator.Get_size())
        if communicator.Get_rank() == root:
            room = _contribution(part.inputs[0], how, part.outputs[0], begun)
            request = communicator.Ireduce(MPI.IN_PLACE, how.numbers(room), how.op, root)
        else:
            values = _prepared(part.inputs[0], how, begun)
            request = communicator.Ireduce(how.numbers(values), None, how.op, root)
        begun.requests.append(request)


def _contribution(tensor: Tensor, how: Reduction, output: Tensor, begun: Begun) -> Tensor:
    """Return memory that holds this rank's values and receives the result, which then becomes ``output``."""
    data = output.detach()
    if how.prepare is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        room = data
    else:
        room = _prepared(tensor, how, begun)
    begun.kept.append(room)
    _conclude(room, how, data, begun)
    return room


def _prepared(tensor: Tensor, how: Reduction, begun: Begun) -> Tensor:
    values = tensor.detach().resolve_conj().resolve_neg()
    if how.prepare is not None:
        values = how.prepare(values)
    values = values.contiguous()
    begun.kept.append(values)
    return values


def _conclude(room: Tensor, how: Reduction, output: Tensor, begun: Begun) -> None:
    if how.conclude is not None:
        conclude = how.conclude
        begun.finish.append(lambda: conclude(room))
    if room is not output:
        begun.finish.append(lambda: output.data.copy_(room.view(output.shape)))


def _reduce_scatter(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    for part in operation.parts:
        output = part.outputs[0]
        how = reduction(output.dtype, operation.reduce_op, communicator.Get_size())
        if how.prepare is None:
            values = _sources(part.inputs, begun)
        else:
            values = torch.cat([_prepared(tensor, how, begun).reshape(-1) for tensor in part.inputs])
            begun.kept.append(values)
        data = output.detach()
        in_place = how.dtype is data.dtype and data.is_contiguous()
        room = data if in_place else torch.empty(data.shape, dtype=how.dtype)
        if in_place and _overlap(values, data):
            values = values.clone()
            begun.kept.append(values)
        begun.kept.append(room)
        _conclude(room, how, data, begun)
        counts = _counts(part.inputs)
        begun.requests.append(communicator.Ireduce_scatter(how.numbers(values), how.numbers(room), counts, how.op))


def _broadcast(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    root = _root(operation)
    mine = communicator.Get_rank() == root
    for part in operation.parts:
        value = _source(part.inputs[0], begun) if mine else _target(part.outputs[0], begun)
        begun.requests.append(communicator.Ibcast(raw(value), root))


def _all_gather(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    for part in operation.parts:
        value = _source(part.inputs[0], begun)
        room = _targets(part.outputs, begun)
        if _overlap(value, room):  # the input is often a view of the output
            value = value.clone()
            begun.kept.append(value)
        counts = _counts(part.outputs)
        begun.requests.append(communicator.Iallgatherv(raw(value), _raw_vector(room, counts)))


def _gather(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    root = _root(operation)
    for part in operation.parts:
        value = _source(part.inputs[0], begun)
        room = None
        if communicator.Get_rank() == root:
            room = _raw_vector(_targets(part.outputs, begun), _counts(part.outputs))
        begun.requests.append(communicator.Igatherv(raw(value), room, root))


def _scatter(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    root = _root(operation)
    for part in operation.parts:
        values = None
        if communicator.Get_rank() == root:
            values = _raw_vector(_sources(part.inputs, begun), _counts(part.inputs))
        room = _target(part.outputs[0], begun)
        begun.requests.append(communicator.Iscatterv(values, raw(room), root))


def _all_to_all(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    for part in operation.parts:
        values, room = _sources(part.inputs, begun), _targets(part.outputs, begun)
        if _overlap(values, room):
            values = values.clone()
            begun.kept.append(values)
        sent, taken = _counts(part.inputs), _counts(part.outputs)
        begun.requests.append(communicator.Ialltoallv(_raw_vector(values, sent), _raw_vector(room, taken)))


def _barrier(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    begun.requests.append(communicator.Ibarrier())


# -- messages --------------------------------------------------------------------------------------


def _send(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    signature = operation.signature
    value = _source(operation.parts[0].inputs[0], begun)
    peer = signature.members.index(signature.peer)
    begun.requests.append(communicator.Isend(raw(value), peer, signature.tag))


def _recv(communicator: MPI.Intracomm, operation: Operation, begun: Begun) -> None:
    signature = operation.signature
    room = _target(operation.parts[0].outputs[0], begun)
    peer = signature.members.index(signature.peer) if signature.peer >= 0 else MPI.ANY_SOURCE
    begun.requests.append(communicator.Irecv(raw(room), peer, signature.tag))


def _overlap(one: Tensor, other: Tensor) -> bool:
    start, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    return start < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end


_BEGIN: dict[str, Callable[[MPI.Intracomm, Operation, Begun], None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "recv": _recv,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "send": _send,
}
