"""The connections between ranks. As on gloo, a time limit that elapses in a message closes those of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pdlcheck.worlds.observe import Signature
from pdlcheck.worlds.simulated.engine.gloo_errors import connection_closed, pair_closure

if TYPE_CHECKING:
    from pdlcheck.worlds.simulated.engine.work import SimulatedWork

__all__ = ["Connections", "needs"]


class Connections:
    """The connections of one run.

    Args:
        posted: the operations that are not matched yet, by key. Those that lose a rank are removed from it.
    """

    def __init__(self, posted: dict[int, SimulatedWork]) -> None:
        self.closed: set[tuple[str, int]] = set()  # (group, rank)
        self._posted = posted

    def check(self, signature: Signature, lost: Iterable[int] = ()) -> None:
        """Raise gloo's error for an operation whose partners are known to be out of reach.

        Args:
            signature: the operation.
            lost: further ranks that are out of reach.
        """
        if (signature.group, signature.rank) in self.closed:
            raise pair_closure()
        for rank in [*lost, *(rank for group, rank in self.closed if group == signature.group)]:
            if needs(signature, rank):
                raise connection_closed(rank)

    def close(self, ends: Iterable[tuple[str, int]]) -> None:
        """Close these connections (group, rank), and lose the operations that need them."""
        for end in ends:
            self.closed.add(end)
            self._lose_at(*end)

    def _lose_at(self, group: str, rank: int) -> None:
        self.lose(lambda s: (s.group, s.rank) == (group, rank), lambda _: pair_closure())
        self.lose(lambda s: s.group == group and needs(s, rank), lambda _: connection_closed(rank))

    def lose(self, hits: Callable[[Signature], bool], error: Callable[[Signature], RuntimeError]) -> list[Signature]:
        """Give an error to the operations that will never match; return their signatures."""
        lost = []
        for key, work in list(self._posted.items()):
            signature = work.operation.signature
            if not work.matched and hits(signature):
                del self._posted[key]
                work.lose(error(signature))
                lost.append(signature)
        return lost


def needs(signature: Signature, rank: int) -> bool:
    """Return whether the operation cannot complete without this rank. A receive from any source can, as on gloo."""
    return signature.peer == rank if signature.is_p2p else rank in signature.members
