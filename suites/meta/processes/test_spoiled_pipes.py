"""Code of a rank writes to descriptors that are not its own, as a C library or a daemon may do."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankDied
from pdlcheck.worlds import get_world
from pdlcheck.worlds.processes.exchange.board import Board, SpoiledBoard, shared_file

GARBAGE = {
    "a line": b"hello world, this is a line\n",
    "one byte": b"\n",
    "a negative length": struct.pack("!i", -7),
    "a length beyond all memory": struct.pack("!iQ", -1, 2**62) + b"\x80 and more",
    "a large length": struct.pack("!i", 2**31 - 1) + b"no message at all",
    "text of the right length": struct.pack("!i", 5) + b"abcde",
    "a pickle of something else": struct.pack("!i", 5) + b"\x80\x05K\x01.",
    "half a pickle": struct.pack("!i", 4) + b"\x80\x05(K",
}


def to_the_controller():
    """Yield the descriptors of the rank's pipe."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as end:
            if end.family == socket.AF_UNIX:
                yield int(name)


def write(data):
    if dist.get_rank() == 1:
        for fd in to_the_controller():
            os.write(fd, data)
    dist.barrier()
    return "returned"


def close_all():
    if dist.get_rank() == 1:
        for fd in list(to_the_controller()):
            os.close(fd)
    dist.barrier()


def write_to_its_own():
    reading, writing = os.pipe()
    os.write(writing, GARBAGE["a line"])
    dist.barrier()
    return os.read(reading, 5)


@pytest.fixture(scope="module")
def world():
    with contextlib.closing(get_world("gloo")) as opened:
        yield opened


@pytest.mark.parametrize("what", GARBAGE)
def test_a_rank_that_writes_into_its_pipe_is_named(world, what):
    with pytest.raises(RankDied, match=r"rank 1 was killed by pdlcheck, as it wrote b'.*' into its pipe to the contr"):
        world.run(write, GARBAGE[what], world_size=2)
    assert world.run(write_to_its_own, world_size=2) == [b"hello", b"hello"]


def test_a_rank_that_closes_its_pipe_is_named(world):
    with pytest.raises(RankDied, match=r"(?s)rank 1 .*(as it closed its pipe to the controller|Bad file descriptor)"):
        world.run(close_all, world_size=2)
    assert world.run(write_to_its_own, world_size=2) == [b"hello", b"hello"]


@pytest.mark.parametrize("at", [0, 8, 40, 41])
def test_a_log_that_was_overwritten_is_told(at):
    fd = shared_file(1)
    board = Board(fd, 1)
    board.clear(0, 1)
    board.log(0, (0, "all_reduce"))
    os.pwrite(fd, b"\xff" * 8, (8 << 16) + at)
    with pytest.raises(SpoiledBoard, match="the memory that rank 0 shares with the controller was overwritten"):
        board.take(0, 1)
    board.close()
    os.close(fd)
