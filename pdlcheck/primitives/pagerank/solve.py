"""The fast PageRank: a power iteration that stops when the true error, not the last step, is small enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pdlcheck.primitives.pagerank.arguments import distribution, require_damping, require_iterations
from pdlcheck.primitives.pagerank.formats import as_graph
from pdlcheck.primitives.pagerank.gathering import LANES
from pdlcheck.primitives.pagerank.graph import Float64
from pdlcheck.primitives.pagerank.kernels import TILE, sweep
from pdlcheck.primitives.pagerank.layout import Layout, layout_of
from pdlcheck.primitives.pagerank.memory import require_free_memory, solver_nbytes

__all__ = ["PageRankResult", "pagerank"]

TINY = 2.0**-150  # what a float32 may be off below its range of normal numbers

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
    start: Any = None,
    method: Literal["auto", "power", "gauss-seidel"] = "auto",
    progress: Callable[[int, float], None] | None = None,
) -> PageRankResult:
    """Rank the nodes by ``x = (1 - d) v + d (P x + m w)``, where m is the mass of x on dangling nodes.

    ``P[j, i]`` is the share of i's out-weight that goes to j. Edges that occur twice add, self-loops are
    edges, a node whose out-weights are all 0 is dangling. A round reads 4 bytes and one random number per
    edge (12 with weights), sixteen at a time; the same graph gives the same bits with any number of threads
    (``torch.get_num_threads()`` are used on large ones). The first call on a graph lays its edges out, others
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
        start: what to begin with, likewise: the ranks before a few edges were changed, for example; ``None`` is v.
        method: ``"gauss-seidel"`` uses each new score at once, on one thread: half the rounds where ranks spread
            slowly; ``"power"`` shares a round among threads; ``"auto"`` is the former up to half a million edges.
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
    graph = as_graph(graph)
    damping = require_damping(damping)
    if method not in ("auto", "power", "gauss-seidel"):
        raise ValueError(f"method must be 'auto', 'power' or 'gauss-seidel', got {method!r}")
    if not (isinstance(tol, int | float | np.number) and 0 < tol < math.inf):
        raise ValueError(
            f"tol must be a positive number, the largest L1 error wanted, got {tol!r}; 1e-8 is usual"
        )
    if max_iter is not None:
        max_iter = require_iterations("max_iter", max_iter)
    nbytes = solver_nbytes(graph.num_nodes, graph.num_edges, weighted=graph.weights is not None)
    require_free_memory(f"ranking {graph}", nbytes, "use a machine with more memory, or number nodes without gaps")
    teleport = distribution("personalization", personalization, graph)
    landing = teleport if dangling is None else distribution("dangling", dangling, graph)
    first = teleport if start is None else distribution("start", start, graph)
    if graph.num_nodes == 0:
        if progress is not None:
            progress(0, math.inf)
        return PageRankResult(np.zeros(0), 0, 0.0, True, time.perf_counter() - began, graph.names)
    if max_iter is None:
        max_iter = _enough_iterations(damping, tol)
    layout = layout_of(graph)
    in_place = len(layout.blocks) == 1 if method == "auto" else method == "gauss-seidel"
    rounds = _Rounds(layout, damping, teleport, landing, first, in_place=in_place)
    if progress is not None:
        progress(0, math.inf)
    bound, converged = rounds.run(tol, max_iter, progress)
    seconds = time.perf_counter() - began
    return PageRankResult(rounds.scores_of_nodes(), rounds.iteration, bound, converged, seconds, graph.names)


def _enough_iterations(damping: float, tol: float) -> int:
    """Rounds after which ``d step / (1 - d)`` is half of ``tol`` on every graph: ``step <= 2 d**(k - 1)``."""
    if damping == 0:
        return 2
    wanted = max(min(tol, 1.0), np.finfo(float).eps) * (1 - damping) / 4
    return 2 + math.ceil(math.log(wanted) / math.log(damping))


