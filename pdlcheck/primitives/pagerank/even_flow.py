"""Where rounds begin when nothing is known: with what nodes would hold if every edge carried the same.

Rank follows in-degree, roughly, and in-degrees cost no round. Where edges are many and lead anywhere this is one to
three rounds nearer to the ranks than the teleport vector; where ranks spread slowly it makes little difference.

Source: Fortunato, Boguna, Flammini and Menczer, "Approximating PageRank from in-degree" (2006).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Sums", "even_flow"]


class Sums(NamedTuple):
    """Of a vector: over all nodes, and over those that are dangling."""

    all: float
    dangling: float


def even_flow(damping: float, base: Sums, landing: Sums, in_degree: Sums) -> tuple[float, float]:
    """The numbers a and b of ``x = (1 - d) base + a in_degree + b landing``.

    With them x sums to 1, and b is d times what dangling nodes hold. Two equations for two numbers; no node is seen.

    Args:
        damping: d, in [0, 1).
        base, landing: the teleport vector and where dangling nodes lead to; each has at most the sum 1 / (1 - d).
        in_degree: edges that enter; ``all`` may be 0.

    Example:
        >>> even_flow(0.5, Sums(1.0, 0.5), Sums(1.0, 0.5), Sums(1.0, 1.0))  # one edge, to the node without a way out
        (0.2, 0.3)
    """
    given, edges = (1 - damping) * base.all, max(1.0, in_degree.all)
    share = in_degree.dangling / edges
    held = (1 - damping) * base.dangling + share * (1 - given)
    held /= 1 + damping * (share * landing.all - landing.dangling)
    return (1 - given - damping * held * landing.all) / edges, damping * held
