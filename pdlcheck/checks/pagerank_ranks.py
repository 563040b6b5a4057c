"""Checks of PageRank over ranks: any function that ranks a graph whose edges the ranks hold together.

The function is called on every rank with that rank's part of the graph, which has ``src``, ``dst``, ``num_nodes`` (of
the whole graph) and ``weights``; the graph is all parts together, and what "right" is says
:mod:`pdlcheck.checks.pagerank`. It returns an object with ``nodes``, the ids that this rank has in the end, and
``scores``, one for each of them; or, without ``nodes``, all scores on every rank. Where it has ``iterations``,
``error_bound`` or ``converged`` too, they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from pdlcheck.checks.graphs import Edges
from pdlcheck.checks.message import case, failure, name_of
from pdlcheck.checks.pagerank import check_error_bound
from pdlcheck.checks.pagerank_oracle import MAX_DENSE_NODES, Float64, Oracle, likely_cause
from pdlcheck.checks.pagerank_rank_causes import Rounds, solution_cause
from pdlcheck.errors import Inconclusive

__all__ = ["check_halo_bytes", "check_pagerank_over_ranks", "check_pagerank_rounds"]

NUMBERS = 8  # that a rank may tell all others in a round: the step, the dangling mass and the like


def check_pagerank_over_ranks(
    function: Callable[[Any], Any],
    parts: Sequence[Any],
    world: Any,
    *,
    damping: float = 0.85,
    tol: float | None = 1e-8,
    personalization: Any = None,
    dangling: Any = None,
) -> None:
    """The shards of all ranks are the PageRank of the whole graph, and the ranks agree on when they stopped.

    Args:
        function: called as ``function(parts[rank])`` on every rank.
        parts: for each rank the edges that it holds at first; ``len(parts)`` is the world size.
        world: where the ranks run.
        damping, personalization, dangling: what ``function`` uses.
        tol: L1 error that it may leave; rounding is allowed on top. ``None`` is the ``error_bound`` that it returns.

    Raises:
        AssertionError: a node in no shard or in two; ranks that stopped apart; a wrong score, with the rank that has
            it, the in-edges with the ranks of their sources, and the likely cause; an ``error_bound`` that the true
            error is above.
        Inconclusive: the graph is too large for the dense solution.
    """
    __tracebackhide__ = True
    run = _Run.of(function, parts, world, Oracle.of(_whole(parts), damping, personalization, dangling))
    if run.oracle.num_nodes > MAX_DENSE_NODES:
        raise Inconclusive(
            f"check_pagerank_over_ranks: {run.oracle.num_nodes} nodes are too many for the dense solution"
        )
    run.require_agreement()
    expected = run.oracle.solve()
    first = run.results[0]
    left = float(first.error_bound) if tol is None else tol
    allowed = left + run.oracle.rounding(expected, np.dtype(np.float64))
    run.require(expected, allowed, "the dense solution is", lambda: solution_cause(run.oracle, run.owner, run.scores))
    if tol is not None and hasattr(first, "error_bound") and hasattr(first, "converged"):

        def assembled(graph: Any) -> Any:
            return SimpleNamespace(scores=run.scores, error_bound=first.error_bound, converged=first.converged)

        assembled.__name__ = run.name
        vectors = {"personalization": personalization, "dangling": dangling}
        check_error_bound(assembled, _whole(parts), damping=damping, tol=tol, **vectors)


def check_pagerank_rounds(
    function: Callable[..., Any],
    parts: Sequence[Any],
    world: Any,
    *,
    rounds: int = 3,
    damping: float = 0.85,
) -> None:
    """After ``rounds`` rounds from the uniform vector, the scores are those of as many serial rounds, to rounding.

    For power iterations, in which a round reads the scores of the round before and no others. An exchange that is one
    round late converges to the same scores, but more slowly than its error bound says; here it shows.

    Args:
        function: called as ``function(parts[rank], max_iter=rounds)``; must not stop earlier.
        parts, world, damping: as in :func:`check_pagerank_over_ranks`.
    """
    __tracebackhide__ = True
    oracle = Oracle.of(_whole(parts), damping)
    run = _Run.of(function, parts, world, oracle, max_iter=rounds)
    run.require_iterations(rounds)
    serial = Rounds.of(oracle, run.owner, rounds)
    allowed = oracle.rounding(serial.right[-1], np.dtype(np.float64))
    run.require(serial.right[-1], allowed, f"{rounds} serial rounds give", lambda: serial.cause(run.scores, allowed))


def check_halo_bytes(
    function: Callable[..., Any], parts: Sequence[Any], world: Any, *, itemsize: int = 8, numbers: int = NUMBERS
) -> dict[tuple[int, int], int]:
    """A round moves one value for each distinct source that another rank's nodes have on this rank, and no more.

    A round is what the second one adds to the traffic of the first. Messages and all_to_alls must carry exactly the
    cut of the partition, ``itemsize`` bytes a value; other operations at most ``numbers`` float64 of each rank.

    Args:
        function: called as ``function(parts[rank], max_iter=1)``, then with 2; must not stop earlier. Its results have
            ``nodes``.
        parts: as in :func:`check_pagerank_over_ranks`.
        world: one that counts ``traffic``: ``sim``.

    Returns:
        ``{(src, dst): bytes}`` of a round, where there are any.

    Raises:
        AssertionError: naming the two ranks, the bytes found and the nodes that need them.
        ValueError: ``world`` counts no traffic.
    """
    __tracebackhide__ = True
    if not hasattr(type(world), "traffic"):
        raise ValueError(f"check_halo_bytes needs a world that counts traffic, got {world.name}; use get_world('sim')")
    oracle = Oracle.of(_whole(parts), 0.5)
    flows, run = [], None
    for rounds in (1, 2):
        run = _Run.of(function, parts, world, oracle, max_iter=rounds)
        run.require_iterations(rounds)
        flows.append(world.traffic.flows)
    assert run is not None
    if run.results[0].nodes is None:
        raise ValueError(f"check_halo_bytes needs results with nodes, {run.name} gave all scores to every rank")
    world_size = len(parts)
    cut: dict[tuple[int, int], int] = {}
    found: dict[int, int] = {}
    live = oracle.weights > 0
    src, dst = oracle.src[live], oracle.dst[live]
    for one in range(world_size):
        for other in range(world_size):
            crossing = (run.owner[src] == one) & (run.owner[dst] == other) & (one != other)
            nodes = np.unique(src[crossing])
            moved, rest = _moved(flows, one, other)
            if moved != itemsize * len(nodes):
                raise failure(
                    f"{run.name}: rank {one} sends rank {other} {moved} bytes a round, the edges between them need "
                    f"{itemsize * len(nodes)}",
                    needed=f"nodes {nodes.tolist()[:12]} of rank {one}, {itemsize} bytes each, once",
                    likely_cause=_bytes_cause(moved // itemsize, len(nodes), crossing.sum(), (run.owner == one).sum()),
                    case=run.facts,
                )
            cut[one, other] = moved
            found[one] = found.get(one, 0) + rest
    allowed = 2 * (world_size - 1) * 8 * numbers
    for rank, nbytes in found.items():
        if nbytes > allowed:
            raise failure(
                f"{run.name}: rank {rank} sends {nbytes} bytes a round in other operations than messages and "
                f"all_to_all, {numbers} numbers to all others are {allowed}",
                likely_cause="whole vectors are gathered or summed over ranks, where a few values are needed",
                case=run.facts,
            )
    return {pair: nbytes for pair, nbytes in cut.items() if nbytes}


@dataclass(frozen=True)
class _Result:
    """What a rank gave, in a form that travels."""

    nodes: NDArray[np.int64] | None
    scores: Float64
    said: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name in ("iterations", "error_bound", "converged") and name in self.said:
            return self.said[name]
        raise AttributeError(name)


@dataclass(frozen=True)
class _Run:
    """One call of the function on every rank; ``owner`` of a node is the rank whose shard has it."""

    name: str
    results: list[_Result]
    oracle: Oracle
    scores: Float64
    owner: NDArray[np.int64]
    facts: str

    @classmethod
    def of(
        cls, function: Callable[..., Any], parts: Sequence[Any], world: Any, oracle: Oracle, **keywords: Any
    ) -> _Run:
        __tracebackhide__ = True
        name, n = name_of(function), oracle.num_nodes
        results = list(world.run(_call, function, list(parts), keywords, world_size=len(parts)))
        facts = case(world, len(parts), num_nodes=n, num_edges=len(oracle.src), damping=oracle.damping, **keywords)
        if len(oracle.src) <= 12:
            held = [f"rank {rank}: {_listed(part)}" for rank, part in enumerate(parts)]
            facts += "\n  edges held    " + "; ".join(held)
        scores, owner = np.full(n, np.nan), np.full(n, -1)
        for rank, result in enumerate(results):
            nodes = np.arange(n) if result.nodes is None else result.nodes
            if result.scores.shape != nodes.shape:
                raise failure(
                    f"{name}: rank {rank} returned scores of shape {result.scores.shape} for {len(nodes)} nodes",
                    case=facts,
                )
            twice = nodes[owner[nodes] >= 0]
            if result.nodes is not None and twice.size:
                raise failure(
                    f"{name}: node {twice[0]} is in the shards of ranks {owner[twice[0]]} and {rank}", case=facts
                )
            if result.nodes is None and rank:
                other = np.flatnonzero(result.scores != scores)
                if other.size:
                    node = int(other[0])
                    raise failure(
                        f"{name}: rank {rank} holds {result.scores[node]!r} for node {node}, rank 0 {scores[node]!r}",
                        likely_cause="the ranks were to hold the same bits: what one of them sums must be sent to all",
                        case=facts,
                    )
                continue
            scores[nodes], owner[nodes] = result.scores, rank
        missing = np.flatnonzero(owner < 0)
        if missing.size:
            raise failure(f"{name}: node {missing[0]} is in no shard, one of {missing.size}", case=facts)
        return cls(name, results, oracle, scores, owner, facts)

    def require_agreement(self) -> None:
        """All ranks say the same of when they stopped."""
        __tracebackhide__ = True
        for what in ("iterations", "error_bound", "converged"):
            said = [result.said.get(what) for result in self.results]
            odd = next((rank for rank, value in enumerate(said) if value != said[0]), None)
            if odd is not None:
                raise failure(
                    f"{self.name}: {what} is {said[odd]!r} on rank {odd}, {said[0]!r} on rank 0",
                    likely_cause="a rank decides by numbers of its own when to stop, not by those of all ranks",
                    case=self.facts,
                )

    def require_iterations(self, rounds: int) -> None:
        for rank, result in enumerate(self.results):
            done = result.said.get("iterations", rounds)
            if done < rounds and self.oracle.num_nodes:
                raise Inconclusive(
                    f"{self.name}: rank {rank} stopped after {done} of {rounds} rounds; call it with a smaller tol"
                )

    def require(
        self, expected: Float64, allowed: float, what: str, rank_cause: Callable[[], str | None]
    ) -> None:
        """Raise, with the worst node, where the L1 distance is above ``allowed``; NaN is above everything."""
        __tracebackhide__ = True
        difference = np.abs(self.scores - expected)
        distance = float(difference.sum())
        if distance <= allowed:
            return
        node = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
        cause = None if np.isnan(distance) else rank_cause()
        if np.isnan(distance):
            cause = "not a number: values of other ranks are used before they have arrived, or out-weights of 0"
        raise failure(
            f"{self.name}: rank {self.owner[node]} holds {self.scores[node]:.12g} for node {node}, "
            f"{what} {expected[node]:.12g}",
            in_edges=self._in_edges(node),
            distance=f"sum |found - expected| = {distance:.3e}, allowed {allowed:.1e}",
            sum=f"{self.scores.sum():.12g}",
            likely_cause=cause or likely_cause(self.oracle, self.scores, expected, allowed),
            case=self.facts,
        )

    def _in_edges(self, node: int) -> str:
        sources = self.oracle.src[self.oracle.dst == node]
        shown = [f"{u} (rank {self.owner[u]}) -> {node}" for u in sources[:8]]
        return ", ".join(shown) + (f", ... ({len(sources)} in all)" if len(sources) > 8 else "") or "none"


def _call(function: Callable[..., Any], parts: list[Any], keywords: dict[str, Any]) -> _Result:
    got = function(parts[dist.get_rank()], **keywords)
    scores = getattr(got, "scores", got)
    if hasattr(scores, "detach"):
        scores = scores.detach().cpu().numpy()
    nodes = getattr(got, "nodes", None)
    said = {what: getattr(got, what) for what in ("iterations", "error_bound", "converged") if hasattr(got, what)}
    ids = None if nodes is None else np.array(nodes, np.int64)
    return _Result(ids, np.array(scores, np.float64), said)


def _whole(parts: Sequence[Any]) -> Edges:
    """All edges that the ranks hold."""
    weights = None
    if any(part.weights is not None for part in parts):
        ones = [np.ones(len(part.src)) if part.weights is None else part.weights for part in parts]
        weights = np.concatenate(ones)
    src = np.concatenate([np.asarray(part.src, np.int64) for part in parts])
    dst = np.concatenate([np.asarray(part.dst, np.int64) for part in parts])
    return Edges(src, dst, int(parts[0].num_nodes), weights)


def _listed(part: Any) -> str:
    pairs = zip(np.asarray(part.src).tolist(), np.asarray(part.dst).tolist(), strict=True)
    return ", ".join(f"{u} -> {v}" for u, v in pairs) or "none"


def _moved(flows: list[dict[tuple[int, int, str], tuple[int, int]]], one: int, other: int) -> tuple[int, int]:
    """Bytes that the second run sent more than the first: by messages and all_to_alls, and by other operations."""
    moved = {"halo": 0, "rest": 0}
    for sign, flow in zip((-1, 1), flows, strict=True):
        for (src, dst, op), (_, nbytes) in flow.items():
            if (src, dst) == (one, other):
                moved["halo" if op in ("send", "all_to_all") else "rest"] += sign * nbytes
    return moved["halo"], moved["rest"]


def _bytes_cause(moved: int, nodes: int, edges: int, owned: int) -> str | None:
    if moved == edges:
        return "a value is sent for each edge, not for each distinct source"
    if moved == owned:
        return "all scores of the rank are sent, needed or not"
    return "values are left out" if moved < nodes else "values are sent that no edge needs"
