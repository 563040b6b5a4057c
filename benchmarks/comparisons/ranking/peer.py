"""The description of a peer: the functions that build its graph and solve it, and the claims of its documentation."""

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
    """The arguments of one PageRank; the vectors have one number per node, with any sum above 0."""

    damping: float = 0.85
    personalization: Any = None
    dangling: Any = None


@dataclass(frozen=True, eq=False)
class Peer:
    """One solver.

    Args:
        name: name of the package, and of the algorithm if it has several.
        module: the module that must be importable.
        build: edges -> the package's graph; timed as build.
        solve: graph, question, setting -> the package's answer; timed as solve. The setting None is the default.
        read: edges, answer -> one score per node; not timed.
        first: wanted error, number of nodes -> the setting at which a search for it begins; None: there is no setting.
        strict: the setting for the smallest error that the package supports on small graphs.
        claims: the features, as of :func:`features`, that its documentation claims beyond a plain directed graph.
        guarantees: the setting is a bound on the error, so no search is needed.
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
    """Return the features that a case needs beyond a plain directed graph."""
    found = {
        "weights": edges.weights is not None,
        "personalization": question.personalization is not None,
        "dangling weights": question.dangling is not None,
    }
    return frozenset(name for name, there in found.items() if there)


def as_scores(edges: Edges, answer: Any) -> np.ndarray:
    """Return a mapping from node to score as an array of scores."""
    return np.array([answer[i] for i in range(edges.num_nodes)], np.float64)
