"""PageRank: the solver, its published versions, its kernels, and over ranks."""

import pytest

pytest.importorskip("numba", reason="PageRank needs numba: pip install 'pdlcheck[pagerank]'")
