"""Detection of ranks that make equal calls (same operation, shape and dtype) in different orders.

The data does not stop such ranks: each call meets a partner that fits, and the values are mixed up. Only the names of
the tensors reveal it. Two ranks may use different names for the tensors of one collective, if they reach it from two
branches. But when rank 0 reduced ``a`` with rank 1's ``b``, and then ``b`` with rank 1's ``a``, they meant the same
calls and made them in different orders.

Taking turns looks the same: ``all_reduce(mine if rank == turn else zeros)`` for turn 0, 1, ... So two tensors count as
one if a condition on the rank chooses between them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from pdlcheck.errors import CollectiveMismatch
from pdlcheck.operations.signature import Name, Signature
from pdlcheck.operations.words import who
from pdlcheck.worlds.observe.branches import are_branches_on_rank
from pdlcheck.worlds.observe.naming import FRAMES

__all__ = ["Orders"]

_MEMORY = 64  # collectives with different names that are kept for a pair of ranks


class _Meeting(NamedTuple):
    """One collective in which two ranks had different names for their tensors."""

    signatures: tuple[Signature, Signature]
    names: tuple[frozenset[Name], frozenset[Name]]  # the names of each rank that the other does not have

    def find(self, side: int, name: tuple[str, str]) -> Name | None:
        return next((own for own in self.names[side] if own[:2] == name), None)


_Crossing = tuple[_Meeting, Name, Name, _Meeting, Name, Name]


class Orders:
    """The pairs of names that met, for each group and kind of call."""

    def __init__(self) -> None:
        self._met: dict[object, deque[_Meeting]] = defaultdict(lambda: deque(maxlen=_MEMORY))

    def met(self, signatures: Sequence[Signature]) -> CollectiveMismatch | None:
        """Record one complete collective; return the error if ranks have made equal calls in different orders.

        Each rank is compared with the first: if any two ranks differ, at least one of them differs from the first.

        Args:
            signatures: those of all ranks, in group order.
        """
        first = signatures[0]
        known = {name[:2] for name in first.names}
        crossings: dict[int, _Crossing] = {}
        for other in signatures[1:]:
            if known == {name[:2] for name in other.names}:
                continue
            unlike = _not_among(first.names, other.names), _not_among(other.names, first.names)
            if not any(unlike):
                continue
            meetings = self._met[_kind(first, other)]
            meetings.append(_Meeting((first, other), unlike))
            if crossing := _crossing(meetings):
                crossings[other.rank] = crossing
        if not crossings:
            return None
        alike = [one.rank for one in signatures if one is first or not self._met.get(_kind(first, one))]
        for rank in crossings:
            self._met[_kind(first, next(one for one in signatures if one.rank == rank))].clear()
        return _error(*next(iter(crossings.values())), sides=sorted([alike, list(crossings)], key=len))


def _kind(first: Signature, other: Signature) -> object:
    """Return a key for the calls that two ranks can exchange undetected."""
    return first.group, first.op, first.reduce_op, first.root, first.shapes, first.dtypes, other.rank


def _not_among(names: Sequence[Name], others: Sequence[Name]) -> frozenset[Name]:
    """Return the names that the other rank does not have.

    Names are in order, from the innermost function outwards, and end after FRAMES functions. If two paths lead to one
    call and one path is a function longer, the outermost names differ. That proves nothing, because the other rank's
    name may follow beyond the limit.
    """
    known = {name[:2] for name in others}
    if len({name.function for name in others}) >= FRAMES:
        in_both = [place for place, name in enumerate(names) if name[:2] in known]
        names = names[: in_both[-1] + 1] if in_both else names
    return frozenset(name for name in names if name[:2] not in known)


def _crossing(meetings: Sequence[_Meeting]) -> _Crossing | None:
    """Find a collective where rank r used ``x`` and rank s ``y``, and each rank used the other's name elsewhere.

    A name counts if both ranks have used it equally often: then they made the same calls in different orders.
    """
    balance: Counter[tuple[str, str]] = Counter()
    for meeting in meetings:
        balance.update(name[:2] for name in meeting.names[0])
        balance.subtract(name[:2] for name in meeting.names[1])
    for one, other in product(meetings, meetings):
        crossing: tuple[Name, Name, Name, Name] | None = None
        for x, y in product(sorted(one.names[0]), sorted(one.names[1])):
            again = other.find(1, x[:2])
            if again is None:
                continue
            there = other.find(0, y[:2]) or min(other.names[0], default=again)
            if _takes_turns(x, y, there, again):  # then the functions that the branches call also take turns
                crossing = None
                break
            if crossing is None and not (balance[x[:2]] or balance[y[:2]]):
                crossing = x, y, there, again
        if crossing is not None:
            x, y, there, again = crossing
            return one, x, y, other, there, again
    return None


def _takes_turns(x: Name, y: Name, there: Name, again: Name) -> bool:
    return x.where == again.where and y.where == there.where and are_branches_on_rank(x, y)


def _error(
    one: _Meeting, x: Name, y: Name, other: _Meeting, there: Name, again: Name, *, sides: Sequence[Sequence[int]]
) -> CollectiveMismatch:
    """Return the error.

    ``sides``: the ranks that agree with the first rank, and those that do not; the smaller group comes first.
    """
    first, second = sorted((one, other), key=lambda meeting: meeting.signatures[0].seq)
    words = [(x, y), (there, again)] if first is one else [(there, again), (x, y)]
    call = first.signatures[0]
    lines = list(_lines_of(first, second, words))
    head = (
        f"{who(sides)} differ in the order of equal calls: {call.kind} in the {call.group_text}; shapes and dtypes "
        "fit, so the values are mixed up in silence"
    )
    text = "\n".join([head, *(f"  {line}" for line in lines)])
    odd = list(sides[0]) if len(sides[0]) < len(sides[1]) else []
    return CollectiveMismatch(text, what="the order", ranks=lines, odd=odd)


def _lines_of(first: _Meeting, second: _Meeting, words: Sequence[tuple[Name, Name]]) -> Iterator[str]:
    for side in (0, 1):
        calls = (
            f"`{names[side].text}` in collective {meeting.signatures[side].seq} at {names[side].where}"
            for meeting, names in zip((first, second), words, strict=True)
        )
        yield f"rank {first.signatures[side].rank}: {', then '.join(calls)}"
