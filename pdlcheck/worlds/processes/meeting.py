"""How the ranks of one operation recognise each other on the board."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pdlcheck.worlds.processes.board import digest_of
from pdlcheck.worlds.watch import Signature

__all__ = ["Meeting", "Meetings"]


class Meeting(NamedTuple):
    """Where an operation is on the board, and the ranks that have to be there as well."""

    digest: int
    others: tuple[int, ...]


class Meetings:
    """The operations of one rank in one call.

    Two ranks get the same digest only if the controller would let their operations go together: signatures that must
    agree do, and so do the names of the tensors, which tell the order of equal calls. A message is known by its number
    among those of the same sender, receiver and tag.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self._messages: Counter[object] = Counter()
        self._open_to_all: set[str] = set()  # groups with a receive from any source: only the controller can tell

    def of(self, signature: Signature) -> Meeting | None:
        """None where what goes together depends on more than the operation itself."""
        s = signature
        if s.is_p2p:
            return self._message(s)
        if len(set(s.splits[0] + s.splits[1])) > 1:
            return None
        names = frozenset([name[:2] for name in s.names])
        what = s.group, s.seq, s.op, s.members, s.root, s.reduce_op, s.dtypes, s.shapes, s.splits, names
        others = tuple([rank for rank in s.members if rank != s.rank])
        return Meeting(digest_of(self._call, what), others)

    def _message(self, s: Signature) -> Meeting | None:
        if s.peer < 0:
            self._open_to_all.add(s.group)
        if s.group in self._open_to_all:
            return None
        sender, receiver = (s.rank, s.peer) if s.op == "send" else (s.peer, s.rank)
        way = s.group, sender, receiver, s.tag
        self._messages[way] += 1
        what = "message", way, self._messages[way], s.dtypes, s.numel
        return Meeting(digest_of(self._call, what), (s.peer,))
