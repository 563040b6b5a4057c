"""Which operations of the ranks belong together, and when they do not fit.

Pure bookkeeping on signatures: the simulated world feeds it from its rank threads, the process world from the
announcements that its ranks send, so both give the same verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from operator import attrgetter
from typing import NamedTuple

from pdlcheck.worlds.watch.mismatch import mismatch, p2p_mismatch
from pdlcheck.worlds.watch.order import Orders
from pdlcheck.worlds.watch.signature import Signature

__all__ = ["Match", "Matcher"]


class Match(NamedTuple):
    """Operations that form one collective (in group order) or one message (send, recv); ``keys`` are the callers'."""

    signatures: tuple[Signature, ...]
    keys: tuple[Hashable, ...]


class _Posted(NamedTuple):
    signature: Signature
    key: Hashable


class Matcher:
    """Collects the operations that the ranks post and pairs them.

    Collectives meet by (group, number of the collective in the group); messages by (group, source, destination, tag)
    in the order posted, as MPI and gloo do.
    """

    def __init__(self) -> None:
        self._collectives: dict[tuple[str, int], dict[int, _Posted]] = defaultdict(dict)
        self._orders = Orders()
        self._sends: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)  # (group, dst, tag)
        self._recvs: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)

    def post(self, signature: Signature, key: Hashable) -> Match | None:
        """Add an operation; return what it completes.

        Raises:
            CollectiveMismatch: its arguments do not fit those of a rank that is already there, or the ranks make
                equal calls in another order.
        """
        posted = _Posted(signature, key)
        return self._post_p2p(posted) if signature.is_p2p else self._post_collective(posted)

    def missing(self, signature: Signature) -> tuple[int, ...]:
        """Global ranks that a waiting operation still needs; for a receive from any rank, all others."""
        if signature.is_p2p:
            if signature.peer >= 0:
                return (signature.peer,)
            return tuple(rank for rank in signature.members if rank != signature.rank)
        there = self._collectives.get((signature.group, signature.seq), {})
        return tuple(rank for rank in signature.members if rank not in there)

    def _post_collective(self, posted: _Posted) -> Match | None:
        signature = posted.signature
        there = self._collectives[signature.group, signature.seq]
        self._compare(signature, there)
        there[signature.rank] = posted
        if len(there) < len(signature.members):
            return None
        del self._collectives[signature.group, signature.seq]
        ordered = [there[rank] for rank in signature.members]
        if error := self._orders.met([p.signature for p in ordered]):
            raise error
        return Match(*zip(*ordered, strict=True))

    def _compare(self, arriving: Signature, there: Mapping[int, _Posted]) -> None:
        for other in there.values():
            if error := mismatch(other.signature, arriving, map(_signature_of, there.values())):
                raise error
            if arriving.op != "all_to_all":
                return  # they agree with one another, so one of them speaks for all, but not about what they exchange

    def _post_p2p(self, posted: _Posted) -> Match | None:
        signature = posted.signature
        if signature.op == "send":
            place = (signature.group, signature.peer, signature.tag)
            partner = _take(self._recvs[place], lambda recv: recv.peer in (-1, signature.rank))
            if partner is None:
                self._sends[place].append(posted)
                return None
            return _message(posted, partner)
        place = (signature.group, signature.rank, signature.tag)
        partner = _take(self._sends[place], lambda send: signature.peer in (-1, send.rank))
        if partner is None:
            self._recvs[place].append(posted)
            return None
        return _message(partner, posted)


_signature_of = attrgetter("signature")


def _take(queue: list[_Posted], fits: Callable[[Signature], bool]) -> _Posted | None:
    for index, posted in enumerate(queue):
        if fits(posted.signature):
            return queue.pop(index)
    return None


def _message(send: _Posted, recv: _Posted) -> Match:
    if error := p2p_mismatch(send.signature, recv.signature):
        raise error
    return Match((send.signature, recv.signature), (send.key, recv.key))
