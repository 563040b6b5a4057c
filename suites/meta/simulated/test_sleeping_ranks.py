"""Simulated ranks that sleep: the others run meanwhile, and time passes once no other rank can run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from time import sleep

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from pdlcheck.errors import Deadlock, Livelock
from pdlcheck.faults import Kill
from pdlcheck.worlds import get_world
from pdlcheck.worlds.simulated.scheduling import scheduler

SCHEDULES = ["first", *(f"random:{seed}" for seed in range(4))]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def waits_for_a_file(path, by_name=False):
    """Wait on rank 1 for a file that rank 0 writes."""
    dist.barrier()
    if dist.get_rank() == 0:
        path.touch()
        return None
    until = time.monotonic() + 10
    while not path.exists() and time.monotonic() < until:
        (sleep if by_name else time.sleep)(0.01)
    return path.exists()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_rank_that_waits_for_a_file_lets_the_others_write_it(world, tmp_path, by_name):
    assert world.run(waits_for_a_file, tmp_path / "file", by_name, world_size=2) == [None, True]


@every_schedule
def test_under_every_schedule(tmp_path, schedule):
    assert get_world("sim", schedule=schedule).run(waits_for_a_file, tmp_path / "file", world_size=2) == [None, True]


def waits_for_a_key():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        while not store.check(["key"]):
            time.sleep(0.001)
        return store.get("key")
    time.sleep(0.05)
    store.set("key", "value")
    return None


def test_a_key_that_is_looked_for_between_sleeps(world):
    assert world.run(waits_for_a_key, world_size=2) == [b"value", None]


@every_schedule
def test_ranks_wake_in_the_order_of_their_time(schedule):
    order = []

    def program():
        time.sleep((0.03, 0.01, 0.02)[dist.get_rank()])
        order.append(dist.get_rank())

    get_world("sim", schedule=schedule).run(program, world_size=3)
    assert order == [1, 2, 0]


def test_ranks_sleep_at_a_time_and_not_one_after_another():
    began = time.monotonic()
    get_world("sim").run(time.sleep, 0.5, world_size=16)
    assert 0.5 <= time.monotonic() - began < 0.5 * 16


@every_schedule
def test_a_rank_that_polls_without_sleeping_waits_for_one_that_sleeps(schedule):
    def program():
        if dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(1), 1)
            while not work.is_completed():
                pass
            work.wait()
        else:
            for _ in range(20):
                time.sleep(0.005)
            dist.send(torch.ones(1), 0)

    began = time.monotonic()
    get_world("sim", schedule=schedule).run(program, world_size=2)
    assert time.monotonic() - began < 20


def test_what_a_process_writes_is_waited_for(world, tmp_path):
    def program(path):
        if dist.get_rank() == 0:
            write = f"import time; time.sleep(0.5); open({str(path)!r}, 'w')"
            with subprocess.Popen([sys.executable, "-c", write]):
                while not path.exists():
                    time.sleep(0.0001)
        dist.barrier()
        return path.exists()

    assert world.run(program, tmp_path / "file", world_size=2) == [True, True]


def test_what_a_thread_writes_is_waited_for(tmp_path):
    def program(path):
        if dist.get_rank() == 0:
            timer = threading.Timer(0.3, path.touch)
            timer.start()
            while not path.exists():
                time.sleep(0)
            timer.join()
        else:
            work = dist.irecv(torch.zeros(1), 0)
            while not work.is_completed():
                time.sleep(0)
            work.wait()
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        return path.exists()

    assert get_world("sim").run(program, tmp_path / "file", world_size=2) == [True, True]


def test_a_limit_comes_before_a_rank_wakes_that_sleeps_longer(world):
    def program():
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            with pytest.raises(dist.DistStoreError, match="wait timeout after 200ms"):
                store.wait(["late"], timedelta(seconds=0.2))
            store.wait(["late"], timedelta(seconds=20))
        else:
            time.sleep(1)
            store.set("late", "value")

    world.run(program, world_size=2)


def asks_in_its_sleep(comes):
    if dist.get_rank() == 0:
        work = dist.irecv(torch.zeros(1), 1)
        while not work.is_completed():
            time.sleep(0)
        work.wait()
    elif comes:
        dist.send(torch.ones(1), 0)


def test_a_rank_that_sleeps_between_polls_for_ever_is_a_livelock(monkeypatch):
    monkeypatch.setattr(scheduler, "POLLS_S", 0.5)
    get_world("sim").run(asks_in_its_sleep, True, world_size=2)
    with pytest.raises(Livelock, match="rank 0: asks for recv from rank 1"):
        get_world("sim").run(asks_in_its_sleep, False, world_size=2)


def test_others_that_are_blocked_are_a_deadlock_once_nobody_sleeps():
    def program():
        time.sleep(0.05)
        dist.recv(torch.zeros(1), 1 - dist.get_rank())

    with pytest.raises(Deadlock, match="2 of 2 are blocked"):
        get_world("sim").run(program, world_size=2)


def test_a_rank_that_waits_for_one_that_has_failed_is_ended(monkeypatch):
    monkeypatch.setattr(scheduler, "SLEEPERS_S", 0.3)

    def program():
        if dist.get_rank() == 1:
            raise OSError("no such disk")
        while True:
            time.sleep(0.1)

    began = time.monotonic()
    with pytest.raises(OSError, match="no such disk"):
        get_world("sim").run(program, world_size=2)
    assert time.monotonic() - began < 20


def test_survivors_of_a_killed_rank_sleep_as_long_as_they_like(monkeypatch):
    monkeypatch.setattr(scheduler, "SLEEPERS_S", 0.1)

    def program():
        if dist.get_rank() == 1:
            dist.barrier()
        time.sleep(0.3)
        return dist.get_rank()

    assert get_world("sim", faults=[Kill(1, 0)]).run(program, world_size=3)[::2] == [0, 2]


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        time.sleep(0.01)
        return place


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_a_rank_forks_sleep_as_ever():
    def program():
        return [batch.tolist() for batch in DataLoader(Slow(), batch_size=2, num_workers=1)]

    assert get_world("sim").run(program, world_size=2) == [[[0, 1], [2, 3]]] * 2


def test_a_module_that_sleeps_while_it_is_imported_keeps_the_turn(tmp_path, monkeypatch):
    (tmp_path / "imported_slowly.py").write_text("import time\ntime.sleep(0.05)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def program():
        import imported_slowly

        return imported_slowly.__name__

    assert get_world("sim").run(program, world_size=3) == ["imported_slowly"] * 3
    del sys.modules["imported_slowly"]


def test_what_no_clock_can_sleep_is_refused_as_ever():
    def program():
        told = []
        for seconds in (-1, float("nan"), "1"):
            try:
                time.sleep(seconds)
            except (TypeError, ValueError) as error:
                told.append(type(error).__name__)
        return told

    here = program()
    assert here == ["ValueError", "ValueError", "TypeError"]
    assert get_world("sim").run(program, world_size=2) == [here] * 2
