"""A world whose ranks run in processes that a function starts: here, subprocesses of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import RankDied, WorldTooSmall, WorldUnavailable
from pdlcheck.worlds.remote import RemoteWorld, serve
from pdlcheck.worlds.remote.ticket import VARIABLE, Ticket, ticket_of

PROGRAM = [sys.executable, "-m", "pdlcheck.worlds.remote"]


class Machine:
    """Starts the processes of ranks, and keeps them."""

    def __init__(self, program=PROGRAM):
        self.program = program
        self.started = []

    def start(self, rank, variables):
        process = subprocess.Popen(self.program, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
        self.started.append((rank, process))
        return process


@pytest.fixture(scope="module")
def machine():
    return Machine()


@pytest.fixture(scope="module")
def mine(machine):
    world = RemoteWorld("mine", machine.start, host="127.0.0.1", timeout_s=30)
    yield world
    world.close()
    for _, process in machine.started:
        process.wait(5)


def total():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def test_ranks_are_forked_by_the_processes_of_the_function(mine, machine):
    assert mine.run(total, world_size=2) == [3.0, 3.0]
    ranks = sorted(rank for rank, _ in machine.started)
    assert ranks == [0, 1]
    grandparents = mine.run(_grandparent, world_size=2)
    assert grandparents == [process.pid for _, process in sorted(machine.started)]


def _grandparent():
    """Return the parent of the fork server, which is the parent of the rank."""
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_a_larger_world_starts_the_processes_that_are_missing(mine, machine):
    mine.run(total, world_size=2)
    before = len(machine.started)
    assert mine.run(total, world_size=3) == [6.0] * 3
    assert [rank for rank, _ in machine.started[before:]] == [2]


def test_a_failure_of_a_rank_has_its_line_and_its_output(mine):
    def wrong():
        print("on", dist.get_rank())
        assert dist.get_rank() == 0, "only rank 0 is right"

    with pytest.raises(AssertionError, match="only rank 0 is right") as failed:
        mine.run(wrong, world_size=2)
    assert "on 1" in str(getattr(failed.value, "__notes__", ""))


def test_operations_are_compared_before_data_moves(mine):
    def one_alone():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), src=0)

    with pytest.raises(Exception, match="all_reduce") as failed:
        mine.run(one_alone, world_size=2)
    assert type(failed.value).__name__ == "CollectiveMismatch"


def test_a_process_that_is_killed_is_reported_and_started_again(mine, machine):
    mine.run(total, world_size=2)
    processes = dict(machine.started)

    def killed(pid):
        if dist.get_rank() == 0:
            os.kill(pid, signal.SIGKILL)
            dist.recv(torch.empty(1), src=1)
        time.sleep(30)

    with pytest.raises(RankDied, match="rank 1 went down with the process that had forked it"):
        mine.run(killed, processes[1].pid, world_size=2)
    before = len(machine.started)
    assert mine.run(total, world_size=2) == [3.0, 3.0]
    assert [rank for rank, _ in machine.started[before:]] == [1]


def test_no_process_is_left_after_close():
    machine = Machine()
    world = RemoteWorld("mine", machine.start, host="127.0.0.1")
    pids = world.run(os.getpid, world_size=2)
    world.close()
    for _, process in machine.started:
        process.wait(5)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            _wait_for_the_end(pid)


def _wait_for_the_end(pid):
    for _ in range(50):
        os.kill(pid, 0)
        subprocess.run(["sleep", "0.1"], check=True)


def test_a_process_that_ends_at_once_is_reported_with_its_exit_code():
    world = RemoteWorld("mine", Machine([sys.executable, "-c", "raise SystemExit(3)"]).start, host="127.0.0.1")
    message = r"ranks of world mine cannot start: the process of rank \d ended with exit code 3 before it reached 127"
    with pytest.raises(WorldUnavailable, match=message):
        world.run(total, world_size=2)
    world.close()


def test_a_function_that_has_no_room_says_so_before_it_starts_anything(machine):
    def reserve(world_size):
        if world_size > 2:
            raise WorldTooSmall("needs 3 ranks", world="mine", cure="", world_size=world_size, available=2)

    before = len(machine.started)
    world = RemoteWorld("mine", machine.start, reserve=reserve, host="127.0.0.1")
    with pytest.raises(WorldTooSmall, match="needs 3 ranks"):
        world.run(total, world_size=3)
    assert len(machine.started) == before
    world.close()


def test_the_program_alone_says_that_a_world_starts_it(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"{VARIABLE} is not set: a world starts this program"):
        serve()
    with pytest.raises(ValueError, match=f"{VARIABLE} is damaged; pass it on as it is"):
        ticket_of({VARIABLE: '{"rank": 1}'})


def test_a_ticket_does_not_show_its_key():
    assert "secret" not in repr(Ticket(0, "127.0.0.1", 1, "secret", 0))
