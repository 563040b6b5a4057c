"""The checks of digests: they distinguish shards, and are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.checks.message import case, failure, name_of, takes_world
from pdlcheck.checks.rank_results import bits

__all__ = ["check_digest", "check_gathered_digests"]


@takes_world
def check_digest(digest: Callable[[Tensor], str], data: Tensor, world: Any, *, world_size: int = 2) -> None:
    """Check that equal data has the same digest on every rank, and that any change gives another digest.

    Args:
        digest: called with a tensor on every rank.
        data: a tensor with at least one element. The check changes one element, its dtype, its shape and its length.
        world: where the ranks run; each process of a process world salts Python's ``hash`` differently.
        world_size: number of ranks.
    """
    __tracebackhide__ = True
    changed = data.clone(memory_format=torch.contiguous_format).view(-1)
    bits(changed).view(-1)[-1:].bitwise_xor_(1)  # adding 1 would not change a large float
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
    """Check that every rank gets the digest of each rank, in rank order, and that only equal shards have equal digests.

    Args:
        gather: called with this rank's shard on every rank; returns one digest for each rank.
        shards: the data that each rank loaded.
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


def _digests(digest: Callable[[Tensor], str], variants: dict[str, Tensor]) -> dict[str, str]:
    return {what: digest(data) for what, data in variants.items()}


def _gather(gather: Callable[[Tensor], Sequence[str]], shards: Sequence[Tensor]) -> list[str]:
    return list(gather(shards[dist.get_rank()]))
