"""Pools of MPI ranks: the verdicts of the other worlds, and the behaviour after a process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pdlcheck.errors import PdlcheckError, RankDied, RankTimeout, WorldUnavailable
from pdlcheck.worlds import get_world
from pdlcheck.worlds.mpi.job import Job, why_not
from pdlcheck.worlds.processes import ProcessWorld

from ..every_world.programs import DEADLOCKS, EXPECTED, MISMATCHES, train_ddp
from ..needs_mpi import needs_mpi
from ..still_running import still_running
from .programs import (
    AS_SIMULATED,
    a_reduction_keeps_the_inputs_of_others,
    moves_while_nobody_waits,
    train_with_no_sync_and_uneven_inputs,
)

pytestmark = needs_mpi

FAULTY = [*DEADLOCKS, *(program for _, program in MISMATCHES)]
FOLDERS = {Path(tempfile.gettempdir()), Path("/dev/shm")}


@pytest.fixture(scope="module", params=[True, False], ids=["watched", "plain"])
def world(request: pytest.FixtureRequest) -> Iterator[ProcessWorld]:
    world = ProcessWorld("mpi", timeout_s=20, watch=request.param)
    yield world
    world.close()


@pytest.fixture(scope="module")
def watched() -> Iterator[ProcessWorld]:
    world = ProcessWorld("mpi", timeout_s=20)
    yield world
    world.close()


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def assert_heals(world: ProcessWorld) -> None:
    assert world.run(total, world_size=2) == [3.0, 3.0]


def left_in_folders(controller: int | None = None) -> set[Path]:
    """Return the files of a controller or this process in the temporary folders; other test workers have theirs."""
    names = f"pdlcheck-mpi-{controller or os.getpid()}-*"
    return {path for folder in FOLDERS for path in folder.glob(names)}


def in_job(pid: int) -> list[int]:
    """Return ``pid`` and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [pid, *(other for child in children.read_text().split() for other in in_job(int(child)))]
    return []


