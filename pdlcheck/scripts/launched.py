"""``pdlcheck run`` under torchrun, mpiexec or srun: rank 0 of the launch reports, and every process runs its rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.exit_codes import FAILED
from pdlcheck.launch.environment import Launch
from pdlcheck.launch.nesting import leave_mpi_environment
from pdlcheck.worlds.processes.controller import forkserver

__all__ = ["run_launched"]

_PRELOAD = ("pdlcheck.scripts.on_rank",)


def run_launched(own: Launch, seed: int, lead: Callable[[Any], int]) -> int:
    """Run this process's part of a launch, and return the exit code of rank 0.

    Args:
        own: the place of this process in the launch.
        seed: the seed of the ranks.
        lead: called on rank 0 with the placement of the ranks; returns the exit code.
    """
    leave_mpi_environment()
    forkserver.start(preload=_PRELOAD, seed=seed, rank=own.rank)
    if own.rank:
        from pdlcheck.worlds.launched.agent import serve

        return serve(own)
    from pdlcheck.worlds.launched.placement import LaunchedPlacement

    placement, code = LaunchedPlacement(own), FAILED
    try:
        code = lead(placement)
    finally:
        placement.close(code)
    return code
