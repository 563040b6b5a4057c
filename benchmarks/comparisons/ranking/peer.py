"""What every peer is: how to build its graph, how to ask it, and what its documentation claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from pdlcheck.checks.graphs import Edges

__all__ = ["INSTALL", "Peer", "Question", "Setting", "as_scores", "features"]

INSTALL = "pip install -c constraints.txt -e '.[peers]'"
Setting = float | int | None  # a tolerance, a number of iterations, or the package's default


@dataclass(frozen=True)
class Question:
    """The arguments of one PageRank; the vectors are one number per node, of any sum above 0."""

    damping: float = 0.85
    personalization: Any = None
    dangling: Any = None


@dataclass(frozen=True, eq=False)
class Peer:
    """One solver.

    Args:
        name: of the package, and of the algorithm where it has several.
        module: that must be importable.
        build: edges -> the package's graph; this is timed as build.
        solve: graph, question, setting -> the package's answer, timed as solve. The setting None is the default.
        read: edges, answer -> one score per node, not timed.
        first: error wanted, number of nodes -> the setting at which a search for it begins; None: there is no setting.
        strict: the setting for the smallest error that the package can be asked for on small graphs.
        claims: the features, as of :func:`features`, that its documentation claims beyond a plain directed graph.
        guarantees: the setting is a bound on the error, so there is nothing to search for.
    """

    name: str
    module: str
    build: Callable[[Edges], Any]
    solve: Callable[[Any, Question, Setting], Any]
    read: Callable[[Edges, Any], Any] = lambda edges, answer: np.asarray(answer)
    first: Callable[[float, int], Setting] = lambda error, num_nodes: error
    strict: Setting = None
    claims: frozenset[str] = field(default_factory=frozenset)
    guarantees: bool = False

    @property
    def installed(self) -> bool:
        return find_spec(self.module) is not None


def features(edges: Edges, question: Question) -> frozenset[str]:
    """What a case needs beyond a plain directed graph."""
    found = {
        "weights": edges.weights is not None,
        "personalization": question.personalization is not None,
        "dangling weights": question.dangling is not None,
    }
    return frozenset(name for name, there in found.items() if there)


def as_scores(edges: Edges, answer: Any) -> np.ndarray:
    """A mapping from node to score as one score per node."""
    return np.array([answer[i] for i in range(edges.num_nodes)], np.float64)
