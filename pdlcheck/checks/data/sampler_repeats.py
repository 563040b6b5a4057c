"""The rules for samplers that repeat samples on purpose: repeated augmentation, weights, endless streams."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pdlcheck.checks.checkpoint.unsaved_state import seed_streams
from pdlcheck.checks.data.shard_rules import ENOUGH_SAMPLES, require_other_orders, require_shards, some
from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import case, failure, name_of
from pdlcheck.errors import Inconclusive

__all__ = ["Repeats", "drawn", "require_repeats", "what_to_pass"]

_OTHER_ORDERS = "ranks draw different orders, or cut the order in overlapping parts: its seed must be that of all ranks"

_ONE_SEED = "each pass over the data begins from one seed again: draw all passes from one generator that goes on"


@dataclass(frozen=True)
class Repeats:
    """The properties that a sampler promises.

    Args:
        num_samples: number of samples in the data set.
        times: how often the ranks together have each sample; None if they draw with replacement.
        endless: whether the stream never ends, so that the check takes as many samples as an epoch has.
        uneven: whether one rank may have one sample more than another.
        shuffle: whether each epoch has another order.
    """

    num_samples: int
    times: int | None
    endless: bool
    uneven: bool
    shuffle: bool

    def worth(self, world_size: int) -> int:
        """Return the number of samples that one rank has in an epoch."""
        return -(-self.num_samples * (self.times or 1) // world_size)


def drawn(sampler: Any, promise: Repeats) -> list[int]:
    """Return all samples that a sampler gives.

    Raises:
        AssertionError: the sampler continues after four times the samples of all ranks, and after ``len`` samples.
        TypeError: the sampler gives batches.
    """
    told = len(sampler) if hasattr(sampler, "__len__") else 0
    most = max(told, 4 * promise.num_samples * (promise.times or 1))
    given = list(itertools.islice(sampler, most + 1))
    if given and isinstance(given[0], list | tuple):
        raise TypeError(
            f"check_sampler takes samplers of single samples, a {type(sampler).__name__} gives batches; give what it "
            "takes them from, or see check_epoch_loop"
        )
    found = [int(sample) for sample in given]
    if len(found) > most:
        raise failure(
            f"{type(sampler).__name__}: goes on after {most} samples of {promise.num_samples}",
            likely_cause="it never ends: pass endless=True if that is meant",
        )
    return found


def require_repeats(
    make_sampler: Callable[..., Any], world: Any, promise: Repeats, *, world_size: int, epochs: int
) -> None:
    """Check that the ranks together have each sample ``promise.times`` times.

    Ranks that draw with replacement must never have the same order twice.
    """
    __tracebackhide__ = True
    subject = name_of(make_sampler)
    ranks: list[list[list[int]]] = world.run(_orders, make_sampler, promise, epochs, world_size=world_size)
    orders = [{rank: passes[epoch] for rank, passes in enumerate(ranks)} for epoch in range(epochs)]
    enough = min(map(len, orders[0].values())) >= ENOUGH_SAMPLES
    for epoch, order in enumerate(orders[:1] if promise.endless and promise.times else orders):
        facts = case(world, world_size, num_samples=promise.num_samples, repeats=promise.times, epoch=epoch)
        _require_known(subject, order, promise, facts)
        if promise.times is None:
            if not enough:
                raise Inconclusive(
                    f"{subject}: of fewer than {ENOUGH_SAMPLES} samples ranks may draw the same by chance, got "
                    f"{min(map(len, order.values()))}; pass a larger num_samples"
                )
            _require_others(subject, orders[: epoch + 1] if promise.shuffle else orders[epoch : epoch + 1], facts)
        elif promise.times == 1:
            require_shards(subject, order, promise.num_samples, "pad", facts, list)
        else:
            _require_times(subject, order, promise, promise.times, facts)
    if promise.shuffle and enough:
        facts = case(world, world_size, num_samples=promise.num_samples)
        if promise.endless:
            _require_no_period(subject, orders, promise, facts)
        require_other_orders(subject, orders, facts, _ONE_SEED if promise.endless else None)


def what_to_pass(make_sampler: Callable[..., Any], world: Any, promise: Repeats, *, world_size: int) -> str | None:
    """Return a hint with the ``repeats`` that fits a sampler whose samples repeat; None if there is no such value."""
    ranks = [passes[0] for passes in world.run(_orders, make_sampler, promise, 1, world_size=world_size)]
    counts = Counter(itertools.chain(*ranks))
    times = max(counts.values(), key=list(counts.values()).count, default=1)
    one_share = all(sorted(indices) == sorted(ranks[0]) for indices in ranks)  # most likely the rank is not used
    if times > 1 and not one_share and _come_so_often(counts, times, world_size) and len(counts) > 4 * world_size:
        return f"if ranks are to have each sample {times} times together (repeated augmentation), pass repeats={times}"
    if len(counts) < promise.num_samples and all(len(set(indices)) < len(indices) for indices in ranks):
        return "if samples are drawn with replacement, as by weights, pass repeats=None"
    return None


def _orders(make_sampler: Callable[..., Any], promise: Repeats, epochs: int) -> list[list[int]]:
    """Return this rank's samples in each epoch.

    For an endless stream, return consecutive parts with as many samples as an epoch has.
    """
    seed_streams(dist.get_rank())
    sampler = make_sampler(range(promise.num_samples), num_replicas=dist.get_world_size(), rank=dist.get_rank())
    if promise.endless:
        stream, worth = iter(sampler), promise.worth(dist.get_world_size())
        return [[int(sample) for sample in itertools.islice(stream, worth)] for _ in range(epochs)]
    found = []
    for epoch in range(epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        found.append(drawn(sampler, promise))
    return found


def _require_no_period(subject: str, orders: Sequence[dict[int, list[int]]], promise: Repeats, facts: str) -> None:
    """Check that a stream that is dealt to the ranks in turn does not repeat after all its samples.

    The check joins the samples of all ranks, because a repeated stream may give each rank other samples. That is so if
    the number of samples is not a multiple of the number of ranks.
    """
    __tracebackhide__ = True
    streams = [itertools.chain(*(order[rank] for order in orders)) for rank in orders[0]]
    dealt = list(itertools.chain(*zip(*streams, strict=True)))
    whole = promise.num_samples * (promise.times or 1)
    if len(dealt) >= 2 * whole and dealt[:whole] == dealt[whole : 2 * whole]:
        raise failure(
            f"{subject}: {some(dealt[:whole])} of all ranks in turn come again after them, in the same order",
            likely_cause=_ONE_SEED,
            case=facts,
        )


def _require_known(subject: str, ranks: dict[int, list[int]], promise: Repeats, facts: str) -> None:
    __tracebackhide__ = True
    lengths = [len(indices) for indices in ranks.values()]
    if not any(lengths):
        raise failure(
            f"{subject}: no rank has a sample",
            likely_cause="their number is rounded down, as timm's to 256 in all: pass a larger num_samples",
            case=facts,
        )
    if max(lengths) - min(lengths) > promise.uneven:
        raise failure(
            f"{subject}: the ranks have {lengths} samples, they may differ by {int(promise.uneven)}",
            likely_cause="ranks without a batch leave the others waiting at the end of the epoch",
            case=facts,
        )
    for rank, indices in ranks.items():
        for index in indices:
            if not 0 <= index < promise.num_samples:
                raise failure(
                    f"{subject}: rank {rank} holds sample {index}, there are samples 0 to {promise.num_samples - 1}",
                    case=facts,
                )


def _require_times(subject: str, ranks: dict[int, list[int]], promise: Repeats, times: int, facts: str) -> None:
    """Check that each sample that comes at all comes ``times`` times.

    Samples that pad the shares, or that stand at their ends, may come more or less often.
    """
    __tracebackhide__ = True
    counts = Counter(itertools.chain(*ranks.values()))
    more, fewer = _more_and_fewer(counts, times)
    if not _come_so_often(counts, times, len(ranks)):
        sample, count = next(iter((more or fewer).items()))
        by = [rank for rank, indices in ranks.items() if sample in indices]
        raise failure(
            f"{subject}: sample {sample} comes {count} times, on ranks {by}, {times} times on all together are right",
            samples=f"{len(more)} come more often, {len(fewer)} less often, {len(counts)} in all",
            likely_cause=_why(list(ranks.values()), counts, times),
            case=facts,
        )
    missing = sorted(set(range(promise.num_samples)) - counts.keys())
    if missing and not promise.shuffle:
        raise failure(
            f"{subject}: {some(missing)} on no rank, in an order that is that of every epoch",
            likely_cause="the epoch ends before they come",
            case=facts,
        )


def _more_and_fewer(counts: Counter[int], times: int) -> tuple[Counter[int], Counter[int]]:
    more = {sample: count for sample, count in counts.items() if count > times}
    return Counter(more), Counter({sample: count for sample, count in counts.items() if count < times})


def _come_so_often(counts: Counter[int], times: int, world_size: int) -> bool:
    more, fewer = _more_and_fewer(counts, times)
    return more.total() - times * len(more) < world_size and len(fewer) <= 2 * world_size


def _why(ranks: Sequence[list[int]], counts: Counter[int], times: int) -> Diagnosis:
    found = sorted(set(counts.values()))
    repeated = f"all come {found[0]} times: repeats={times} is not what the sampler is told"
    same = "all ranks have the same share: the rank does not reach what cuts the order"
    return explain(
        ranks,
        [
            Candidate.when(repeated, len(found) == 1),
            Candidate.when(same, len(ranks) > 1 and all(indices == ranks[0] for indices in ranks)),
        ],
        hints=[Candidate.when(_OTHER_ORDERS, True)],
    )


def _require_others(subject: str, orders: Sequence[dict[int, list[int]]], facts: str) -> None:
    """Check that no rank draws, in the last of these epochs, the order of another rank in any of them."""
    __tracebackhide__ = True
    now = len(orders) - 1
    for rank, indices in orders[now].items():
        for epoch, order in reversed(list(enumerate(orders))):
            for other, had in order.items():
                if other == rank or had != indices:
                    continue
                same = epoch == now
                raise failure(
                    f"{subject}: rank {rank} has {some(indices)}{'' if same else f' in epoch {now}'}, as rank {other}"
                    f"{'' if same else f' in epoch {epoch}'} has",
                    likely_cause="the rank reaches neither the seed nor what cuts the order"
                    if same
                    else "seeds of ranks and epochs overlap, as in seed + epoch + rank: take world_size times epoch",
                    case=facts,
                )
