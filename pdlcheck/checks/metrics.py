"""A metric that ranks compute together is the metric of one process on all samples, for every number of ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pdlcheck.checks.message import case, failure, name_of, show, takes_world
from pdlcheck.errors import Inconclusive

__all__ = ["check_metric"]

Samples = tuple[Tensor, ...]
Values = dict[str, Any]  # by their place in what was reported

# A float32 mean of a thousand terms, added in another order, is off by 1e-6 of it at most; one sample in ten thousand
# that counts twice or not at all moves it by more.
RELATIVE = 1e-5

_MANY = 4  # mistakes that give one number, such as 0 or 1: none of them is likely


@takes_world
def check_metric(
    evaluate: Callable[..., Any],
    samples: Sequence[Tensor],
    world: Any,
    *,
    world_sizes: Sequence[int] = (2, 3),
    reference: Callable[..., Any] | None = None,
) -> None:
    """What ranks report about the samples that they share must be what one process reports about all of them.

    It is asked about all samples and about all but the last, since one of the two numbers is uneven over ranks; where
    the mean of the ranks' values is right by chance, as with ``torch.arange``, once more with the last sample first.
    Numbers may be off by 1e-5 of the largest that any share of the samples has; integers and everything else must be
    equal.

    Args:
        evaluate: called as ``evaluate(*samples)`` on every rank, with all samples, of which it takes the rank's share
            as the program does, by a sampler for example. Returns a number, a tensor, or lists and dicts of them; None
            on ranks that report nothing, or in the place of what others report.
        samples: tensors whose first dimension is the samples, such as inputs and targets; two samples or more.
        world: where the ranks run.
        world_sizes: numbers of ranks.
        reference: called as ``reference(*samples)`` in one process; the default is ``evaluate`` in a world of one rank,
            which cannot tell that batches of unlike sizes count the same.

    Raises:
        AssertionError: names rank, number and the likely cause: the mean of the ranks' values, the value of one rank's
            share, samples that a sampler repeats or drops, a sum for a mean.
        Inconclusive: one process reports nothing or NaN, or the same for every share of the samples.

    Example:
        >>> import torch.distributed as dist
        >>> from pdlcheck.worlds import get_world
        >>> def mean_error(errors):
        ...     own = errors[dist.get_rank() :: dist.get_world_size()]
        ...     total = torch.stack([own.sum(), torch.tensor(float(len(own)))])
        ...     dist.all_reduce(total)
        ...     return float(total[0] / total[1])
        >>> check_metric(mean_error, [torch.arange(7.0)], get_world("sim"))
    """
    __tracebackhide__ = True
    count = min((len(tensor) for tensor in samples), default=0)
    if count < 2 or any(len(tensor) != count for tensor in samples):
        sizes = ", ".join(str(len(tensor)) for tensor in samples) or "none"
        raise ValueError(f"check_metric needs tensors with the same number of samples, 2 or more; got {sizes}")
    if any(size < 2 for size in world_sizes) or not world_sizes:
        raise ValueError(f"check_metric compares with one process; world_sizes must be 2 or more, got {world_sizes}")
    shows, by_chance = False, None
    for order in (None, "last_sample_first"):
        for size in (count, count - 1):
            given = tuple(t[:size] if order is None else t[:size].roll(1, 0) for t in samples)
            alone = _Alone(evaluate, reference, given, world, order)
            for world_size in world_sizes:
                _compare(alone, world_size)
                shows = shows or alone.tells_shares_apart(world_size)
                if by_chance != set():
                    found = alone.right_by_chance(world_size)
                    by_chance = found if by_chance is None else by_chance & found
        if not by_chance:
            break
    if not shows:
        raise Inconclusive(
            f"{name_of(evaluate)} reports the same for every share of the samples, no fault would show: give it "
            "samples that differ"
        )


@dataclass(frozen=True)
class _Alone:
    """What one process reports."""

    evaluate: Callable[..., Any]
    reference: Callable[..., Any] | None
    samples: Samples
    world: Any
    order: str | None = None
    _shares: dict[int, list[list[Values]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples[0])

    @functools.cached_property
    def of_all(self) -> Values:
        who = name_of(self.reference or self.evaluate)
        values = self.of(self.samples)
        if all(value is None for value in values.values()):
            raise Inconclusive(f"{who} reports nothing in one process, there is nothing to compare with")
        for place, value in values.items():
            if isinstance(value, float | complex) and not math.isfinite(abs(value)):
                raise Inconclusive(f"{who} reports {value}{place} in one process, there is nothing to compare with")
        return values

    def of(self, samples: Samples) -> Values:
        if self.reference is not None:
            return _values(self.reference(*samples))
        return _values(self.world.run(self.evaluate, *samples, world_size=1)[0])

    def of_share(self, samples: Samples) -> Values:
        """Nothing, where the program cannot do with so few."""
        try:
            return self.of(samples)
        except Exception:
            return {}

    def shares(self, world_size: int) -> list[list[Values]]:
        """What one process reports about the share of each rank, for the two usual ways to share."""
        if world_size not in self._shares:
            strided = [tuple(t[rank::world_size] for t in self.samples) for rank in range(world_size)]
            blocks = zip(*(torch.tensor_split(t, world_size) for t in self.samples), strict=True)
            self._shares[world_size] = [[self.of_share(share) for share in way] for way in (strided, blocks)]
        return self._shares[world_size]

    def tells_shares_apart(self, world_size: int) -> bool:
        return any(
            not _near(share[place], value, 0.0)
            for shares in self.shares(world_size)
            for share in shares
            for place, value in self.of_all.items()
            if place in share
        )

    def right_by_chance(self, world_size: int) -> set[tuple[int, str]]:
        """Ways to share and places where the mean of the ranks' values, each counted once, is the right number."""
        return {
            (way, place)
            for way, shares in enumerate(self.shares(world_size))
            for place, value in self.of_all.items()
            if _is_number(value)
            and all(_is_number(share.get(place)) for share in shares)
            and _near(sum(share[place] for share in shares) / world_size, value, 0.0)
        }

    def largest(self, world_size: int, place: str) -> float:
        """Of what any share has there."""
        found = [share.get(place) for shares in self.shares(world_size) for share in shares]
        return max((abs(value) for value in found if _is_number(value) and math.isfinite(abs(value))), default=0.0)

    def mistakes(self, world_size: int, place: str) -> Iterator[tuple[str, Any]]:
        """What may have been done, and what comes of it."""
        size = len(self)
        missing, extra = -size % world_size, size % world_size
        for shares in self.shares(world_size):
            found = [share.get(place) for share in shares]
            numbers = [value for value in found if _is_number(value)]
            if len(numbers) == world_size:
                mean = sum(numbers) / world_size
                cure = "weigh them by their samples" if extra else "sum what each is made of, and compute it from that"
                yield f"the mean of the ranks' values, each counted once: {cure}", mean
                yield "the values of the ranks were added", sum(numbers)
            for rank, value in enumerate(found):
                yield f"the value of the samples of rank {rank} alone: it was not reduced", value
        if missing:
            padded = tuple(torch.cat([t, t[torch.arange(missing) % size]]) for t in self.samples)
            repeated = "the first sample counts" if missing == 1 else f"the first {missing} samples count"
            yield f"{repeated} twice, as a sampler pads to {size + missing}", self.of_share(padded).get(place)
        if extra:
            rest = tuple(t[: size - extra] for t in self.samples)
            dropped = "the last sample counts" if extra == 1 else f"the last {extra} samples count"
            kept = self.of_share(rest).get(place)
            yield f"{dropped} not at all, as a sampler drops what does not fill all ranks", kept
        value = self.of_all.get(place)
        if _is_number(value):
            yield f"world_size = {world_size} times too large: summed, not averaged", value * world_size
            yield f"world_size = {world_size} times too small: divided twice", value / world_size


