"""The values that one process reports: for all samples, for the share of each rank, and for the usual mistakes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pdlcheck.checks.message import name_of
from pdlcheck.errors import Inconclusive

__all__ = ["LEAVE_OUT", "TAILS", "Alone", "Samples", "Values", "is_number", "near", "values_of"]

Samples = tuple[Tensor, ...]
Values = dict[str, Any]  # by their place in the report

# A float32 mean of a thousand terms, added in another order, is off by 1e-6 of its value at most. One sample in ten
# thousand that counts twice or not at all moves it by more.
RELATIVE = 1e-5

# What a sampler may do if the samples do not fill all ranks: True if it repeats samples, False if it drops them.
TAILS = {"the first again": True, "the last again": True, "the last dropped": False}
LEAVE_OUT = "leave out what is gathered beyond the data set, as accelerate's gather_for_metrics() does"


@dataclass(frozen=True)
class Alone:
    """The values that one process reports, for all samples and for parts of them."""

    evaluate: Callable[..., Any]
    reference: Callable[..., Any] | None
    samples: Samples
    world: Any
    order: str | None = None
    _shares: dict[int, list[list[Values]]] = field(default_factory=dict)
    _tails: dict[tuple[int, str], Values] = field(default_factory=dict)
    _moved: dict[tuple[int, ...], Values] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.samples[0])

    @functools.cached_property
    def of_all(self) -> Values:
        """Return the values for all samples.

        Raises:
            Inconclusive: there is no value, or one that is not finite.
        """
        who = name_of(self.reference or self.evaluate)
        values = self.of(self.samples)
        if all(value is None for value in values.values()):
            raise Inconclusive(f"{who} reports nothing in one process, there is nothing to compare with")
        for place, value in values.items():
            if isinstance(value, float | complex) and not math.isfinite(abs(value)):
                raise Inconclusive(f"{who} reports {value}{place} in one process, there is nothing to compare with")
        return values

    @functools.cached_property
    def of_one_rank(self) -> Values:
        """Return the values that a world of one rank reports for all samples; none if it is the reference, or fails."""
        if self.reference is None:
            return {}
        try:
            return values_of(self.world.run(self.evaluate, *self.samples, world_size=1)[0])
        except Exception:
            return {}

    def of(self, samples: Samples) -> Values:
        """Return the values that one process reports for these samples."""
        if self.reference is not None:
            return values_of(self.reference(*samples))
        return values_of(self.world.run(self.evaluate, *samples, world_size=1)[0])

    def of_share(self, samples: Samples) -> Values:
        """Return the values for these samples; no values if the program fails, as with too few samples."""
        try:
            return self.of(samples)
        except Exception:
            return {}

    def shares(self, world_size: int) -> list[list[Values]]:
        """Return the values for the share of each rank, for the two usual distributions: strided, and in blocks."""
        if world_size not in self._shares:
            strided = [tuple(t[rank::world_size] for t in self.samples) for rank in range(world_size)]
            blocks = zip(*(torch.tensor_split(t, world_size) for t in self.samples), strict=True)
            self._shares[world_size] = [[self.of_share(share) for share in way] for way in (strided, blocks)]
        return self._shares[world_size]

    def tells_shares_apart(self, world_size: int) -> bool:
        """Return whether at least one share has a value that differs from that of all samples."""
        return any(
            not near(share[place], value, 0.0)
            for shares in self.shares(world_size)
            for share in shares
            for place, value in self.of_all.items()
            if place in share
        )

    def right_by_chance(self, world_size: int) -> set[tuple[int, str]]:
        """Return the distributions and the places where the plain mean of the ranks' values is the right number."""
        return {
            (way, place)
            for way, shares in enumerate(self.shares(world_size))
            for place, value in self.of_all.items()
            if is_number(value)
            and all(is_number(share.get(place)) for share in shares)
            and near(sum(share[place] for share in shares) / world_size, value, 0.0)
        }

    def tail(self, world_size: int, how: str) -> Values:
        """Return the values after a sampler's treatment of the tail, see ``TAILS``; no values if there is no tail."""
        size = len(self)
        if not size % world_size:
            return {}
        if (world_size, how) not in self._tails:
            again = torch.arange(-size % world_size) % size
            rows = torch.arange(size)
            chosen = {
                "the first again": lambda: torch.cat([rows, again]),
                "the last again": lambda: torch.cat([rows, torch.full_like(again, size - 1)]),
                "the last dropped": lambda: rows[: size - size % world_size],
            }[how]()
            self._tails[world_size, how] = self.of_share(tuple(t[chosen] for t in self.samples))
        return self._tails[world_size, how]

    def hides(self, world_size: int, how: str) -> set[str]:
        """Return the places whose number would be accepted in spite of this treatment of the tail."""
        found = self.tail(world_size, how)
        if found and found.keys() != self.of_all.keys():
            return set()
        return {place for place in self.of_all if place not in found or self.accepts(world_size, place, found[place])}

    def with_one_at(self, row: int, *, first: bool) -> Alone:
        """Return the same samples, with one of them moved to the first or last position."""
        others = [other for other in range(len(self)) if other != row]
        rows = [row, *others] if first else [*others, row]
        order = f"sample_{row}_{'first' if first else 'last'}"
        return Alone(self.evaluate, self.reference, tuple(t[rows] for t in self.samples), self.world, order)

    def can_be_compared(self) -> bool:
        """Return whether the program reports values for this order; False if it needs its samples in another order."""
        try:
            return bool(self.of_all)
        except Exception:
            return False

    def accepts(self, world_size: int, place: str, value: Any) -> bool:
        """Return whether a value is the right one, within the tolerance."""
        expected = self.of_all[place]
        return near(value, expected, 0.0) or near(value, expected, self.largest(world_size, place))

    def telling(self, place: str, *, repeated: bool) -> int | None:
        """Return a sample that changes the number at ``place``; None if the search finds none.

        With ``repeated`` the sample counts twice, otherwise not at all. The search halves the samples by one bit of
        their positions. If neither half changes the number, it takes another bit: a ratio stays the same if twice as
        many samples of each kind count. Any two samples differ in some bit.
        """
        bits = range(len(self).bit_length())
        ahead = [torch.arange(len(self))]
        for _ in range(4 * len(bits)):
            if not ahead:
                return None
            rows = ahead.pop()
            if len(rows) == 1:
                return int(rows)
            for bit in bits:
                apart = (rows >> bit) % 2 == 1
                halves = [half for half in (rows[apart], rows[~apart]) if 0 < len(half) < len(rows)]
                moved = [(move, half) for half in halves if (move := self._move(half, place, repeated))]
                if moved:
                    ahead.extend(half for _, half in sorted(moved, key=lambda one: one[0]))
                    break
        return None

    def _move(self, rows: Tensor, place: str, repeated: bool) -> float:
        """Return how far the number moves if these samples count twice, or not at all; 0 if it cannot be computed."""
        key = (repeated, *sorted(rows.tolist()))
        if key not in self._moved:
            every = torch.arange(len(self))
            chosen = torch.cat([every, rows]) if repeated else every[~torch.isin(every, rows)]
            self._moved[key] = self.of_share(tuple(t[chosen] for t in self.samples))
        found, expected = self._moved[key].get(place), self.of_all[place]
        if not (is_number(found) and is_number(expected)) or near(found, expected, 0.0):
            return 0.0
        return abs(found - expected) if math.isfinite(abs(found)) else 0.0

    def largest(self, world_size: int, place: str) -> float:
        """Return the largest magnitude of the number at ``place`` in any share."""
        found = [share.get(place) for shares in self.shares(world_size) for share in shares]
        return max((abs(value) for value in found if is_number(value) and math.isfinite(abs(value))), default=0.0)

    def mistakes(self, world_size: int, place: str) -> Iterator[tuple[str, Any]]:
        """Yield the usual mistakes, each with the number that it gives."""
        size = len(self)
        missing, extra = -size % world_size, size % world_size
        for shares in self.shares(world_size):
            found = [share.get(place) for share in shares]
            numbers = [value for value in found if is_number(value)]
            if len(numbers) == world_size:
                mean = sum(numbers) / world_size
                cure = "weigh them by their samples" if extra else "sum what each is made of, and compute it from that"
                yield f"the mean of the ranks' values, each counted once: {cure}", mean
                yield "the values of the ranks were added", sum(numbers)
            for rank, value in enumerate(found):
                yield f"the value of the samples of rank {rank} alone: it was not reduced", value
        if missing:
            first, last = (f"the {end} sample counts" for end in ("first", "last"))
            repeated = first if missing == 1 else f"the first {missing} samples count"
            to = f"as a sampler pads to {size + missing}"
            yield f"{repeated} twice, {to}: {LEAVE_OUT}", self.tail(world_size, "the first again").get(place)
            often = "twice" if missing == 1 else f"{missing + 1} times"
            yield f"{last} {often}, {to}", self.tail(world_size, "the last again").get(place)
            dropped = last if extra == 1 else f"the last {extra} samples count"
            kept = self.tail(world_size, "the last dropped").get(place)
            yield f"{dropped} not at all, as a sampler drops what does not fill all ranks", kept
        value = self.of_all.get(place)
        if is_number(value):
            yield f"world_size = {world_size} times too large: summed, not averaged", value * world_size
            yield (
                f"world_size = {world_size} times too small: divided twice, or each rank counts all samples",
                value / world_size,
            )


