"""Which operations of the ranks belong together, and when they do not fit.

Pure bookkeeping on signatures: the simulated world feeds it from its rank threads, the process world from the
announcements that its ranks send, so both give the same verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import NamedTuple

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.worlds.watch.mismatch import fits, mismatch, p2p_mismatch
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
        # those that cannot be, as their ranks differ; whom one of them names and who is not there yet
        self._spoiled: dict[tuple[str, int], set[int]] = {}
        self._orders = Orders()
        self._sends: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)  # (group, dst, tag)
        self._recvs: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)

    def post(self, signature: Signature, key: Hashable) -> Match | None:
        """Add an operation; return what it completes.

        Raises:
            CollectiveMismatch: all ranks of the collective are there, and their arguments do not fit, or they make
                equal calls in another order; a message does not fit its buffer.
        """
        posted = _Posted(signature, key)
        return self._post_p2p(posted) if signature.is_p2p else self._post_collective(posted)

    def spoils(self, signature: Signature) -> bool:
        """Whether a collective that is posted cannot be: ranks differ that are there already."""
        return (signature.group, signature.seq) in self._spoiled and not signature.is_p2p

    def verdict(self) -> CollectiveMismatch | None:
        """On the first collective that cannot be, by the ranks that are there; None if there is no such one."""
        return next((_verdict(self._collectives[place]) for place in self._spoiled), None)

    def missing(self, signature: Signature) -> tuple[int, ...]:
        """Global ranks that a waiting operation still needs; for a receive from any rank, all others."""
        if signature.is_p2p:
            if signature.peer >= 0:
                return (signature.peer,)
            return tuple(rank for rank in signature.members if rank != signature.rank)
        place = signature.group, signature.seq
        there = self._collectives.get(place, {})
        if place in self._spoiled:  # ranks may differ in who takes part
            return tuple(sorted(self._spoiled[place]))
        return tuple(rank for rank in signature.members if rank not in there)

    def is_complete(self, signature: Signature) -> bool:
        """Whether all are there that a spoiled collective needs; asked by each rank that waits in it, at each turn."""
        return not self._spoiled[signature.group, signature.seq]

    def _post_collective(self, posted: _Posted) -> Match | None:
        signature = posted.signature
        place = signature.group, signature.seq
        there = self._collectives[place]
        if not self._agrees(signature, there) and place not in self._spoiled:
            self._spoiled[place] = {rank for other in there.values() for rank in other.signature.members}
        there[signature.rank] = posted
        if self._spoiled and place in self._spoiled:
            self._spoiled[place].update(signature.members)
            self._spoiled[place].difference_update(there)
            if self.is_complete(signature) and (error := _verdict(there)):
                raise error
            return None
        if len(there) < len(signature.members):
            return None
        del self._collectives[place]
        ordered = [there[rank] for rank in signature.members]
        if error := self._orders.met([p.signature for p in ordered]):
            raise error
        return Match(*zip(*ordered, strict=True))

    def _agrees(self, arriving: Signature, there: Mapping[int, _Posted]) -> bool:
        others = iter(there.values())
        if arriving.op != "all_to_all" and not arriving.is_new_group:
            others = islice(others, 1)  # else they need not be equal to agree, and another one may agree with some
        return all(fits(other.signature, arriving) for other in others)

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


def _verdict(there: Mapping[int, _Posted]) -> CollectiveMismatch | None:
    return mismatch([posted.signature for posted in there.values()])


def _take(queue: list[_Posted], fits: Callable[[Signature], bool]) -> _Posted | None:
    for index, posted in enumerate(queue):
        if fits(posted.signature):
            return queue.pop(index)
    return None


def _message(send: _Posted, recv: _Posted) -> Match:
    if error := p2p_mismatch(send.signature, recv.signature):
        raise error
    return Match((send.signature, recv.signature), (send.key, recv.key))
