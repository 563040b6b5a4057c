"""The fast PageRank: sweeps that stop when the true error, not only the last step, is small enough."""

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

FEW_NODES = 1000  # a dense matrix of so many takes 16 MB and little time
MANY_ROUNDS = 10_000  # d = 0.999 and tol = 1e-8 may need 35 000, and far fewer on a graph without cycles

__all__ = ["PageRankResult", "enough_iterations", "pagerank", "require_tol"]


@dataclass(frozen=True, eq=False)
class PageRankResult:
    """The scores that :func:`pagerank` found, and a bound on their error.

    ``scores`` is one float64 per node and sums to 1. ``error_bound`` bounds the sum of absolute differences from the
    exact scores, including truncation and round-off. ``converged`` is True if that is at most ``tol``. ``seconds`` is
    the duration of the call, including the layout of the edges. ``names`` are the names of the nodes, ``None`` if they
    have none.
    """

    scores: Float64
    iterations: int
    error_bound: float
    converged: bool
    seconds: float
    names: Sequence[Hashable] | None = field(default=None, repr=False)

    def top(self, count: int = 10) -> list[tuple[Hashable, float]]:
        """Return the ``count`` best nodes with their scores, best first; equal scores are in order of id."""
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

    ``P[j, i]`` is the share of i's out-weight that goes to j. The weights of edges that occur twice add up. Self-loops
    are edges. A node whose out-weights are all 0 is dangling.

    A round is one iteration over the edges. It reads 4 bytes per edge (12 with weights), and one number from a random
    address per edge, sixteen at a time. From a million edges on, up to ``torch.get_num_threads()`` threads share a
    round, at most one per core. Edges of nodes that no cycle leads to are read once and in no round, if there are many
    of them. The same graph gives the same bits with any number of threads. The first call on a graph lays out its
    edges; later calls reuse the layout.

    The solver stops when ``(d step + r) / (1 - d) <= tol``. ``step`` is the L1 length of the last update, and ``r``
    bounds the round-off of one round. So the bound holds for the true error. A small step alone does not guarantee
    that.

    Args:
        graph: any object that :func:`as_graph` reads.
        damping: d, in [0, 1).
        tol: the largest true L1 error allowed, above 0.
        max_iter: the largest number of rounds, 1 or more; ``None`` allows as many as any graph can need at this
            ``damping`` and ``tol``.
        personalization: v, one number per node or a dict from node to number (0 for nodes left out), scaled to sum 1. A
            dict has the names of the nodes as keys for a networkx graph, else their ids. ``None`` is uniform.
        dangling: w, in the same form; ``None`` means ``personalization``.
        start: the start vector, in the same form: for example the scores before a few edges were changed. ``None``
            means v. If ``personalization`` is ``None`` too, it means the scores if every edge carried the same amount
            (on a device, v).
        device: the device of the iteration; scores are returned as an array. On ``"cuda"`` the method is ``"power"``,
            with eight rounds at a time, and the edges stay in its memory as long as ``graph`` is kept.
        kernel: the code that sums the rows on a device: ``"triton"``, on CUDA; ``"csr"``, torch's sparse product, on
            any device. ``"auto"`` uses compiled loops on the CPU, ``"triton"`` on CUDA if Triton is installed, and else
            ``"csr"``.
        method: ``"gauss-seidel"`` reads new scores in the round that computed them and keeps their sum at 1. From a
            million edges on, it reads only those of earlier sixteenths of the rows. It needs fewer rounds, above all if
            scores spread slowly. ``"power"`` reads only the scores of the last round. ``"auto"`` is ``"gauss-seidel"``.
            With at most a thousand nodes and a ``damping`` so near 1 that 10 000 rounds may not suffice, it begins with
            the dense solution.
        progress: called after each round with its number and the error bound. It is also called before the first round,
            when the edges are laid out, with 0 and infinity.

    Returns:
        A :class:`PageRankResult`. Its ``converged`` is False if ``max_iter`` was too small, or if ``tol`` is finer than
        float64 can guarantee on this graph; ``error_bound`` is then the bound that was reached. Without edges the
        scores are v; without nodes they are empty.

    Raises:
        ValueError: the graph, damping, tol, max_iter or a vector is wrong. The message names the cure; the error is
            raised before the first round.
        TypeError: ``graph`` cannot be read as a graph.
        MemoryError: the layout and the vectors do not fit in memory; raised before they are allocated.

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
    """Return the dense solution as the start vector, or ``teleport`` if that solution is not usable.

    It is not usable if, for example, float64 cannot distinguish d from 1.
    """
    try:
        scores = pagerank_reference(graph, damping=damping, personalization=teleport, dangling=landing)
    except np.linalg.LinAlgError:
        return teleport
    return scores / scores.sum() if np.isfinite(scores).all() and scores.min() >= 0 < scores.sum() else teleport


def require_tol(tol: float) -> float:
    """Return ``tol`` as a positive float."""
    if not (isinstance(tol, int | float | np.number) and 0 < tol < math.inf):
        raise ValueError(f"tol must be a positive number, the largest L1 error wanted, got {tol!r}; 1e-8 is usual")
    return float(tol)


def enough_iterations(damping: float, tol: float) -> int:
    """Return a number of rounds after which the bound is at most ``tol`` on every graph.

    It includes a few rounds for changes of precision. The residual of either method shrinks by the factor d in each
    round, because ``|U (I - L)**-1| <= d`` in the 1-norm. Here ``L + U`` is the matrix, and L is its part that is
    multiplied with new scores. The step is at most 2 / (1 - d) times the residual.
    """
    if damping == 0:
        return 4
    wanted = max(min(tol, 1.0), np.finfo(float).eps) * (1 - damping) ** 2 / 8
    return 8 + math.ceil(math.log(wanted) / math.log(damping))
