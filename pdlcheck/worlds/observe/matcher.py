"""The matching of the ranks' operations, and the detection of operations that do not fit.

It works on signatures only. The simulated world feeds it from its rank threads, and the process world from the
signatures that its ranks send, so both give the same verdicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import NamedTuple

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.operations.signature import Signature
from pdlcheck.worlds.observe.mismatch import PAIRWISE, fits, mismatch, p2p_mismatch
from pdlcheck.worlds.observe.order import Orders
from pdlcheck.worlds.observe.parting import Partings

__all__ = ["Match", "Matcher"]


class Match(NamedTuple):
    """The operations of one collective, in group order, or of one message (send, recv), with the callers' ``keys``."""

    signatures: tuple[Signature, ...]
    keys: tuple[Hashable, ...]


class _Posted(NamedTuple):
    signature: Signature
    key: Hashable


class Matcher:
    """The operations that the ranks have posted, matched as they arrive.

    Collectives meet by (group, number of the collective in the group); messages by (group, source, destination, tag)
    in the order posted, as in MPI and gloo.
    """

    def __init__(self) -> None:
        self._collectives: dict[tuple[str, int], dict[int, _Posted]] = defaultdict(dict)
        # collectives whose ranks disagree, with the ranks that one of them names and that are still missing
        self._spoiled: dict[tuple[str, int], set[int]] = {}
        self._orders = Orders()
        self._partings = Partings()
        self._sends: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)  # (group, dst, tag)
        self._recvs: dict[tuple[str, int, int], list[_Posted]] = defaultdict(list)

    def begin(self) -> None:
        """Start a run, in which the ranks have not met yet."""
        self._partings = Partings()

    def post(self, signature: Signature, key: Hashable) -> Match | None:
        """Add an operation; return the match that it completes, if any.

        Args:
            signature: the operation.
            key: returned in the match.

        Raises:
            CollectiveMismatch: all ranks of a collective are there and their arguments do not fit, or the ranks make
                equal calls in another order, or a message does not fit its buffer.
        """
        posted = _Posted(signature, key)
        return self._post_p2p(posted) if signature.is_p2p else self._post_collective(posted)

    def is_mismatched(self, signature: Signature) -> bool:
        """Return whether a posted collective cannot complete, because the ranks that have posted it disagree."""
        return (signature.group, signature.seq) in self._spoiled and not signature.is_p2p

    def verdict(self) -> CollectiveMismatch | None:
        """Return the error of the first collective whose posted signatures disagree; None if there is none."""
        return next((self._verdict(self._collectives[place]) for place in self._spoiled), None)

    def parted(self, now: Mapping[int, Signature | None]) -> list[str]:
        """Return one or two lines about where ranks parted that wait in these operations, or have returned (None)."""
        return self._partings.report(now)

    def missing(self, signature: Signature) -> tuple[int, ...]:
        """Return the global ranks that a waiting operation still needs: all other ranks for a receive from any rank."""
        if signature.is_p2p:
            if signature.peer >= 0:
                return (signature.peer,)
            return tuple(rank for rank in signature.members if rank != signature.rank)
        place = signature.group, signature.seq
        there = self._collectives.get(place, {})
        if place in self._spoiled:  # the ranks may disagree about the members
            return tuple(sorted(self._spoiled[place]))
        return tuple(rank for rank in signature.members if rank not in there)

    def is_complete(self, signature: Signature) -> bool:
        """Return whether all ranks that a spoiled collective needs are there.

        Each rank that waits in the collective calls this at each turn.
        """
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
            if self.is_complete(signature) and (error := self._verdict(there)):
                raise error
            return None
        if len(there) < len(signature.members):
            return None
        del self._collectives[place]
        ordered = [there[rank] for rank in signature.members]
        signatures = [p.signature for p in ordered]
        self._partings.met(signatures)
        if error := self._orders.met(signatures):
            raise error
        return Match(*zip(*ordered, strict=True))

    def _verdict(self, there: Mapping[int, _Posted]) -> CollectiveMismatch | None:
        now = {rank: there[rank].signature for rank in sorted(there)}
        error = mismatch(list(now.values()))
        if error is None or not (lines := self._partings.report(now)):
            return error
        return CollectiveMismatch("\n  ".join([str(error), *lines]), **error.fields)

    def _agrees(self, arriving: Signature, there: Mapping[int, _Posted]) -> bool:
        others = iter(there.values())
        if arriving.op not in PAIRWISE and not arriving.is_new_group:
            others = islice(others, 1)  # the other ops may agree without being equal: compare all
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


def _take(queue: list[_Posted], fits: Callable[[Signature], bool]) -> _Posted | None:
    for index, posted in enumerate(queue):
        if fits(posted.signature):
            return queue.pop(index)
    return None


def _message(send: _Posted, recv: _Posted) -> Match:
    if error := p2p_mismatch(send.signature, recv.signature):
        raise error
    return Match((send.signature, recv.signature), (send.key, recv.key))
