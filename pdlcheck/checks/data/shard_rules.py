"""The rules for the samples of ranks, and the usual causes of a broken rule."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import failure

__all__ = ["ENOUGH_SAMPLES", "require_other_orders", "require_shards", "some"]

_IN_ORDER = "samples come in the order of the data set: nothing is shuffled, which shuffle=False accepts"

# There are 12! orders, so two epochs draw the same one by chance once in 5e8 times.
ENOUGH_SAMPLES = 12


def require_shards(
    subject: str,
    ranks: dict[int, list[int]],
    num_samples: int,
    tail: str,
    facts: str,
    order_of_one: Callable[[], list[int]],
    batch: int = 1,
    dealt_in: int = 1,
    sets: str = "",
) -> None:
    """Check that the shards are disjoint and cover the data.

    Args:
        subject: the owner of the shards, for the message.
        ranks: the samples of each rank.
        num_samples: as in ``check_shards``.
        tail: as in ``check_shards``.
        facts: the case.
        order_of_one: returns the samples that a single rank draws.
        batch: the samples in a batch; the last batch is left out if it is not full.
        dealt_in: samples that go to a rank together; one round of all ranks has ``world_size * dealt_in`` samples.
        sets: text to add if the ranks in each of several sets have the same samples; ``{}`` stands for the sets.
    """
    __tracebackhide__ = True
    world_size = len(ranks)
    owners: dict[int, list[int]] = collections.defaultdict(list)
    for rank, indices in ranks.items():
        for index in indices:
            if not 0 <= index < num_samples:
                raise failure(
                    f"{subject}: rank {rank} holds sample {index}, there are samples 0 to {num_samples - 1}",
                    case=facts,
                )
            owners[index].append(rank)
    lengths = [len(indices) for indices in ranks.values()]
    a_round = world_size * dealt_in
    allowed = max(batch, dealt_in) if tail == "uneven" else 0
    if max(lengths) - min(lengths) > allowed:
        raise failure(
            f"{subject}: the shards have {lengths} samples, they may differ by {allowed}",
            likely_cause="ranks without a batch leave the others waiting at the end of the epoch"
            + ("; if they have as many, of unlike sizes, pass tail='uneven'" if dealt_in > 1 and not allowed else ""),
            case=facts,
        )
    repeats = sum(lengths) - len(owners)
    least = -num_samples % a_round if tail == "pad" else 0
    if repeats > least:
        shared = {sample: sorted(set(by)) for sample, by in owners.items() if len(set(by)) > 1}
        twice = {sample: by for sample, by in owners.items() if len(by) > len(set(by))}
        if sum(len(by) - 1 for by in shared.values()) > least:
            sample, by = next(iter(shared.items()))
            found = f"sample {sample} is in the shards of ranks {by}, shards must be disjoint"
        else:
            sample, by = next(iter(twice.items()))
            rank = next(rank for rank in by if by.count(rank) > 1)
            found = f"rank {rank} draws sample {sample} {by.count(rank)} times, it must draw it once"
        raise failure(
            f"{subject}: {found}",
            repeated=f"{repeats} samples more than there are, {least} allowed",
            likely_cause=_why_repeated(ranks, num_samples, least, sets, dealt=dealt_in > 1 or batch > 1),
            case=facts,
        )
    missing = sorted(set(range(num_samples)) - owners.keys())
    if len(missing) > (num_samples % a_round if tail == "drop" else 0) + world_size * (batch - 1):
        raise failure(
            f"{subject}: {some(missing)} in no shard, the shards must cover all {num_samples}",
            likely_cause=_why_missing(missing, num_samples, order_of_one(), lengths),
            case=facts,
        )


def require_other_orders(
    subject: str,
    orders: Sequence[dict[int, list[int]]],
    facts: str,
    why: str | None = None,
    num_samples: int | None = None,
) -> None:
    """Check that each rank has, in each epoch after the first, an order that it did not have before.

    Args:
        subject: as in :func:`require_shards`.
        orders: the samples of each rank, for each epoch.
        facts: the case.
        why: the likely cause of a subject that does not receive the epoch; None selects one of the usual causes.
        num_samples: names the samples that every epoch leaves out; None if an epoch need not have all samples.
    """
    __tracebackhide__ = True
    left_out = "" if num_samples is None else _left_out_always(orders, num_samples)
    for epoch, now in enumerate(orders):
        for earlier in reversed(range(epoch)):
            for rank, later in now.items():
                if orders[earlier][rank] == later:
                    raise failure(
                        f"{subject}: rank {rank} has {some(later)} in epochs {earlier} and {epoch}",
                        likely_cause=(why or (_IN_ORDER if later == sorted(later) else _why_again(epoch - earlier)))
                        + left_out,
                        case=facts,
                    )


def _left_out_always(orders: Sequence[dict[int, list[int]]], num_samples: int) -> str:
    """Return a text that names the samples in no epoch if all epochs have one order; empty if there are none."""
    missing = sorted(set(range(num_samples)).difference(*orders[0].values()))
    if not missing or any(order != orders[0] for order in orders):
        return ""
    return f"; every epoch drops the same: {some(missing)}"


def _why_again(period: int) -> str:
    if period == 1:
        return "the epoch does not reach the sampler: set_epoch was forgotten"
    return (
        f"the order comes again after {period} epochs: the number that reaches the sampler is not that of the epoch "
        "in the whole training, but one that starts anew"
    )


def _why_repeated(by_rank: dict[int, list[int]], num_samples: int, least: int, told: str, *, dealt: bool) -> Diagnosis:
    """Return the likely cause of repeated samples: shared by ranks, drawn again by one rank, or padding.

    ``told`` is the text for sets of ranks with the same samples. ``dealt`` is True if the user has passed how many
    samples go to a rank together.
    """
    ranks = list(by_rank.values())
    sets = [set(indices) for indices in ranks]
    covered, count = set().union(*sets), sum(map(len, sets))
    several, complete = len(ranks) > 1, len(covered) == num_samples
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, indices in by_rank.items():
        alike.setdefault(tuple(indices), []).append(rank)
    together = [tuple(own) for own in alike.values()]
    times, batch = _times_each(ranks), None if dealt else _whole_batches(ranks, num_samples)
    more = sum(map(len, ranks)) - num_samples
    again = [rank for rank, indices in by_rank.items() if len(set(indices)) < len(indices)]
    table = {
        "every rank has the whole data set: the sampler is missing": several
        and all(sorted(indices) == list(range(num_samples)) for indices in ranks),
        "all ranks have the same shard: the rank does not reach what cuts the order": several
        and all(sorted(indices) == sorted(ranks[0]) for indices in ranks),
        f"the ranks of each of {together} have the same samples in one order{told.format(together)}": len(together) > 1
        and all(len(own) > 1 for own in together),
        "the shards are padded to one length with samples that come again": complete
        and {len(indices) for indices in ranks} == {-(-num_samples // len(ranks))},
        f"each rank has each of its samples {times} times: the workers of its loader, if there are {times}, do not "
        "share them out, as by get_worker_info()": count == len(covered) == num_samples and times > 1,
        f"all samples come, {more} of them again, as where the last batch of each rank is filled up: if ranks have "
        "whole batches, as accelerate's loaders deal them, pass dealt_in=, the samples in one, such as "
        f"{batch}; if not, they cut the order in overlapping parts": complete and batch is not None,
        f"ranks {again} draw samples of their own again": count - len(covered) <= least,
    }
    return explain(
        by_rank,
        *([Candidate.when(text, true)] for text, true in table.items()),
        hints=[Candidate.when("ranks draw different orders, or cut the order in overlapping parts", True)],
    )


def _times_each(ranks: Sequence[list[int]]) -> int:
    """Return how often each rank has each of its samples; 0 if the counts differ."""
    often = {count for indices in ranks for count in collections.Counter(indices).values()}
    return often.pop() if len(often) == 1 else 0


def _whole_batches(ranks: Sequence[list[int]], num_samples: int) -> int | None:
    """Return the smallest batch size that explains the number of samples on each rank; None if there is none."""
    lengths = {len(indices) for indices in ranks}
    size = lengths.pop()
    if lengths:
        return None
    a_round = (batch * len(ranks) for batch in range(2, size) if not size % batch)  # two batches or more for a rank
    return next((one // len(ranks) for one in a_round if num_samples + -num_samples % one == size * len(ranks)), None)


def _why_missing(missing: list[int], num_samples: int, order: list[int], lengths: list[int]) -> Diagnosis:
    """Return the likely cause of missing samples, from their positions in the order that a single rank draws."""
    count, last = len(missing), num_samples - len(missing)
    places = [place for place, sample in enumerate(order) if sample in missing]
    tail = places == list(range(last, num_samples)) or missing[0] == last
    some = count < num_samples
    even = count < len(lengths) and len(set(lengths)) == 1
    table = {
        "they are not in the order that is cut: one rank alone leaves them out too": bool(order)
        and set(missing) <= set(range(num_samples)) - set(order),
        "the first samples of the order are left out": some and places == list(range(count)),
        "the tail is dropped: pass tail='drop' if that is meant": some and tail and even,
        "the tail is dropped": some and tail and not even,
    }
    return explain(missing, *([Candidate.when(text, true)] for text, true in table.items()))


def some(indices: Sequence[int]) -> str:
    """Return a text with the first few samples: ``samples 3, 5, 6, ... (17 in all)``."""
    shown = ", ".join(map(str, indices[:6]))
    return f"samples {shown}" if len(indices) <= 6 else f"samples {shown}, ... ({len(indices)} in all)"
