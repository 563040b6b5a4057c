"""The results of all ranks after one call of a PageRank over ranks, combined into one vector of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from pdlcheck.checks.graphs import Edges
from pdlcheck.checks.message import case, failure, name_of, show
from pdlcheck.checks.pagerank.oracle import Float64, Oracle, Table, diagnose
from pdlcheck.errors import Inconclusive

__all__ = ["Shards", "whole"]


@dataclass(frozen=True)
class Result:
    """The result of one rank, in a form that can be sent to the controller.

    ``said`` holds those of ``iterations``, ``error_bound`` and ``converged`` that the result has.
    """

    nodes: NDArray[np.int64] | None
    scores: Float64
    said: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name in ("iterations", "error_bound", "converged") and name in self.said:
            return self.said[name]
        raise AttributeError(name)


@dataclass(frozen=True)
class Shards:
    """One call of the function on every rank. ``owner`` gives, for each node, the rank whose shard has it."""

    name: str
    results: list[Result]
    oracle: Oracle
    scores: Float64
    owner: NDArray[np.int64]
    facts: dict[str, str]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        parts: Sequence[Any],
        world: Any,
        oracle: Oracle,
        *,
        damping: float | None = None,
        **keywords: Any,
    ) -> Shards:
        """Call ``function(part, **keywords)`` on every rank and combine the shards.

        Args:
            function: the function under test.
            parts: the edges of each rank.
            world: where the ranks run.
            oracle: the right equation of the whole graph.
            damping: for the case in messages.
            **keywords: passed on to ``function``.

        Raises:
            AssertionError: a node is in no shard, or in two; or, without ``nodes``, the ranks hold different scores.
        """
        __tracebackhide__ = True
        name, n = name_of(function), oracle.num_nodes
        results = list(world.run(_call, function, list(parts), keywords, world_size=len(parts)))
        facts = {"case": case(world, len(parts), num_nodes=n, num_edges=len(oracle.src), damping=damping, **keywords)}
        if len(oracle.src) <= 12:
            facts["edges_held"] = "; ".join(f"rank {rank}: {_listed(part)}" for rank, part in enumerate(parts))
        scores, owner = np.full(n, np.nan), np.full(n, -1)
        for rank, result in enumerate(results):
            nodes = np.arange(n) if result.nodes is None else result.nodes
            if result.scores.shape != nodes.shape:
                raise failure(
                    f"{name}: rank {rank} returned scores of shape {result.scores.shape} for {len(nodes)} nodes",
                    **facts,
                )
            if nodes.dtype.kind not in "iu" or nodes.ndim != 1:
                raise failure(f"{name}: nodes of rank {rank} are {show(nodes.tolist())}, expected ids", **facts)
            outside = nodes[(nodes < 0) | (nodes >= n)]
            if outside.size:
                cause = "ids are counted from 1, or a range ends behind its last node" if outside.max() == n else None
                raise failure(
                    f"{name}: rank {rank} has a score for node {outside[0]}, nodes are 0 to {n - 1}",
                    likely_cause=cause,
                    **facts,
                )
            ids, counts = np.unique(nodes, return_counts=True)
            if (counts > 1).any():
                raise failure(f"{name}: node {ids[counts > 1][0]} is twice in the shard of rank {rank}", **facts)
            twice = nodes[owner[nodes] >= 0]
            if result.nodes is not None and twice.size:
                raise failure(
                    f"{name}: node {twice[0]} is in the shards of ranks {owner[twice[0]]} and {rank}", **facts
                )
            if result.nodes is None and rank:
                other = np.flatnonzero(result.scores != scores)
                if other.size:
                    node = int(other[0])
                    raise failure(
                        f"{name}: rank {rank} holds {show(float(result.scores[node]))} for node {node}, "
                        f"rank 0 {show(float(scores[node]))}",
                        likely_cause="the ranks were to hold the same bits: what one of them sums must be sent to all",
                        **facts,
                    )
                continue
            scores[nodes], owner[nodes] = result.scores, rank
        missing = np.flatnonzero(owner < 0)
        if missing.size:
            raise failure(f"{name}: node {missing[0]} is in no shard, one of {missing.size}", **facts)
        return cls(name, results, oracle, scores, owner, facts)

    def require_agreement(self) -> None:
        """Check that ``iterations``, ``error_bound`` and ``converged`` are the same on all ranks."""
        __tracebackhide__ = True
        for what in ("iterations", "error_bound", "converged"):
            said = [result.said.get(what) for result in self.results]
            odd = next((rank for rank, value in enumerate(said) if value != said[0]), None)
            if odd is not None:
                raise failure(
                    f"{self.name}: {what} is {said[odd]!r} on rank {odd}, {said[0]!r} on rank 0",
                    likely_cause="a rank decides by numbers of its own when to stop, not by those of all ranks",
                    **self.facts,
                )

    def require_iterations(self, rounds: int) -> None:
        """Raise ``Inconclusive`` if a rank stopped before ``rounds`` rounds."""
        for rank, result in enumerate(self.results):
            done = result.said.get("iterations", rounds)
            if done < rounds and self.oracle.num_nodes:
                raise Inconclusive(
                    f"{self.name}: rank {rank} stopped after {done} of {rounds} rounds; call it with a smaller tol"
                )

    def require(self, expected: Float64, allowed: float, what: str, causes: Sequence[Table]) -> None:
        """Raise, with the worst node, if the L1 distance is above ``allowed``. NaN is above every allowance."""
        __tracebackhide__ = True
        difference = np.abs(self.scores - expected)
        distance = float(difference.sum())
        if distance <= allowed:
            return
        node = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
        early = "not a number: values of other ranks are used before they have arrived, or out-weights of 0"
        raise failure(
            f"{self.name}: rank {self.owner[node]} holds {self.scores[node]:.12g} for node {node}, "
            f"{what} {expected[node]:.12g}",
            in_edges=self._in_edges(node),
            distance=f"sum |found - expected| = {distance:.3e}, allowed {allowed:.1e}",
            sum=f"{self.scores.sum():.12g}",
            likely_cause=early if np.isnan(distance) else diagnose(self.oracle, self.scores, expected, allowed, causes),
            **self.facts,
        )

    def _in_edges(self, node: int) -> str:
        sources = self.oracle.src[self.oracle.dst == node]
        shown = [f"{u} (rank {self.owner[u]}) -> {node}" for u in sources[:8]]
        return ", ".join(shown) + (f", ... ({len(sources)} in all)" if len(sources) > 8 else "") or "none"


def _call(function: Callable[..., Any], parts: list[Any], keywords: dict[str, Any]) -> Result:
    got = function(parts[dist.get_rank()], **keywords)
    scores = getattr(got, "scores", got)
    if hasattr(scores, "detach"):
        scores = scores.detach().cpu().numpy()
    nodes = getattr(got, "nodes", None)
    said = {what: getattr(got, what) for what in ("iterations", "error_bound", "converged") if hasattr(got, what)}
    if nodes is not None:
        nodes = np.array(nodes.detach().cpu().numpy() if hasattr(nodes, "detach") else nodes)
        nodes = nodes.astype(np.int64) if nodes.dtype.kind in "iu" or not nodes.size else nodes
    return Result(nodes, np.array(scores, np.float64), said)


def whole(parts: Sequence[Any]) -> Edges:
    """Return one graph with the edges of all ranks.

    Raises:
        TypeError: a part is not a graph.
        ValueError: ``parts`` is empty, or the parts have different ``num_nodes``.
    """
    if not parts or isinstance(parts, str):
        raise ValueError(f"parts must be one graph for each rank, got {parts!r}; its length is the world size")
    for rank, part in enumerate(parts):
        if not all(hasattr(part, name) for name in ("src", "dst", "num_nodes", "weights")):
            raise TypeError(
                f"parts[{rank}] must have src, dst, num_nodes and weights, got a {type(part).__qualname__}; "
                "pdlcheck.checks.graphs.Edges has them"
            )
        if part.num_nodes != parts[0].num_nodes:
            raise ValueError(
                f"parts must have the num_nodes of the whole graph, got {parts[0].num_nodes} for rank 0 and "
                f"{part.num_nodes} for rank {rank}"
            )
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
