"""The meeting of an operation's ranks on the board."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pdlcheck.worlds.observe import Signature
from pdlcheck.worlds.processes.exchange.board import digest_of

__all__ = ["Meeting", "Meetings"]


class Meeting(NamedTuple):
    """The place of an operation on the board, and the ranks that must be there as well.

    Args:
        digest: equal on ranks whose operations match; 0 if the controller must compare more than the digest.
        place: equal on ranks whose operations meet, whether or not they match.
        others: global ranks.
    """

    digest: int
    place: int
    others: tuple[int, ...]


class Meetings:
    """The operations of one rank in one call.

    Two ranks get the same digest only if the controller would match their operations. So their signatures agree where
    they must, and so do the names of the tensors, which identify the order of equal calls. A message is identified by
    its number among those of the same sender, receiver and tag.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self._messages: Counter[object] = Counter()
        self._open_to_all: set[str] = set()  # groups with a receive from any source: only the controller can match

    def of(self, signature: Signature) -> Meeting | None:
        """Return the meeting of an operation; None if it depends on more than the operation itself."""
        s = signature
        if s.is_p2p:
            return self._message(s)
        place = digest_of(self._call, (s.group, s.seq, "place"))
        others = tuple([rank for rank in s.members if rank != s.rank])
        if len(set(s.splits[0] + s.splits[1])) > 1:
            return Meeting(0, place, others)
        names = sorted({name[:2] for name in s.names}, key=repr)
        what = s.group, s.seq, s.op, s.members, s.root, s.reduce_op, s.dtypes, s.shapes, s.orders, s.splits, names
        return Meeting(digest_of(self._call, what), place, others)

    def _message(self, s: Signature) -> Meeting | None:
        if s.peer < 0:
            self._open_to_all.add(s.group)
        if s.group in self._open_to_all:
            return None
        sender, receiver = (s.rank, s.peer) if s.op == "send" else (s.peer, s.rank)
        way = s.group, sender, receiver, s.tag
        self._messages[way] += 1
        place = "message", way, self._messages[way]
        what = *place, s.dtypes, s.numel
        return Meeting(digest_of(self._call, what), digest_of(self._call, place), (s.peer,))
