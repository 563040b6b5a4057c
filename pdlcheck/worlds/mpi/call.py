"""The MPI call of an operation: its buffers, its requests, and the steps that follow their completion.

Tensors whose memory layout fits MPI are used in place. Others are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdlcheck.operations import mpi_call
from pdlcheck.operations.operation import Operation
from pdlcheck.operations.validation import refuse
from pdlcheck.worlds.mpi.datatypes import Reduction, raw, reduction
from pdlcheck.worlds.mpi.library import MPI

__all__ = ["MpiCall", "begin"]


class MpiCall:
    """The call of one operation; each operation begins its own, see :class:`pdlcheck.operations.mpi_call.MpiCall`.

    ``kept`` lives until all ``requests`` are complete. Then the functions in ``finish`` must be called.
    """

    __slots__ = ("communicator", "finish", "kept", "requests", "size")
    in_place = MPI.IN_PLACE
    any_source = MPI.ANY_SOURCE

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.communicator = communicator
        self.size = communicator.Get_size()
        self.requests: list[MPI.Request] = []
        self.finish: list[Callable[[], object]] = []
        self.kept: list[Any] = []

    def begun(self, request: MPI.Request) -> None:
        """Record a request, for which the operation waits."""
        self.requests.append(request)

    def release(self) -> None:
        """Drop the buffers of a complete operation."""
        self.requests, self.finish, self.kept = [], [], []

    # -- tensors as MPI needs them -----------------------------------------------------------------

    def source(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor``, contiguous, for MPI to read."""
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self.kept.append(flat)
        return flat

    def sources(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the values of all ``tensors`` in one flat tensor."""
        flat = _joined(tensors)
        if flat is None:
            values = [tensor.detach().resolve_conj().resolve_neg().reshape(-1) for tensor in tensors]
            flat = torch.cat(values)
        self.kept.append(flat)
        return flat

    def target(self, tensor: Tensor) -> Tensor:
        """Return contiguous memory whose content becomes ``tensor``."""
        data = tensor.detach()
        if data.is_contiguous() and not data.is_conj() and not data.is_neg():
            self.kept.append(data)
            return data
        room = torch.empty(data.shape, dtype=data.dtype)
        self.kept.append(room)
        self.finish.append(lambda: data.data.copy_(room))
        return room

    def targets(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one flat tensor whose content becomes the ``tensors``."""
        flat = _joined(tensors)
        if flat is None:
            counts = [tensor.numel() for tensor in tensors]
            flat = torch.empty(sum(counts), dtype=tensors[0].dtype)
            for tensor, piece in zip(tensors, torch.split(flat, counts), strict=True):
                self.finish.append(partial(tensor.detach().data.copy_, piece.view(tensor.shape)))
        self.kept.append(flat)
        return flat

    def apart(self, values: Tensor, room: Tensor) -> Tensor:
        """Return ``values``, or a copy if they share memory with ``room``."""
        if _overlap(values, room):
            values = values.clone()
            self.kept.append(values)
        return values

    def raw(self, tensor: Tensor) -> list[Any]:
        """Return a contiguous tensor as a buffer that MPI moves without interpreting it."""
        return raw(tensor)

    def raw_vector(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Any]:
        """Return a flat tensor as a buffer with one piece for each of ``tensors``."""
        buffer, _, datatype = raw(flat)
        counts = [tensor.numel() for tensor in tensors]
        displacements, position = [], 0
        for count in counts:
            displacements.append(position)
            position += count
        return [buffer, (counts, displacements), datatype]

    # -- reductions --------------------------------------------------------------------------------

    def reduction(self, of: torch.dtype, reduce_op: Any) -> Reduction:
        """Return the reduction for a reduce-op on a dtype."""
        return reduction(of, reduce_op, self.size)

    def prepared(self, tensor: Tensor, how: mpi_call.Reduction) -> Tensor:
        """Return this rank's contribution to a reduction."""
        values = tensor.detach().resolve_conj().resolve_neg()
        if how.prepare is not None:
            values = how.prepare(values)
        values = values.contiguous()
        self.kept.append(values)
        return values

    def contribution(self, tensor: Tensor, how: mpi_call.Reduction, output: Tensor) -> Tensor:
        """Return memory that holds this rank's contribution and receives the result, which then becomes ``output``."""
        data = output.detach()
        if how.prepare is None and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            room = data
        else:
            room = self.prepared(tensor, how)
        self._conclude(room, how, data)
        return room

    def result(self, how: mpi_call.Reduction, output: Tensor) -> Tensor:
        """Return memory that receives the result of a reduction, which then becomes ``output``."""
        data = output.detach()
        in_place = how.dtype is data.dtype and data.is_contiguous()
        room = data if in_place else torch.empty(data.shape, dtype=how.dtype)
        self._conclude(room, how, data)
        return room

    def _conclude(self, room: Tensor, how: mpi_call.Reduction, output: Tensor) -> None:
        self.kept.append(room)
        if how.conclude is not None:
            self.finish.append(partial(how.conclude, room))
        if room is not output:
            self.finish.append(lambda: output.data.copy_(room.view(output.shape)))


def begin(communicator: MPI.Intracomm, operation: Operation) -> MpiCall:
    """Post an operation of the group that ``communicator`` spans.

    Raises:
        NotImplementedError: a tensor is sparse.
        ValueError: a tensor is not on the CPU, or the reduce-op is not defined for its dtype.
        RuntimeError: the tensors do not fit one another.
    """
    call = MpiCall(communicator)
    refuse(operation)
    for part in operation.parts:
        for tensor in (*part.inputs, *part.outputs):
            _check(tensor)
    with torch.no_grad():
        operation.method.kind.begin(operation, call)
    return call


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"the mpi backend moves dense tensors, got layout {tensor.layout}; call .to_dense() first"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"the mpi backend moves tensors of the CPU, got one on {tensor.device}; call .cpu() first")


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


def _overlap(one: Tensor, other: Tensor) -> bool:
    start, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    return start < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end
