"""The checks of samplers for a DataLoader: their samples, their length, and how they continue after a stop.

The checks count the used samples one by one. Ranks draw from different random numbers.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from pdlcheck.checks.checkpoint.unsaved_state import seed_streams
from pdlcheck.checks.data.sampler_repeats import Repeats, drawn, require_repeats, what_to_pass
from pdlcheck.checks.data.shard_rules import ENOUGH_SAMPLES, some
from pdlcheck.checks.data.shards import check_epochs_differ, check_shards
from pdlcheck.checks.diagnosis import Candidate, explain
from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = ["check_sampler", "check_sampler_resumes"]

MakeSampler = Callable[..., Any]
Tail = Literal["uneven", "pad", "drop"]

# A right sampler drops a given sample in less than half of the epochs. By chance it drops the sample in 20 of 20 epochs
# less than once in a million times.
ENOUGH_EPOCHS = 20

FETCHED_AHEAD = 3  # samples that a loader takes before training uses them


@takes_world
def check_sampler(
    make_sampler: MakeSampler,
    world: Any,
    *,
    num_samples: int,
    world_size: int,
    tail: Tail = "pad",
    shuffle: bool = True,
    epochs: int = 3,
    repeats: int | None = 1,
    endless: bool = False,
    dealt_in: int = 1,
) -> None:
    """Check that in every epoch the ranks' samples are disjoint, cover the data, and are as many as ``len`` returns.

    If samples repeat on purpose, the ranks together must have each sample ``repeats`` times. An epoch may then end
    before all samples have come, if the missing ones come in other epochs.

    Args:
        make_sampler: called as ``make_sampler(dataset, num_replicas=world_size, rank=rank)`` on every rank, as
            ``torch.utils.data.DistributedSampler`` is.
        world: where the ranks run.
        num_samples: number of samples in the data set.
        world_size: number of ranks.
        tail: the treatment of samples that do not divide evenly, as in :func:`check_shards`.
        shuffle: whether each epoch must have another order, drawn from seed and epoch alone. This is checked with 12
            samples or more for each rank. With ``tail="drop"``, the epochs must not always drop the same samples.
        epochs: number of epochs to check.
        repeats: how often the ranks together have each sample, as with repeated augmentation. None if they draw with
            replacement, for example by weights. The only rule is then that no rank draws the order of another rank in
            the same or an earlier epoch.
        endless: whether the stream never ends. The check takes as many samples as an epoch has and treats them as an
            epoch. The samples that follow must have another order. ``len`` and ``set_epoch`` are not used.
        dealt_in: the samples in a batch, if each rank has whole batches, filled up or dropped, as in
            :func:`check_shards`.

    Raises:
        AssertionError: the samples, their order or ``len`` are wrong. The message names samples, ranks and the epoch.
        Inconclusive: ranks draw fewer than 12 samples with replacement, so they may draw the same ones by chance.

    Example:
        >>> from torch.utils.data import DistributedSampler
        >>> from pdlcheck.worlds import get_world
        >>> check_sampler(DistributedSampler, get_world("sim"), num_samples=7, world_size=3)
    """
    __tracebackhide__ = True
    if repeats is not None and repeats < 1:
        raise ValueError(f"check_sampler takes repeats as 1 or more, or None for any number, got {repeats}")
    promise = Repeats(num_samples, repeats, endless, tail == "uneven", shuffle)
    by_intention = endless or repeats != 1
    if dealt_in < 1 or (dealt_in > 1 and by_intention):
        raise ValueError(
            "check_sampler takes dealt_in as the samples in a batch, 1 or more, and only where each sample comes once "
            f"in an epoch that ends, got {dealt_in}"
        )

    def shards(num_samples: int, *, rank: int, world_size: int, epoch: int) -> list[int]:
        sampler = make_sampler(range(num_samples), num_replicas=world_size, rank=rank)
        _set_epoch(sampler, epoch, shuffle=shuffle)
        return drawn(sampler, promise)

    shards.__name__ = name_of(make_sampler)
    if by_intention:
        require_repeats(make_sampler, world, promise, world_size=world_size, epochs=epochs)
    if endless:
        return
    shared = {"num_samples": num_samples, "world_size": world_size}
    require = partial(check_shards, shards, world, **shared, tail=tail, dealt_in=dealt_in)
    for epoch in range(epochs if not by_intention else 0):
        try:
            require(epoch=epoch)
        except CheckFailed as error:
            if told := what_to_pass(make_sampler, world, promise, world_size=world_size):
                error.add_note(told)
            raise
    if shuffle and repeats is not None and num_samples >= ENOUGH_SAMPLES * world_size:
        check_epochs_differ(shards, world, num_samples=num_samples, world_size=world_size, epochs=epochs)
    facts = case(world, world_size, num_samples=num_samples, tail=tail)
    ranks = world.run(_passes, make_sampler, promise, epochs, world_size=world_size)
    for rank, passes in enumerate(ranks):
        for number, (told, found) in enumerate(passes):
            if told != len(found):
                raise failure(
                    f"{name_of(make_sampler)}: in epoch {number // 2} len() of rank {rank} is {told}, "
                    f"it gives {len(found)} samples",
                    likely_cause="loaders, progress bars and schedules of the learning rate rely on len()",
                    case=facts,
                )
            if repeats is not None and number % 2 and found != passes[number - 1][1]:
                raise failure(
                    f"{name_of(make_sampler)}: asked again in epoch {number // 2}, rank {rank} gives "
                    f"{some(found)}, it gave {some(passes[number - 1][1])}",
                    likely_cause="the order is drawn from a stream that goes on; draw it from seed and epoch",
                    case=facts,
                )
    if shuffle and repeats is not None and (tail == "drop" or by_intention) and num_samples >= world_size:
        _require_all_in_time(make_sampler, world, promise, ranks, facts)


@takes_world
def check_sampler_resumes(
    make_sampler: MakeSampler,
    world: Any,
    *,
    num_samples: int,
    world_sizes: Sequence[int] = (2, 2),
    used: Sequence[int] = (3,),
    tail: Tail = "pad",
    epoch: int = 1,
    commit: Callable[[Any, int], object] = lambda sampler, num_samples: sampler.commit(num_samples),
) -> None:
    """Check that a fresh sampler that loads the state gives the samples that training had not used, each of them once.

    The run has one leg for each entry of ``world_sizes``. In each leg, ranks take more samples than training uses,
    because a loader fetches ahead. Training commits the samples that it used. Fresh samplers on the next number of
    ranks then load the state of rank 0. The last leg uses all samples.

    After it has loaded the state, a sampler gets ``set_epoch(epoch)`` with the epoch in which training stopped, as a
    loop over epochs does. It must keep its position. If the number of ranks does not change, every rank must give
    exactly the samples that the undisturbed run gives next. Each leg starts with other random numbers, as a restarted
    program does.

    Args:
        make_sampler: as in :func:`check_sampler`; its samplers have ``state_dict`` and ``load_state_dict``.
        world: where the ranks run.
        num_samples: number of samples in the data set.
        world_sizes: numbers of ranks, one for each leg.
        used: number of samples that each rank uses in each leg except the last. A rank with fewer samples uses all.
        tail: as in :func:`check_shards`, for the samples that are left after a stop.
        epoch: the epoch in which training stops.
        commit: informs a sampler that training used samples.

    Raises:
        AssertionError: samples are lost or come again, or come in another order. The message names samples and ranks.
        Inconclusive: nothing was used before a stop, or nothing is left after it.

    Example:
        >>> from pdlcheck.primitives import ShardSampler
        >>> from pdlcheck.worlds import get_world
        >>> check_sampler_resumes(ShardSampler, get_world("sim"), num_samples=20, world_sizes=(2, 3), used=(4,))
    """
    __tracebackhide__ = True
    if len(world_sizes) != len(used) + 1:
        raise ValueError(f"check_sampler_resumes needs one leg more than stops, got {len(world_sizes)} and {len(used)}")
    subject = name_of(make_sampler)
    facts = case(world, world_sizes[0], num_samples=num_samples, world_sizes=world_sizes, used=used, tail=tail)
    state: Any = None
    gone: set[int] = set()
    before: list[list[int]] = []
    for leg, (world_size, want) in enumerate(zip(world_sizes, [*used, None], strict=True)):
        arguments = (make_sampler, num_samples, epoch, state, want, commit, leg)
        ranks = world.run(_leg, *arguments, world_size=world_size)
        given = [samples for samples, _ in ranks]
        resumed = Resumed(world, world_size, arguments, num_samples, gone, given)
        as_many = leg > 0 and world_size == world_sizes[leg - 1]
        if as_many:
            _require_same(subject, resumed, [one[used[leg - 1] :] for one in before], facts)
        if leg:
            _require_rest(subject, resumed, tail, facts, as_undisturbed=as_many)
        gone |= {sample for one in given for sample in one[:want]}
        if want is not None and not (gone and any(one[want:] for one in given)):
            raise Inconclusive(f"{subject}: nothing is left after stop {leg}, {len(gone)} of {num_samples} were used")
        before, state = given, ranks[0][1]


def _set_epoch(sampler: Any, epoch: int, *, shuffle: bool) -> None:
    """Set the epoch of a sampler, as a loop over epochs does.

    A sampler that keeps one order, or that draws with replacement, may have no ``set_epoch``.
    """
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    elif shuffle:
        raise TypeError(
            f"the sampler, a {type(sampler).__name__}, has no set_epoch, by which ranks shuffle alike and each epoch "
            "anew; pass shuffle=False if it keeps one order, repeats=None if it draws with replacement"
        )


def _passes(make_sampler: MakeSampler, promise: Repeats, epochs: int) -> list[tuple[int, list[int]]]:
    """Return ``len`` and the samples of one sampler on this rank, twice for each epoch."""
    seed_streams(dist.get_rank())
    sampler = make_sampler(range(promise.num_samples), num_replicas=dist.get_world_size(), rank=dist.get_rank())
    found = []
    for epoch in range(epochs):
        for _ in range(2):
            _set_epoch(sampler, epoch, shuffle=promise.shuffle and promise.times is not None)
            found.append((len(sampler), drawn(sampler, promise)))
    return found


def _require_all_in_time(
    make_sampler: MakeSampler,
    world: Any,
    promise: Repeats,
    ranks: Sequence[list[tuple[int, list[int]]]],
    facts: str,
) -> None:
    """Check that the samples that one epoch of a shuffled order drops come in another epoch."""
    __tracebackhide__ = True
    epochs = ENOUGH_EPOCHS * (promise.times or 1)

    def never() -> list[int]:
        return sorted(set(range(promise.num_samples)).difference(*(had for passes in ranks for _, had in passes)))

    if never():
        ranks = world.run(_passes, make_sampler, promise, epochs, world_size=len(ranks))
    if lost := never():
        raise failure(
            f"{name_of(make_sampler)}: {some(lost)} come in none of {epochs} epochs",
            likely_cause="the tail is dropped before the order is drawn: draw it from all samples, then drop",
            case=facts,
        )


def _leg(
    make_sampler: MakeSampler,
    num_samples: int,
    epoch: int,
    state: Any,
    want: int | None,
    commit: Callable[[Any, int], object],
    stream: int,
    set_epoch: bool = True,
) -> tuple[list[int], Any]:
    """Return this rank's samples until the end of the epoch, and the state after ``want`` of them were used."""
    seed_streams(100 + 1000 * stream + dist.get_rank())
    sampler = make_sampler(range(num_samples), num_replicas=dist.get_world_size(), rank=dist.get_rank())
    if state is not None:
        sampler.load_state_dict(state)
    if set_epoch:
        sampler.set_epoch(epoch)  # as the loop over epochs does
    iterator = iter(sampler)
    if want is None:
        return [int(sample) for sample in iterator], None
    ahead = [int(sample) for sample in itertools.islice(iterator, want + FETCHED_AHEAD)]
    for _ in ahead[:want]:
        commit(sampler, 1)
    saved = sampler.state_dict()
    return ahead + [int(sample) for sample in iterator], saved


