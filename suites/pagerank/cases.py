"""The versions that several suites of PageRank run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import strategies as st

from pdlcheck.primitives.pagerank import pagerank_v0, pagerank_v1, pagerank_v2, pagerank_v3

DAMPING = st.sampled_from([0.85, 0.0, 0.3, 0.95])
VERSIONS = {"pagerank_v1": pagerank_v1, "pagerank_v2": pagerank_v2, "pagerank_v3": pagerank_v3}
NEEDS_DGL = pytest.mark.skipif(
    find_spec("dgl") is None, reason="pagerank_v0 needs DGL, which is missing: pip install 'pdlcheck[dgl]'"
)


def import_dgl():
    """Import DGL as pagerank_v0 does, without a file in the home folder, which may be missing."""
    from pdlcheck.primitives.pagerank.dgl_v0 import dgl

    return dgl


if find_spec("dgl") is not None:
    VERSIONS["pagerank_v0"] = pagerank_v0


def cases(*names: str) -> pytest.MarkDecorator:
    """Parametrize ``version`` over primitives, so that each test covers one of them."""
    marks = {"pagerank_v0": [NEEDS_DGL]}
    params = [pytest.param(n, marks=[pytest.mark.verifies(n), *marks.get(n, [])]) for n in names]
    return pytest.mark.parametrize("version", params)


each_version = cases("pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3")
each_primitive = cases("pagerank_v0", "pagerank_v1", "pagerank_v2", "pagerank_v3", "pagerank", "pagerank_reference")


def left_over(version: str, damping: float) -> float:
    """Return the L1 error that the primitive may have: 2 d**200 after 200 rounds, the tolerance for the solver."""
    return {"pagerank": 1e-8, "pagerank_reference": 0.0}.get(version, 2 * damping**200)
