"""The common settings of a pool's ranks, the first message to each rank, and the store that they meet at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdlcheck.launch.nesting import INSIDE
from pdlcheck.worlds.processes.controller.placement import Placement
from pdlcheck.worlds.processes.exchange.messages import Start

__all__ = ["Setup", "start_of", "store_at"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The common settings of a pool's ranks."""

    world_size: int
    backend: str
    threads: int | None  # None: the placement decides
    watch: bool
    take_turns: bool
    device: str
    comm_wrappers: tuple[str, ...] = ()
    cuda_as_cpu: bool = False


def start_of(setup: Setup, placement: Placement, rank: int, port: int) -> Start:
    """Return the first message to a rank whose pool has its store at ``port``."""
    variables = {
        **placement.variables(rank, setup.world_size),
        INSIDE: "1",
        "MASTER_ADDR": placement.host,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(setup.world_size),
    }
    return Start(
        rank=rank,
        world_size=setup.world_size,
        backend=setup.backend,
        threads=setup.threads or placement.threads(rank, setup.world_size),
        host=placement.host,
        port=port,
        hosts_store=rank == 0 and not placement.hosts_store,
        variables=variables,
        watch=setup.watch,
        take_turns=setup.take_turns,
        board=placement.shares_memory and setup.watch,
        device=setup.device,
        comm_wrappers=setup.comm_wrappers,
        cuda_as_cpu=setup.cuda_as_cpu,
    )


def store_at(host: str, port: int, listening: int) -> Any:
    """Return a store that this process hosts, on a descriptor that listens at the address; it lives with the result."""
    from pdlcheck.compat.torch.stores import TCPStore  # it imports torch, and this module is imported before torch

    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
