"""The base classes of the operations: what a world asks about one, with the answers that most of them give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor

from pdlcheck.operations.method import Method
from pdlcheck.operations.mpi_call import MpiCall
from pdlcheck.operations.operation import Operation, Part
from pdlcheck.operations.reductions import Order, multiplied
from pdlcheck.operations.rounds import Payload, Round
from pdlcheck.operations.signature import Signature

__all__ = ["Collective", "Moved", "OperationKind", "Write"]

Write = tuple[Tensor, Tensor]  # (output, its new value)
Moved = list[list[Write]]  # the writes of each rank, in group order


class OperationKind:
    """All that is particular to one operation; the base class moves nothing, as a barrier does.

    Args:
        methods: the methods of a process group that post it.

    Attributes:
        name: the field's name, ``all_reduce``.
        algorithm: the name of the algorithm whose messages stand for the collective; empty for a message.
        root_name: torch's name for the root of a collective, or for the other end of a message.
        one_order: the order of the elements in memory must agree between the ranks; other operations make copies.
        lists: the lists of tensors that it takes, with one tensor for each rank.
        pieces: which of the tensors must have one shape on a rank.
        reads_late: some results arrive before all inputs are sent, so they must not share memory.
        takes_sparse: it accepts sparse tensors.
        compares_pairs: two ranks may disagree although their signatures are equal; see :meth:`disagreement`.
        has_future: gloo has a future of it.
        leaves_partial_sums: gloo leaves partial sums in the tensor of a rank that is not the root.
        is_ordered: ranks can mix up two equal operations.
    """

    name: ClassVar[str]
    algorithm: ClassVar[str] = ""
    root_name: ClassVar[Literal["dst", "src"]] = "dst"
    one_order: ClassVar[bool] = False
    lists: ClassVar[tuple[Literal["inputs", "outputs"], ...]] = ()
    pieces: ClassVar[Literal["all", "own", "none"]] = "all"
    reads_late: ClassVar[bool] = False
    takes_sparse: ClassVar[bool] = False
    compares_pairs: ClassVar[bool] = False
    has_future: ClassVar[bool] = True
    leaves_partial_sums: ClassVar[bool] = False
    is_ordered: ClassVar[bool] = True

    def __init__(self, *methods: Method) -> None:
        self.methods: list[Method] = []
        self.add(*methods)

    def add(self, *methods: Method) -> None:
        """Add methods that post this operation."""
        for method in methods:
            method.kind = self
            self.methods.append(method)

    # -- tensors -----------------------------------------------------------------------------------

    def reads(self, operation: Operation) -> list[Tensor]:
        """Return the tensors that the operation reads on its rank."""
        return [tensor for part in operation.parts for tensor in part.inputs]

    def writes(self, operation: Operation) -> list[Tensor]:
        """Return the tensors that the operation writes on its rank."""
        return [tensor for part in operation.parts for tensor in part.outputs]

    def results(self, operation: Operation) -> list[Tensor]:
        """Return the tensors that the handle of the operation shows as its result."""
        return [tensor for part in operation.parts for tensor in part.outputs]

    # -- agreement of the ranks --------------------------------------------------------------------

    def disagreement(self, one: Signature, other: Signature) -> tuple[str, str] | None:
        """Return how two ranks disagree although their signatures fit, and in what; None if they agree."""
        return None

    def only_sends(self, signature: Signature) -> bool:
        """Return whether the rank waits for a send, and not for a receive, if another rank does not come."""
        return False

    # -- the effect --------------------------------------------------------------------------------

    def moves(self, operations: Sequence[Operation], parts: Sequence[Sequence[Part]], order: Order) -> Moved:
        """Compute the effect of one collective (operations in group order) or one message (send, recv).

        Args:
            operations: the operations of all ranks.
            parts: ``parts[i]`` are the parts of ``operations[i]``. Their inputs may be copies.
            order: sorts the values of a reduction into the order of adding.

        Returns:
            The writes of each operation. The value of a collective is a copy; that of a message is the sent tensor
            itself.
        """
        return [[] for _ in operations]

    def begin(self, operation: Operation, mpi: MpiCall) -> None:
        """Begin the non-blocking MPI call."""
        raise NotImplementedError(f"MPI does not carry out {self.name}")

    # -- the clock ---------------------------------------------------------------------------------

    def payload(self, operations: Sequence[Operation]) -> Payload:
        """Return the bytes of a collective, in the form that :meth:`rounds` takes."""
        return ()

    def rounds(self, n: int, root: int, payload: Payload) -> Iterator[Round]:
        """Yield the messages of the algorithm on ``n`` ranks, round by round; see :mod:`pdlcheck.clock.rounds`."""
        return iter(())

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Collective(OperationKind):
    """A collective that moves data; a subclass moves the data of one part."""

    def move(self, parts: Sequence[Part], root: int, reduce_op: Any, order: Order) -> Moved:
        """Compute the effect of one part.

        Reductions add in one order for all ranks, so every rank gets the same bits.

        Args:
            parts: one of each rank, in group order.
            root: the number of the root in the group; 0 without one.
            reduce_op: the reduce-op, if the collective reduces.
            order: sorts the values of a reduction into the order of adding.
        """
        raise NotImplementedError(self.name)

    def moves(self, operations: Sequence[Operation], parts: Sequence[Sequence[Part]], order: Order) -> Moved:
        """Compute the effect of one collective, part by part."""
        first = operations[0]
        signature = first.signature
        root = signature.members.index(signature.root) if signature.root >= 0 else 0
        if signature.reduce_op == "PREMUL_SUM":
            parts = [multiplied(own, operation.reduce_op) for own, operation in zip(parts, operations, strict=True)]
        writes: Moved = [[] for _ in operations]
        alike = all(operation.signature.shapes == signature.shapes for operation in operations)
        for column in zip(*parts, strict=True):
            ranks = column if alike else _in_one_shape(column)
            moved = self.move(ranks, root, first.reduce_op, order)
            for mine, more in zip(writes, moved, strict=True):
                mine += more
        return writes


def _in_one_shape(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts with all inputs in the shape of the first: they may differ in dimensions of one element."""
    shapes = [tensor.shape for part in parts for tensor in part.inputs[:1]]
    return [Part([tensor.reshape(shapes[0]) for tensor in part.inputs], part.outputs) for part in parts]
