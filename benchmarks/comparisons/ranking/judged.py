"""The verdict on a peer's answer to one case, by the dense float64 solution."""

from __future__ import annotations

import re
import warnings
from typing import Any, NamedTuple

import numpy as np

from pdlcheck.checks.diagnosis import Diagnosis
from pdlcheck.checks.pagerank.oracle import Oracle, diagnose
from ranking.drawn import Case
from ranking.ours import rounds
from ranking.peer import Peer, Setting, features

__all__ = ["AGREES", "LIMIT", "NOT_SUPPORTED", "Verdict", "judge"]

AGREES, NOT_SUPPORTED = "agrees", "not supported"
LIMIT = 1e-6  # L1 error that a peer may have at its strictest setting, which asks for far less


class Verdict(NamedTuple):
    """The ``kind`` of an answer, and its L1 error if it has one."""

    kind: str
    error: float | None = None


def judge(peer: Peer, case: Case, setting: Setting) -> Verdict:
    """Judge the answer of ``peer`` at ``setting``; ours must keep the bound that it states itself."""
    edges, question = case.edges, case.question
    if features(edges, question) - peer.claims:
        return Verdict(NOT_SUPPORTED)
    oracle = Oracle.of(edges, question.damping, question.personalization, question.dangling)
    expected = oracle.solve()
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            answer = peer.solve(peer.build(edges), question, setting)
            scores = np.asarray(peer.read(edges, answer), np.float64)
    except Exception as error:
        kind = type(error).__name__
        return Verdict("does not converge" if "onverge" in kind else f"no answer: {kind}")
    if scores.shape != expected.shape:
        return Verdict(f"{scores.size} scores for {edges.num_nodes} nodes" if edges.num_nodes < 2 else "wrong shape")
    if not np.isfinite(scores).all():
        return Verdict("NaN or infinity")
    if not getattr(answer, "converged", True):
        return Verdict("does not converge")
    error = float(np.abs(scores - expected).sum())
    allowed = _allowed(peer, answer, oracle, expected)
    if error <= allowed:
        return Verdict(AGREES, error)
    return Verdict(_kind(diagnose(oracle, scores, expected, allowed)), error)


def _allowed(peer: Peer, answer: Any, oracle: Oracle, expected: np.ndarray) -> float:
    if peer.name.startswith("pdlcheck"):
        known = (oracle.num_nodes + 8) * 2.3e-16 / (1 - oracle.damping)  # error of the dense solution itself
        if hasattr(answer, "error_bound"):
            return float(answer.error_bound) + known
        return 2 * oracle.damping ** rounds(oracle.damping) + oracle.rounding(expected, np.dtype(np.float64)) + known
    return LIMIT


def _kind(diagnosis: Diagnosis) -> str:
    """Return the likely causes, or else what is seen of the scores, without the numbers of this case."""
    texts = diagnosis.fits or diagnosis.hints
    if not texts:
        return "wrong, for no known cause"
    cause = ", or ".join(text.partition(":")[0] for text in texts[:3])
    return "wrong: " + re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", cause)
