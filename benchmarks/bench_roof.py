"""Limits of the machine that no collective can exceed: copies in memory, bytes through a socket, copies to a device.

All ranks copy at once, as they do in a collective. Two ranks use the socket, as gloo does on one host and between two.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

NBYTES = 64 << 20  # larger than most caches


@pytest.mark.benchmark(group="roof")
def test_copy_in_memory(rank_benchmark: Any, device: torch.device) -> None:
    """Read and write ``NBYTES / 2`` on each rank: ``algbw`` is the bandwidth of one rank beside the others."""
    source, target = (torch.zeros(NBYTES // 8, device=device) for _ in range(2))
    rank_benchmark(target.copy_, source, nbytes=NBYTES)


@pytest.fixture
def connection(rank: int, world_size: int) -> Iterator[socket.socket | None]:
    """Yield a TCP connection between the first and the last rank; None on the others."""
    if world_size == 1:
        pytest.skip("a connection needs two ranks")
    processes: list[Any] = [None] * world_size
    dist.all_gather_object(processes, (socket.gethostname(), os.getpid()))
    if len({*processes}) == 1:
        pytest.skip("simulated ranks share a process, which would wait for itself")
    address: list[Any] = [None]
    if rank == 0:
        listener = socket.create_server((_own_address(), 0))
        address = [listener.getsockname()]
    dist.broadcast_object_list(address, 0)
    if rank == 0:
        with listener:
            end = listener.accept()[0]
    else:
        end = socket.create_connection(address[0]) if rank == world_size - 1 else None
    yield end
    if end is not None:
        end.close()


def _own_address() -> str:
    """Return the address by which the other ranks reach this host."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.create_connection(where) as probe:
        return str(probe.getsockname()[0])


@pytest.mark.benchmark(group="roof")
def test_socket(rank_benchmark: Any, rank: int, world_size: int, connection: socket.socket | None) -> None:
    """Time the bytes from the first rank to the last, and one byte back."""
    data = bytearray(NBYTES // 4)

    def send() -> None:
        if connection is None:
            return
        if rank == 0:
            connection.sendall(data)
            connection.recv(1)
        else:
            left = memoryview(data)
            while left:
                left = left[connection.recv_into(left) :]
            connection.send(b"1")

    rank_benchmark(send, nbytes=len(data), operation="send_recv")


@pytest.mark.gpu
@pytest.mark.benchmark(group="roof")
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_copy_to_device(rank_benchmark: Any, device: torch.device, pinned: bool) -> None:
    """Time a copy over PCIe or NVLink, from the memory of the host."""
    source = torch.zeros(NBYTES // 4, pin_memory=pinned)
    target = torch.zeros(NBYTES // 4, device=device)
    rank_benchmark(target.copy_, source, nbytes=NBYTES)
