"""A marker that skips tests if MPI ranks cannot start; its reason has the install command."""

from __future__ import annotations

import pytest

from pdlcheck.worlds.mpi.job import CURE, why_not

__all__ = ["needs_mpi"]

_WHY = why_not()

needs_mpi = pytest.mark.skipif(bool(_WHY), reason=f"{_WHY}: {CURE}")
