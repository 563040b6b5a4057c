"""The less usual causes of a wrong metric: batches, sums and counts; tried if no usual cause gives the number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.metrics.integer_means import means_of_integers
from pdlcheck.checks.metrics.values import LEAVE_OUT, Alone, Values, is_number, near

__all__ = ["in_other_places", "rare_causes", "sample_count_cause"]

Mistake = tuple[str, Values]
Of = Callable[[Sequence[int]], Values]
Shares = Sequence[Sequence[int]]  # for each rank, the positions of its samples

_LARGEST_BATCH = 16
_TAILS = ("filled up", "short", "dropped")  # treatments of the last samples
_ASKED = 400  # the limit of evaluations in one process


def rare_causes(alone: Alone, world_size: int) -> Iterator[Iterator[Mistake]]:
    """Yield groups of possible mistakes, each mistake with the values that it gives.

    The first group with a mistake that explains all wrong numbers holds the likely cause.
    """
    of = _Asked(alone)
    batches = [size for size in range(2, _LARGEST_BATCH + 1) if size * world_size <= len(alone)]
    yield _wrong_counts(alone, world_size)
    yield means_of_integers(alone, world_size)
    yield _filled_up(alone, world_size, of)
    yield _not_reduced(alone, world_size, (1, *batches), of)
    yield _means_of_batches(alone, world_size, batches, of)
    yield _any_one(alone, world_size, of)  # last, because it needs the most evaluations


def sample_count_cause(alone: Alone, world_size: int, found: Values) -> Diagnosis:
    """Return why a rank reports more or fewer numbers than one process."""
    count, expected = len(alone), len(alone.of_all)
    each = 0 if expected % count else expected // count  # how many numbers there are for a sample
    samples = len(found) // each if each and not len(found) % each else 0

    if not samples:
        gathered = "there is a value of each rank: they are gathered, not reduced"
        return explain(found, [Candidate.when(gathered, len(found) == world_size * expected)])
    head, whole, share = f"there are {samples} samples of {count}", world_size * count, -(-count // world_size)
    table = {
        "each rank has all: the sampler is missing": samples == whole,
        f"as where shares or batches are filled up: {LEAVE_OUT}": count < samples != whole,
        "those of a rank: they are not gathered": samples <= share,
        "what does not fill all ranks, or a batch, is dropped": share < samples < count,
    }
    return explain(found, [Candidate.when(f"{head}: {why}", true) for why, true in table.items()])


def in_other_places(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether two or more numbers are the expected ones in another order."""
    numbers = [*found, *expected]
    if len(found) < 2 or not all(isinstance(one, int | float) for one in numbers):
        return False
    return all(near(one, other, 0.0) for one, other in zip(sorted(found), sorted(expected), strict=True))


class _Asked:
    """The values that one process reports for sets of samples; each set is evaluated once."""

    def __init__(self, alone: Alone) -> None:
        self._alone, self._known = alone, dict[tuple[int, ...], Values]()

    def __call__(self, places: Sequence[int]) -> Values:
        key = tuple(places)
        if key not in self._known:
            if len(self._known) == _ASKED:
                return {}
            rows = torch.tensor(key, dtype=torch.long)
            self._known[key] = self._alone.of_share(tuple(t[rows] for t in self._alone.samples))
        return self._known[key]


def _wrong_counts(alone: Alone, world_size: int) -> Iterator[Mistake]:
    """Yield means whose sum and whose number of samples belong to different samples."""
    count, everything = len(alone), alone.of_all
    for way, starts in zip(alone.shares(world_size), (True, False), strict=True):
        for rank, share in enumerate(way):
            own = len(range(rank, count, world_size)) if starts else len(_blocks(count, world_size)[rank])
            if own:
                text = f"a sum over all ranks, divided by the samples of rank {rank} alone"
                yield text, _times(everything, count / own)
                yield f"the sum of rank {rank} alone, divided by the samples of all ranks", _times(share, own / count)
    for how, more, text in (
        ("the first again", -count % world_size, "samples that a sampler repeats are in the sum, not in its number"),
        ("the last dropped", -(count % world_size), "samples that a sampler drops are in the number, not in the sum"),
    ):
        yield f"{text}: the sum is divided by {count}", _times(alone.tail(world_size, how), (count + more) / count)
    yield "a sum over the samples: it was not divided by their number", _times(everything, count)
    yield "it was divided by the number of samples once too often", _times(everything, 1 / count)


