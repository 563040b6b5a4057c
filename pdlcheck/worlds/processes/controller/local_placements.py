"""The placements of ranks on this machine, by backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdlcheck.worlds.processes.controller.local import LocalPlacement

if TYPE_CHECKING:
    from pdlcheck.worlds.processes.controller.forkserver import ForkServer
    from pdlcheck.worlds.processes.controller.placement import Placement

__all__ = ["local_placement"]


def local_placement(backend: str, server: ForkServer) -> Placement:
    """Return the placement of ranks on this machine that will use a backend of ``torch.distributed``."""
    if backend == "mpi":
        from pdlcheck.worlds.processes.controller.mpi_placement import MpiPlacement  # only worlds of MPI need it

        return MpiPlacement(server)
    return LocalPlacement(server)
