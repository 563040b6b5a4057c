"""The causes of wrong gradients, each with the gradients that it predicts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.gradients.truth import Gradients, Reference, or_zero
from pdlcheck.checks.tolerances import NARROW, ROUNDED, Tolerance

__all__ = ["Causes"]

Held = dict[str, Tensor]  # wrong gradients by name

_COUPLED = (
    "samples of one shard see those of others, as in batch norm or a contrastive loss: on ranks they must see the same "
    "ones, through a gather that gradients come back through"
)
_MOST, _SAME = 1000, 1e-4  # the limit of the divisors to try, and the relative tolerance of a factor


@dataclass(frozen=True)
class Causes:
    """The tables of causes for gradients that differ from those of a reference."""

    reference: Reference

    def diagnose(self, everyone: Sequence[Gradients], wrong: Sequence[Sequence[str]], rank: int) -> Diagnosis:
        """Return the candidates that explain all wrong gradients of ``rank``.

        Args:
            everyone: the gradients of each rank.
            wrong: the names of the wrong gradients of each rank.
            rank: the rank whose gradients are to be explained.
        """
        names = wrong[rank]
        found = {name: or_zero(everyone[rank][name], self.reference.of(name)) for name in names}
        alike = len(everyone) > 1 and all(_same(held[n], everyone[rank][n]) for held in everyone for n in names)
        candidates = [
            Candidate(text, functools.partial(_for_each, names, of)) for text, of in self._causes(rank, alike=alike)
        ]
        return explain(
            found,
            candidates,
            [Candidate(ROUNDED, holds=self._is_rounded_to_float32)],
            self._other_divisors(found),
            self._other_offsets(found, rank),
            *([rounding] for rounding in self._roundings()),
            tolerance={name: self._tolerance(name) for name in names},
            expected={name: self.reference.of(name) for name in names},
            hints=[Candidate(_COUPLED, holds=lambda _: self._sees_others()), *_of_right_ranks(wrong)],
        )

    def _tolerance(self, name: str) -> Tolerance:
        # A candidate may be world_size times larger than the gradients from which the tolerance is computed.
        return Tolerance(absolute=self.reference.allowed(name) * len(self.reference.sizes))

    def _is_rounded_to_float32(self, found: Held) -> bool:
        return all(replace(self.reference, dtype=torch.float32).accepts(name, held) for name, held in found.items())

    def _flat(self, found: Held) -> tuple[Tensor, Tensor]:
        """Return all elements of ``found``, and the right ones."""
        right = torch.cat([self.reference.of(name).flatten() for name in found])
        return torch.cat([held.flatten() for held in found.values()]), right

    def _other_divisors(self, found: Held) -> Iterator[Candidate[Held]]:
        """Yield the sum over ranks divided by the whole number that fits best, if one does."""
        held, expected = self._flat(found)
        if held.is_complex() or not expected.any():
            return
        world_size, times = len(self.reference.sizes), float(held.dot(expected) / expected.dot(expected))
        divisor = round(world_size / times) if times > 0 else 0
        if not 1 < divisor < _MOST or abs(times * divisor / world_size - 1) > _SAME:
            return
        yield Candidate(
            f"it is {times:.6g} times what is right: as a sum over world_size = {world_size} ranks divided by "
            f"{divisor}",
            lambda: {name: self.reference.of(name) * world_size / divisor for name in found},
        )

    def _other_offsets(self, found: Held, rank: int) -> Iterator[Candidate[Held]]:
        """Yield the cause in which slices of right gradients are at other places of their tensor."""
        own = self.reference.shards[rank]
        parts = {name: (held.flatten(), self.reference.of(name).flatten()) for name, held in found.items()}
        moved = {
            name: _moved(*pair, or_zero(own[name], self.reference.of(name)).flatten(), self._tolerance(name))
            for name, pair in parts.items()
        }
        name, (first, last, source) = next(((name, at) for name, at in moved.items() if at), ("", (0, 0, 0)))
        yield Candidate.when(
            f"right elements are at another offset: elements {first} to {last} of {name!r}, in flat order, are those "
            f"that belong to {source} to {source + last - first}; a slice, as of a tensor that two buckets share, was "
            "copied to the wrong place",
            all(moved.values()),
        )

    def _roundings(self) -> Iterator[Candidate[Held]]:
        """Yield the rounding of each narrow dtype, the smallest first."""
        for narrow in NARROW:
            yield Candidate(
                f"it differs by no more than {str(narrow).removeprefix('torch.')} rounds: something computes or sends "
                "in it, as a hook that compresses does, which check_comm_hook(relative=) is for",
                holds=functools.partial(self._is_rounded_to, narrow),
            )

    def _is_rounded_to(self, narrow: torch.dtype, found: Held) -> bool:
        """Return whether the rounding of a narrow dtype explains the errors; one factor of all elements must not."""
        held, expected = self._flat(found)
        off = held - expected
        if off.is_complex() or not expected.any():
            return False
        along = off.dot(expected) / expected.dot(expected)
        if (off - along * expected).norm() <= 0.1 * off.norm():
            return False
        scales = self.reference.largest
        largest = torch.cat([torch.full_like(one.flatten(), scales[name]) for name, one in found.items()])
        return bool((off.abs() <= NARROW[narrow] * largest).all())

    def _mix(self, weights: Sequence[float]) -> Callable[[str], Tensor]:
        """Return the weighted sum of the shards' gradients, as a function of the name."""

        def mix(name: str) -> Tensor:
            like = self.reference.of(name)
            parts = [w * or_zero(grads[name], like) for w, grads in zip(weights, self.reference.shards, strict=True)]
            return torch.stack(parts).sum(0)

        return mix

    def _largest_of_shards(self, name: str) -> Tensor:
        """Return the maximum over shards, element by element; for complex gradients, which have no order, the sum."""
        parts = torch.stack([or_zero(grads[name], self.reference.of(name)) for grads in self.reference.shards])
        return parts.sum(0) if parts.is_complex() else parts.amax(0)

    def _means(self) -> Callable[[str], Tensor]:
        return self._mix([n / sum(self.reference.sizes) for n in self.reference.sizes])

    def _sums(self) -> Callable[[str], Tensor]:
        return self._mix([1.0] * len(self.reference.sizes))

    def _sees_others(self) -> bool:
        """Return whether a sample's gradient depends on other shards, as in batch norm or a contrastive loss."""
        right = {name: self.reference.of(name) for name in self.reference.union}

        def gives(mix: Callable[[str], Tensor]) -> bool:
            return all(bool(self._tolerance(name).accepts(mix(name), goal).all()) for name, goal in right.items())

        return not gives(self._means()) and not gives(self._sums())

    def _causes(self, rank: int, *, alike: bool) -> Iterator[tuple[str, Callable[[str], Tensor]]]:
        """Yield the possible causes, each with the gradient that it predicts for each name.

        A cause that is another one in other words for these shards is left out. ``alike``: all ranks hold the same
        gradients, so they are not each rank's own.
        """
        world_size, total = len(self.reference.sizes), sum(self.reference.sizes)
        uneven = len(set(self.reference.sizes)) > 1

        def one(place: int) -> Callable[[str], Tensor]:
            return self._mix([float(place == other) for other in range(world_size)])

        def scaled(factor: float) -> Callable[[str], Tensor]:
            return lambda name: self.reference.of(name) * factor

        def with_earlier(factor: float) -> Callable[[str], Tensor]:
            def mix(name: str) -> Tensor:
                return or_zero(
                    (self.reference.before or {}).get(name), self.reference.of(name)
                ) + factor * self.reference.of(name)

            return mix

        def halfway(name: str) -> Tensor:
            return with_earlier(1.0)(name) / 2

        yield "it is zero, or None: gradients were lost", scaled(0.0)
        if self.reference.before is not None:
            yield "it is what the call before gave: what it kept was not filled anew", with_earlier(0.0)
            yield (
                "what the call before gave was added: what it kept, such as a buffer, was not zeroed",
                with_earlier(1.0),
            )
            yield "it is the mean of what this call and the one before had to give", halfway
        yield f"it is world_size = {world_size} times too large: summed, not averaged", scaled(world_size)
        sees_others, cut = self._sees_others(), ""
        if sees_others:
            cut = ", or a gather in the loss cuts the way back to the outputs of other ranks"
        yield f"it is world_size = {world_size} times too small: divided once too often{cut}", scaled(1 / world_size)
        if not alike:
            yield "it is the gradient of this rank's own shard: it was never synchronised", one(rank)
        means, sums = self._means(), self._sums()
        if sees_others:
            coupled = (
                "of what the shards give, which one process on all samples does not have: samples see each other, as "
                "in batch norm (call .eval() in make), or in the loss"
            )
            yield f"it is the mean {coupled}", means
            yield f"it is the sum {coupled}", sums
        unweighted = self._mix([1 / world_size] * world_size)
        yield "it is the plain mean over ranks: shards are uneven, weight them with their samples", unweighted
        if not all(self.reference.sizes):
            busy = [1 / sum(n > 0 for n in self.reference.sizes) if n else 0.0 for n in self.reference.sizes]
            yield "it is the plain mean over ranks that have samples: weight them with their samples", self._mix(busy)
        if uneven:
            yield "it is the plain sum over ranks: of means, where one mean is right", sums
        yield f"it is {total} times too small: divided by the samples again", scaled(1 / total)
        yield f"it is {total} times too large: not divided by the samples", scaled(total)
        own = self.reference.sizes[rank]
        if own and own * world_size != total:
            of_this_rank = f"the {own} sample(s) of this rank, where all ranks have {total}"
            yield f"it is divided by world_size times {of_this_rank}", scaled(total / (own * world_size))
            yield f"it is divided by {of_this_rank}", scaled(total / own)
        for other in range(world_size):
            if alike or other != rank:
                yield f"it is the gradient of rank {other}'s shard: copied, not averaged", one(other)
        yield "each element is the largest over ranks: reduced by MAX, not averaged", self._largest_of_shards
        for part in _parts_of(rank, world_size):
            only = f"only the shards of ranks {', '.join(map(str, part))} are in it"
            samples = sum(self.reference.sizes[r] for r in part)
            for what, weights in (
                ("mean", [n / samples if samples and r in part else 0.0 for r, n in enumerate(self.reference.sizes)]),
                ("sum", [float(r in part) for r in range(world_size)]),
                ("sum divided by world_size", [float(r in part) / world_size for r in range(world_size)]),
            ):
                yield f"{only}, as a {what}: it was synchronised in a sub-group", self._mix(weights)
        for other in range(world_size):
            left = [n if place != other else 0 for place, n in enumerate(self.reference.sizes)]
            if sum(left):
                yield f"the shard of rank {other} is missing", self._mix([n / total for n in left])
                if sum(n > 0 for n in left) > 1:  # the gradient of a single shard is a cause of its own
                    yield f"the shard of rank {other} is left out", self._mix([n / sum(left) for n in left])