def _compare(alone: _Alone, world_size: int) -> None:
    __tracebackhide__ = True
    who, expected = name_of(alone.evaluate), alone.of_all
    reports = alone.world.run(alone.evaluate, *alone.samples, world_size=world_size)
    told = [(rank, _values(report)) for rank, report in enumerate(reports) if report is not None]
    facts = case(alone.world, world_size, samples=len(alone), order=alone.order)
    told = [(rank, found) for rank, found in told if any(value is not None for value in found.values())]
    if not told:
        raise failure(f"{who}: no rank reports anything, one process reports {_listed(expected)}", case=facts)
    for rank, found in told:
        if found.keys() != expected.keys():
            raise failure(
                f"{who}: rank {rank} reports {_listed(found)}, one process reports {_listed(expected)}", case=facts
            )
        for place, value in expected.items():
            held = found[place]
            if held is None and any(others.get(place) is not None for _, others in told):
                continue  # others report it
            if _near(held, value, 0.0) or _near(held, value, alone.largest(world_size, place)):
                continue
            raise failure(
                f"{who}: rank {rank} reports {_shown(held)}{place}, "
                f"one process on all {len(alone)} samples reports {_shown(value)}",
                ranks=", ".join(f"rank {other}: {_shown(values.get(place))}" for other, values in told),
                likely_cause=_why(alone, world_size, place, held),
                case=facts,
            )


def _why(alone: _Alone, world_size: int, place: str, held: Any) -> str | None:
    """Every usual mistake that gives the very number, each once; none where so many do that they say nothing."""
    texts = dict.fromkeys(text for text, wrong in alone.mistakes(world_size, place) if _near(held, wrong, 0.0))
    return "; or ".join(texts) if 0 < len(texts) < _MANY else None


def _values(report: Any, place: str = "") -> Values:
    """The numbers in a report, each by its place: ``" at ['loss'][0]"``; none for None alone."""
    if report is None:
        return {f" at {place}": None} if place else {}
    if isinstance(report, Mapping):
        items = [(f"[{key!r}]", value) for key, value in report.items()]
    elif isinstance(report, list | tuple):
        items = [(f"[{index}]", value) for index, value in enumerate(report)]
    elif hasattr(report, "tolist"):  # a tensor, an array or one number of an array
        return _values(report.tolist(), place)
    else:
        return {f" at {place}" if place else "": report}
    return {where: value for key, inner in items for where, value in _values(inner, place + key).items()}


def _is_number(value: Any) -> TypeGuard[complex]:
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def _near(found: Any, expected: Any, largest: float) -> bool:
    if not (_is_number(found) and _is_number(expected)) or (isinstance(found, int) and isinstance(expected, int)):
        return type(found) is type(expected) and bool(found == expected)
    return bool(abs(found - expected) <= RELATIVE * max(abs(expected), largest))


def _shown(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else show(value)


def _listed(values: Values) -> str:
    return ", ".join(f"{_shown(value)}{place}" for place, value in values.items()) or "nothing"
