"""What networkx is told about its backend ``pdlcheck`` when networkx itself is imported: so this imports nothing."""

from __future__ import annotations

from typing import Any

from pdlcheck import __version__

__all__ = ["backend_info"]

PAGERANK = """\
``tol`` bounds the true L1 error, not the last step. Where ``max_iter`` rounds or float64 do not reach it, an
error of ``len(G) * tol * alpha / (1 - alpha)`` is enough: this is what networkx's own rule promises.
``alpha`` must be in [0, 1). Negative weights and vectors are a ValueError."""


def backend_info() -> dict[str, Any]:
    """The entry point ``networkx.backend_info``."""
    return {
        "backend_name": "pdlcheck",
        "project": "pdlcheck",
        "package": "pdlcheck",
        "version": __version__,
        "short_summary": "PageRank on all cores, with a bound on its true error.",
        "functions": {"google_matrix": {}, "pagerank": {"additional_docs": PAGERANK}},
    }
