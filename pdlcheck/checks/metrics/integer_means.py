"""The cause of a wrong metric whose divisor is a mean of integers that lost its fraction."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from pdlcheck.checks.metrics.values import Alone, Values, is_number, near, values_of

__all__ = ["means_of_integers"]

_OTHER_RUNS = 3  # with fewer samples
_COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the sum": lambda tensor: tensor,
    "the number of entries >= 0": lambda tensor: tensor >= 0,
    "the number of entries other than 0": lambda tensor: tensor != 0,
}


def means_of_integers(alone: Alone, world_size: int) -> Iterator[tuple[str, Values]]:
    """Yield the values if a divisor is a mean over ranks, as an integer, with the total that loses its fraction.

    Runs with fewer samples must confirm a total. The ratios of small integers are few, so one run may fit by chance.
    """
    count = len(alone)
    for kept, sampler in ((count // world_size, "drops"), (count // world_size + 1, "repeats")):
        if count % world_size and kept:
            yield (
                f"the sum over all {count} samples, divided by {kept * world_size}: the mean over ranks of their "
                f"number was rounded to {kept}, or samples that a sampler {sampler} count only in the sum",
                _times(alone.of_all, count / world_size / kept),
            )
    others: list[tuple[Alone, Values]] | None = None
    for place, tensor in enumerate(alone.samples):
        if tensor.is_floating_point() or tensor.is_complex():
            continue
        for name, counted in _COUNTS.items():
            for more in (0, 1):
                predicted = _predicted(alone, world_size, place, counted, more)
                if predicted is None or int(counted(tensor).sum()) == count:
                    continue
                others = list(_other_runs(alone, world_size)) if others is None else others
                if _confirmed(others, world_size, place, counted, more):
                    total = int(counted(tensor).sum())
                    yield (
                        f"it is divided by {total // world_size + more} in place of {total / world_size:.6g}, which is "
                        f"{name} of samples[{place}], {total}, over {world_size} ranks: the mean of an integer lost "
                        "its fraction; add the numbers of the ranks, or average them in floating point",
                        predicted,
                    )


def _predicted(
    alone: Alone, world_size: int, place: int, counted: Callable[[Tensor], Tensor], more: int
) -> Values | None:
    """Return the values with the rounded mean; None if it has no fraction, or is rounded to 0."""
    total = int(counted(alone.samples[place]).sum())
    kept = total // world_size + more
    if total < 1 or not kept or not total % world_size:
        return None
    return _times(alone.of_all, total / world_size / kept)


def _other_runs(alone: Alone, world_size: int) -> Iterator[tuple[Alone, Values]]:
    """Yield the values that the ranks report for fewer samples, each with those of one process."""
    for fewer in range(1, _OTHER_RUNS + 1):
        if len(alone) - fewer >= world_size:
            other = Alone(alone.evaluate, alone.reference, tuple(t[:-fewer] for t in alone.samples), alone.world)
            try:
                reports = alone.world.run(alone.evaluate, *other.samples, world_size=world_size)
                found = next(values_of(one) for one in reports if one is not None)
                if other.of_all.keys() == found.keys():
                    yield other, found
            except Exception:  # the program may need its number of samples
                return


def _confirmed(
    others: list[tuple[Alone, Values]], world_size: int, place: int, counted: Callable[[Tensor], Tensor], more: int
) -> bool:
    """Return whether each other run has the values with the rounded mean, and at least one has a fraction to lose."""
    fractions = 0
    for other, found in others:
        predicted = _predicted(other, world_size, place, counted, more)
        wrong = [where for where, value in found.items() if not other.accepts(world_size, where, value)]
        if bool(wrong) != (predicted is not None):
            return False
        if predicted is not None:
            fractions += 1
            if not all(near(found[where], predicted.get(where), 0.0) for where in wrong):
                return False
    return fractions > 0


def _times(values: Values, factor: float) -> Values:
    return {place: value * factor for place, value in values.items() if is_number(value)}