@dataclass(frozen=True)
class Resumed:
    """The samples that ranks give after a stop.

    Args:
        world: where the ranks ran.
        world_size: number of ranks.
        leg: the arguments of :func:`_leg`.
        num_samples: number of samples in the data set.
        gone: the samples that were used before.
        given: the samples of each rank.
    """

    world: Any
    world_size: int
    leg: tuple[Any, ...]
    num_samples: int
    gone: set[int]
    given: list[list[int]]

    def why_anew(self, right: list[list[int]] | set[int]) -> str | None:
        """Return why the epoch starts again; None if it does not, or if the reason is unknown.

        The reason is found by loading the state without a call of set_epoch().

        Args:
            right: the samples that each rank must give, or those that the ranks must give together.
        """
        if not self._begins_anew(self.given):
            return None
        held = self._without_set_epoch()
        together = set(itertools.chain(*held))
        if right in (held, together):
            return "set_epoch() loses the position that was loaded: the epoch that training stopped in begins anew"
        if self._begins_anew(held):
            return "the state has no position, or it is not loaded: the epoch begins anew"
        if len(together) == self.num_samples - len(self.gone):
            return "the epoch begins anew: it is not part of the state, or not loaded, so set_epoch() names another one"
        return None

    def needs_the_same_numbers(self, right: list[list[int]]) -> bool:
        """Return whether ranks give the right samples if they start with the random numbers of the previous leg."""
        *leg, stream = self.leg
        ranks = self.world.run(_leg, *leg, stream - 1, world_size=self.world_size)
        return [samples for samples, _ in ranks] == right

    def how_far_off(self, right: list[list[int]]) -> str | None:
        """Return by how many samples each rank continues too late or too early; None if this is not the fault."""
        off = {len(must) - len(own) for own, must in zip(self.given, right, strict=True)}
        by = off.pop()
        if off or not by or not all(self.given) or not all(right) or self._begins_anew(self.given):
            return None
        longer, shorter = (right, self.given) if by > 0 else (self.given, right)
        if [one[abs(by) :] for one in longer] != shorter:
            return None
        whose = f"{abs(by)} of its samples" if abs(by) > 1 else "a sample"
        return f"each rank goes on {whose} too {'late: never used' if by > 0 else 'early: used once more'}"

    def _begins_anew(self, given: list[list[int]]) -> bool:
        """Return whether ranks give the whole epoch, except the tail."""
        together = set(itertools.chain(*given))
        return self.gone <= together and len(together) > self.num_samples - self.world_size

    def _without_set_epoch(self) -> list[list[int]]:
        """Return the samples of each rank after it loads the state without set_epoch(); empty if that fails."""
        try:
            return [samples for samples, _ in self.world.run(_leg, *self.leg, False, world_size=self.world_size)]
        except Exception:  # the user's sampler may need set_epoch(); the failure is clear without this detail
            return []


