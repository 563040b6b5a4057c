"""The scores that typical mistakes of PageRank over ranks lead to, for the likely cause of wrong scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdlcheck.checks.pagerank.oracle import Float64, Oracle

__all__ = ["Rounds", "solution_cause"]

MAX_TRIED = 200  # each costs a dense solution
CLOSE = 1e-7  # scores with a larger L1 distance are different

Owners = NDArray[np.int64]


def solution_cause(oracle: Oracle, owner: Owners, held: Sequence[Owners], found: Float64) -> str | None:
    """Return the known mistake that leads to the scores ``found``, or ``None``.

    Args:
        oracle: the right equation.
        owner: the rank that has each node in the end.
        held: for each rank the numbers of the edges that it held at first.
        found: the scores of all ranks.
    """
    right = oracle.solve()
    for cause, scores in _wrong_solutions(oracle, owner, held):
        if np.abs(scores - found).sum() <= CLOSE < np.abs(right - found).sum():
            return f"{cause}: the scores are exactly those"
    return None


def _wrong_solutions(oracle: Oracle, owner: Owners, held: Sequence[Owners]) -> Iterator[tuple[str, Float64]]:
    matrix = oracle.matrix()
    lost = oracle.out == 0
    apart = owner[:, None] != owner[None, :]
    lands = np.where(lost[None, :], oracle.landing[:, None], 0.0)
    base = (1 - oracle.damping) * oracle.teleport

    def solve(moved: Float64, added: Float64 | None = None) -> Float64:
        system = np.eye(oracle.num_nodes) - oracle.damping * moved
        return np.asarray(np.linalg.solve(system, base if added is None else base + oracle.damping * added))

    yield "the dangling mass of other ranks is left out", solve(matrix + np.where(apart, 0.0, lands))
    yield "edges from nodes of other ranks are left out", solve(np.where(apart, 0.0, matrix) + lands)
    frozen = np.where(apart, matrix, 0.0) @ oracle.teleport
    yield (
        "scores of other ranks are those of the first round, never sent again",
        solve(np.where(apart, 0.0, matrix) + lands, frozen),
    )
    yield "edge weights ignored", replace(oracle, weights=np.ones(len(oracle.src))).solve()
    alone = [
        replace(oracle, src=oracle.src[here], dst=oracle.dst[here], weights=oracle.weights[here]).solve()
        for here in held
    ]
    yield "each rank ranks the edges that it holds alone, and the mean is taken", np.mean(alone, axis=0)
    tried = 0
    for rank in np.unique(owner):
        for node in np.flatnonzero((matrix[owner == rank] > 0).any(axis=0) & (owner != rank)):
            tried += 1
            if tried > MAX_TRIED:
                return
            without = matrix.copy()
            without[owner == rank, node] = 0
            yield f"the score of node {node} (rank {owner[node]}) never reaches rank {rank}", solve(without + lands)


@dataclass(frozen=True)
class Rounds:
    """The scores of serial rounds from the uniform vector.

    Args:
        oracle: the right equation.
        owner: the rank that has each node.
        right: the scores after 0, 1, ... rounds.
        late: the scores after the last round if one exchange is a round late, by the text of that mistake.
    """

    oracle: Oracle
    owner: Owners
    right: list[Float64]
    late: dict[str, Float64]

    @classmethod
    def of(cls, oracle: Oracle, owner: Owners, rounds: int) -> Rounds:
        """Compute ``rounds`` serial rounds, and the same number with each late exchange."""
        matrix, lost = oracle.matrix(), oracle.out == 0
        apart = owner[:, None] != owner[None, :]
        far, near = np.where(apart, matrix, 0.0), np.where(apart, 0.0, matrix)
        start = np.full(oracle.num_nodes, 1 / max(oracle.num_nodes, 1))

        def after(late_far: bool, late_mass: bool) -> list[Float64]:
            seen = [start]
            for k in range(rounds):
                now, before = seen[k], seen[max(k - 1, 0)]
                arrived = near @ now + far @ (before if late_far else now)
                arrived = arrived + (before if late_mass else now)[lost].sum() * oracle.landing
                seen.append(np.asarray((1 - oracle.damping) * oracle.teleport + oracle.damping * arrived))
            return seen

        late = {
            "scores of other ranks are those of the round before: they are used one round late": after(True, False)[-1],
            "the dangling mass is that of the round before: it is used one round late": after(False, True)[-1],
        }
        return cls(oracle, owner, after(False, False), late)

    def cause(self, found: Float64, allowed: float) -> str | None:
        """Return the mistake that explains the scores ``found`` after the last round, or ``None``."""
        right = self.right[-1]
        close = max(allowed, 1e-12)
        for cause, scores in self.late.items():
            if np.abs(scores - found).sum() <= close < np.abs(scores - right).sum():
                return f"{cause}: the scores are exactly those"
        for rank in np.unique(self.owner):
            here = self.owner == rank
            if np.abs(found - right)[here].sum() <= close:
                continue
            for k, scores in enumerate(self.right[:-1]):
                if np.abs(scores - found)[here].sum() <= close:
                    return f"rank {rank} stopped early: its scores are those after {k} of {len(self.right) - 1} rounds"
        return None
