"""The fast PageRank: a power iteration that stops when the true error, not the last step, is small enough."""

from __future__ import annotations

import math
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.arguments import distribution, require_damping, require_iterations
from pdlcheck.primitives.pagerank.graph import Float64, Graph, Int64, as_graph
from pdlcheck.primitives.pagerank.kernels import TILE, pull_csr, sweep

__all__ = ["PageRankResult", "pagerank"]

EDGES_PER_BLOCK = (
    1 << 19
)  # a sweep over this many takes about 1 ms, 20 times what handing it to a thread costs
MAX_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class PageRankResult:
    """What :func:`pagerank` found, and how far from the truth it can be.

    ``scores`` is one float64 per node and sums to 1. ``error_bound`` bounds the sum of absolute differences
    from the exact ranks, truncation and round-off. ``converged`` says whether that is at most ``tol``.
    """

    scores: Float64
    iterations: int
    error_bound: float
    converged: bool
    names: tuple[Hashable, ...] | None = field(default=None, repr=False)

    def top(self, count: int = 10) -> list[tuple[Hashable, float]]:
        """The ``count`` best nodes with their scores, best first; equal scores in order of id."""
        best = np.argsort(-self.scores, kind="stable")[:count]
        return [(int(i) if self.names is None else self.names[i], float(self.scores[i])) for i in best]


def pagerank(
    graph: Any,
    *,
    damping: float = 0.85,
    tol: float = 1e-8,
    max_iter: int | None = None,
    personalization: Any = None,
    dangling: Any = None,
) -> PageRankResult:
    """Rank the nodes by ``x = (1 - d) v + d (P x + m w)``, where m is the mass of x on dangling nodes.

    ``P[j, i]`` is the share of i's out-weight that goes to j. Edges that occur twice add, self-loops are
    edges, a node whose out-weights are all 0 is dangling. A round reads 4 bytes and one random float64 per
    edge (12 with weights); the same graph gives the same bits with any number of threads
    (``torch.get_num_threads()`` are used on large ones).

    It stops when ``(d step + r) / (1 - d) <= tol``: ``step`` is the L1 length of the last update and ``r``
    bounds what one round can lose to round-off, so the bound holds for the true error. A small step alone
    does not say that.

    Args:
        graph: whatever :func:`as_graph` reads.
        damping: d, in [0, 1).
        tol: largest true L1 error wanted, above 0.
        max_iter: rounds, 1 or more; ``None`` is as many as any graph can need at this ``damping`` and
            ``tol``.
        personalization: v, one number per node or a dict from node to number (0 for nodes left out), scaled
            to sum 1; nodes are the names of a networkx graph, else ids. ``None`` is uniform.
        dangling: w, likewise; ``None`` is ``personalization``.

    Returns:
        A :class:`PageRankResult`. Its ``converged`` is False, and ``error_bound`` says what was reached,
        where ``max_iter`` was too small or ``tol`` is finer than float64 can promise on this graph.
        Without edges the scores are v; without nodes they are empty.

    Raises:
        ValueError: a bad graph, damping, tol, max_iter or vector, named with its cure, at once.
        TypeError: ``graph`` is nothing that can be read as one.

    Example:
        >>> result = pagerank(([0, 1, 2], [1, 2, 0]))
        >>> result.converged, result.scores.round(4).tolist()
        (True, [0.3333, 0.3333, 0.3333])

    Source: Page, Brin, Motwani and Winograd, "The PageRank citation ranking: bringing order to the web"
        (1999);
    the stopping rule is Banach's fixed-point bound.
    """
    graph = as_graph(graph)
    damping = require_damping(damping)
    if not (isinstance(tol, int | float | np.number) and 0 < tol < math.inf):
        raise ValueError(
            f"tol must be a positive number, the largest L1 error wanted, got {tol!r}; 1e-8 is usual"
        )
    if max_iter is not None:
        max_iter = require_iterations("max_iter", max_iter)
    teleport = distribution("personalization", personalization, graph)
    landing = teleport if dangling is None else distribution("dangling", dangling, graph)
    if graph.num_nodes == 0:
        return PageRankResult(np.zeros(0), 0, 0.0, True, graph.names)
    if max_iter is None:
        max_iter = _enough_iterations(damping, tol)
    return _power_iteration(graph, damping, tol, max_iter, teleport, landing)


def _enough_iterations(damping: float, tol: float) -> int:
    """Rounds after which ``d step / (1 - d)`` is half of ``tol`` on every graph: ``step <= 2 d**(k - 1)``."""
    if damping == 0:
        return 2
    wanted = max(min(tol, 1.0), np.finfo(float).eps) * (1 - damping) / 4
    return 2 + math.ceil(math.log(wanted) / math.log(damping))