def _require_same(subject: str, resumed: Resumed, undisturbed: list[list[int]], facts: str) -> None:
    """Check that the same ranks continue with exactly the samples of the undisturbed run."""
    __tracebackhide__ = True
    given = resumed.given
    for rank, (found, expected) in enumerate(zip(given, undisturbed, strict=True)):
        if found == expected:
            continue
        ahead = any(given) and given == [one[FETCHED_AHEAD:] for one in undisturbed]
        others = sorted(itertools.chain(*given)) == sorted(itertools.chain(*undisturbed))
        tables = {
            "the order, or its seed, is drawn from global random numbers, and is not part of the state": (
                resumed.needs_the_same_numbers(undisturbed)
            ),
            "the position counts what the loader fetched ahead, not what training used": ahead,
            "the samples that are left come in another order, or on other ranks": others,
        }
        known = resumed.why_anew(undisturbed) or resumed.how_far_off(undisturbed)
        cause = explain(
            given,
            *([Candidate.when(text, true)] for text, true in tables.items()),
            [Candidate.when(known or "the epoch begins anew", known is not None)],
        )
        raise failure(
            f"{subject}: resumed, rank {rank} gives {some(found)}, the undisturbed run gives {some(expected)}",
            used_before=some(sorted(resumed.gone)),
            likely_cause=cause,
            case=facts,
        )


