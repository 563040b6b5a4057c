"""What keeps the processes that a launched process starts from joining the launch. Does not import torch."""

from __future__ import annotations

import os

__all__ = ["INSIDE", "leave_mpi_environment"]

INSIDE = "PDLCHECK_INSIDE"  # set in ranks, and in the processes of a launch that form one session

# MPI joins the run of mpiexec by these variables. Neither a launched process nor its ranks are such members.
_OF_MPI = ("PMIX_", "PMI_")


def leave_mpi_environment() -> None:
    """Keep this process, and those that it starts, from joining MPI as members of the run of mpiexec."""
    for name in [name for name in os.environ if name.startswith(_OF_MPI)]:
        del os.environ[name]
