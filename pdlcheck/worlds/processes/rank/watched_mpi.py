"""The watched class that wraps every MPI group of this process."""

from __future__ import annotations

import torch.distributed as dist

from pdlcheck.worlds.mpi.group import MpiGroup, wrap_groups
from pdlcheck.worlds.observe import WatchedGroup
from pdlcheck.worlds.processes.rank.coordinator import GroupEngine, OperationCoordinator
from pdlcheck.worlds.processes.rank.watched_groups import being_made, meet_in_new_group, numbered

__all__ = ["watch_mpi"]


def watch_mpi(coordinator: OperationCoordinator) -> None:
    """Make all MPI groups that are created from now on announce their operations."""
    meet_in_new_group(coordinator)

    class WatchedMpi(WatchedGroup):
        """One rank's end of an MPI group whose calls are compared before they are made."""

        def __init__(self, real: MpiGroup) -> None:
            engine = GroupEngine(coordinator, real)
            made = being_made[-1]
            super().__init__(made.name, real.rank(), made.members, engine, real.getBackendName(), made.among)
            self._real = real

        def shutdown(self) -> None:
            self._real.shutdown()

    def watched(real: MpiGroup) -> dist.ProcessGroup:
        group = WatchedMpi(real)
        numbered(group)
        return group

    wrap_groups(watched)
