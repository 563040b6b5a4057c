"""What PageRank must be, computed densely from the edges; and what typical mistakes make of it.

Nothing here is shared with an implementation: the oracle takes ``src``, ``dst``, ``num_nodes`` and
``weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Oracle", "likely_cause"]

Float64 = NDArray[np.float64]
MAX_DENSE_NODES = 3000  # 72 MB, about a second


@dataclass(frozen=True, eq=False)
class Oracle:
    """The equation ``x = (1 - d) v + d (P x + (1_D x) w)`` of one graph, damping and pair of vectors."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    num_nodes: int
    weights: Float64
    damping: float
    teleport: Float64
    landing: Float64

    @classmethod
    def of(cls, graph: Any, damping: float, personalization: Any = None, dangling: Any = None) -> Oracle:
        """For any ``graph`` with ``src``, ``dst``, ``num_nodes`` and ``weights`` (None: all 1)."""
        src, dst = np.asarray(graph.src, np.int64), np.asarray(graph.dst, np.int64)
        n = int(graph.num_nodes)
        weights = np.ones(len(src)) if graph.weights is None else np.asarray(graph.weights, np.float64)
        largest = np.zeros(n)
        np.maximum.at(largest, src, weights)  # a node's weights over their largest: no sum overflows
        weights = weights / np.where(largest > 0, largest, 1)[src]
        teleport = np.ones(n) if personalization is None else np.asarray(personalization, np.float64)
        landing = teleport if dangling is None else np.asarray(dangling, np.float64)
        sums = teleport.sum() or 1.0, landing.sum() or 1.0
        return cls(src, dst, n, weights, damping, teleport / sums[0], landing / sums[1])

    @property
    def out(self) -> Float64:
        """Out-weight per node."""
        return np.asarray(np.bincount(self.src, self.weights, self.num_nodes), np.float64)

    def step(self, scores: Float64) -> Float64:
        """One serial round from ``scores``."""
        out = self.out
        shares = np.divide(scores, out, out=np.zeros(self.num_nodes), where=out > 0)
        # of no edges numpy makes integers
        arrived = np.bincount(self.dst, self.weights * shares[self.src], self.num_nodes).astype(np.float64)
        arrived += scores[out == 0].sum() * self.landing
        return np.asarray((1 - self.damping) * self.teleport + self.damping * arrived, np.float64)

    def matrix(self) -> Float64:
        """P, dense: column i is how node i shares out its rank, 0 where it is dangling."""
        dense = np.zeros((self.num_nodes, self.num_nodes))
        np.add.at(dense, (self.dst, self.src), self.weights)
        out = dense.sum(axis=0)
        return np.asarray(np.divide(dense, out, out=np.zeros_like(dense), where=out > 0), np.float64)

    def solve(self) -> Float64:
        """The scores, by a dense linear solve."""
        return _solve(self, self.matrix())

    def rounding(self, scores: Float64, dtype: np.dtype[Any]) -> float:
        """What rounding in ``dtype`` can cost in L1.

        A round rounds each term less than 32 times, a row's sum once per entry, and the sum over dangling
        nodes once per node; the errors of all rounds add up to 1/(1 - d) times those of one. Below float64
        the sum over dangling nodes must be made in blocks of 128 or wider, as numpy, torch and GPUs do: one
        running float32 sum of 100 000 scores is off by 1e-3.
        """
        if self.num_nodes == 0:
            return 0.0
        eps = float(np.finfo(dtype).eps)
        scores = np.abs(np.nan_to_num(scores, posinf=0, neginf=0))
        scores = scores / max(1.0, float(scores.sum()))  # scores that blew up are not excused by it
        lost = self.out == 0
        degrees = np.bincount(self.dst, minlength=self.num_nodes) + np.bincount(self.src, minlength=self.num_nodes)
        chain = int(lost.sum()) if eps < 1e-15 else min(int(lost.sum()), 128)
        terms = 32 * float(scores.sum()) + float(degrees @ scores) + chain * float(scores[lost].sum())
        return eps * terms / (1 - self.damping)


def _solve(oracle: Oracle, matrix: Float64, dangling: NDArray[np.bool_] | None = None) -> Float64:
    """The scores for another matrix, and perhaps other nodes whose rank lands as that of dangling ones."""
    system = -oracle.damping * matrix
    system[:, oracle.out == 0 if dangling is None else dangling] -= oracle.damping * oracle.landing[:, None]
    system[np.diag_indices(oracle.num_nodes)] += 1
    return np.asarray(np.linalg.solve(system, (1 - oracle.damping) * oracle.teleport), np.float64)