# -- verdicts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[program.__name__ for program, _ in EXPECTED])
def test_a_program_gives_every_rank_what_it_should(world, program, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
        assert world.run(program, world_size=4) == expected


@pytest.mark.parametrize("program", AS_SIMULATED, ids=lambda program: program.__name__)
def test_a_program_gives_every_rank_what_simulated_ranks_get(watched, program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert watched.run(program, world_size=4) == get_world("sim").run(program, world_size=4)


@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_a_faulty_program_gets_the_verdict_of_simulated_ranks(watched, program):
    verdicts = []
    for world in (get_world("sim"), watched):
        with pytest.raises(PdlcheckError) as caught:
            world.run(program, world_size=2)
        verdicts.append((caught.type, sorted(caught.value.ranks)))
    assert verdicts[0] == verdicts[1]


def test_replicas_of_ddp_are_equal_bit_for_bit(world):
    for program in (train_ddp, train_with_no_sync_and_uneven_inputs):
        first, *others = world.run(program, world_size=3)
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_a_reduction_keeps_the_inputs_of_others(world):
    """Simulated ranks leave NaN there; gloo leaves partial sums."""
    assert world.run(a_reduction_keeps_the_inputs_of_others, world_size=4) == [True] * 4


def test_a_long_message_moves_while_its_sender_waits_for_something_else(world):
    assert world.run(moves_while_nobody_waits, world_size=2) == [3.0 * 2**20] * 2


def describe() -> tuple[int, str]:
    """Return the process id, and the name that the next group gets."""
    group = dist.new_group([1, 0])
    x = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(x, group=group)
    assert x.item() == 3.0
    return os.getpid(), group.group_name


@pytest.mark.parametrize(
    ("isolation", "same_processes", "same_groups"),
    [("pool", True, True), ("reinit", True, False), ("fresh", False, False)],
)
def test_what_two_runs_share(world, isolation, same_processes, same_groups):
    world.isolation = isolation
    try:
        (pid, name), *_ = world.run(describe, world_size=2)
        (other_pid, other_name), *_ = world.run(describe, world_size=2)
    finally:
        world.isolation = "pool"
    assert (pid == other_pid) == same_processes
    assert (other_name != name) == same_groups  # torch names groups by their number


# -- faults ----------------------------------------------------------------------------------------


def test_a_rank_that_raises_stops_the_others_and_a_watched_pool_stays(watched):
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("lr")
        dist.all_reduce(torch.ones(1))

    before = watched.pids(2)
    start = time.monotonic()
    with pytest.raises(KeyError, match="lr") as caught:
        watched.run(body, world_size=2)
    assert time.monotonic() - start < watched.timeout_s / 2
    assert "rank 0 was stopped in all_reduce" in "\n".join(caught.value.__notes__)
    assert watched.pids(2) == before
    assert_heals(watched)


def test_a_killed_rank_is_named_at_once_and_the_next_call_has_a_new_job(world):
    def body() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    world.run(total, world_size=2)
    start = time.monotonic()
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        world.run(body, world_size=2)
    assert time.monotonic() - start < world.timeout_s / 2
    assert_heals(world)


def test_ranks_that_hang_are_shown_and_replaced():
    world = ProcessWorld("mpi", timeout_s=1, watch=False)
    try:
        with pytest.raises(RankTimeout, match="in all_reduce at") as caught:
            world.run(lambda: dist.get_rank() and dist.all_reduce(torch.ones(1)), world_size=2)
        assert caught.value.ranks[0] == "rank 0: has returned"
        assert_heals(world)
    finally:
        world.close()


def test_after_close_nothing_is_left():
    before = left_in_folders()
    world = ProcessWorld("mpi")
    ranks = world.pids(3)
    made = left_in_folders() - before
    processes = [pid for folder in made for pid in users_of(folder)]
    assert made
    assert len(processes) >= 3, "mpiexec and its children were looked for in the wrong place"
    world.close()
    assert left_in_folders() - before == set()
    assert still_running([*ranks, *processes]) == []


def test_of_a_job_that_cannot_start_nothing_is_left(monkeypatch):
    before = left_in_folders()
    monkeypatch.setattr(subprocess, "Popen", None)  # fails after the folders are made
    with pytest.raises(TypeError):
        Job(2)
    assert left_in_folders() == before


def test_ranks_start_where_there_is_no_home(monkeypatch):
    monkeypatch.delenv("HOME")
    assert why_not() == ""
    world = ProcessWorld("mpi", timeout_s=20)
    try:
        assert world.run(total, world_size=2) == [3.0] * 2
    finally:
        world.close()


def test_of_a_world_that_nobody_holds_nothing_is_left():
    before = left_in_folders()
    assert ProcessWorld("mpi").run(total, world_size=2) == [3.0] * 2
    assert left_in_folders() - before == set()


def users_of(folder: Path) -> list[int]:
    """Return processes that name ``folder`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("victim", ["mpiexec", "supervisor", "seat"])
def test_a_job_that_loses_a_process_leaves_nothing_behind(victim):
    before = left_in_folders()
    job = Job(2)
    supervisor, mpiexec, seat, *_ = processes = in_job(job.pid)
    assert len(processes) == 4
    os.kill({"mpiexec": mpiexec, "supervisor": supervisor, "seat": seat}[victim], signal.SIGKILL)
    time.sleep(0.1)
    job.end()
    assert left_in_folders() - before == set()
    assert still_running(processes) == []


def test_a_pool_whose_mpiexec_was_killed_is_replaced(watched):
    before = left_in_folders()
    watched.run(total, world_size=3)
    folders = left_in_folders() - before
    supervisor = min(pid for folder in folders for pid in users_of(folder))
    ranks = watched.pids(3)
    os.kill(in_job(supervisor)[1], signal.SIGKILL)
    assert still_running(ranks) == []
    assert watched.run(total, world_size=3) == [6.0] * 3


def test_a_killed_controller_leaves_nothing_behind(tmp_path):
    program = tmp_path / "controller.py"
    program.write_text(
        "import os, time\n"
        "from pdlcheck.worlds import get_world\n"
        "world = get_world('mpi')\n"
        "print(*world.pids(2), flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        ranks = [int(pid) for pid in controller.stdout.readline().split()]
        processes = [pid for folder in left_in_folders(controller.pid) for pid in users_of(folder)]
        assert len(ranks) == 2
        assert processes
        controller.kill()
    assert still_running([*ranks, *processes]) == []
    assert left_in_folders(controller.pid) == set()


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setattr("pdlcheck.worlds.mpi.job.find_mpiexec", lambda: None)
    with pytest.raises(WorldUnavailable, match=r"there is no mpiexec; pip install 'pdlcheck\[mpi\]'"):
        ProcessWorld("mpi").run(total, world_size=2)


def test_an_mpi_that_does_not_start_is_told_with_how_it_ended_and_the_cure(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_coll", "^basic,tuned,libnbc,inter,sync,self,sm,han,adapt")  # no component can add
    words = r"^mpi processes cannot start: rank \d ended its process with exit code \d+ while it joined the group; "
    cure = r"pip install 'pdlcheck\[mpi\]' brings an MPI and an mpiexec that fit"
    world = ProcessWorld("mpi")
    with pytest.raises(WorldUnavailable, match=words + cure):
        world.run(total, world_size=2)
    world.close()


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("mpiexec (Open MPI) 5.0.0", "mpiexec ended; pip install 'pdlcheck[mpi]'\nmy leg is broken"),
        ("HYDRA build details:", "is not Open MPI's: it says 'HYDRA build details:'; pip install 'pdlcheck[mpi]'"),
    ],
    ids=["broken", "of-another-mpi"],
)
def test_an_mpiexec_that_does_not_work_is_told_with_its_words(tmp_path, monkeypatch, says, told):
    program = tmp_path / "mpiexec"
    answer = f'case "$1" in --version) echo "{says}";; *) echo my leg is broken >&2; exit 3;; esac'
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setattr("pdlcheck.worlds.mpi.job.find_mpiexec", lambda: str(program))
    before = left_in_folders()
    world = ProcessWorld("mpi")
    with pytest.raises(WorldUnavailable) as caught:
        world.run(total, world_size=2)
    world.close()
    assert told in str(caught.value)
    assert left_in_folders() - before == set()
