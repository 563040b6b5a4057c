"""Checks of PageRank over ranks: any function that ranks a graph whose edges are distributed over the ranks.

A check calls the function on every rank with that rank's part of the graph. A part has ``src``, ``dst``, ``num_nodes``
(of the whole graph) and ``weights``. The graph is the union of all parts, and :mod:`pdlcheck.checks.pagerank.scores`
defines its right scores.

The function returns an object with ``nodes``, the ids that this rank has in the end, and ``scores``, one for each of
them. Without ``nodes``, every rank must return all scores. If the object also has ``iterations``, ``error_bound`` or
``converged``, the checks compare them between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pdlcheck.checks.diagnosis import Candidate, Diagnosis, explain
from pdlcheck.checks.message import failure, takes_world
from pdlcheck.checks.pagerank.oracle import MAX_DENSE_NODES, Oracle
from pdlcheck.checks.pagerank.rank_causes import Rounds, solution_causes
from pdlcheck.checks.pagerank.scores import check_error_bound, require_tol
from pdlcheck.checks.pagerank.shards import Shards, whole
from pdlcheck.errors import Inconclusive

__all__ = ["check_halo_bytes", "check_pagerank_over_ranks", "check_pagerank_rounds"]

NUMBERS = 8  # values that a rank may send to all others in a round: the step, the dangling mass and the like


@takes_world
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
    """Check that the shards of all ranks are the PageRank of the whole graph, and that all ranks stopped together.

    Args:
        function: called as ``function(parts[rank])`` on every rank.
        parts: for each rank the edges that it holds at first; ``len(parts)`` is the world size.
        world: where the ranks run.
        damping: the d that ``function`` uses.
        personalization: the teleport vector that ``function`` uses.
        dangling: the vector that receives the rank of dangling nodes in ``function``.
        tol: the L1 error that ``function`` may leave; rounding is allowed on top. ``None`` is the ``error_bound`` that
            the function returns.

    Raises:
        AssertionError: a node is in no shard or in two; ranks stopped at different times; a score is wrong; or the true
            error exceeds ``error_bound``. For a wrong score, the message names the rank that has it, the in-edges with
            the ranks of their sources, and the likely cause.
        Inconclusive: the graph is too large for the dense solution.
    """
    __tracebackhide__ = True
    if tol is not None:
        tol = require_tol(tol)
    run = Shards.of(
        function, parts, world, Oracle.of(whole(parts), damping, personalization, dangling), damping=damping
    )
    if run.oracle.num_nodes > MAX_DENSE_NODES:
        raise Inconclusive(
            f"check_pagerank_over_ranks: {run.oracle.num_nodes} nodes are too many for the dense solution"
        )
    run.require_agreement()
    expected = run.oracle.solve()
    first = run.results[0]
    left = float(first.error_bound) if tol is None else tol
    allowed = left + run.oracle.rounding(expected, np.dtype(np.float64))
    held = np.split(np.arange(len(run.oracle.src)), np.cumsum([len(part.src) for part in parts])[:-1])
    run.require(expected, allowed, "the dense solution is", [*solution_causes(run.oracle, run.owner, held, run.scores)])
    if tol is not None and hasattr(first, "error_bound") and hasattr(first, "converged"):

        def assembled(graph: Any) -> Any:
            return SimpleNamespace(scores=run.scores, error_bound=first.error_bound, converged=first.converged)

        assembled.__name__ = run.name
        vectors = {"personalization": personalization, "dangling": dangling}
        check_error_bound(assembled, whole(parts), damping=damping, tol=tol, **vectors)


@takes_world
def check_pagerank_rounds(
    function: Callable[..., Any],
    parts: Sequence[Any],
    world: Any,
    *,
    rounds: int = 3,
    damping: float = 0.85,
) -> None:
    """Check that ``rounds`` rounds from the uniform vector give the scores of as many serial rounds, up to rounding.

    This check is for power iterations, in which a round reads only the scores of the round before. An exchange that is
    one round late converges to the same scores, but more slowly than its error bound claims. This check detects it.

    Args:
        function: called as ``function(parts[rank], max_iter=rounds)``; must not stop earlier.
        parts: as in :func:`check_pagerank_over_ranks`.
        world: where the ranks run.
        damping: the d that ``function`` uses.
        rounds: the number of rounds to compare.

    Raises:
        AssertionError: a score is wrong; names the rank, the node and the likely cause.
        Inconclusive: a rank stopped before ``rounds`` rounds.
    """
    __tracebackhide__ = True
    oracle = Oracle.of(whole(parts), damping)
    run = Shards.of(function, parts, world, oracle, damping=damping, max_iter=rounds)
    run.require_iterations(rounds)
    serial = Rounds.of(oracle, run.owner, rounds)
    allowed = oracle.rounding(serial.right[-1], np.dtype(np.float64))
    run.require(serial.right[-1], allowed, f"{rounds} serial rounds give", [*serial.causes(run.scores, allowed)])


@takes_world
def check_halo_bytes(
    function: Callable[..., Any], parts: Sequence[Any], world: Any, *, itemsize: int = 8, numbers: int = NUMBERS
) -> dict[tuple[int, int], int]:
    """Check that one round sends each score that another rank needs exactly once.

    A rank needs the score of every distinct source of its nodes' in-edges. The traffic of a round is the difference
    between a run of two rounds and a run of one. Messages and all_to_alls must carry exactly the cut of the partition,
    ``itemsize`` bytes a value. All other operations of a rank may carry at most ``2 * (world_size - 1) * numbers``
    float64 values.

    Args:
        function: called as ``function(parts[rank], max_iter=1)``, then with 2; must not stop earlier. Its results must
            have ``nodes``.
        parts: as in :func:`check_pagerank_over_ranks`.
        world: a world that counts ``traffic``: ``sim``.
        itemsize: the bytes of one score.
        numbers: how many values a rank may send to all others in a round in other operations.

    Returns:
        ``{(src, dst): bytes}`` of one round, without pairs that exchange nothing.

    Raises:
        AssertionError: names the two ranks, the bytes found and the nodes whose scores are needed.
        Inconclusive: a rank stopped too early.
        Unsupported: ``world`` counts no traffic.
    """
    __tracebackhide__ = True
    oracle = Oracle.of(whole(parts), 0.5)
    flows, run = [], None
    for rounds in (1, 2):
        run = Shards.of(function, parts, world, oracle, max_iter=rounds)
        run.require_iterations(rounds)
        flows.append(world.traffic.flows)
    assert run is not None
    if run.results[0].nodes is None:
        raise ValueError(f"check_halo_bytes needs results with nodes, {run.name} gave all scores to every rank")
    world_size = len(parts)
    cut: dict[tuple[int, int], int] = {}
    found: dict[int, int] = {}
    live = oracle.scaled > 0
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
                    **run.facts,
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
                **run.facts,
            )
    return {pair: nbytes for pair, nbytes in cut.items() if nbytes}


def _moved(flows: list[dict[tuple[int, int, str], tuple[int, int]]], one: int, other: int) -> tuple[int, int]:
    """Return the additional bytes of the second run: in messages and all_to_alls, and in other operations."""
    moved = {"halo": 0, "rest": 0}
    for sign, flow in zip((-1, 1), flows, strict=True):
        for (src, dst, op), (_, nbytes) in flow.items():
            if (src, dst) == (one, other):
                moved["halo" if op in ("send", "all_to_all") else "rest"] += sign * nbytes
    return moved["halo"], moved["rest"]


def _bytes_cause(moved: int, nodes: int, edges: int, owned: int) -> Diagnosis:
    return explain(
        moved,
        [
            Candidate.when("a value is sent for each edge, not for each distinct source", moved == edges),
            Candidate.when("all scores of the rank are sent, needed or not", moved == owned),
        ],
        hints=[Candidate.when("values are left out" if moved < nodes else "values are sent that no edge needs", True)],
    )
