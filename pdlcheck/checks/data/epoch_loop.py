"""The check of a program's own loop over epochs: it distributes the data over ranks, each time in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist

from pdlcheck.checks.checkpoint.unsaved_state import seed_streams
from pdlcheck.checks.data.shard_rules import ENOUGH_SAMPLES, require_other_orders, require_shards, some
from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.errors import Inconclusive

__all__ = ["check_epoch_loop"]

_ONE_REPLICA = ": right if each holds one replica of the model, as in tensor parallelism: pass same_samples={}"


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
    dealt_in: int = 1,
    same_samples: Sequence[Sequence[int]] = (),
) -> None:
    """Check that a program's loop distributes the data over ranks, in each epoch in an order of its own.

    The loop is the program's own, with its sampler and loader. The check finds a ``set_epoch`` that the loop forgets,
    calls on another sampler, calls too late, or calls with numbers that repeat.

    Args:
        visit: called as ``visit(dataset, epochs)`` on every rank, under different random numbers; ``dataset[i]`` is
            ``i``. It runs the loop and returns the content of the batches: for each epoch a tensor, or batches. Batches
            may also be arrays, lists or dicts; all entries of a dict hold the same samples.
        world: where the ranks run.
        num_samples: 12 or more for each rank, so that no order repeats by chance.
        world_size: number of ranks.
        epochs: number of epochs, 2 or more.
        tail: as in :func:`check_shards`.
        shuffle: False for a loop that keeps one order on purpose.
        drop_last: the samples in a batch of each rank, if the loader has ``drop_last=True``. The loop must leave out
            the samples that do not fill the last batch, and no others.
        dealt_in: the samples in a batch, if whole batches are dealt to the ranks in turn, as accelerate's loaders do.
            Up to ``world_size * dealt_in - 1`` samples may then be repeated or dropped.
        same_samples: sets of ranks that visit the same samples in the same order. In tensor parallelism, these are the
            ranks that hold one replica of the model. Each set counts as one rank in the distribution of the data.

    Raises:
        AssertionError: the samples or their order are wrong. The message names the samples, the ranks and the epoch.
        TypeError: a batch is of another type. The message names the type and what to return.

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
        raise Inconclusive(
            f"check_epoch_loop needs {ENOUGH_SAMPLES} samples for each of {len(replicas)} that share them, got "
            f"num_samples={num_samples}; pass {ENOUGH_SAMPLES * len(replicas)} or more"
        )
    if drop_last is not None and drop_last < 1:
        raise ValueError(f"check_epoch_loop takes drop_last as the samples in a batch, 1 or more, got {drop_last}")
    if dealt_in < 1 or (dealt_in > 1 and drop_last is not None):
        raise ValueError(
            "check_epoch_loop takes dealt_in as the samples in a batch, 1 or more, and without drop_last, got "
            f"{dealt_in} and {drop_last}; for a loader that drops the last round pass tail='drop'"
        )
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
        require_shards(
            subject,
            order,
            num_samples,
            tail,
            facts,
            list,
            batch=drop_last or 1,
            dealt_in=dealt_in,
            sets=_ONE_REPLICA,
        )
    if shuffle:
        facts = case(world, world_size, num_samples=num_samples)
        require_other_orders(subject, orders, facts, num_samples=num_samples)


def _require_whole_batches(
    subject: str, ranks: dict[int, list[int]], num_samples: int, tail: str, batch: int, facts: str
) -> None:
    """Check that each rank has all the batches that its share fills."""
    __tracebackhide__ = True
    whole, more = divmod(num_samples, len(ranks))
    for rank, indices in ranks.items():
        # With an uneven tail both lengths are right, because a sampler may give the longer shares to any ranks.
        shares = {"pad": {whole + (more > 0)}, "drop": {whole}}.get(tail, {whole, whole + (more > 0)})
        if len(indices) not in {share // batch * batch for share in shares}:
            raise failure(
                f"{subject}: rank {rank} has {len(indices)} samples, full batches of {batch} from a share of "
                f"{max(shares)} hold {max(shares) // batch * batch}",
                likely_cause="the loader has no drop_last=True" if len(indices) in shares else None,
                case=facts,
            )


def _one_of_each(same_samples: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """Return the first rank of each set, and the ranks that are in no set."""
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
            f"{subject}: ranks {one[0]} and {other[0]} must visit the same samples, rank {one[0]} has {some(one[1])}, "
            f"rank {other[0]} has {some(other[1])}",
            likely_cause="the sampler is given the rank in all ranks, not that among the replicas of the model",
            case=facts,
        )


def _visited(visit: Callable[[range, int], Any], num_samples: int, epochs: int) -> list[list[int]]:
    """Run the loop under this rank's own random numbers, and return the samples of each epoch."""
    seed_streams(dist.get_rank())
    visited = visit(range(num_samples), epochs)
    if not isinstance(visited, Iterable):
        raise TypeError(
            f"visit must return what each epoch's batches held, it returned a {type(visited).__name__}; have it return "
            "a list with one entry for each epoch"
        )
    return [_numbers(held) for held in visited]


def _numbers(held: Any) -> list[int]:
    """Return the numbers in tensors, arrays, sequences and dicts, nested to any depth."""
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