def _filled_up(alone: Alone, world_size: int, of: Of) -> Iterator[Mistake]:
    """Yield the values if batches are dealt to the ranks in turn, and the last ones are filled up.

    The loaders of accelerate deal the batches so.
    """
    count = len(alone)
    for again in dict.fromkeys(-count % (world_size * size) for size in range(2, count // world_size + 1)):
        if again > 1:
            text = f"the first {again} samples count twice, as a loader fills up the last batches"
            yield f"{text}: {LEAVE_OUT}", of([*range(count), *range(again)])


def _any_one(alone: Alone, world_size: int, of: Of) -> Iterator[Mistake]:
    """Yield the values if one sample is repeated or left out by a sampler that shuffles."""
    count = len(alone)
    everything = range(count)
    if -count % world_size == 1:
        text = f"one sample counts twice, as a sampler that shuffles pads to {count + 1}: {LEAVE_OUT}"
        yield from ((text, of([*everything, one])) for one in everything)
    if count % world_size == 1:
        text = f"one sample counts not at all, as a sampler that shuffles drops what does not fill {world_size} ranks"
        yield from ((text, of([other for other in everything if other != one])) for one in everything)


def _not_reduced(alone: Alone, world_size: int, sizes: Sequence[int], of: Of) -> Iterator[Mistake]:
    """Yield the values of one rank's share alone."""
    for size in sizes:
        dealt = f", dealt in batches of {size}" if size > 1 else ""
        for tail in _TAILS:
            for rank, share in enumerate(_dealt(len(alone), world_size, size, tail)):
                yield f"the value of the samples of rank {rank} alone{dealt}: it was not reduced", of(share)


def _means_of_batches(alone: Alone, world_size: int, sizes: Sequence[int], of: Of) -> Iterator[Mistake]:
    """Yield means of the values of batches, which may have unlike sizes.

    The means are over all ranks together, over each rank and then over ranks, or over one rank.
    """
    for size in sizes:
        text = f"the mean of the values of batches of {size}, each counted once: weigh them by their samples"
        for shares in _ways(len(alone), world_size, size):
            values = [[of(share[i : i + size]) for i in range(0, len(share), size)] for share in shares]
            yield text, _mean([one for own in values for one in own])
            yield text, _mean([_mean(own) for own in values])
            for rank, own in enumerate(values):
                yield f"the mean of the values of rank {rank}'s batches of {size} alone: it was not reduced", _mean(own)


def _ways(count: int, world_size: int, batch: int) -> Iterator[Shares]:
    """Yield the usual distributions of the samples over ranks."""
    for size in (1, batch):
        for tail in _TAILS:
            yield _dealt(count, world_size, size, tail)
    yield _blocks(count, world_size)


def _dealt(count: int, world_size: int, size: int, tail: str) -> Shares:
    """Return the samples of each rank if batches of ``size`` samples go to the ranks in turn.

    ``tail`` is the treatment of samples that do not fill all ranks; see ``_TAILS``.
    """
    order = list(range(count))
    if tail == "filled up":  # with the first samples
        order += order[: -count % (world_size * size)]
    elif tail == "dropped":
        order = order[: count - count % (world_size * size)]
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return [[place for one in batches[rank::world_size] for place in one] for rank in range(world_size)]


def _blocks(count: int, world_size: int) -> Shares:
    return [part.tolist() for part in torch.tensor_split(torch.arange(count), world_size)]


def _times(values: Values, factor: float) -> Values:
    return {place: value * factor for place, value in values.items() if is_number(value)}


def _mean(everything: Sequence[Values]) -> Values:
    """Return the mean of each number that all reports have."""
    first = everything[0] if everything else {}
    return {
        place: sum(values[place] for values in everything) / len(everything)
        for place in first
        if all(is_number(values.get(place)) for values in everything)
    }