def _moved(held: Tensor, right: Tensor, own: Tensor, tolerance: Tolerance) -> tuple[int, int, int] | None:
    """Return the first and last flat index of a slice that holds the right elements of another place, and that place.

    All other elements must be right, or those of the rank's own shard. None if there is no such slice of two or more.
    """
    wrong = ~tolerance.accepts(held, right)
    unexplained = (wrong & ~tolerance.accepts(held, own)).nonzero().flatten()
    if len(unexplained) < 2:
        return None
    first, last = int(unexplained[0]), int(unexplained[-1])
    size = last - first + 1
    if bool((held[first : last + 1] == held[first]).all()):
        return None  # the same value at all places shows no offset
    for source in tolerance.accepts(held[first], right[: len(right) - size + 1]).nonzero().flatten().tolist():
        if bool(tolerance.accepts(held[first : last + 1], right[source : source + size]).all()):
            return first, last, source
    return None


def _parts_of(rank: int, world_size: int) -> Iterator[tuple[int, ...]]:
    """Yield the groups that a rank may be in: neighbours, and every n-th rank.

    Groups of one rank, of all ranks except one, and of all ranks are left out.
    """
    found = {tuple(range(first, last)) for first in range(rank + 1) for last in range(rank + 1, world_size + 1)}
    found |= {tuple(range(rank % n, world_size, n)) for n in range(2, world_size)}
    yield from sorted(one for one in found if 1 < len(one) < world_size - 1)


def _for_each(names: Sequence[str], of: Callable[[str], Tensor]) -> dict[str, Tensor]:
    return {name: of(name) for name in names}


def _of_right_ranks(wrong: Sequence[Sequence[str]]) -> Iterator[Candidate[Held]]:
    """Yield a hint if some ranks hold the right gradients."""
    right = [str(rank) for rank, names in enumerate(wrong) if not names]
    whose = f"rank{'s' if len(right) > 1 else ''} {', '.join(right)} alone"
    yield Candidate.when(
        f"they are right on {whose}: what is reduced does not reach all, as reduce() leaves it on dst",
        true=bool(right),
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)
