"""Shards are disjoint and cover the data, epochs differ, and digests tell shards apart."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.held import bits
from pdlcheck.checks.lost import STREAMS, seed_streams
from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.errors import Inconclusive

__all__ = ["check_digest", "check_epoch_loop", "check_epochs_differ", "check_gathered_digests", "check_shards"]

Shards = Callable[..., Any]

# 12! orders: that two epochs draw the same one by chance happens once in 5e8 times.
ENOUGH_SAMPLES = 12


@takes_world
def check_shards(
    shards: Shards,
    world: Any,
    *,
    num_samples: int,
    world_size: int,
    epoch: int = 0,
    tail: Literal["uneven", "pad", "drop"] = "uneven",
) -> None:
    """The ranks' shards must be disjoint, cover all samples, and differ in length as ``tail`` allows.

    Args:
        shards: called as ``shards(num_samples, rank=rank, world_size=world_size, epoch=epoch)`` on every
            rank, under different random numbers; returns this rank's indices, a tensor or any sequence of
            ints.
        world: where the ranks run.
        num_samples, world_size, epoch: the case.
        tail: ``"uneven"``: each sample once, lengths differ by at most 1; ``"pad"``: equal lengths, fewer
            than ``world_size`` repeats; ``"drop"``: equal lengths, fewer than ``world_size`` samples left
            out.

    Raises:
        AssertionError: names the samples and the ranks.

    Example:
        >>> from pdlcheck.primitives import shard_indices
        >>> from pdlcheck.worlds import get_world
        >>> check_shards(shard_indices, get_world("sim"), num_samples=7, world_size=3)
    """
    __tracebackhide__ = True
    ranks = _draw(shards, world, num_samples, world_size, epoch)
    facts = case(world, world_size, num_samples=num_samples, epoch=epoch, tail=tail)
    by_rank, alone = dict(enumerate(ranks)), partial(_order_of_one_rank, shards, world, num_samples, epoch)
    _require_shards(name_of(shards), by_rank, num_samples, tail, facts, alone)


@takes_world
def check_epochs_differ(shards: Shards, world: Any, *, num_samples: int, world_size: int, epochs: int = 3) -> None:
    """A shuffled order must be another one in every epoch, and the same one when an epoch is drawn again.

    Args:
        shards: as in :func:`check_shards`.
        world: where the ranks run.
        num_samples: 12 or more for each rank, so that no order comes twice by chance.
        world_size, epochs: the case.

    Raises:
        AssertionError: an epoch has the order of one before, or cannot be repeated.
    """
    __tracebackhide__ = True
    if num_samples < ENOUGH_SAMPLES * world_size:
        raise Inconclusive(
            f"check_epochs_differ needs {ENOUGH_SAMPLES} samples for each rank, of fewer an order may come twice by "
            f"chance; num_samples={num_samples} on {world_size} ranks: pass {ENOUGH_SAMPLES * world_size} or more"
        )
    orders = [_draw(shards, world, num_samples, world_size, epoch) for epoch in range(epochs)]
    subject, facts = name_of(shards), case(world, world_size, num_samples=num_samples)
    _require_other_orders(subject, [dict(enumerate(order)) for order in orders], facts)

    def redraw(kept: str | None = None) -> list[list[int]]:
        return list(world.run(_indices, shards, num_samples, 1, epochs, kept, world_size=world_size))

    again = redraw()
    for rank in range(world_size):
        if again[rank] != orders[1][rank]:
            raise failure(
                f"{subject}: rank {rank} has {_some(again[rank])} when epoch 1 is drawn again, "
                f"it had {_some(orders[1][rank])}",
                likely_cause=f"the order depends on more than seed and epoch{_on_what(redraw, again)}; training cannot "
                "be resumed",
                case=facts,
            )


@takes_world
def check_epoch_loop(
    visit: Callable[[range, int], Any],
    world: Any,
    *,
    num_samples: int,
    world_size: int,
    epochs: int = 3,
    tail: Literal["uneven", "pad", "drop"] = "pad",
    shuffle: bool = True,
    drop_last: int | None = None,
    same_samples: Sequence[Sequence[int]] = (),
) -> None:
    """In each epoch of a program's loop ranks must share the data out, and in another order than in any before.

    The loop is the program's own, with its sampler and loader: a ``set_epoch`` that it forgets, calls on another
    sampler, too late, or with numbers that come again, shows here.

    Args:
        visit: called as ``visit(dataset, epochs)`` on every rank, under different random numbers; ``dataset[i]`` is
            ``i``. Runs the loop, and returns what each epoch's batches held: for each epoch a tensor, or batches, which
            may be arrays, lists or dicts too; of a dict all entries hold the same samples.
        world: where the ranks run.
        num_samples: 12 or more for each rank, so that no order comes twice by chance.
        world_size, epochs: the case; 2 epochs or more.
        tail: as in :func:`check_shards`.
        shuffle: False for a loop that keeps one order by intention.
        drop_last: the samples in a batch of each rank, where the loader has ``drop_last=True``: it must leave out what
            does not fill the last batch, and no more.
        same_samples: sets of ranks that visit the same samples in one order, as in tensor parallelism those do that
            hold one replica of the model; each set counts as one of those that share the data out.

    Raises:
        AssertionError: names the samples, the ranks and the epoch.
        TypeError: a batch is something else; says what, and what to return.

    Example:
        >>> from torch.utils.data import DataLoader, DistributedSampler
        >>> from pdlcheck.worlds import get_world
        >>> def visit(dataset, epochs):
        ...     sampler = DistributedSampler(dataset)
        ...     loader, seen = DataLoader(dataset, batch_size=4, sampler=sampler), []
        ...     for epoch in range(epochs):
        ...         sampler.set_epoch(epoch)
        ...         seen.append(list(loader))
        ...     return seen
        >>> check_epoch_loop(visit, get_world("sim"), num_samples=25, world_size=2)
    """
    __tracebackhide__ = True
    if epochs < 2:
        raise ValueError(f"check_epoch_loop compares epochs, it needs 2 or more, got {epochs}")
    replicas = _one_of_each(same_samples, world_size)
    if shuffle and num_samples < ENOUGH_SAMPLES * len(replicas):
        raise Inconclusive(f"check_epoch_loop needs {ENOUGH_SAMPLES} samples for each rank, got {num_samples}")
    if drop_last is not None and drop_last < 1:
        raise ValueError(f"check_epoch_loop takes drop_last as the samples in a batch, 1 or more, got {drop_last}")
    ranks: list[list[list[int]]] = world.run(_visited, visit, num_samples, epochs, world_size=world_size)
    subject = name_of(visit)
    for rank, visited in enumerate(ranks):
        if len(visited) != epochs:
            raise ValueError(
                f"check_epoch_loop needs what each of {epochs} epochs held, {subject} returns {len(visited)} on rank "
                f"{rank}; return one tensor, or one list of batches, for each epoch"
            )
    orders = [{rank: ranks[rank][epoch] for rank in replicas} for epoch in range(epochs)]
    for epoch, order in enumerate(orders):
        facts = case(world, world_size, num_samples=num_samples, epoch=epoch, tail=tail, drop_last=drop_last)
        for first, *others in same_samples:
            for rank in others:
                _require_the_same(subject, (first, ranks[first][epoch]), (rank, ranks[rank][epoch]), facts)
        if drop_last is not None:
            _require_whole_batches(subject, order, num_samples, tail, drop_last, facts)
        _require_shards(subject, order, num_samples, tail, facts, list, batch=drop_last or 1)
    if shuffle:
        _require_other_orders(subject, orders, case(world, world_size, num_samples=num_samples))


@takes_world
def check_digest(digest: Callable[[Tensor], str], data: Tensor, world: Any, *, world_size: int = 2) -> None:
    """A digest must be the same for the same data on every rank, and another one after any change.

    Args:
        digest: called with a tensor on every rank.
        data: a tensor with at least one element; its changes are one element, its dtype, its shape.
        world: where the ranks run; each process of a process world salts Python's ``hash`` in its own way.
        world_size: number of ranks.
    """
    __tracebackhide__ = True
    changed = data.clone(memory_format=torch.contiguous_format).view(-1)
    bits(changed).view(-1)[-1:].bitwise_xor_(1)  # adding 1 leaves a large number as it is
    variants = {
        "the data": data,
        "the data with another last element": changed.view(data.shape),
        "the data as another dtype": data.to(torch.float64 if data.dtype != torch.float64 else torch.float32),
        "the data in another shape": data.unsqueeze(0),
        "the data twice": torch.cat([data.reshape(-1), data.reshape(-1)]),
    }
    facts = case(world, world_size, shape=tuple(data.shape), dtype=data.dtype)
    ranks = world.run(_digests, digest, variants, world_size=world_size)
    for rank, digests in enumerate(ranks):
        for what, found in digests.items():
            if found != ranks[0][what]:
                raise failure(
                    f"{name_of(digest)}: of {what}, rank {rank} says {found}, rank 0 says {ranks[0][what]}",
                    likely_cause="it depends on the process: on hash(), or on an address",
                    case=facts,
                )
            if what != "the data" and found == digests["the data"]:
                raise failure(f"{name_of(digest)}: {what} has the digest of the data, {found}", case=facts)


@takes_world
def check_gathered_digests(gather: Callable[[Tensor], Sequence[str]], shards: Sequence[Tensor], world: Any) -> None:
    """Every rank must get the digest of every rank, in rank order; two are equal only if the shards are.

    Args:
        gather: called with this rank's shard on every rank; returns one digest for each rank.
        shards: what each rank loaded.
        world: where the ranks run.
    """
    __tracebackhide__ = True
    ranks = [list(found) for found in world.run(_gather, gather, list(shards), world_size=len(shards))]
    facts = case(world, len(shards), shards=[tuple(shard.shape) for shard in shards])
    for rank, found in enumerate(ranks):
        if len(found) != len(shards) or found != ranks[0]:
            raise failure(
                f"{name_of(gather)}: rank {rank} got {found}, rank 0 got {ranks[0]}",
                expected=f"the same {len(shards)} digests on every rank",
                case=facts,
            )
    alone = [world.run(_gather, gather, [shard], world_size=1)[0][0] for shard in shards]
    for rank, (found_here, expected) in enumerate(zip(ranks[0], alone, strict=True)):
        if found_here != expected:
            raise failure(
                f"{name_of(gather)}: for rank {rank} it says {found_here}, that shard has {expected}",
                likely_cause=next(
                    (f"it is that of rank {r}'s shard" for r, one in enumerate(alone) if one == found_here),
                    None,
                ),
                case=facts,
            )


def _require_shards(
    subject: str,
    ranks: dict[int, list[int]],
    num_samples: int,
    tail: str,
    facts: str,
    order_of_one: Callable[[], list[int]],
    batch: int = 1,
) -> None:
    """``batch``: of so many samples the last one is left out where it is not full."""
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
    allowed = batch if tail == "uneven" else 0
    if max(lengths) - min(lengths) > allowed:
        raise failure(
            f"{subject}: the shards have {lengths} samples, they may differ by {allowed}",
            likely_cause="ranks without a batch leave the others waiting at the end of the epoch",
            case=facts,
        )
    repeats = sum(lengths) - len(owners)
    least = -num_samples % world_size if tail == "pad" else 0
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
            likely_cause=_why_repeated(ranks, num_samples, least),
            case=facts,
        )
    missing = sorted(set(range(num_samples)) - owners.keys())
    if len(missing) > (num_samples % world_size if tail == "drop" else 0) + world_size * (batch - 1):
        raise failure(
            f"{subject}: {_some(missing)} in no shard, the shards must cover all {num_samples}",
            likely_cause=_why_missing(missing, num_samples, order_of_one(), lengths),
            case=facts,
        )


def _require_whole_batches(
    subject: str, ranks: dict[int, list[int]], num_samples: int, tail: str, batch: int, facts: str
) -> None:
    """Each rank has all the batches that its share fills."""
    __tracebackhide__ = True
    whole, more = divmod(num_samples, len(ranks))
    for rank, indices in ranks.items():
        # with a tail that is uneven, either: a sampler may give the longer shares to any ranks
        shares = {"pad": {whole + (more > 0)}, "drop": {whole}}.get(tail, {whole, whole + (more > 0)})
        if len(indices) not in {share // batch * batch for share in shares}:
            raise failure(
                f"{subject}: rank {rank} has {len(indices)} samples, full batches of {batch} from a share of "
                f"{max(shares)} hold {max(shares) // batch * batch}",
                likely_cause="the loader has no drop_last=True" if len(indices) in shares else None,
                case=facts,
            )


def _require_other_orders(subject: str, orders: Sequence[dict[int, list[int]]], facts: str) -> None:
    """Of each rank, in each epoch after the first, than in any before."""
    __tracebackhide__ = True
    for epoch, now in enumerate(orders):
        for earlier in reversed(range(epoch)):
            for rank, later in now.items():
                if orders[earlier][rank] == later:
                    raise failure(
                        f"{subject}: rank {rank} has {_some(later)} in epochs {earlier} and {epoch}",
                        likely_cause=_why_again(epoch - earlier),
                        case=facts,
                    )


def _why_again(period: int) -> str:
    if period == 1:
        return "the epoch does not reach the sampler: set_epoch was forgotten"
    return (
        f"the order comes again after {period} epochs: the number that reaches the sampler is not that of the epoch "
        "in the whole training, but one that starts anew"
    )


def _one_of_each(same_samples: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """The first rank of each set, and those that are in none."""
    listed = [rank for ranks in same_samples for rank in ranks]
    if len(set(listed)) < len(listed) or not set(listed) <= set(range(world_size)):
        raise ValueError(
            f"check_epoch_loop takes as same_samples sets of ranks below world_size={world_size} that have none in "
            f"common, got {[list(ranks) for ranks in same_samples]}"
        )
    followers = {rank for ranks in same_samples for rank in list(ranks)[1:]}
    return [rank for rank in range(world_size) if rank not in followers]


def _require_the_same(subject: str, one: tuple[int, list[int]], other: tuple[int, list[int]], facts: str) -> None:
    __tracebackhide__ = True
    if one[1] != other[1]:
        raise failure(
            f"{subject}: ranks {one[0]} and {other[0]} must visit the same samples, rank {one[0]} has {_some(one[1])}, "
            f"rank {other[0]} has {_some(other[1])}",
            likely_cause="the sampler is given the rank in all ranks, not that among the replicas of the model",
            case=facts,
        )


def _visited(visit: Callable[[range, int], Any], num_samples: int, epochs: int) -> list[list[int]]:
    """On every rank, under other random numbers: the samples of each epoch."""
    seed_streams(dist.get_rank())
    return [_numbers(held) for held in visit(range(num_samples), epochs)]


def _numbers(held: Any) -> list[int]:
    """Of tensors, arrays, sequences and dicts, at any depth."""
    if hasattr(held, "tolist"):
        held = held.tolist()
    if isinstance(held, list | tuple):
        return [number for one in held for number in _numbers(one)]
    if isinstance(held, Mapping) and held:
        first, *others = ((key, _numbers(value)) for key, value in held.items())
        for key, numbers in others:
            if numbers != first[1]:
                raise TypeError(
                    f"check_epoch_loop asks which samples a batch holds, entries {first[0]!r} and {key!r} of the "
                    f"{type(held).__name__} hold different ones; have visit return the entry that has the samples"
                )
        return first[1]
    if not isinstance(held, int | float):
        raise TypeError(
            f"check_epoch_loop takes tensors, arrays, numbers, and lists and dicts of them, visit returned a "
            f"{type(held).__name__} in an epoch; have it return the numbers of the samples"
        )
    return [int(held)]


def _draw(shards: Shards, world: Any, num_samples: int, world_size: int, epoch: int) -> list[list[int]]:
    return list(world.run(_indices, shards, num_samples, epoch, epoch, world_size=world_size))


def _indices(shards: Shards, num_samples: int, epoch: int, stream: int, kept: str | None = None) -> list[int]:
    """On every rank, under other random numbers for every rank and every ``stream``; those ``kept`` are the epoch's."""
    seed_streams(1000 * epoch + dist.get_rank())
    states = {name: get() for name, (get, _) in STREAMS.items()}
    seed_streams(1000 * stream + dist.get_rank())
    if kept is not None:
        STREAMS[kept][1](states[kept])
    found = shards(num_samples, rank=dist.get_rank(), world_size=dist.get_world_size(), epoch=epoch)
    return [int(index) for index in found]


