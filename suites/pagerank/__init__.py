"""Tests of PageRank: the solver, its published versions, its kernels, and PageRank over ranks."""

import pytest

pytest.importorskip("numba", reason="PageRank needs numba: pip install 'pdlcheck[pagerank]'")
