"""The data of one match: read from the inputs at some moment, then held for ranks that have not waited yet."""

from __future__ import annotations

from collections.abc import Sequence

from pdlcheck.compat.torch.modes import DisableTorchDispatch
from pdlcheck.operations.reductions import Order
from pdlcheck.worlds.simulated.engine.delivery import write
from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Transfer"]


class Transfer:
    """The data of the operations of one match.

    Args:
        works: the operations, in group order.
        order: sorts the values of a reduction into the order of adding.
    """

    def __init__(self, works: Sequence[SimulatedWork], order: Order) -> None:
        self._works = works
        self._order = order
        self.moved = False

    def move(self) -> None:
        """Read all inputs, and write the outputs that are not held back."""
        if self.moved:
            return
        self.moved = True
        works, self._works = self._works, ()  # they refer to this transfer: breaks a reference cycle
        with DisableTorchDispatch():  # hides this from the modes of ranks
            operations, parts = [work.operation for work in works], [work.parts for work in works]
            results = operations[0].method.kind.moves(operations, parts, self._order)
            for work, undamaged in zip(works, results, strict=True):
                writes = undamaged if work.deliver is None else work.deliver(undamaged)
                if not work.holds_back:
                    write(writes, as_user=work.operation.method.copies)
                elif work.operation.signature.is_p2p:
                    work.results = [(output, value.clone()) for output, value in writes]
                else:
                    work.results = list(writes)