@dataclass(frozen=True, eq=False)
class _Rows:
    """In-edges by row. Rows go by falling in-degree, so that the processor predicts where their loops end."""

    node: Int64  # of each row
    indptr: NDArray[Any]
    sources: NDArray[Any]  # rows, one per edge
    shares: Float64 | None  # of each edge; None where every node shares alike
    out: Float64  # 1 / out-degree, or 1 with shares; 0 for a dangling node
    share_error: float  # how often a share was rounded


def _power_iteration(
    graph: Graph, damping: float, tol: float, max_iter: int, teleport: Float64, landing: Float64
) -> PageRankResult:
    n = graph.num_nodes
    rows = _rows(graph)
    teleport, landing = teleport[rows.node], landing[rows.node]
    scores = teleport.copy()
    sent, sent_next = scores * rows.out, np.empty(n)
    dangling_mass = math.fsum(scores[rows.out == 0])
    if (teleport == teleport[0]).all():
        teleport = teleport[:1]
    if (landing == landing[0]).all():
        landing = landing[:1]
    blocks = _blocks(rows.indptr)
    # One round rounds each term a few times (less than 16), each row's sum once per entry, and the dangling
    # mass once per term of its longest chain of additions: a tile, the tiles of a block, the blocks.
    unit = float(np.finfo(np.float64).eps) / 2
    chain = min(TILE, n) + max(last - first for first, last in blocks) / TILE + len(blocks)
    bound, iteration, converged = math.inf, 0, False
    threads = min(len(blocks), torch.get_num_threads())
    with ThreadPoolExecutor(threads) as pool:
        while iteration < max_iter and not converged:
            iteration += 1
            round_of = partial(
                _sweep, rows, teleport, landing, damping, dangling_mass, sent, scores, sent_next
            )
            parts = list(pool.map(round_of, blocks) if threads > 1 else map(round_of, blocks))
            lost = 16 + rows.share_error + chain * dangling_mass
            step, dangling_mass, gathered = (math.fsum(column) for column in zip(*parts, strict=True))
            sent, sent_next = sent_next, sent
            lost = unit * (lost + gathered)
            bound = (damping * step * (1 + 1e-9) + lost) / (1 - damping)  # 1e-9: the round-off of step itself
            converged = bound <= tol
            if damping * step <= lost / 16:  # such steps are round-off and say nothing
                break
    found = np.empty(n)
    found[rows.node] = scores
    return PageRankResult(found, iteration, bound, converged, graph.names)


def _sweep(
    rows: _Rows,
    teleport: Float64,
    landing: Float64,
    damping: float,
    dangling_mass: float,
    sent: Float64,
    scores: Float64,
    sent_next: Float64,
    block: tuple[int, int],
) -> tuple[float, float, float]:
    matrix = rows.indptr, rows.sources, rows.shares, rows.out
    parts: tuple[float, float, float] = sweep(
        *block, *matrix, teleport, landing, damping, dangling_mass, sent, scores, sent_next
    )
    return parts


def _rows(graph: Graph) -> _Rows:
    n, weights = graph.num_nodes, graph.weights
    ids = np.int32 if n <= np.iinfo(np.int32).max else np.int64
    offsets = np.int32 if graph.num_edges <= np.iinfo(np.int32).max else np.int64
    in_degree = np.bincount(graph.dst, minlength=n)
    node = np.argsort(-in_degree, kind="stable")
    row = np.empty(n, ids)
    row[node] = np.arange(n, dtype=ids)
    indptr = np.concatenate([[0], np.cumsum(in_degree[node])]).astype(offsets)
    alike = weights is None or (weights.size > 0 and weights.min() == weights.max() > 0)
    sources = np.empty(graph.num_edges, ids)
    edge_order = np.empty(0 if alike else graph.num_edges, offsets)
    pull_csr(graph.src, graph.dst, row, indptr[:-1].copy(), sources, edge_order)
    degree = np.bincount(graph.src, minlength=n)
    if alike:
        out = np.divide(1.0, degree, out=np.zeros(n), where=degree > 0)
        return _Rows(node, indptr, sources, None, out[node], 0.0)
    out = (~graph.dangling).astype(np.float64)
    return _Rows(node, indptr, sources, graph.probabilities[edge_order], out[node], float(degree.max()))


def _blocks(indptr: NDArray[Any]) -> list[tuple[int, int]]:
    """Ranges of rows with about equal work; they depend on the graph alone, and so does each rounding."""
    n = len(indptr) - 1
    work = indptr[1:].astype(np.int64) + 4 * np.arange(1, n + 1)
    count = int(min(MAX_BLOCKS, max(1, work[-1] // EDGES_PER_BLOCK)))
    cuts = np.searchsorted(work, work[-1] * np.arange(1, count) / count)
    edges = np.unique(np.concatenate([[0], cuts, [n]]))
    return [(int(first), int(last)) for first, last in pairwise(edges)]
