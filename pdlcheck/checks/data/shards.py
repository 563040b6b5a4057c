"""The checks that shards are disjoint and cover the data, and that each epoch has its own order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from pdlcheck.checks.checkpoint.unsaved_state import STREAMS, seed_streams
from pdlcheck.checks.data.shard_rules import ENOUGH_SAMPLES, require_other_orders, require_shards, some
from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.errors import Inconclusive

__all__ = ["check_epochs_differ", "check_shards"]

Shards = Callable[..., Any]


@takes_world
def check_shards(
    shards: Shards,
    world: Any,
    *,
    num_samples: int,
    world_size: int,
    epoch: int = 0,
    tail: Literal["uneven", "pad", "drop"] = "uneven",
    dealt_in: int = 1,
) -> None:
    """Check that the ranks' shards are disjoint, cover all samples, and differ in length as ``tail`` allows.

    Args:
        shards: called as ``shards(num_samples, rank=rank, world_size=world_size, epoch=epoch)`` on every
            rank, under different random numbers; returns this rank's indices, a tensor or any sequence of
            ints.
        world: where the ranks run.
        num_samples: number of samples in the data set.
        world_size: number of ranks.
        epoch: the epoch to draw.
        tail: ``"uneven"``: each sample once, lengths differ by at most 1; ``"pad"``: equal lengths, fewer
            than ``world_size`` repeats; ``"drop"``: equal lengths, fewer than ``world_size`` samples left
            out.
        dealt_in: the samples in a batch, if ranks have whole batches. ``world_size * dealt_in`` then replaces
            ``world_size`` in these numbers, and lengths may differ by ``dealt_in``.

    Raises:
        AssertionError: a shard is wrong. The message names the samples and the ranks.

    Example:
        >>> from pdlcheck.primitives import shard_indices
        >>> from pdlcheck.worlds import get_world
        >>> check_shards(shard_indices, get_world("sim"), num_samples=7, world_size=3)
    """
    __tracebackhide__ = True
    if dealt_in < 1:
        raise ValueError(f"check_shards takes dealt_in as the samples in a batch, 1 or more, got {dealt_in}")
    ranks = _draw(shards, world, num_samples, world_size, epoch)
    facts = case(world, world_size, num_samples=num_samples, epoch=epoch, tail=tail)
    by_rank, alone = dict(enumerate(ranks)), partial(_order_of_one_rank, shards, world, num_samples, epoch)
    require_shards(name_of(shards), by_rank, num_samples, tail, facts, alone, dealt_in=dealt_in)


@takes_world
def check_epochs_differ(shards: Shards, world: Any, *, num_samples: int, world_size: int, epochs: int = 3) -> None:
    """Check that a shuffled order differs in every epoch, and that an epoch that is drawn again has the same order.

    Args:
        shards: as in :func:`check_shards`.
        world: where the ranks run.
        num_samples: 12 or more for each rank, so that no order repeats by chance.
        world_size: number of ranks.
        epochs: number of epochs.

    Raises:
        AssertionError: an epoch has the order of an earlier one, or cannot be repeated.
        Inconclusive: there are fewer than 12 samples for each rank.
    """
    __tracebackhide__ = True
    if num_samples < ENOUGH_SAMPLES * world_size:
        raise Inconclusive(
            f"check_epochs_differ needs {ENOUGH_SAMPLES} samples for each rank, of fewer an order may come twice by "
            f"chance; num_samples={num_samples} on {world_size} ranks: pass {ENOUGH_SAMPLES * world_size} or more"
        )
    orders = [_draw(shards, world, num_samples, world_size, epoch) for epoch in range(epochs)]
    subject, facts = name_of(shards), case(world, world_size, num_samples=num_samples)
    require_other_orders(subject, [dict(enumerate(order)) for order in orders], facts)

    def redraw(kept: str | None = None) -> list[list[int]]:
        return list(world.run(_indices, shards, num_samples, 1, epochs, kept, world_size=world_size))

    again = redraw()
    for rank in range(world_size):
        if again[rank] != orders[1][rank]:
            raise failure(
                f"{subject}: rank {rank} has {some(again[rank])} when epoch 1 is drawn again, "
                f"it had {some(orders[1][rank])}",
                likely_cause=f"the order depends on more than seed and epoch{_on_what(redraw, again)}; training cannot "
                "be resumed",
                case=facts,
            )


def _draw(shards: Shards, world: Any, num_samples: int, world_size: int, epoch: int) -> list[list[int]]:
    return list(world.run(_indices, shards, num_samples, epoch, epoch, world_size=world_size))


def _indices(shards: Shards, num_samples: int, epoch: int, stream: int, kept: str | None = None) -> list[int]:
    """Return this rank's indices, drawn under random numbers that depend on the rank and on ``stream``.

    ``kept`` names a random stream that starts from ``epoch`` instead of ``stream``.
    """
    seed_streams(1000 * epoch + dist.get_rank())
    states = {name: get() for name, (get, _) in STREAMS.items()}
    seed_streams(1000 * stream + dist.get_rank())
    if kept is not None:
        STREAMS[kept][1](states[kept])
    found = shards(num_samples, rank=dist.get_rank(), world_size=dist.get_world_size(), epoch=epoch)
    return [int(index) for index in found]


def _on_what(redraw: Callable[..., list[list[int]]], again: list[list[int]]) -> str:
    """Return which random streams change the order, in words; empty if no two draws are equal, as with a clock."""
    names = [name for name in STREAMS if redraw(name) != again] if redraw() == again else []
    return f": on {' and '.join(names)}" if names else ""


def _order_of_one_rank(shards: Shards, world: Any, num_samples: int, epoch: int) -> list[int]:
    """Return the samples that a single rank draws; empty if that fails."""
    try:
        return _draw(shards, world, num_samples, 1, epoch)[0]
    except Exception:  # the user's function may support one number of ranks only; the failure is clear without this
        return []
