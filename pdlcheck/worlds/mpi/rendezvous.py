"""The rendezvous of ranks that mpiexec started: MPI numbers them and sends the address of torch's store on rank 0."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from pdlcheck.compat.torch.stores import TCPStore
from pdlcheck.worlds.mpi.library import MPI, start

__all__ = ["meet"]


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return a store that all ranks of MPI share, this rank, and the number of ranks.

    The store listens on loopback if all ranks are on one host.
    """
    start()
    everybody = MPI.COMM_WORLD
    rank, world_size = everybody.Get_rank(), everybody.Get_size()
    neighbours = everybody.Split_type(MPI.COMM_TYPE_SHARED)
    on_one_host = everybody.allreduce(neighbours.Get_size() == world_size, MPI.LAND)
    neighbours.Free()
    place, listening = None, None
    if rank == 0:
        host = "127.0.0.1" if on_one_host else socket.gethostname()
        listening = socket.create_server((host if on_one_host else "", 0), backlog=world_size)
        place = (host, listening.getsockname()[1])
    host, port = everybody.bcast(place)
    store = TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening is not None else None,
    )
    return store, rank, world_size
