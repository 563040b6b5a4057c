"""The controller's messages, reads and requests have a time limit, whatever the other side does."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import RankDied, RankTimeout, WorldUnavailable
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.message_pipe import MessagePipe
from pdlcheck.worlds.processes.controller.process_state import is_stopped

MORE_THAN_A_PIPE_HOLDS = 3_000_000


@pytest.fixture
def world():
    made = ProcessWorld(timeout_s=2)
    yield made
    made.close()


def assert_heals(world: ProcessWorld) -> None:
    world.timeout_s = 60
    assert world.run(dist.get_rank, world_size=2) == [0, 1]


def holds_python(rank):
    """Start a thread that keeps the GIL inside C code, as a deadlock in an extension does."""
    if dist.get_rank() == rank:
        threading.Thread(target=lambda: (time.sleep(0.3), ctypes.PyDLL(None).sleep(500)), daemon=True).start()


def test_arguments_that_a_rank_does_not_read(world):
    world.run(holds_python, 1, world_size=2)
    time.sleep(1)
    with pytest.raises(RankTimeout, match="no result within 2 s from rank 1 of 2") as caught:
        world.run(torch.numel, torch.ones(MORE_THAN_A_PIPE_HOLDS), world_size=2)
    assert "rank 1: busy outside Python" in str(caught.value)
    assert_heals(world)


def test_arguments_that_every_rank_reads_arrive_though_no_pipe_holds_them(world):
    world.timeout_s = 60  # time does not matter here
    sent = torch.arange(MORE_THAN_A_PIPE_HOLDS)
    assert world.run(lambda x: int(x.sum()), sent, world_size=3) == [int(sent.sum())] * 3
    assert [int(got.sum()) for got in world.run(lambda: sent + 1, world_size=2)] == [int((sent + 1).sum())] * 2


def stops_as_it_answers():
    """Return more than the pipe holds, from a process that stops once it has begun to send."""

    def stop():
        own = os.getpid()
        while True:
            words = Path(f"/proc/{own}/task/{own}/syscall").read_text().split()
            if words[0] == "1" and int(words[3], 16) > 100_000:  # write(fd, buffer, many)
                os.kill(own, signal.SIGSTOP)
                return
            time.sleep(0.001)

    if dist.get_rank() == 1:
        threading.Thread(target=stop, daemon=True).start()
        return torch.ones(300_000_000, dtype=torch.uint8)
    return 0


@pytest.mark.skipif(not os.access("/proc/self/syscall", os.R_OK), reason="needs /proc/PID/syscall")
def test_an_answer_of_which_a_part_does_not_come(world):
    world.timeout_s = 6  # a loaded machine takes time to make the answer
    with pytest.raises(RankTimeout, match="no result within 6 s from rank 1 of 2") as caught:
        world.run(stops_as_it_answers, world_size=2)
    assert "rank 1: stopped by SIGSTOP or SIGTSTP" in str(caught.value)
    assert_heals(world)


@pytest.fixture
def server():
    """Yield the fork server, which exists before a world needs it."""
    yield forkserver.retain(server)
    forkserver.release(server)


def stop(server):
    for pid in server.pids:
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            time.sleep(0.001)


def test_a_fork_server_that_is_stopped_is_replaced(server):
    world = ProcessWorld(timeout_s=60)
    try:
        stop(server)
        assert_heals(world)
    finally:
        world.close()


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_as_it_forks_is_named_and_replaced(server, monkeypatch):
    world = ProcessWorld(timeout_s=60)
    try:
        stop(server)
        with monkeypatch.context() as seen_before:
            seen_before.setattr(forkserver.ForkServer, "alive", True)
            with pytest.raises(WorldUnavailable, match=r"the fork server, process \d+, does not answer: a signal"):
                world.run(dist.get_rank, world_size=2)
        assert_heals(world)
    finally:
        world.close()


@pytest.mark.slow
def test_how_a_rank_ended_is_told_though_its_fork_server_is_stopped(server):
    world = ProcessWorld(timeout_s=60)

    def end(servers):
        if dist.get_rank() == 1:
            for pid in servers:
                os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()

    try:
        with pytest.raises(RankDied, match="rank 1 was killed by SIGTERM"):
            world.run(end, server.pids, world_size=2)
        assert_heals(world)
    finally:
        world.close()


# -- the pipe ---------------------------------------------------------------------------------------


@pytest.fixture
def pipe():
    ours, theirs = Pipe(duplex=True)
    with ours, theirs:
        yield MessagePipe(ours), theirs


@pytest.mark.parametrize("size", [0, 1, 5, (1 << 14) - 1, 1 << 14, 10_000_000])
def test_messages_of_every_length_go_both_ways(pipe, size):
    own, theirs = pipe
    data = b"\x80" + bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    answered = []
    reader = threading.Thread(target=lambda: answered.append(theirs.recv_bytes()))
    reader.start()
    own.send(data)
    while own.is_behind:
        own.flush()
    reader.join()
    assert answered == [data]
    writer = threading.Thread(target=lambda: (theirs.send_bytes(data), theirs.send_bytes(b"\x80the next")))
    writer.start()
    got = []
    while len(got) < 2:
        message = own.receive()
        if message is not None:
            got.append(bytes(message))
    writer.join()
    assert got == [data, b"\x80the next"]


def test_a_message_with_a_long_header_is_read_and_written(pipe, monkeypatch):
    """Messages of more than 2 GiB have a long header."""
    from pdlcheck.worlds.processes.controller import message_pipe

    own, theirs = pipe
    os.write(theirs.fileno(), b"\xff\xff\xff\xff" + (3).to_bytes(8, "big") + b"\x80bc")
    assert own.receive() == b"\x80bc"
    monkeypatch.setattr(message_pipe, "_LONGEST", 2)
    own.send(b"abc")
    assert theirs.recv_bytes() == b"abc"


def test_messages_stay_in_order_while_the_other_end_does_not_read(pipe):
    own, theirs = pipe
    sent = [bytes([number]) * 100_000 for number in range(10)]
    for data in sent:
        own.send(data)
    assert own.is_behind
    got = []
    while len(got) < 10:
        own.flush()
        got.append(theirs.recv_bytes())
    assert got == sent
    assert not own.is_behind


def test_an_end_in_the_midst_of_a_message_is_the_end(pipe):
    own, theirs = pipe
    os.write(theirs.fileno(), (100).to_bytes(4, "big") + b"\x80bc")
    assert own.receive() is None
    theirs.close()
    with pytest.raises(EOFError):
        own.receive()
    own.send(b"whoever has gone is noticed when he is read from")
    assert not own.is_behind


def test_what_the_controller_reads_may_come_from_another_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with Connection(ours.detach()) as end, Connection(theirs.detach()) as other:
        own = MessagePipe(end)
        other.send({"a": 1})
        message = None
        while message is None:
            message = own.receive()
        assert pickle.loads(message) == {"a": 1}