def likely_cause(oracle: Oracle, found: Float64, expected: Float64, tol: float) -> str | None:
    """The mistake whose scores ``found`` are, if they are those of a known one; ``None`` otherwise."""
    if not np.isfinite(found).all():
        return "not finite: a division by an out-weight of 0, or contributions not divided by the out-weight"
    total, n = float(found.sum()), oracle.num_nodes
    if total > 1e6 * n:
        return "the sum grows round by round: not divided by the out-weight, or dangling mass not divided by n"
    if n > MAX_DENSE_NODES:
        return _mass_cause(total, tol)
    close = max(tol, 1e-9 * max(1.0, abs(total)))

    def same(scores: Float64) -> bool:
        return bool(np.abs(scores - found).sum() <= close < np.abs(scores - expected).sum())

    causes = dict.fromkeys(cause for cause, scores in _mistakes(oracle) if same(scores))
    if causes:
        return f"{', or '.join(list(causes)[:3])}: the scores are exactly those"
    if n > 1 and same(expected * n):
        return f"every score is num_nodes={n} times the right one: ranks start at 1 and teleport adds 1 - d"
    if total > 0 and same(expected * total):
        return f"every score is {total:.6g} times the right one: the scores are not normalised to sum 1"
    current = np.full(n, 1 / n)
    for k in range(60):
        if same(current):
            return f"stopped too early: these are the scores after {k} rounds from the uniform vector"
        current = oracle.step(current)
    fed = np.bincount(oracle.dst, minlength=n) > 0
    if not fed.all() and not (oracle.out == 0).any():
        base = float(found[~fed].max())
        right = float(((1 - oracle.damping) * oracle.teleport)[~fed].max())
        if base > 0 and not np.isclose(base, right, rtol=1e-6):
            return f"a node without in-edges holds {base:.6g}, (1 - d)/n is {right:.6g}: a wrong n or damping"
    if mass := _mass_cause(total, close):
        return mass
    if np.abs(oracle.step(found) - found).sum() > close:
        return "not a fixed point: stopped too early, or the transition matrix is another one"
    return None


def _mass_cause(total: float, close: float) -> str | None:
    if total < 1 - close:
        return "the sum is below 1: mass is lost, at dangling nodes or along edges that count in the degree only"
    if total > 1 + close:
        return "the sum is above 1: not divided by the out-weight, edges added twice, or ranks start at 1"
    return None


def _mistakes(oracle: Oracle) -> Iterator[tuple[str, Float64]]:
    """Mistakes by name, each with the scores that it leads to."""
    for cause, make in _known_mistakes(oracle):
        try:
            yield cause, make()
        except np.linalg.LinAlgError:
            continue  # this mistake has no fixed point on this graph


def _known_mistakes(oracle: Oracle) -> Iterator[tuple[str, Callable[[], Float64]]]:
    src, dst, weights, n = oracle.src, oracle.dst, oracle.weights, oracle.num_nodes
    right, out, nobody = oracle.matrix(), oracle.out, np.zeros(n, np.bool_)
    adjacency = right * out  # [j, i]: weight of the edges i -> j
    counts = np.zeros((n, n))
    np.add.at(counts, (dst, src), 1.0)
    pairs = np.minimum(counts, 1)
    in_weight = adjacency.sum(axis=1)

    def solve(
        sums: Float64, degree: Float64 | None = None, dangling: NDArray[np.bool_] | None = None
    ) -> Callable[[], Float64]:
        """Scores for the entries ``sums`` over ``degree`` of the sending node (None: not divided)."""
        if degree is not None:
            sums = np.divide(sums, degree, out=np.zeros_like(sums), where=np.broadcast_to(degree > 0, (n, n)))
        return partial(_solve, oracle, sums, dangling)

    def edges(keep: NDArray[Any]) -> Callable[[], Float64]:
        return replace(oracle, src=src[keep], dst=dst[keep], weights=weights[keep]).solve

    yield "dangling mass dropped", solve(right, dangling=nobody)
    yield "dangling nodes keep their mass", solve(right + np.diag((out == 0).astype(float)), dangling=nobody)
    yield "matrix transposed, the ranks of the reversed graph", replace(oracle, src=dst, dst=src).solve
    yield "transition matrix transposed, its rows sum to 1", solve(right.T)
    yield "adjacency transposed, but not the out-degrees", solve(adjacency.T, out)
    yield "divided by the in-degree, not the out-degree", solve(adjacency, in_weight)
    yield "divided by the in-degree, not the out-degree", solve(adjacency, in_weight, in_weight == 0)
    yield "not divided by the out-weight", solve(adjacency)
    yield "self-loops left out", edges(np.flatnonzero(src != dst))
    yield "self-loops left out of the sum, but counted in the out-degree", solve(right * (1 - np.eye(n)))
    yield "edge weights ignored", replace(oracle, weights=np.ones(len(src))).solve
    yield "edge weights ignored in the sum, but counted in the out-weight", solve(counts, out)
    yield (
        "edge weights ignored in the out-weight, but counted in the sum",
        solve(adjacency, counts.sum(axis=0)),
    )
    yield "repeated edges collapsed into one", solve(pairs, pairs.sum(axis=0))
    yield "of repeated edges only the last one kept", edges(_last_of_repeated(src, dst))
    yield (
        "repeated edges collapsed in the sum, but counted in the out-degree",
        solve(pairs, counts.sum(axis=0)),
    )
    yield (
        "repeated edges counted in the sum, but collapsed in the out-degree",
        solve(counts, pairs.sum(axis=0)),
    )
    there, back = np.concatenate([src, dst]), np.concatenate([dst, src])
    yield "edges taken as undirected", replace(oracle, src=there, dst=back, weights=np.tile(weights, 2)).solve
    yield "damping taken for 1 - damping", replace(oracle, damping=1 - oracle.damping).solve
    uniform = np.full(n, 1 / max(n, 1))
    yield "personalization ignored", replace(oracle, teleport=uniform).solve
    yield (
        "personalization and dangling vector ignored",
        replace(oracle, teleport=uniform, landing=uniform).solve,
    )
    yield "dangling mass spread uniformly, not by its own vector", replace(oracle, landing=uniform).solve
    yield (
        "dangling mass follows the teleport vector, not its own",
        replace(oracle, landing=oracle.teleport).solve,
    )


def _last_of_repeated(src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.int64]:
    last = {pair: e for e, pair in enumerate(zip(src.tolist(), dst.tolist(), strict=True))}
    return np.array(sorted(last.values()), np.int64)
