"""The fast PageRank: sweeps that stop when the true error, not the last step, is small enough."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from pdlcheck.primitives.pagerank.arguments import (
    distribution,
    require_damping,
    require_device,
    require_iterations,
)
from pdlcheck.primitives.pagerank.device import is_on_device, require_room_on, solve_on_device
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.graph import Float64, Graph, borrowed_graph
from pdlcheck.primitives.pagerank.layout import is_laid_out, layout_of
from pdlcheck.primitives.pagerank.memory import require_free_memory, solver_nbytes, vectors_nbytes
from pdlcheck.primitives.pagerank.progress import RoundProgress, unheard
from pdlcheck.primitives.pagerank.reference import pagerank_reference
from pdlcheck.primitives.pagerank.rounds import Rounds

FEW_NODES = 1000  # whose dense matrix takes 16 MB and a moment
MANY_ROUNDS = 10_000  # at d = 0.999 and tol = 1e-8 there may be 35 000, and on a graph without cycles many fewer

__all__ = ["PageRankResult", "enough_iterations", "pagerank", "require_tol"]


@dataclass(frozen=True, eq=False)
class PageRankResult:
    """What :func:`pagerank` found, and how far from the truth it can be.

    ``scores`` is one float64 per node and sums to 1. ``error_bound`` bounds the sum of absolute differences
    from the exact ranks, truncation and round-off. ``converged`` says whether that is at most ``tol``. ``seconds``
    is what the call took, the layout of the edges included.
    """

    scores: Float64
    iterations: int
    error_bound: float
    converged: bool
    seconds: float
    names: Sequence[Hashable] | None = field(default=None, repr=False)

    def top(self, count: int = 10) -> list[tuple[Hashable, float]]:
        """The ``count`` best nodes with their scores, best first, equal scores in order of id."""
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise TypeError(f"count must be an int, got {count!r}")
        if count < 0:
            raise ValueError(f"count must be 0 or more, got {count}")
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
    start: Any = None,
    method: Literal["auto", "power", "gauss-seidel"] = "auto",
    device: torch.device | str = "cpu",
    kernel: Literal["auto", "csr", "triton"] = "auto",
    progress: RoundProgress = unheard,
) -> PageRankResult:
    """Rank the nodes by ``x = (1 - d) v + d (P x + m w)``, where m is the mass of x on dangling nodes.

    ``P[j, i]`` is the share of i's out-weight that goes to j. Edges that occur twice add, self-loops are
    edges, a node whose out-weights are all 0 is dangling. A round reads 4 bytes and one random number per
    edge (12 with weights), sixteen at a time; from a million edges on ``torch.get_num_threads()`` threads,
    one a core at most, share it.
    Edges of nodes that no cycle leads to, where they are many, are read once, and in no round.
    The same graph gives the same bits with any number of threads. The first call on a graph lays its edges out, others
    find them so.

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
        start: what to begin with, likewise: the ranks before a few edges were changed, for example; ``None`` is v, and
            where v is uniform, what nodes would hold if every edge carried the same (on a device, v).
        device: of the iteration; scores come back as an array. On ``"cuda"`` rounds are by ``"power"``, eight at a
            time, and the edges stay in its memory as long as ``graph`` is kept.
        kernel: what sums the rows on a device: ``"triton"``, on CUDA; ``"csr"``, torch's sparse product, on any;
            ``"auto"`` is the former where Triton is installed, and on the CPU neither but compiled loops.
        method: ``"gauss-seidel"`` reads new scores in the round that made them (from a million edges on, those of
            the sixteenths of the rows before) and keeps their sum at 1: fewer rounds, most of all where ranks spread
            slowly. ``"power"`` reads the last round's alone. ``"auto"`` is the former; on at most a thousand nodes,
            with a ``damping`` so near 1 that 10 000 rounds may not do, it begins with the dense solution.
        progress: called after each round with its number and the error bound; before the first, when the edges are
            laid out, with 0 and infinity.

    Returns:
        A :class:`PageRankResult`. Its ``converged`` is False, and ``error_bound`` says what was reached,
        where ``max_iter`` was too small or ``tol`` is finer than float64 can promise on this graph.
        Without edges the scores are v; without nodes they are empty.

    Raises:
        ValueError: a bad graph, damping, tol, max_iter or vector, named with its cure, at once.
        TypeError: ``graph`` is nothing that can be read as one.
        MemoryError: the layout and the vectors do not fit in memory, before they are allocated.

    Example:
        >>> result = pagerank(([0, 1, 2], [1, 2, 0]))
        >>> result.converged, result.scores.round(4).tolist()
        (True, [0.3333, 0.3333, 0.3333])

    Source: Page, Brin, Motwani and Winograd, "The PageRank citation ranking: bringing order to the web"
        (1999);
    the stopping rule is Banach's fixed-point bound.
    """
    began = time.perf_counter()
    borrows = isinstance(graph, tuple) and len(graph) in (2, 3)
    graph = borrowed_graph(*graph) if borrows else as_graph(graph)
    damping = require_damping(damping)
    if method not in ("auto", "power", "gauss-seidel"):
        raise ValueError(f"method must be 'auto', 'power' or 'gauss-seidel', got {method!r}")
    tol = require_tol(tol)
    if max_iter is not None:
        max_iter = require_iterations("max_iter", max_iter)
    where = require_device(device, torch.float64)
    elsewhere = where.type != "cpu" or kernel != "auto"
    given = sum(vector is not None for vector in (personalization, dangling, start))
    if elsewhere:
        require_room_on(where, graph, given, laid_out=is_on_device(graph, where))
    else:
        if is_laid_out(graph):
            nbytes = vectors_nbytes(graph.num_nodes, given)
        else:
            nbytes = solver_nbytes(graph.num_nodes, graph.num_edges, weighted=graph.weights is not None)
        require_free_memory(f"ranking {graph}", nbytes, "use a machine with more memory, or number nodes without gaps")
    teleport = distribution("personalization", personalization, graph)
    landing = teleport if dangling is None else distribution("dangling", dangling, graph)
    first = teleport if start is None else distribution("start", start, graph)
    if kernel not in ("auto", "csr", "triton"):
        raise ValueError(f"kernel must be 'auto', 'csr' or 'triton', got {kernel!r}")
    if elsewhere and method == "gauss-seidel":
        raise ValueError("method is 'gauss-seidel', which is for device='cpu' with kernel='auto'; use method='power'")
    if graph.num_nodes == 0:
        progress(0, math.inf)
        return PageRankResult(np.zeros(0), 0, 0.0, True, time.perf_counter() - began, graph.names)
    if max_iter is None:
        max_iter = enough_iterations(damping, tol)
    if elsewhere:
        vectors = teleport, landing, first
        found = solve_on_device(graph, where, kernel, damping, tol, max_iter, *vectors, progress=progress)
        return PageRankResult(*found, time.perf_counter() - began, graph.names)
    layout = layout_of(graph)
    by_row = layout.uniform if personalization is None else layout.rows_of(teleport)
    rounds = Rounds(
        *(layout, damping, by_row, by_row if landing is teleport else layout.rows_of(landing)),
        in_place=method != "power",
        progress=progress,
    )
    progress(0, math.inf)
    warm = start is not None
    if method == "auto" and max_iter > MANY_ROUNDS and graph.num_nodes <= FEW_NODES and not warm:
        first, warm = _directly(graph, damping, teleport, landing), True
    begin = layout.rows_of(first) if warm else None if personalization is None else by_row
    scores, bound = rounds.run(begin, tol, max_iter, warm=warm)
    seconds = time.perf_counter() - began
    return PageRankResult(scores, rounds.iteration, float(bound), bool(bound <= tol), seconds, graph.names)


def _directly(graph: Graph, damping: float, teleport: Float64, landing: Float64) -> Float64:
    """The dense solution, to begin with; ``teleport`` where it is of no use, as where float64 cannot tell d from 1."""
    try:
        scores = pagerank_reference(graph, damping=damping, personalization=teleport, dangling=landing)
    except np.linalg.LinAlgError:
        return teleport
    return scores / scores.sum() if np.isfinite(scores).all() and scores.min() >= 0 < scores.sum() else teleport


def require_tol(tol: float) -> float:
    """``tol`` as a positive float."""
    if not (isinstance(tol, int | float | np.number) and 0 < tol < math.inf):
        raise ValueError(f"tol must be a positive number, the largest L1 error wanted, got {tol!r}; 1e-8 is usual")
    return float(tol)


def enough_iterations(damping: float, tol: float) -> int:
    """Rounds after which the bound is at most ``tol`` on every graph, and some for changes of precision.

    The residual of either method falls by d a round: ``|U (I - L)**-1| <= d`` in the 1-norm where ``L + U`` is the
    matrix and L what met new scores. The step is at most 2 / (1 - d) times it.
    """
    if damping == 0:
        return 4
    wanted = max(min(tol, 1.0), np.finfo(float).eps) * (1 - damping) ** 2 / 8
    return 8 + math.ceil(math.log(wanted) / math.log(damping))