def values_of(report: Any, place: str = "") -> Values:
    """Return the values in a report, each by its place: ``" at ['loss'][0]"``; no values if the report is None."""
    if report is None:
        return {f" at {place}": None} if place else {}
    if isinstance(report, Mapping):
        items = [(f"[{key!r}]", value) for key, value in report.items()]
    elif dataclasses.is_dataclass(report) and not isinstance(report, type):
        items = [(f".{one.name}", getattr(report, one.name)) for one in dataclasses.fields(report)]
    elif isinstance(report, list | tuple):
        items = [(f"[{index}]", value) for index, value in enumerate(report)]
    elif hasattr(report, "tolist"):  # a tensor, an array or one number of an array
        return values_of(report.tolist(), place)
    else:
        return {f" at {place}" if place else "": report}
    return {where: value for key, inner in items for where, value in values_of(inner, place + key).items()}


def is_number(value: Any) -> TypeGuard[complex]:
    """Return whether a value is a number; a bool is not."""
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def near(found: Any, expected: Any, largest: float) -> bool:
    """Return whether two values are equal.

    Numbers that are not both integers may be off by 1e-5 of ``expected`` or of ``largest``, whichever is larger.
    """
    if not (is_number(found) and is_number(expected)) or (isinstance(found, int) and isinstance(expected, int)):
        return type(found) is type(expected) and bool(found == expected)
    return bool(abs(found - expected) <= RELATIVE * max(abs(expected), largest))