class _Rounds:
    """The iteration under way: power iteration, or Gauss-Seidel, which updates in place.

    Both have one bound. A sweep of Gauss-Seidel leaves the residual ``U (x_new - x_old)``, where U is the part of the
    matrix that met old values; its columns sum to d at most, as those of the whole matrix do.

    Large graphs begin with what nodes send in float32, half the memory to read from, and change to float64 when its
    rounding would show.
    """

    def __init__(
        self,
        layout: Layout,
        damping: float,
        teleport: Float64,
        landing: Float64,
        first: Float64,
        *,
        in_place: bool,
    ) -> None:
        self._layout, self._damping = layout, damping
        self._teleport = layout.rows_of(teleport)
        self._landing = self._teleport if landing is teleport else layout.rows_of(landing)
        self._in_place = in_place
        self._single = len(layout.blocks) > 1
        self._scores = layout.rows_of(first)
        self._dangling_mass = math.fsum(self._scores[layout.out == 0])
        self._sent, self._sent_next = self._sending()
        self.iteration = 0

    def run(
        self, tol: float, max_iter: int, progress: Callable[[int, float], None] | None
    ) -> tuple[float, bool]:
        """Go on until the error bound is at most ``tol``; return it, and whether it is."""
        damping, layout = self._damping, self._layout
        bound, converged = math.inf, False
        # One round rounds each term a few times (less than 16), each row's sum once per entry, and the dangling mass
        # once per term of its longest chain of additions: the slices of a tile, lanes, tiles of a block, blocks.
        unit = float(np.finfo(np.float64).eps) / 2
        slices = max(last - first for first, last in layout.blocks)
        chain = min(TILE, slices) + LANES + slices / TILE + len(layout.blocks)
        threads = 1 if self._in_place else min(len(layout.blocks), torch.get_num_threads())
        with ThreadPoolExecutor(threads) as pool:
            while self.iteration < max_iter and not converged:
                self.iteration += 1
                rounded = 16 + layout.share_error + chain * self._dangling_mass
                parts = list(pool.map(self._sweep, layout.blocks) if threads > 1 else map(self._sweep, layout.blocks))
                step, dangling_mass, gathered, total = (math.fsum(column) for column in zip(*parts, strict=True))
                lost = unit * (rounded + gathered)
                if self._single:
                    lost += damping * (float(np.finfo(np.float32).eps) / 2 + len(layout.sources) * TINY)
                self._sent, self._sent_next = self._sent_next, self._sent
                self._dangling_mass = dangling_mass
                bound = (damping * step * (1 + 1e-9) + lost) / (1 - damping)  # 1e-9: the round-off of step itself
                if self._in_place:
                    bound += abs(1 - total) + chain * unit
                    self._scale(1 / total)
                converged = bound <= tol
                if progress is not None:
                    progress(self.iteration, bound)
                if damping * step <= lost * (4 if self._single else 1 / 16):  # the step is round-off
                    if not self._single or converged:
                        break
                    self._single = False
                    self._sent, self._sent_next = self._sending()
        return bound, converged

    def scores_of_nodes(self) -> Float64:
        return self._layout.nodes_of(self._scores)

    def _sending(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """What each node sends along an edge, and room for what it will send next."""
        sent: NDArray[Any] = (self._scores * self._layout.out).astype(np.float32 if self._single else np.float64)
        return sent, sent if self._in_place else np.empty_like(sent)

    def _scale(self, factor: float) -> None:
        self._scores *= factor
        self._sent *= factor
        self._dangling_mass *= factor

    def _sweep(self, block: tuple[int, int]) -> tuple[float, float, float, float]:
        layout, damping = self._layout, self._damping
        matrix = layout.long_rows, layout.begins, layout.steps, layout.sources, layout.shares
        parts: tuple[float, float, float, float] = sweep(
            *(*block, *matrix, self._sent, layout.out, self._teleport, self._landing),
            *(damping, 1 - damping, damping * self._dangling_mass, self._scores, self._sent_next),
        )
        return parts
