"""One result from the shards of all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import exchange, require_agreement
from pdlcheck.primitives.arguments import members, wire_device
from pdlcheck.primitives.pagerank.memory import gathered_nbytes
from pdlcheck.primitives.pagerank.ranks.room import require_room, stores_of
from pdlcheck.primitives.pagerank.ranks.solve import PageRankShard
from pdlcheck.primitives.pagerank.solve import PageRankResult

__all__ = ["gather_scores"]


def gather_scores(shard: PageRankShard, group: dist.ProcessGroup | None = None) -> PageRankResult:
    """Return all scores on every rank, in order of id.

    This costs an all_gather of scores, padded to the longest shard. Two more all_gathers before it compare the
    arguments and the free memory.

    Args:
        shard: the result of :func:`pagerank_over_ranks` on this rank.
        group: the group that it was computed in; ``None`` is the default group.

    Returns:
        The same :class:`PageRankResult` on every rank, except for ``seconds``, which are this rank's.

    Raises:
        ValueError: ``shard`` is another rank's, of another call, or of a group of another size; the same error on every
            rank.
        MemoryError: the scores do not fit in the memory of a machine; the same error on every rank.

    Example:
        >>> from pdlcheck.primitives.pagerank import pagerank_over_ranks
        >>> result = world.run(lambda: gather_scores(pagerank_over_ranks(([0, 1], [1, 0]))), world_size=2)[1]
        >>> result.scores.round(9).tolist()
        [0.5, 0.5]
    """
    who = members("gather_scores", group)
    num_nodes, sizes = shard.cuts[-1], [last - first for first, last in zip(shard.cuts, shard.cuts[1:], strict=False)]

    def facts() -> dict[str, object]:
        here = range(*shard.cuts[who.rank : who.rank + 2]) if len(shard.cuts) == who.world_size + 1 else None
        if here != shard.nodes:
            raise ValueError(
                f"gather_scores got a shard of {len(shard.cuts) - 1} ranks with {shard.nodes} on place {who.rank} "
                f"of {who.world_size}; pass the shard of this rank, and the group that it was computed in"
            )
        return {"ranges of nodes": shard.cuts}

    require_agreement("gather_scores", who, facts)
    nbytes = gathered_nbytes(num_nodes, max(sizes), who.world_size)
    stores = exchange(stores_of(nbytes, who), None, who.group).values
    needs, cure = [nbytes] * who.world_size, "let each rank work on its own shard"
    require_room(f"gather_scores of {num_nodes} nodes", stores, needs, who, cure)
    own = torch.zeros(max(sizes), dtype=torch.float64, device=wire_device(who.group))
    own[: len(shard.scores)] = torch.from_numpy(shard.scores)
    everyone = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(everyone, own, group=who.group)
    scores = torch.cat([one[:size] for one, size in zip(everyone, sizes, strict=True)]).cpu().numpy()
    rest = shard.iterations, shard.error_bound, shard.converged, shard.seconds, shard.names
    return PageRankResult(scores, *rest)
