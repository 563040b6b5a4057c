"""One operation that MPI carries out, as the operations see it: they do not import mpi4py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, dtype

__all__ = ["MpiCall", "Reduction"]


class Reduction(Protocol):
    """One reduce-op on one dtype; see :class:`pdlcheck.worlds.mpi.datatypes.Reduction`."""

    @property
    def op(self) -> Any:
        """Return the operation of MPI."""

    @property
    def dtype(self) -> dtype:
        """Return the dtype of the computation."""

    @property
    def prepare(self) -> Callable[[Tensor], Tensor] | None:
        """Return the function that each rank applies to its contribution."""

    @property
    def conclude(self) -> Callable[[Tensor], object] | None:
        """Return the function that is applied in place to the result."""

    def numbers(self, tensor: Tensor) -> list[Any]:
        """Return a contiguous tensor as a buffer that MPI reduces."""


class MpiCall(Protocol):
    """The call of one operation: buffers for its tensors, and the requests that it has begun.

    Attributes:
        communicator: the communicator of mpi4py, with its non-blocking methods.
        size: the number of ranks.
        in_place: ``MPI.IN_PLACE``.
        any_source: ``MPI.ANY_SOURCE``.
    """

    communicator: Any
    size: int
    in_place: Any
    any_source: int

    def begun(self, request: Any) -> None:
        """Record a request, for which the operation waits."""

    def source(self, tensor: Tensor) -> Tensor:
        """Return the values of ``tensor``, contiguous, for MPI to read."""

    def sources(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the values of all ``tensors`` in one flat tensor."""

    def target(self, tensor: Tensor) -> Tensor:
        """Return contiguous memory whose content becomes ``tensor``."""

    def targets(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return one flat tensor whose content becomes the ``tensors``."""

    def apart(self, values: Tensor, room: Tensor) -> Tensor:
        """Return ``values``, or a copy if they share memory with ``room``."""

    def raw(self, tensor: Tensor) -> list[Any]:
        """Return a contiguous tensor as a buffer that MPI moves without interpreting it."""

    def raw_vector(self, flat: Tensor, tensors: Sequence[Tensor]) -> list[Any]:
        """Return a flat tensor as a buffer with one piece for each of ``tensors``."""

    def reduction(self, of: dtype, reduce_op: Any) -> Reduction:
        """Return the reduction for a reduce-op on a dtype."""

    def prepared(self, tensor: Tensor, how: Reduction) -> Tensor:
        """Return this rank's contribution to a reduction."""

    def contribution(self, tensor: Tensor, how: Reduction, output: Tensor) -> Tensor:
        """Return memory that holds this rank's contribution and receives the result, which then becomes ``output``."""

    def result(self, how: Reduction, output: Tensor) -> Tensor:
        """Return memory that receives the result of a reduction, which then becomes ``output``."""
