"""Small graphs and questions drawn by number: the named corner cases first, then random ones with the same traits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdlcheck.checks.graphs import CORNERS, Edges
from ranking.peer import Question

__all__ = ["Case", "draw"]

SIZES = [1, 2, 3, 4, 6, 10, 20, 40, 60]  # the only graph without nodes is a corner case
DAMPING = [0.85, 0.85, 0.85, 0.5, 0.95, 0.0]


@dataclass(frozen=True, eq=False)
class Case:
    """One graph and one question about it."""

    edges: Edges
    question: Question
    name: str = ""

    def __repr__(self) -> str:
        question = self.question
        vectors = {"personalization": question.personalization, "dangling": question.dangling}
        told = [f"{name}={vector.tolist()}" for name, vector in vectors.items() if vector is not None]
        return ", ".join([repr(self.edges), f"damping={question.damping}", *told])


def draw(number: int, seed: int = 0) -> Case:
    """Return case ``number`` of a run with ``seed``, which depends on these two numbers only.

    Dangling and isolated nodes, repeated edges, self-loops, several parts, no edges, no nodes, weights with zeros among
    them, weights over twelve orders of magnitude, nodes whose weights are all 0, personalization with zeros, and
    dangling weights: each trait occurs with its own probability.
    """
    if number < len(CORNERS):
        name = list(CORNERS)[number]
        return Case(CORNERS[name], Question(), name)
    rng = np.random.default_rng([seed, number])
    n = int(rng.choice(SIZES))
    src, dst = _pairs(rng, n)
    weights = _weights(rng, src, n) if rng.random() < 0.5 else None
    damping = float(rng.choice(DAMPING))
    personalization = _vector(rng, n) if rng.random() < 0.35 else None
    dangling = _vector(rng, n) if rng.random() < 0.25 else None
    return Case(Edges(src, dst, n, weights), Question(damping, personalization, dangling))


def _pairs(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    count = 0 if rng.random() < 0.03 else int(rng.integers(1, 1 + n * int(rng.integers(1, 5))))
    src, dst = rng.integers(0, n, (2, count))
    if n > 1 and rng.random() < 0.3:  # two parts without an edge between them
        cut = int(rng.integers(1, n))
        dst = np.where(src < cut, dst % cut, cut + dst % (n - cut))
    if rng.random() < 0.4:
        loops = rng.random(count) < 0.3
        dst = np.where(loops, src, dst)
    keep = np.ones(count, bool)
    if rng.random() < 0.5:  # nodes without an out-edge
        keep &= ~(rng.random(n) < rng.random())[src]
    src, dst = src[keep], dst[keep]
    if rng.random() < 0.5 and len(src):
        again = rng.integers(0, len(src), int(rng.integers(1, 4)))
        return np.concatenate([src, src[again]]), np.concatenate([dst, dst[again]])
    first = np.sort(np.unique(src * n + dst, return_index=True)[1])
    return src[first], dst[first]


def _weights(rng: np.random.Generator, src: np.ndarray, n: int) -> np.ndarray:
    kind = int(rng.integers(3))
    if kind == 0:
        return rng.integers(0, 17, len(src)) / 4
    weights = rng.random(len(src)) if kind == 1 else 10.0 ** rng.uniform(-6, 6, len(src))
    if rng.random() < 0.3:  # all weights of some nodes are 0
        weights[(rng.random(n) < 0.3)[src]] = 0
    return weights


def _vector(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw a vector of any sum; half of the time it contains zeros."""
    vector = rng.random(n) + 0.01
    if rng.random() < 0.5:
        vector[rng.random(n) < 0.6] = 0
    if not vector.any():
        vector[int(rng.integers(n))] = 3.0
    return vector
