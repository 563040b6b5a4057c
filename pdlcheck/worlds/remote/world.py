"""The world whose ranks run in processes that a function starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdlcheck.worlds.processes.world import ProcessWorld
from pdlcheck.worlds.remote.placement import RankJob, RemotePlacement

__all__ = ["RemoteWorld"]


class RemoteWorld(ProcessWorld):
    """A world whose ranks run in processes that ``start`` starts: on other machines, as jobs, actors or containers.

    Such a process runs ``python -m pdlcheck.worlds.remote``, or calls :func:`serve`. It connects to this machine and
    forks the ranks, so that a test starts in milliseconds and a killed rank is replaced. Everything else is as on
    ``gloo``: operations are compared before data moves, output and failures of the ranks are reported here.

    Args:
        name: the name of the world.
        start: ``start(rank, variables)`` starts the process of a rank with these environment variables and returns it;
            ``poll()`` of the result returns None while it runs, ``kill()`` ends it. It is called at the first use of a
            rank, and again after the process has ended. The variables hold a secret: do not put them on a command line.
        reserve: ``reserve(world_size)`` is called before ``start`` is called for the first time for so many ranks: it
            may allocate the machines, or raise :class:`pdlcheck.errors.WorldTooSmall`.
        host: the address of this machine at which the processes reach it; default: that of the default route.
        backend: the backend of the default group.
        options: those of :class:`ProcessWorld`.

    Example:
        >>> import os, subprocess, sys
        >>> def start(rank, variables):
        ...     program = [sys.executable, "-m", "pdlcheck.worlds.remote"]
        ...     return subprocess.Popen(program, env={**os.environ, **variables})
        >>> world = RemoteWorld("mine", start, host="127.0.0.1")
        >>> import torch.distributed as dist
        >>> world.run(dist.get_rank, world_size=2)
        [0, 1]
        >>> world.close()
    """

    def __init__(
        self,
        name: str,
        start: Callable[[int, dict[str, str]], RankJob],
        *,
        reserve: Callable[[int], object] = lambda world_size: None,
        host: str | None = None,
        backend: str = "gloo",
        **options: Any,
    ) -> None:
        self._remote = RemotePlacement(name, start, reserve=reserve, host=host, seed=options.get("seed", 0))
        super().__init__(backend, name=name, placement=self._remote, **options)

    def close(self) -> None:
        """End the ranks and their processes. The world may be used again; it then starts new ones."""
        super().close()
        self._remote.close()
