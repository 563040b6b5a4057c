"""The placement of ranks that are forked on this machine and take the places of one run of mpiexec."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pdlcheck.worlds.mpi.job import Job, home
from pdlcheck.worlds.processes.controller.forkserver import ForkServer
from pdlcheck.worlds.processes.controller.local import LocalPlacement, LocalProcess

__all__ = ["MpiPlacement"]

_PRELOAD = "pdlcheck.worlds.mpi.preload"


class MpiPlacement:
    """A ``Placement`` with one mpiexec for each pool, because MPI does not survive the loss of a rank."""

    host = LocalPlacement.host
    hosts_store = False
    shares_memory = True

    def __init__(self, server: ForkServer) -> None:
        server.preload([_PRELOAD])
        self._local = LocalPlacement(server)
        self.environment: Mapping[str, str] = server.environment
        self._job: SharedJob | None = None

    def check(self, world_size: int) -> None:
        """Accept every world size."""

    def ranks_here(self, world_size: int) -> int:
        """Return ``world_size``, because all ranks run on the controller's machine."""
        return world_size

    def place(self, rank: int, world_size: int, fds: Sequence[int]) -> MpiProcess:
        """Start a rank; rank 0 first starts the mpiexec of its pool."""
        if rank == 0:
            self._job = SharedJob(world_size)
        assert self._job is not None
        with self._job:
            return MpiProcess(self._job, self._local.place(rank, world_size, fds))

    def variables(self, rank: int, world_size: int) -> Mapping[str, str]:
        """Return the rank's environment variables, including those of its place in the job."""
        assert self._job is not None
        return {**self._local.variables(rank, world_size), **home(), **self._job.variables(rank)}

    def threads(self, rank: int, world_size: int) -> int:
        """Return the number of threads that a rank may use."""
        return self._local.threads(rank, world_size)


class SharedJob:
    """A job that ends with its last user: a process that has a place in it, or one that is about to start."""

    def __init__(self, world_size: int) -> None:
        self._job = Job(world_size)
        self._users = 0
        self._ranks: list[LocalProcess] = []
        self._job.on_loss(self._end_ranks)

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return the variables by which MPI recognises a rank."""
        return self._job.variables[rank]

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *args: object) -> None:
        self.leave()

    @property
    def last_words(self) -> str:
        """Return why the ranks of the job were killed; empty while mpiexec runs."""
        return "mpiexec has ended, and MPI cannot do without it\n" if self._job.is_lost else ""

    def add(self, rank: LocalProcess) -> None:
        """Add a rank that takes its place in the job."""
        self._ranks.append(rank)
        self.enter()

    def enter(self) -> None:
        """Count one more user."""
        self._users += 1

    def leave(self) -> None:
        """Count one user less; end the job after the last one."""
        self._users -= 1
        if not self._users:
            self._job.end()

    def _end_ranks(self) -> None:
        """Kill the ranks of the job.

        Otherwise they would notice the loss only at their next operation, in the middle of a test.
        """
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)


class MpiProcess:
    """A ``RankProcess``: a local process that has a place in a job."""

    def __init__(self, job: SharedJob, process: LocalProcess) -> None:
        self._job = job
        self._process = process
        self.connection: Connection[Any, Any] = process.connection
        job.add(process)

    @property
    def status(self) -> int:
        return self._process.status

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    @property
    def went_with(self) -> str:
        return self._process.went_with

    def started(self) -> int:
        return self._process.started()

    def has_started(self) -> bool:
        return self._process.has_started()

    def is_well(self) -> bool:
        return not self._job.last_words and self._process.is_well()

    def is_stopped(self) -> bool:
        return self._process.is_stopped()

    def waited_for_cores(self) -> float | None:
        return self._process.waited_for_cores()

    def ended(self, timeout_s: float) -> bool:
        return self._process.ended(timeout_s)

    def signal(self, signo: int) -> None:
        self._process.signal(signo)

    def output(self) -> tuple[str, str, str]:
        out, err, journal = self._process.output()
        return out, err + self._job.last_words, journal

    def bound_output(self) -> None:
        self._process.bound_output()

    def rewind(self) -> None:
        self._process.rewind()

    def close(self) -> None:
        self._process.close()
        self._job.leave()
