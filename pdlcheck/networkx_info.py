"""The description of the backend ``pdlcheck`` that networkx reads at its own import; this module imports little."""

from __future__ import annotations

from typing import Any

from pdlcheck import __version__

__all__ = ["backend_info"]

PAGERANK = """\
``tol`` bounds the true L1 error, not the last step. Where ``max_iter`` rounds or float64 do not reach it, an
error of ``len(G) * tol * max(1, alpha / (1 - alpha))`` is enough; networkx's own rule promises no less from
``alpha`` 0.5 on.
``alpha`` must be in [0, 1). Negative weights and vectors are a ValueError."""


def backend_info() -> dict[str, Any]:
    """Return the description of the backend; networkx calls this entry point ``networkx.backend_info``."""
    return {
        "backend_name": "pdlcheck",
        "project": "pdlcheck",
        "package": "pdlcheck",
        "version": __version__,
        "short_summary": "PageRank on all cores, with a bound on its true error.",
        "functions": {"google_matrix": {}, "pagerank": {"additional_docs": PAGERANK}},
    }
