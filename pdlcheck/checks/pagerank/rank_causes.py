"""The scores that typical mistakes of PageRank over ranks lead to, for the likely cause of wrong scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdlcheck.checks.diagnosis import Candidate
from pdlcheck.checks.pagerank.oracle import Float64, Oracle, Table

__all__ = ["Rounds", "solution_causes"]

MAX_TRIED = 200  # each costs a dense solution
CLOSE = 1e-7  # scores with a larger L1 distance are different

Owners = NDArray[np.int64]


def solution_causes(oracle: Oracle, owner: Owners, held: Sequence[Owners], found: Float64) -> Iterator[Table]:
    """Yield the tables of the known mistakes that lead to the scores ``found``.

    Args:
        oracle: the right equation.
        owner: the rank that has each node in the end.
        held: for each rank the numbers of the edges that it held at first.
        found: the scores of all ranks.
    """
    right = oracle.solve()
    for solutions in (_wrong_solutions(oracle, owner, held), _unsent_scores(oracle, owner)):
        yield (
            Candidate.when(
                f"{cause}: the scores are exactly those",
                bool(np.abs(scores - found).sum() <= CLOSE < np.abs(right - found).sum()),
            )
            for cause, scores in solutions
        )


def _solve(oracle: Oracle, moved: Float64, added: Float64 | None = None) -> Float64:
    base = (1 - oracle.damping) * oracle.teleport
    system = np.eye(oracle.num_nodes) - oracle.damping * moved
    return np.asarray(np.linalg.solve(system, base if added is None else base + oracle.damping * added))


def _wrong_solutions(oracle: Oracle, owner: Owners, held: Sequence[Owners]) -> Iterator[tuple[str, Float64]]:
    matrix = oracle.matrix()
    lost = oracle.out == 0
    apart = owner[:, None] != owner[None, :]
    lands = np.where(lost[None, :], oracle.landing[:, None], 0.0)
    solve = partial(_solve, oracle)
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


def _unsent_scores(oracle: Oracle, owner: Owners) -> Iterator[tuple[str, Float64]]:
    """Yield the scores without one value that a rank needs from another."""
    matrix = oracle.matrix()
    lands = np.where((oracle.out == 0)[None, :], oracle.landing[:, None], 0.0)
    tried = 0
    for rank in np.unique(owner):
        for node in np.flatnonzero((matrix[owner == rank] > 0).any(axis=0) & (owner != rank)):
            tried += 1
            if tried > MAX_TRIED:
                return
            without = matrix.copy()
            without[owner == rank, node] = 0
            scores = _solve(oracle, without + lands)
            yield f"the score of node {node} (rank {owner[node]}) never reaches rank {rank}", scores


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

    def causes(self, found: Float64, allowed: float) -> Iterator[Table]:
        """Yield the tables of the mistakes that explain the scores ``found`` after the last round."""
        right = self.right[-1]
        close = max(allowed, 1e-12)
        yield (
            Candidate.when(
                f"{cause}: the scores are exactly those",
                bool(np.abs(scores - found).sum() <= close < np.abs(scores - right).sum()),
            )
            for cause, scores in self.late.items()
        )
        yield self._early_ranks(found, close)

    def _early_ranks(self, found: Float64, close: float) -> Iterator[Candidate[Float64]]:
        rounds = len(self.right) - 1
        for rank in np.unique(self.owner):
            here = self.owner == rank
            if np.abs(found - self.right[-1])[here].sum() <= close:
                continue
            for k, scores in enumerate(self.right[:-1]):
                yield Candidate.when(
                    f"rank {rank} stopped early: its scores are those after {k} of {rounds} rounds",
                    bool(np.abs(scores - found)[here].sum() <= close),
                )