def _on_what(redraw: Callable[..., list[list[int]]], again: list[list[int]]) -> str:
    """The random numbers that make it another order; nothing where no two draws are alike, as with the time."""
    names = [name for name in STREAMS if redraw(name) != again] if redraw() == again else []
    return f": on {' and '.join(names)}" if names else ""


def _order_of_one_rank(shards: Shards, world: Any, num_samples: int, epoch: int) -> list[int]:
    """What a rank draws that is alone; empty where that fails."""
    try:
        return _draw(shards, world, num_samples, 1, epoch)[0]
    except Exception:  # the user's function may know one number of ranks only; the finding stands without it
        return []


def _why_repeated(by_rank: dict[int, list[int]], num_samples: int, least: int) -> str:
    """Whether ranks share samples, or draw their own again, or pad their shards to one length."""
    ranks = list(by_rank.values())
    sets = [set(indices) for indices in ranks]
    covered = set().union(*sets)
    if len(ranks) > 1 and all(sorted(indices) == list(range(num_samples)) for indices in ranks):
        return "every rank has the whole data set: the sampler is missing"
    if len(ranks) > 1 and all(sorted(indices) == sorted(ranks[0]) for indices in ranks):
        return "all ranks have the same shard: the rank does not reach what cuts the order"
    if len(covered) == num_samples and {len(indices) for indices in ranks} == {-(-num_samples // len(ranks))}:
        return "the shards are padded to one length with samples that come again"
    if sum(map(len, sets)) - len(covered) <= least:
        again = [rank for rank, indices in by_rank.items() if len(set(indices)) < len(indices)]
        return f"ranks {again} draw samples of their own again"
    return "ranks draw different orders, or cut the order in overlapping parts"


def _why_missing(missing: list[int], num_samples: int, order: list[int], lengths: list[int]) -> str | None:
    """Where the samples in no shard are in the order that one rank draws."""
    if order and set(missing) <= set(range(num_samples)) - set(order):
        return "they are not in the order that is cut: one rank alone leaves them out too"
    places = [place for place, sample in enumerate(order) if sample in missing]
    if places == list(range(len(missing))):
        return "the first samples of the order are left out"
    if places == list(range(num_samples - len(missing), num_samples)) or missing[0] == num_samples - len(missing):
        if len(missing) < len(lengths) and len(set(lengths)) == 1:
            return "the tail is dropped: pass tail='drop' if that is meant"
        return "the tail is dropped"
    return None


def _digests(digest: Callable[[Tensor], str], variants: dict[str, Tensor]) -> dict[str, str]:
    return {what: digest(data) for what, data in variants.items()}


def _gather(gather: Callable[[Tensor], Sequence[str]], shards: Sequence[Tensor]) -> list[str]:
    return list(gather(shards[dist.get_rank()]))


def _some(indices: Sequence[int]) -> str:
    """A few of many samples: ``samples 3, 5, 6, ... (17 in all)``."""
    shown = ", ".join(map(str, indices[:6]))
    return f"samples {shown}" if len(indices) <= 6 else f"samples {shown}, ... ({len(indices)} in all)"
