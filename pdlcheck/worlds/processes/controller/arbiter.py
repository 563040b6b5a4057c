"""The controller's judgement of watched operations: which ones may go, which ones mismatch, and when ranks deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from pdlcheck.worlds.observe import Callers, Matcher, Signature, deadlock
from pdlcheck.worlds.processes.exchange.agreement import ON_CONTROLLER, Notice, Stage, Verb, may_grant
from pdlcheck.worlds.processes.exchange.messages import Grant

__all__ = ["Arbiter"]

_Grants = Sequence[tuple[int, Grant]]  # of all ranks of an operation


class Arbiter:
    """The judge of one call on ``world_size`` ranks.

    A rank waits when its only communicating thread waits. If every rank that has not ended waits for an operation that
    is not granted, no message can arrive that would grant one. This is a deadlock, found exactly.

    ``agreement.py`` says which operations are granted, and when.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._matcher = Matcher()
        self._open: dict[tuple[int, int], Signature] = {}  # (rank, operation): announced, not granted
        self._waiting: dict[int, Signature] = {}
        self._last: dict[int, Signature] = {}
        self._callers = Callers()
        self._stages: dict[tuple[int, int], Stage] = {}  # those that a rank may still ask about
        self._matched: dict[tuple[int, int], _Grants] = {}
        self._ended: set[int] = set()
        self._unwatched = False
        self.has_open_mismatch = False  # ranks mismatch, and other ranks may still add information
        self.is_torn = False  # an operation was granted to all of its ranks, and one of them has withdrawn it

    def record(self, rank: int, signature: Any) -> None:
        """Record a posted operation for reports."""
        if signature.where:  # without a line, it is the world's own operation
            self._last[rank] = signature
            self._callers.note(signature)

    def posted(self, rank: int, operation: int, signature: Any) -> _Grants:
        """Take an announcement; return the grants that it completes, if one of their ranks has asked.

        Raises:
            CollectiveMismatch: the operation does not match those of the other ranks, and all of them have announced
                theirs.
        """
        self._waiting.pop(rank, None)
        self._take((rank, operation), Notice.ANNOUNCE)
        self._open[rank, operation] = signature
        match = self._matcher.post(signature, (rank, operation))
        if match is None:
            self.has_open_mismatch = self.has_open_mismatch or self._matcher.is_mismatched(signature)
            return []
        source = match.signatures[0].rank if signature.is_p2p else -1
        keys = cast("Sequence[tuple[int, int]]", match.keys)
        for key in keys:
            matched = self._open.pop(key)
            if self._waiting.get(key[0]) is matched:
                del self._waiting[key[0]]
        grants = [(member, Grant(number, source)) for member, number in keys]
        if Stage.REQUESTED in self._stages_of(grants) and (granted := self._grant(grants)):
            return granted
        for key in keys:
            self._take(key, Notice.MATCH)
        self._matched |= dict.fromkeys(keys, grants)
        return []

    def asks(self, rank: int, operation: int) -> _Grants:
        """Record that a rank goes on with an operation when it is granted; return the grants of all ranks if it is.

        Some of the ranks may do something else, and not check whether the operation goes.
        """
        if self._take((rank, operation), Notice.REQUEST) is Verb.GRANT_ALL:
            return self._grant(self._matched[rank, operation])
        return []

    def withdrew(self, rank: int, operations: Iterable[int]) -> None:
        """Record that a rank has ended and never launches these operations; they are not granted any more."""
        for operation in operations:
            self.is_torn |= self._take((rank, operation), Notice.WITHDRAW) is Verb.TEAR

    def forget(self, rank: int, below: int) -> None:
        """Forget the operations of this rank below a number, because no rank will ask about them."""
        self._stages = {key: stage for key, stage in self._stages.items() if key[0] != rank or key[1] >= below}
        self._matched = {key: grants for key, grants in self._matched.items() if key[0] != rank or key[1] >= below}

    def waits(self, rank: int, operation: int) -> None:
        """Record that a rank waits.

        Raises:
            Deadlock: all ranks wait.
            CollectiveMismatch: all ranks wait, and some of their operations mismatch.
        """
        signature = self._open.get((rank, operation))
        if signature is not None:  # else the grant is under way
            self._waiting[rank] = signature
            self._check()

    @property
    def has_open(self) -> bool:
        """Return whether a rank has announced an operation that is not granted."""
        return bool(self._open)

    def unwatch(self) -> None:
        """Stop looking for deadlocks: several threads of a rank communicate, so waits prove nothing."""
        self._unwatched = True

    def ended(self, rank: int) -> None:
        """Record that a rank has returned.

        Raises:
            Deadlock: all the other ranks wait.
            CollectiveMismatch: all the other ranks wait, and some of their operations mismatch.
        """
        self._ended.add(rank)
        self._waiting.pop(rank, None)  # it has seen on the board that it may go on
        self._check()

    def waits_in(self, rank: int) -> str:
        """Return the operation that a rank waits in, in words; empty if it does not wait."""
        signature = self._waiting.get(rank)
        return f"in {signature}" if signature is not None else ""

    def last_operation(self, rank: int) -> str:
        """Return the operation that a rank announced last, in words; empty if there is none."""
        return self._callers.told(self._last[rank]) if rank in self._last else ""

    def raise_mismatch(self) -> None:
        """Stop hesitating.

        Raises:
            CollectiveMismatch: the operations of ranks mismatch.
        """
        if error := self._matcher.verdict():
            raise error

    def _grant(self, grants: _Grants) -> _Grants:
        """Grant an operation to all of its ranks, and return the grants; return none if it may not be granted."""
        if not may_grant(self._stages_of(grants)):
            return []
        return [
            (member, grant)
            for member, grant in grants
            if self._take((member, grant.operation), Notice.GRANT) is Verb.SEND
        ]

    def _stages_of(self, grants: _Grants) -> list[Stage]:
        return [self._stages.get((member, grant.operation), Stage.UNKNOWN) for member, grant in grants]

    def _take(self, key: tuple[int, int], notice: Notice) -> Verb:
        ruling = ON_CONTROLLER[self._stages.get(key, Stage.UNKNOWN), notice]
        if key in self._stages or notice not in (Notice.MATCH, Notice.GRANT):  # else it was forgotten
            self._stages[key] = ruling.stage
        return ruling.verb

    def _check(self) -> None:
        live = self._world_size - len(self._ended)
        if self._unwatched or not live or len(self._waiting) < live:
            return
        self.raise_mismatch()
        raise deadlock(
            waiting=self._waiting,
            ended={rank: self._last.get(rank) for rank in self._ended},
            missing={rank: self._matcher.missing(self._waiting[rank]) for rank in sorted(self._waiting)},
            parted=self._matcher.parted({rank: self._waiting.get(rank) for rank in range(self._world_size)}),
        )
