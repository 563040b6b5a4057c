"""The commands that start the processes of a run: Python itself, or one of the launchers."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["launched"]

_TWO_HOSTS = Path(__file__).parents[2] / "examples" / "ci" / "two_hosts.py"


def launched(world: str, size: int) -> list[str]:
    """Return the first words of a command that runs a Python module once, or in ``size`` launched processes."""
    match world:
        case "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        case "mpiexec":
            from pdlcheck.worlds.mpi.job import find_mpiexec  # this import loads torch

            command = [find_mpiexec() or "mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
            return [*command, sys.executable]
        case "two-hosts":
            return [sys.executable, str(_TWO_HOSTS), str(max(size, 2))]
    return [sys.executable]