def _require_rest(subject: str, resumed: Resumed, tail: Tail, facts: str, *, as_undisturbed: bool) -> None:
    """Check that each unused sample comes once; ``tail`` may repeat or drop fewer samples than there are ranks.

    ``as_undisturbed``: the ranks give what they give without this stop, so the state is not the cause.
    """
    __tracebackhide__ = True
    given, gone = resumed.given, resumed.gone
    counts = collections.Counter(sample for one in given for sample in one)
    rest = set(range(resumed.num_samples)) - gone
    spare = -len(rest) % len(given) if tail == "pad" else 0
    more = sorted(sample for sample in counts if sample in gone or counts[sample] > 1)
    if sum(counts.values()) - len(rest & counts.keys()) > spare:
        raise failure(
            f"{subject}: after the stop {some(more)} come again, or twice",
            repeated=f"{sum(counts.values()) - len(rest & counts.keys())} samples more than are left, {spare} allowed",
            likely_cause="they come again without this stop, too: the sampler repeats them"
            if as_undisturbed
            else resumed.why_anew(rest)
            or "the position is not that of all ranks together: where ranks are fewer or more, shares change",
            case=facts,
        )
    lost = sorted(rest - counts.keys())
    if len(lost) > (len(rest) % len(given) if tail == "drop" else 0):
        raise failure(
            f"{subject}: {some(lost)} never come after the stop, training had not used them",
            likely_cause="they do not come without this stop either: the sampler leaves them out"
            if as_undisturbed
            else "the position counts what the loader fetched ahead, or is not that of all ranks together",
            case=facts,
        )
    lengths = [len(one) for one in given]
    if max(lengths) - min(lengths) > (1 if tail == "uneven" else 0):
        raise failure(
            f"{subject}: after the stop the ranks have {lengths} samples, they may differ by "
            f"{1 if tail == 'uneven' else 0}",
            likely_cause="ranks without a batch leave the others waiting at the end of the epoch",
            case=facts,
        )
