"""The controller's judgement of watched operations: which may go, which do not fit, when nobody can go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from pdlcheck.worlds.processes.exchange.messages import Grant
from pdlcheck.worlds.watch import Callers, Matcher, Signature, deadlock

__all__ = ["Referee"]


class Referee:
    """Judges one call on ``world_size`` ranks.

    A rank waits when its only thread that communicates does. If every rank that has not ended waits for an
    operation that is not granted, nothing can ever arrive that grants one: a deadlock, found exactly.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._matcher = Matcher()
        self._open: dict[tuple[int, int], Signature] = {}  # (rank, operation): announced, not granted
        self._waiting: dict[int, Signature] = {}
        self._last: dict[int, Signature] = {}
        self._callers = Callers()
        self._asked: set[tuple[int, int]] = set()
        self._granted: dict[tuple[int, int], list[tuple[int, Grant]]] = {}  # of which no rank has asked, and none need
        self._ended: set[int] = set()
        self._unwatched = False
        self.hesitates = False  # ranks do not fit, and others may have something to say to it

    def saw(self, rank: int, signature: Any) -> None:
        """Note what a rank posted, for reports."""
        if signature.where:  # else the world's own
            self._last[rank] = signature
            self._callers.note(signature)

    def posted(self, rank: int, operation: int, signature: Any) -> list[tuple[int, Grant]]:
        """Take an announcement; return the grants that it completes, if one of their ranks has asked.

        Raises:
            CollectiveMismatch: the operation does not fit what other ranks have announced, and all of them have.
        """
        self._waiting.pop(rank, None)
        self._open[rank, operation] = signature
        match = self._matcher.post(signature, (rank, operation))
        if match is None:
            self.hesitates = self.hesitates or self._matcher.spoils(signature)
            return []
        source = match.signatures[0].rank if signature.is_p2p else -1
        grants = []
        keys = cast("Sequence[tuple[int, int]]", match.keys)
        for member, number in keys:
            granted = self._open.pop((member, number))
            if self._waiting.get(member) is granted:
                del self._waiting[member]
            grants.append((member, Grant(number, source)))
        if not self._asked.isdisjoint(keys):
            return grants
        self._granted |= dict.fromkeys(keys, grants)
        return []

    def asks(self, rank: int, operation: int) -> list[tuple[int, Grant]]:
        """Note that a rank goes on with an operation when it is granted; return the grants of all ranks if it is.

        Some of them may be about something else, and not look whether it goes.
        """
        self._asked.add((rank, operation))
        pending = self._granted.get((rank, operation), [])
        grants = list(pending)
        pending.clear()
        return grants

    def forget(self, rank: int, below: int) -> None:
        """Nothing more will be asked about the operations of this rank below a number."""
        self._granted = {key: grants for key, grants in self._granted.items() if key[0] != rank or key[1] >= below}
        self._asked = {key for key in self._asked if key[0] != rank or key[1] >= below}

    def waits(self, rank: int, operation: int) -> None:
        """Note that a rank waits.

        Raises:
            Deadlock: all ranks do.
            CollectiveMismatch: the same, and some of them do not fit.
        """
        signature = self._open.get((rank, operation))
        if signature is not None:  # else the grant is under way
            self._waiting[rank] = signature
            self._check()

    @property
    def has_open(self) -> bool:
        """Whether some rank has announced an operation that is not complete."""
        return bool(self._open)

    def unwatch(self) -> None:
        """Several threads of a rank communicate: waits prove nothing any more."""
        self._unwatched = True

    def ended(self, rank: int) -> None:
        """Note that a rank has returned.

        Raises:
            Deadlock: all the others wait.
        """
        self._ended.add(rank)
        self._waiting.pop(rank, None)  # it has seen on the board that it could go on
        self._check()

    def waits_in(self, rank: int) -> str:
        """What a rank waits for; empty if it does not."""
        signature = self._waiting.get(rank)
        return f"in {signature}" if signature is not None else ""

    def last_operation(self, rank: int) -> str:
        """What a rank announced last; empty if nothing."""
        return self._callers.told(self._last[rank]) if rank in self._last else ""

    def speak(self) -> None:
        """Hesitate no longer.

        Raises:
            CollectiveMismatch: ranks do not fit.
        """
        if error := self._matcher.verdict():
            raise error

    def _check(self) -> None:
        live = self._world_size - len(self._ended)
        if self._unwatched or not live or len(self._waiting) < live:
            return
        self.speak()
        raise deadlock(
            waiting=self._waiting,
            ended={rank: self._last.get(rank) for rank in self._ended},
            missing={rank: self._matcher.missing(self._waiting[rank]) for rank in sorted(self._waiting)},
        )
