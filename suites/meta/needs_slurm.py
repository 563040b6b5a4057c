"""The Slurm cluster of ``ci/verdicts/slurm.py`` for a test, or a skip with the install command."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager

import pytest

from .clone import ROOT

__all__ = ["slurm_cluster"]

_FILE = ROOT / "ci" / "verdicts" / "slurm.py"


def slurm_cluster(nodes: int) -> AbstractContextManager[dict[str, str]]:
    """Return a cluster whose nodes are all this machine; entering it gives the variables that ``srun`` needs."""
    if not _FILE.exists():
        pytest.skip("needs ci/verdicts/slurm.py: run the suites in a clone of the repository")
    spec = importlib.util.spec_from_file_location("_slurm", _FILE)
    assert spec is not None
    assert spec.loader is not None
    slurm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slurm)
    if slurm.missing():
        pytest.skip(slurm.missing())
    found: AbstractContextManager[dict[str, str]] = slurm.slurm_cluster(nodes)
    return found
