"""Makes every MPI group of this process a watched one."""

from __future__ import annotations

import torch.distributed as dist

from pdlcheck.worlds.mpi.group import MpiGroup, wrap_groups
from pdlcheck.worlds.processes.announce import Announcer, GroupEngine
from pdlcheck.worlds.processes.watched_groups import meet_in_new_group, numbered
from pdlcheck.worlds.watch import WatchedGroup

__all__ = ["watch_mpi"]


def watch_mpi(announcer: Announcer) -> None:
    """From now on, MPI groups announce what they are asked to do."""
    meet_in_new_group(announcer)

    class WatchedMpi(WatchedGroup):
        """One rank's end of an MPI group whose calls are compared before they are made."""

        def __init__(self, real: MpiGroup) -> None:
            engine = GroupEngine(announcer, real)
            super().__init__(real.group_name, real.rank(), real.members, engine, real.getBackendName())
            self._real = real

        def shutdown(self) -> None:
            self._real.shutdown()

    def watched(real: MpiGroup) -> dist.ProcessGroup:
        group = WatchedMpi(real)
        numbered(group)
        return group

    wrap_groups(watched)
