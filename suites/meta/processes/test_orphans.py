"""Processes and shared memory that a rank creates end with it: in their own sessions, as daemons, in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest
import torch.distributed as dist

from pdlcheck.errors import RankDied
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller import forkserver
from pdlcheck.worlds.processes.controller.local import LocalPlacement
from pdlcheck.worlds.processes.rank.orphans import are_found

from ..clone import ROOT
from ..still_running import is_running, start_of, still_running

pytestmark = pytest.mark.skipif(not are_found(), reason="the system does not tell of the children of a process")


@pytest.fixture
def world():
    made = ProcessWorld(timeout_s=20)
    yield made
    made.close()


def start_session() -> int:
    """Start a process in its own session, as torchrun starts its workers."""
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


def start_daemon() -> int:
    """Start a process in its own session whose parent has ended."""
    return _said_by(f"import subprocess; {_SLEEPER}")


def start_tree() -> int:
    """Start three processes, each in its own session; return the last one."""
    return _said_by(f"import subprocess, time; {_SLEEPER}; time.sleep(300)")


_SLEEPER = "print(subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=-3, stderr=-3).pid, flush=True)"


def _said_by(code: str) -> int:
    started = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    return int(started.stdout.readline())


STARTS = pytest.mark.parametrize(
    "start",
    [start_session, pytest.param(start_daemon, marks=pytest.mark.slow), start_tree],
    ids=["session", "daemon", "tree"],
)


def dies(how):
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(3)


@STARTS
@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_with_a_rank_that_dies_ends_all_that_it_has_started(world, start, how):
    pids = {pid: start_of(pid) for pid in world.run(start, world_size=2)}
    assert all(map(is_running, pids))
    with pytest.raises(RankDied):
        world.run(lambda: dies(how) if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    assert still_running(pids) == []


@STARTS
def test_with_a_world_that_is_closed_ends_all_that_its_ranks_have_started(world, start):
    pids = {pid: start_of(pid) for pid in world.run(start, world_size=2)}
    world.close()
    assert still_running(pids) == []


def test_what_a_rank_has_started_lives_as_long_as_the_rank_whatever_happens_to_others(world):
    pids = world.run(start_daemon, world_size=2)
    other = ProcessWorld(timeout_s=20)
    with pytest.raises(RankDied):
        other.run(lambda: dies("exit"), world_size=1)
    other.close()
    assert all(map(is_running, pids))
    assert world.run(dist.get_rank, world_size=2) == [0, 1]


def test_fresh_ranks_end_with_all_that_they_have_started():
    world = ProcessWorld(isolation="fresh", timeout_s=20)
    try:
        pids = world.run(start_session, world_size=2)
        assert still_running(pids) == []
    finally:
        world.close()


@STARTS
def test_with_a_fork_server_that_is_killed_ends_all_that_its_ranks_have_started(start):
    server = forkserver.retain(STARTS)
    world = ProcessWorld(timeout_s=20)
    try:
        pids = {pid: start_of(pid) for pid in world.run(start, world_size=2)}
        ranks = {pid: start_of(pid) for pid in world.pids(2)}
        for pid in server.pids:
            os.kill(pid, signal.SIGKILL)
        assert still_running(ranks) == []
        assert world.run(dist.get_rank, world_size=2) == [0, 1]  # on a new server
        assert still_running(pids) == []
    finally:
        world.close()
        forkserver.release(STARTS)


def test_with_a_controller_that_is_killed_ends_all_that_its_ranks_have_started(tmp_path):
    script = tmp_path / "controller.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(ROOT)!r})
            from pdlcheck.worlds.processes import ProcessWorld
            from suites.meta.processes.test_orphans import start_daemon, start_session, start_tree
            world = ProcessWorld()
            for start in (start_daemon, start_session, start_tree):
                print(*world.run(start, world_size=2), end=" ")
            print(flush=True)
            time.sleep(60)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as controller:
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 6
        controller.kill()
    assert still_running(pids) == []


def test_what_an_import_of_the_fork_server_has_started_lives_as_long_as_that(tmp_path, monkeypatch):
    told = tmp_path / "helper"
    source = f"import pathlib, subprocess\npathlib.Path({str(told)!r}).write_text(str("
    source += "subprocess.Popen(['sleep', '300'], start_new_session=True).pid))\n"
    (tmp_path / "starts_a_helper.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    server = forkserver.ForkServer()
    try:
        server.preload(["starts_a_helper"])
        rank = LocalPlacement(server).place(0, 1, [])
        rank.started()
        rank.signal(signal.SIGKILL)
        assert rank.ended(20)
        helper = int(told.read_text())
        assert is_running(helper)
        rank.close()
    finally:
        server.stop()
    assert still_running([helper]) == []


def make_segment() -> str:
    return shared_memory.SharedMemory(create=True, size=1000).name


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not to be seen in /dev/shm")
def test_shared_memory_of_a_killed_rank_is_given_back_as_python_does(world):
    names = world.run(make_segment, world_size=2)
    assert all(Path("/dev/shm", name).exists() for name in names)
    trackers = world.run(lambda: resource_tracker._resource_tracker._pid, world_size=2)
    with pytest.raises(RankDied):
        world.run(lambda: dies("SIGKILL") if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    world.close()
    assert still_running(trackers) == []
    until = time.monotonic() + 20
    while any(Path("/dev/shm", name).exists() for name in names) and time.monotonic() < until:
        time.sleep(0.01)
    assert not [name for name in names if Path("/dev/shm", name).exists()]
