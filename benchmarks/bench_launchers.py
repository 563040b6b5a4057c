"""The time until ranks are ready: forked, spawned, after a rendezvous by environment, TCP or file, and restarted.

Rows show medians over rounds. The ranks of ``mp.spawn`` import torch again; those of a pool are forks of a server that
is already up. The restart is torchrun's: from the end of a killed worker to the next step of its successor.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from pdlcheck.bench import slowest_s
from pdlcheck.worlds import get_world

pytestmark = pytest.mark.full  # takes half a minute

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("env", "tcp", "file")


def spawned(rank: int, folder: str) -> None:
    """Run the main function of a spawned rank."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.destroy_process_group()


def spawn_s() -> float:
    """Return the seconds until two spawned ranks have met and ended."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        mp.spawn(spawned, args=(folder,), nprocs=2)  # type: ignore[no-untyped-call]
        return time.perf_counter() - start


def pool_s() -> float:
    """Return the seconds as :func:`spawn_s`, with the fork server up."""
    world, other = get_world("gloo"), get_world("gloo")
    try:
        other.run(os.getpid, world_size=1)
        start = time.perf_counter()
        with world.open(2):
            pass
        world.close()
        return time.perf_counter() - start
    finally:
        world.close()
        other.close()


def meetings_s(folder: str, rounds: int) -> dict[str, list[float]]:
    """Leave the group on each rank and meet again in each way; return the seconds by way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(rounds):
        for method in METHODS:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                given: list[Any] = [probe.getsockname()[1]]
            dist.broadcast_object_list(given, 0)
            port = given[0]
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            where = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{folder}/met-{turn}"}[method]
            dist.barrier()
            dist.destroy_process_group()
            start = time.perf_counter()
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
            seconds[method].append(time.perf_counter() - start)
    return seconds


def restart_s() -> float:
    """Return the seconds from the end of a worker of ``examples/elastic.py`` to the next step after its restart."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        train = ["--max-restarts", "1", str(ROOT / "examples" / "elastic.py"), "--folder", folder, "--pause", "0.2"]
        job = subprocess.Popen(
            [*launch, *train],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        pid, killed_at = 0, 0.0
        assert job.stdout is not None
        for line in job.stdout:
            if (worker := re.search(r"rank 1 of 2 is process (\d+)", line)) and not killed_at:
                pid = int(worker[1])
            if re.search(r"step \d+ on rank 1", line):
                if killed_at:
                    seconds = time.perf_counter() - killed_at
                    break
                os.kill(pid, signal.SIGKILL)
                killed_at = time.perf_counter()
        else:
            raise AssertionError("the worker was not started again")
        job.terminate()
        job.stdout.close()
        job.wait(60)
        return seconds


@pytest.mark.benchmark(group="launchers")
def test_start_of_two_ranks(benchmark: Any, full: bool) -> None:
    seconds: dict[str, list[float]] = {"pool": [], "spawn": []}

    def turn() -> None:
        seconds["pool"].append(pool_s())
        seconds["spawn"].append(spawn_s())

    benchmark.pedantic(turn, rounds=7 if full else 3)
    pool, spawn = (statistics.median(seconds[name]) for name in ("pool", "spawn"))
    benchmark.extra_info |= {"pool_s": pool, "spawn_s": spawn, "world_size": 2}
    benchmark.extra_info["row"] = (
        f"start and end of 2 ranks on gloo, ms: forked {pool * 1e3:.0f}, mp.spawn {spawn * 1e3:.0f}, "
        f"ratio {spawn / pool:.0f}"
    )


@pytest.mark.benchmark(group="launchers")
def test_meeting_of_two_ranks(benchmark: Any, full: bool) -> None:
    found: list[dict[str, list[float]]] = []
    world = get_world("gloo", watch=False, threads_per_rank=1)
    with tempfile.TemporaryDirectory() as folder:
        rounds = 21 if full else 7
        benchmark.pedantic(lambda: found.extend(world.run(meetings_s, folder, rounds, world_size=2)), rounds=1)
    world.close()
    seconds = {name: slowest_s([rank[name] for rank in found]) for name in METHODS}
    benchmark.extra_info |= {f"{name}_s": value for name, value in seconds.items()} | {"world_size": 2}
    benchmark.extra_info["row"] = "2 ranks meet on gloo, ms: " + ", ".join(
        f"{name}:// {value * 1e3:.1f}" for name, value in seconds.items()
    )


@pytest.mark.benchmark(group="launchers")
def test_restart_of_a_worker(benchmark: Any, full: bool) -> None:
    seconds: list[float] = []
    benchmark.pedantic(lambda: seconds.append(restart_s()), rounds=5 if full else 2)
    middle = statistics.median(seconds)
    benchmark.extra_info |= {"restart_s": middle, "world_size": 2}
    benchmark.extra_info["row"] = f"a killed worker of 2 under torchrun takes its next step after {middle:.1f} s"
