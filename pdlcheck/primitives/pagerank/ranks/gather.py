"""One result of the shards of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.primitives.arguments import members, wire_device
from pdlcheck.primitives.pagerank.ranks.solve import PageRankShard
from pdlcheck.primitives.pagerank.solve import PageRankResult

__all__ = ["gather_scores"]


def gather_scores(shard: PageRankShard, group: dist.ProcessGroup | None = None) -> PageRankResult:
    """All scores on every rank, in order of id. One all_gather of the longest shard.

    Args:
        shard: what :func:`pagerank_over_ranks` gave this rank.
        group: the group that it was computed in; ``None`` is the default group.

    Returns:
        The same :class:`PageRankResult` on every rank, but for ``seconds``, which are this rank's.

    Raises:
        ValueError: ``shard`` is another rank's, or of a group of another size.

    Example:
        >>> from pdlcheck.primitives.pagerank import pagerank_over_ranks
        >>> result = world.run(lambda: gather_scores(pagerank_over_ranks(([0, 1], [1, 0]))), world_size=2)[1]
        >>> result.scores.round(9).tolist()
        [0.5, 0.5]
    """
    who = members("gather_scores", group)
    here = range(*shard.cuts[who.rank : who.rank + 2]) if len(shard.cuts) == who.world_size + 1 else None
    if here != shard.nodes:
        raise ValueError(
            f"gather_scores got a shard of {len(shard.cuts) - 1} ranks with {shard.nodes} on place {who.rank} "
            f"of {who.world_size}; pass the shard of this rank, and the group that it was computed in"
        )
    sizes = [last - first for first, last in zip(shard.cuts, shard.cuts[1:], strict=False)]
    own = torch.zeros(max(sizes), dtype=torch.float64, device=wire_device(who.group))
    own[: len(shard.scores)] = torch.from_numpy(shard.scores)
    everyone = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(everyone, own, group=who.group)
    scores = torch.cat([one[:size] for one, size in zip(everyone, sizes, strict=True)]).cpu().numpy()
    rest = shard.iterations, shard.error_bound, shard.converged, shard.seconds, shard.names
    return PageRankResult(scores, *rest)
