"""A quick test for variables of torchrun, mpiexec or srun in the environment of this process."""

from __future__ import annotations

from collections.abc import Mapping

from pdlcheck.launch.nesting import INSIDE

__all__ = ["RANK_VARIABLES", "has_traces"]

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # in the order that `environment` tries


def has_traces(environment: Mapping[str, str]) -> bool:
    """Return whether ``environment.launch_of`` may find a launch; if False, it finds none.

    Example:
        >>> has_traces({"RANK": "0"}), has_traces({"HOME": "/root"})
        (True, False)
    """
    return INSIDE not in environment and any(name in environment for name in RANK_VARIABLES)
