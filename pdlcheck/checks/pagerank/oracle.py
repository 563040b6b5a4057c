"""The PageRank oracle: a dense solution computed from the edges, and the scores that typical mistakes lead to.

The oracle shares no code with an implementation. It needs only ``src``, ``dst``, ``num_nodes`` and ``weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain

__all__ = ["Float64", "Oracle", "Table", "diagnose", "diagnose_sum"]

Float64 = NDArray[np.float64]
Table = Iterable[Candidate[Float64]]
MAX_DENSE_NODES = 3000  # 72 MB, about a second


@dataclass(frozen=True, eq=False)
class Oracle:
    """The equation ``x = (1 - d) v + d (P x + (1_D x) w)`` for one graph, damping and pair of vectors."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    num_nodes: int
    weights: Float64
    damping: float
    teleport: Float64
    landing: Float64

    @classmethod
    def of(cls, graph: Any, damping: float, personalization: Any = None, dangling: Any = None) -> Oracle:
        """Build the oracle for any ``graph`` with ``src``, ``dst``, ``num_nodes`` and ``weights`` (None: all 1).

        Args:
            graph: a graph of any type with these four attributes.
            damping: the d of the equation, in [0, 1).
            personalization: the teleport vector v, one number for each node; None is the uniform vector.
            dangling: the vector w that receives the rank of dangling nodes; None is v.

        Raises:
            TypeError: ``graph`` has no such attributes.
            ValueError: ``damping`` or a vector is not valid.
        """
        if isinstance(damping, bool) or not isinstance(damping, int | float | np.number) or not 0 <= damping < 1:
            raise ValueError(f"damping must be a number in [0, 1), got {damping!r}; pass that of the function")
        if not all(hasattr(graph, name) for name in ("src", "dst", "num_nodes", "weights")):
            raise TypeError(
                f"graph must have src, dst, num_nodes and weights, got a {type(graph).__qualname__}; "
                "pdlcheck.primitives.pagerank.as_graph reads graphs of other libraries"
            )
        src, dst = _on_host(graph.src, np.int64), _on_host(graph.dst, np.int64)
        n = int(graph.num_nodes)
        weights = np.ones(len(src)) if graph.weights is None else _on_host(graph.weights, np.float64)
        teleport = np.full(n, 1 / max(n, 1))
        if personalization is not None:
            teleport = _distribution("personalization", personalization, n)
        landing = teleport if dangling is None else _distribution("dangling", dangling, n)
        return cls(src, dst, n, weights, damping, teleport, landing)

    @cached_property
    def scaled(self) -> Float64:
        """Return each weight divided by the largest weight of its source.

        Sums of scaled weights cannot overflow, and the scores are the same.
        """
        largest = np.zeros(self.num_nodes)
        np.maximum.at(largest, self.src, self.weights)
        return np.asarray(self.weights / np.where(largest > 0, largest, 1)[self.src], np.float64)

    @property
    def out(self) -> Float64:
        """Return the out-weight of each node, the sum of its scaled weights."""
        return np.asarray(np.bincount(self.src, self.scaled, self.num_nodes), np.float64)

    def step(self, scores: Float64) -> Float64:
        """Return the scores after one serial round from ``scores``."""
        out = self.out
        shares = np.divide(scores, out, out=np.zeros(self.num_nodes), where=out > 0)
        # Without edges, numpy's bincount returns integers.
        arrived = np.bincount(self.dst, self.scaled * shares[self.src], self.num_nodes).astype(np.float64)
        arrived += scores[out == 0].sum() * self.landing
        return np.asarray((1 - self.damping) * self.teleport + self.damping * arrived, np.float64)

    def matrix(self) -> Float64:
        """Return the matrix P.

        Column i holds the share of its rank that node i sends to each node; it is 0 if i is dangling.
        """
        dense = np.zeros((self.num_nodes, self.num_nodes))
        np.add.at(dense, (self.dst, self.src), self.scaled)
        out = dense.sum(axis=0)
        return np.asarray(np.divide(dense, out, out=np.zeros_like(dense), where=out > 0), np.float64)

    def solve(self) -> Float64:
        """Return the scores, computed by a dense linear solve."""
        return _solve(self, self.matrix())

    def rounding(self, scores: Float64, dtype: np.dtype[Any]) -> float:
        """Return the largest L1 error that rounding in ``dtype`` can cause.

        In one round, each term is rounded less than 32 times, the sum of a row once per entry, and the sum over
        dangling nodes once per node. The errors of all rounds add up to 1/(1 - d) times the errors of one. Below
        float64, an implementation must sum over dangling nodes in blocks of 128 or wider, as numpy, torch and GPUs do.
        One running float32 sum of 100 000 scores is off by 1e-3.
        """
        if self.num_nodes == 0:
            return 0.0
        eps = float(np.finfo(dtype).eps)
        scores = np.abs(np.nan_to_num(scores, posinf=0, neginf=0))
        scores = scores / max(1.0, float(scores.sum()))  # diverged scores must not enlarge their own tolerance
        lost = self.out == 0
        degrees = np.bincount(self.dst, minlength=self.num_nodes) + np.bincount(self.src, minlength=self.num_nodes)
        chain = int(lost.sum()) if eps < 1e-15 else min(int(lost.sum()), 128)
        terms = 32 * float(scores.sum()) + float(degrees @ scores) + chain * float(scores[lost].sum())
        return eps * terms / (1 - self.damping)


