"""PageRank over ranks: each works on a range of nodes, and receives from others the values that its nodes need."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pdlcheck.primitives.arguments import members
from pdlcheck.primitives.pagerank.even_flow import Sums, even_flow
from pdlcheck.primitives.pagerank.graph import Float64
from pdlcheck.primitives.pagerank.ranks.arguments import agree_on_edges, agree_on_numbers, agree_on_vectors
from pdlcheck.primitives.pagerank.ranks.part import Part, make_part
from pdlcheck.primitives.pagerank.ranks.partition import partition_nodes
from pdlcheck.primitives.pagerank.ranks.room import require_room_for_parts
from pdlcheck.primitives.pagerank.ranks.tally import Tally

__all__ = ["PageRankShard", "iterate", "pagerank_over_ranks"]

UNIT = float(np.finfo(np.float64).eps) / 2


@dataclass(frozen=True, eq=False)
class PageRankShard:
    """The scores of one rank's nodes, and the facts that all ranks share.

    Args:
        nodes: ids of this rank's nodes; the ranges of the ranks follow one another and cover every node.
        scores: float64, one for each of ``nodes``.
        iterations, error_bound, converged: as in :class:`PageRankResult`, for the whole vector; the same bits on every
            rank.
        seconds: the duration of the call on this rank, including the transfer of the edges.
        cuts: the first node of each rank's range, and the number of nodes at the end.
        num_edges: the number of edges that enter ``nodes``.
        num_halo_nodes: the number of nodes of other ranks with an edge to ``nodes``; a round receives 8 bytes for each.
        names: the names of all nodes, or ``None``.
    """

    nodes: range
    scores: Float64
    iterations: int
    error_bound: float
    converged: bool
    seconds: float
    cuts: tuple[int, ...]
    num_edges: int
    num_halo_nodes: int
    names: Sequence[Hashable] | None = field(default=None, repr=False)


def pagerank_over_ranks(
    graph: Any,
    *,
    num_nodes: int | None = None,
    replicated: bool = False,
    damping: float = 0.85,
    tol: float = 1e-8,
    max_iter: int | None = None,
    personalization: Any = None,
    dangling: Any = None,
    start: Any = None,
    group: dist.ProcessGroup | None = None,
) -> PageRankShard:
    """Rank the nodes of a graph whose edges are spread over the ranks, as :func:`pagerank` does.

    The edges of the graph are all that the ranks hold together. Each rank gets a range of nodes with about as many
    in-edges as the others. The edges move there by way of the rank of their source, so no rank ever holds the whole
    graph.

    A round is one all_to_all and one all_gather of 3 numbers. The all_to_all brings each rank the score of every
    distinct node of another rank that has an edge to its own nodes: 8 bytes each and nothing else. Both operations are
    pending while the rank sums what its own nodes send to each other. A round is known to be the last only during the
    next one, so the ranks make one exchange more than there are iterations. Without ``start`` and ``personalization``,
    an all_gather of 6 numbers computes the start vector.

    The rounds run on the CPU, or on the GPU if the group's messages are there. Each rank uses one thread.

    Args:
        graph: the edges that this rank holds: any object that :func:`as_graph` reads. Any rank may hold any edges;
            edges that several ranks hold add. Ids mean the same node on every rank.
        num_nodes: the number of nodes of the whole graph. ``None`` takes it from ``graph``; for a tuple of arrays it is
            the largest id of any rank + 1.
        replicated: every rank holds the same whole graph; each takes a share of its edges.
        damping: as in :func:`pagerank`; the same on every rank, like the next five arguments.
        tol: as in :func:`pagerank`.
        max_iter: as in :func:`pagerank`.
        personalization: as in :func:`pagerank`.
        dangling: as in :func:`pagerank`.
        start: as in :func:`pagerank`.
        group: process group; ``None`` is the default group.

    Returns:
        A :class:`PageRankShard` with this rank's scores. :func:`gather_scores` makes one result of all. The scores are
        within ``tol`` of those of a single process, but in other bits, because sums are in another order.

    Raises:
        TypeError, ValueError: as in :func:`pagerank`; every rank raises the error of the first rank with wrong
            arguments.
        ValueError: ranks were given different arguments; raised before any edge moves. Or there is no process group, as
            in :func:`ring_pass`.
        MemoryError: the parts do not fit in the memory of a machine; the same error on every rank, before any edge
            moves.

    Example:
        >>> def rank_a_ring_of_six():
        ...     here = dist.get_rank()
        ...     return pagerank_over_ranks(([2 * here, 2 * here + 1], [2 * here + 1, (2 * here + 2) % 6]))
        >>> shard = world.run(rank_a_ring_of_six, world_size=3)[1]
        >>> shard.nodes, shard.scores.round(4).tolist(), shard.num_halo_nodes
        (range(2, 4), [0.1667, 0.1667], 1)

    Source: rows in ranges of balanced work are those of D. Gleich, L. Zhukov, P. Berkhin, "Fast parallel PageRank: a
    linear system approach", Yahoo! Research (2004); the stopping rule is Banach's fixed-point bound.
    """
    began = time.perf_counter()
    who = members("pagerank_over_ranks", group)
    damping, tol, rounds = agree_on_numbers(damping, tol, max_iter, who)
    edges = agree_on_edges(graph, num_nodes, replicated, who)
    given = {"personalization": personalization, "dangling": dangling, "start": start}
    partition = partition_nodes(edges.dst, edges.nodes.num_nodes, who)
    num_given = sum(vector is not None for vector in given.values())
    require_room_for_parts("pagerank_over_ranks", edges, partition, num_given, who)
    vectors = agree_on_vectors(edges.nodes, given, who)
    part = make_part(edges.src, edges.dst, edges.weights, partition, who)
    scores, iterations, bound = iterate(part, vectors, damping=damping, tol=tol, max_iter=rounds)
    return PageRankShard(
        *(part.nodes, scores.cpu().numpy(), iterations, bound, bound <= tol, time.perf_counter() - began),
        *(tuple(part.cuts.tolist()), part.num_edges, part.halo.num_nodes, edges.nodes.names),
    )


def iterate(
    part: Part, vectors: dict[str, Float64 | None], *, damping: float, tol: float, max_iter: float
) -> tuple[Tensor, int, float]:
    """Run the power iteration until the error bound is at most ``tol``, if possible.

    Returns:
        This rank's scores, the number of rounds, and the bound.
    """
    num_nodes, device = int(part.cuts[-1]), part.out.device
    if num_nodes == 0:
        return part.out, 0, 0.0
    teleport = _own(vectors["personalization"], part)
    landing = teleport if vectors["dangling"] is None else _own(vectors["dangling"], part)
    if vectors["start"] is not None:
        scores = _own(vectors["start"], part)
    elif vectors["personalization"] is not None:
        scores = teleport
    else:
        scores = _even_flow(part, teleport, landing, damping)
    room = torch.zeros(part.halo.num_nodes, dtype=torch.float64, device=device)
    numbers = torch.stack([part.mass(scores)] * 3)  # in the first round only the mass is read
    tally = Tally(part.who)
    # torch adds long rows in four levels, so a sum of n terms is a chain of about n**(1/4) additions in each level
    chain = 64 + 8 * num_nodes**0.25
    iteration, bound, before, rounded = 0, math.inf, math.inf, 0.0
    while True:
        values, leaving = part.sending(scores)
        exchange = part.halo.start(leaving, room)
        tally.start(numbers)
        arrived = part.add_local(values)
        step, mass_now, gathered = tally.finish()
        stop = False
        if iteration:
            bound = (damping * step * (1 + 1e-9) + UNIT * (rounded + gathered)) / (1 - damping)
            # a step is at most damping times the one before, unless only round-off is left
            stop = bound <= tol or iteration >= max_iter or not step < (1 + damping) / 2 * before
            before = step
        if exchange is not None:
            exchange.wait()
        if stop:
            return scores, iteration, bound
        part.add_remote(room, arrived)
        numbers = part.update(arrived, scores, teleport, landing, damping, mass_now)
        rounded = 16 + part.out_terms + chain * mass_now
        scores = arrived
        iteration += 1


def _even_flow(part: Part, teleport: Tensor, landing: Tensor, damping: float) -> Tensor:
    """Return the start vector for a call without one, see :func:`even_flow`; an all_gather of 6 numbers."""
    tally = Tally(part.who)
    vectors = teleport, landing, part.in_degree
    tally.start(torch.stack([number for vector in vectors for number in (vector.sum(), part.mass(vector))]))
    sums = tally.finish()
    carried, landed = even_flow(damping, *(Sums(*sums[at : at + 2]) for at in (0, 2, 4)))
    return (1 - damping) * teleport + carried * part.in_degree + landed * landing


def _own(vector: Float64 | None, part: Part) -> Tensor:
    """Return the part of ``vector`` for this rank's nodes; ``None`` is the uniform vector."""
    if vector is None:
        return torch.full_like(part.out, 1 / int(part.cuts[-1]))
    return torch.from_numpy(vector[part.nodes.start : part.nodes.stop].copy()).to(part.out.device)