def _on_host(values: Any, dtype: Any) -> NDArray[Any]:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype)


def _distribution(name: str, values: Any, num_nodes: int) -> Float64:
    """Return ``values`` as float64, scaled to sum 1.

    Raises:
        ValueError: ``values`` is not one finite, non-negative number for each node, or is 0 everywhere.
    """
    try:
        vector = _on_host(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be one number per node, got a {type(values).__qualname__} ({error})") from error
    if vector.shape != (num_nodes,):
        raise ValueError(f"{name} must be one number per node, shape ({num_nodes},), got shape {vector.shape}")
    bad = np.flatnonzero(~(np.isfinite(vector) & (vector >= 0)))
    if bad.size:
        raise ValueError(f"{name} holds {vector[bad[0]]} at {bad[0]}; every value must be finite and not negative")
    if num_nodes and not vector.any():
        raise ValueError(f"{name} is 0 everywhere; give at least one node a positive value, or pass None")
    scaled = vector / vector.max(initial=0) if num_nodes else vector  # so that the sum cannot overflow
    return np.asarray(scaled / (scaled.sum() or 1.0), np.float64)


def _solve(oracle: Oracle, matrix: Float64, dangling: NDArray[np.bool_] | None = None) -> Float64:
    """Return the scores for another matrix, and optionally for another set of dangling nodes."""
    system = -oracle.damping * matrix
    system[:, oracle.out == 0 if dangling is None else dangling] -= oracle.damping * oracle.landing[:, None]
    system[np.diag_indices(oracle.num_nodes)] += 1
    return np.asarray(np.linalg.solve(system, (1 - oracle.damping) * oracle.teleport), np.float64)


def diagnose(oracle: Oracle, found: Float64, expected: Float64, tol: float, first: Sequence[Table] = ()) -> Diagnosis:
    """Return the known mistakes that lead to the scores ``found``; the tables of ``first`` are tried before others."""
    total, n = float(found.sum()), oracle.num_nodes
    not_finite = "not finite: a division by an out-weight of 0, or contributions not divided by the out-weight"
    grows = "the sum grows round by round: not divided by the out-weight, or dangling mass not divided by n"
    if not np.isfinite(found).all() or total > 1e6 * n:
        finite = bool(np.isfinite(found).all())
        return explain(found, [Candidate.when(not_finite, not finite)], [Candidate.when(grows, finite)])
    close = max(tol, 1e-9 * max(1.0, abs(total)))

    def same(scores: Float64) -> bool:
        return bool(np.abs(scores - found).sum() <= close < np.abs(scores - expected).sum())

    def gives(text: str, make: Callable[[], Float64]) -> Candidate[Float64]:
        return Candidate(text, holds=lambda _: same(make()))

    small = [*_exact_causes(oracle, expected, total, same)] if n <= MAX_DENSE_NODES else []
    return explain(
        found,
        *first,
        *small,
        _early_causes(oracle, same),
        _damping_causes(oracle, found, close),
        [
            gives(
                f"the {what} edge is left out: the scores are exactly those",
                replace(oracle, src=oracle.src[kept], dst=oracle.dst[kept], weights=oracle.weights[kept]).solve,
            )
            for what, kept in (("first", slice(1, None)), ("last", slice(-1)))
            if n <= MAX_DENSE_NODES
        ],
        hints=_hints(oracle, found, close),
    )


def diagnose_sum(oracle: Oracle, found: Float64, dtype: np.dtype[Any]) -> Diagnosis:
    """Return the cause of a sum of scores that is not 1 although each score is nearly right."""
    lost = found[oracle.out == 0].astype(dtype)
    error = float(np.cumsum(lost, dtype=dtype)[-1]) - float(lost.sum(dtype=np.float64)) if lost.size else 0.0
    grown = oracle.damping * error / (1 - oracle.damping)  # each round adds the error, and damps the earlier ones
    off = float(found.sum()) - 1
    text = (
        f"a running sum in {dtype} over {lost.size} dangling nodes: rounding puts the scores as far off. "
        "Add in blocks, as numpy and torch do, or in float64"
    )
    return explain(found, [Candidate(text, holds=lambda _: bool(0.3 < off / grown < 3) if grown else False)])


def _exact_causes(oracle: Oracle, expected: Float64, total: float, same: Callable[[Float64], bool]) -> Iterator[Table]:
    """Yield the tables of the causes whose scores are known, on a graph that is small enough to solve."""
    n = oracle.num_nodes

    def multiples() -> Iterator[Candidate[Float64]]:
        if n > 1:
            text = f"every score is num_nodes={n} times the right one: ranks start at 1 and teleport adds 1 - d"
            yield Candidate.when(text, same(expected * n))
        if total > 0 and abs(total - n) > 1e-6 * n:
            text = f"every score is {total:.6g} times the right one: the scores are not normalised to sum 1"
            yield Candidate.when(text, same(expected * total))

    yield (Candidate.when(f"{text}: the scores are exactly those", same(scores)) for text, scores in _mistakes(oracle))
    yield multiples()


def _early_causes(oracle: Oracle, same: Callable[[Float64], bool]) -> Iterator[Candidate[Float64]]:
    current = np.full(oracle.num_nodes, 1 / max(oracle.num_nodes, 1))
    for k in range(60):
        text = f"stopped too early: these are the scores after {k} rounds from the uniform vector"
        fits = same(current)
        yield Candidate.when(text, fits)
        if fits:
            return  # later rounds change less than the tolerance
        current = oracle.step(current)


def _damping_causes(oracle: Oracle, found: Float64, close: float) -> Iterator[Candidate[Float64]]:
    """Yield a cause if ``found - v = d (P found + m w - v)`` holds for another damping d."""
    moved, left = replace(oracle, damping=1.0).step(found) - oracle.teleport, found - oracle.teleport
    used = float(moved @ left) / (float(moved @ moved) or 1.0)
    fits = 0 <= used < 1 and abs(used - oracle.damping) >= 1e-6 and np.abs(left - used * moved).sum() <= close
    text = f"damping {used:.6g}, not {oracle.damping:g}: the scores are exactly those"
    yield Candidate(text, holds=lambda _: bool(fits), short="another damping")


def _hints(oracle: Oracle, found: Float64, close: float) -> Iterator[Candidate[Float64]]:
    """Yield what can be seen of scores that no mistake leads to."""
    total = float(found.sum())
    fed = np.bincount(oracle.dst, minlength=oracle.num_nodes) > 0
    if oracle.num_nodes <= MAX_DENSE_NODES and not fed.all() and not (oracle.out == 0).any():
        base = float(found[~fed].max())
        right = float(((1 - oracle.damping) * oracle.teleport)[~fed].max())
        text = f"a node without in-edges holds {base:.6g}, (1 - d)/n is {right:.6g}: a wrong n or damping"
        yield Candidate.when(text, base > 0 and not np.isclose(base, right, rtol=1e-6))
    below = "the sum is below 1: mass is lost, at dangling nodes or along edges that count in the degree only"
    above = "the sum is above 1: not divided by the out-weight, edges added twice, or ranks start at 1"
    yield Candidate.when(below, total < 1 - close)
    yield Candidate.when(above, total > 1 + close)
    moving = abs(total - 1) <= close and np.abs(oracle.step(found) - found).sum() > close
    yield Candidate.when("not a fixed point: stopped too early, or the transition matrix is another one", bool(moving))


def _mistakes(oracle: Oracle) -> Iterator[tuple[str, Float64]]:
    """Yield the name of each known mistake and the scores that it leads to."""
    for cause, make in _known_mistakes(oracle):
        try:
            with np.errstate(all="ignore"):  # raw weights can overflow, scaled ones cannot
                scores = make()
            yield cause, scores
        except np.linalg.LinAlgError:
            continue  # this mistake has no fixed point on this graph


def _known_mistakes(oracle: Oracle) -> Iterator[tuple[str, Callable[[], Float64]]]:
    src, dst, weights, n = oracle.src, oracle.dst, oracle.weights, oracle.num_nodes
    right, nobody = oracle.matrix(), np.zeros(n, np.bool_)
    adjacency, counts = np.zeros((n, n)), np.zeros((n, n))  # [j, i]: weight and number of the edges i -> j
    np.add.at(adjacency, (dst, src), weights)
    np.add.at(counts, (dst, src), 1.0)
    out = adjacency.sum(axis=0)
    pairs = np.minimum(counts, 1)
    in_weight = adjacency.sum(axis=1)

    def solve(
        sums: Float64, degree: Float64 | None = None, dangling: NDArray[np.bool_] | None = None
    ) -> Callable[[], Float64]:
        """Return a function that solves for the entries ``sums`` over ``degree`` of the sender (None: undivided)."""
        if degree is not None:
            sums = np.divide(sums, degree, out=np.zeros_like(sums), where=np.broadcast_to(degree > 0, (n, n)))
        return partial(_solve, oracle, sums, dangling)

    def edges(keep: NDArray[Any]) -> Callable[[], Float64]:
        return replace(oracle, src=src[keep], dst=dst[keep], weights=weights[keep]).solve

    yield "dangling mass dropped", solve(right, dangling=nobody)
    yield "dangling nodes keep their mass", solve(right + np.diag((out == 0).astype(float)), dangling=nobody)
    yield "dangling mass dropped, the scores scaled to sum 1 every round", partial(_scaled_every_round, oracle, right)
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
    proper = src != dst
    there, back = np.concatenate([src, dst[proper]]), np.concatenate([dst, src[proper]])
    both = np.concatenate([weights, weights[proper]])
    yield "edges taken as undirected", replace(oracle, src=there, dst=back, weights=both).solve
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
    exchanged = replace(oracle, teleport=oracle.landing, landing=oracle.teleport)
    yield "personalization and dangling vector exchanged", exchanged.solve
    yield "each connected component solved alone, divided by its own number of nodes", partial(_by_component, oracle)
    isolated = (out == 0) & (in_weight == 0)
    elsewhere = np.where(isolated, 0, oracle.landing)
    yield (
        "isolated nodes get no dangling mass, only (1 - damping) / num_nodes",
        replace(oracle, landing=elsewhere).solve,
    )
    whole = replace(oracle, landing=elsewhere, teleport=np.where(isolated, 1, oracle.teleport))
    yield "isolated nodes keep 1 - damping", whole.solve


def _by_component(oracle: Oracle) -> Float64:
    label = np.arange(oracle.num_nodes)
    while True:
        before = label.copy()
        np.minimum.at(label, oracle.src, label[oracle.dst])
        np.minimum.at(label, oracle.dst, label[oracle.src])
        if np.array_equal(before, label):
            break
    scores = np.zeros(oracle.num_nodes)
    for one in np.unique(label):
        nodes, kept = np.flatnonzero(label == one), label[oracle.src] == one
        src, dst = (np.searchsorted(nodes, ends[kept]) for ends in (oracle.src, oracle.dst))
        even = np.full(len(nodes), 1 / len(nodes))
        part = replace(
            oracle, src=src, dst=dst, num_nodes=len(nodes), weights=oracle.weights[kept], teleport=even, landing=even
        )
        scores[nodes] = part.solve()
    return scores


def _scaled_every_round(oracle: Oracle, matrix: Float64) -> Float64:
    scores = np.full(oracle.num_nodes, 1 / max(oracle.num_nodes, 1))
    for _ in range(60 if oracle.num_nodes > 1000 else 400):
        scores = (1 - oracle.damping) * oracle.teleport + oracle.damping * (matrix @ scores)
        scores /= scores.sum() or 1.0
    return scores


def _last_of_repeated(src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.int64]:
    last = {pair: e for e, pair in enumerate(zip(src.tolist(), dst.tolist(), strict=True))}
    return np.array(sorted(last.values()), np.int64)
