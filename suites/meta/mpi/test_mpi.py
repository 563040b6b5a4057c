"""The MPI backend of torch.distributed in a program under mpiexec; simulated ranks give the expected results."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from pdlcheck.worlds import get_world
from pdlcheck.worlds.mpi.job import find_mpiexec

from ..every_world.programs import EXPECTED
from ..needs_mpi import needs_mpi
from .programs import AS_SIMULATED

pytestmark = needs_mpi

PROGRAMS = f"{__package__}.programs"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ON_THIS_MACHINE = ("--mca", "pml", "ob1", "--mca", "btl", "self,sm")  # a search for networks takes a second


def mpiexec(world_size: int, folder: Path, *program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ``world_size`` ranks; files that MPI writes stay in ``folder``."""
    path = os.pathsep.join([entry for entry in sys.path if entry])
    environment = {**os.environ, **(ROOT if os.geteuid() == 0 else {}), "PYTHONPATH": path, "TMPDIR": str(folder)}
    environment |= variables
    return subprocess.run(
        [str(find_mpiexec()), "-n", str(world_size), "--oversubscribe", *ON_THIS_MACHINE, sys.executable, *program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture(scope="module")
def under_mpiexec(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[object]]:
    """Return the results of four ranks by program."""
    folder = tmp_path_factory.mktemp("mpi")
    done = mpiexec(4, folder, "-m", PROGRAMS, str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(4)]
    return {name: [results[name] for results in ranks] for name in ranks[0]}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "expected"), EXPECTED, ids=[program.__name__ for program, _ in EXPECTED])
def test_a_program_gives_every_rank_what_it_should(under_mpiexec, program, expected):
    assert under_mpiexec[program.__name__] == expected


@pytest.mark.parametrize("program", AS_SIMULATED, ids=lambda program: program.__name__)
def test_a_program_gives_every_rank_what_simulated_ranks_get(under_mpiexec, program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of names that it renames from release to release
        assert under_mpiexec[program.__name__] == get_world("sim").run(program, world_size=4)


def test_a_reduction_keeps_the_inputs_of_others(under_mpiexec):
    """Simulated ranks leave NaN there; gloo leaves partial sums."""
    assert under_mpiexec["a_reduction_keeps_the_inputs_of_others"] == [True] * 4


def test_a_column_is_refused_as_on_simulated_ranks(under_mpiexec):
    assert all(
        told.startswith("RuntimeError: broadcast moves memory") for told in under_mpiexec["broadcast_of_a_column"]
    )


def test_a_program_of_ones_own_may_send_and_receive_columns(under_mpiexec):
    results = under_mpiexec["strided_messages"]
    assert [taken for _, taken in results] == [results[rank - 1][0] for rank in range(4)]


def test_replicas_of_ddp_are_equal_bit_for_bit(under_mpiexec):
    first, *others = under_mpiexec["train_ddp"]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_replicas_are_equal_after_join_and_no_sync(under_mpiexec):
    first, *others = under_mpiexec["train_with_no_sync_and_uneven_inputs"]
    assert isinstance(first, list), first
    assert all(other == first for other in others)


def test_a_long_message_moves_while_its_sender_waits_for_something_else(under_mpiexec):
    assert under_mpiexec["moves_while_nobody_waits"] == [3.0 * 2**20] * 4


def test_what_has_no_meaning_is_refused_with_the_cure_and_the_group_goes_on(under_mpiexec):
    for said, total in under_mpiexec["refusals"]:
        assert "use SUM" in said["AVG of integers"]
        assert "needs a tensor of integers, got torch.float32; use another reduce-op" in said["BOR of floats"]
        assert "needs tensors of one dtype, got torch.float32, torch.int32" in said["two dtypes"]
        assert "needs tensors of one shape, got an input of (2,) and outputs of (3,)" in said["two shapes"]
        assert "call .to_dense() first" in said["a sparse tensor"]
        assert total == 4.0


WAITS_FOR_RANK_1 = (
    "import argparse, os, sys, torch, torch.distributed as dist\n"
    "import pdlcheck.worlds.mpi\n"
    "dist.init_process_group('pdlcheck_mpi')\n"
    "try:\n"
    "    sys.exit(7)\n"
    "except SystemExit as caught:\n"
    "    assert caught.code == 7\n"
    "def end():\n"
    "    {}\n"
    "if dist.get_rank() == 1:\n"
    "    end()\n"
    "dist.all_reduce(torch.ones(1))\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("raise ValueError('rank 1 is ill')", 1, "ValueError"),
        ("sys.exit(3)", 3, "SystemExit(3)"),
        ("argparse.ArgumentParser().error('rank 1 is ill')", 2, "SystemExit(2)"),
        ("sys.exit('rank 1 is ill')", 1, "SystemExit('rank 1 is ill')"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_a_rank_that_ends_by_an_error_ends_the_job_with_its_code_and_one_line(tmp_path, end, code, reason):
    program = tmp_path / "ill.py"
    program.write_text(WAITS_FOR_RANK_1.format(end))
    start = time.monotonic()
    done = mpiexec(2, tmp_path, str(program))
    assert time.monotonic() - start < 60
    assert done.returncode == code, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("pdlcheck_mpi: ")]
    assert said == [
        f"pdlcheck_mpi: rank 1 ended by {reason}, and others had not ended 2 s later: "
        f"the job ends with exit code {code}"
    ]
    if "ill" in end:
        assert "rank 1 is ill" in done.stderr
    if reason == "ValueError":
        assert "ValueError: rank 1 is ill" in done.stderr
        assert "ill.py" in done.stderr


def test_a_process_that_leaves_at_once_ends_the_job(tmp_path):
    program = tmp_path / "leaves.py"
    program.write_text(WAITS_FOR_RANK_1.format("os._exit(5)"))
    assert mpiexec(2, tmp_path, str(program)).returncode == 5


def test_ranks_that_all_end_by_an_error_show_what_each_says(tmp_path):
    program = tmp_path / "all.py"
    program.write_text(WAITS_FOR_RANK_1.format("pass") + "sys.exit(f'rank {dist.get_rank()} is ill')\n")
    done = mpiexec(2, tmp_path, str(program))
    assert done.returncode == 1
    assert "rank 0 is ill" in done.stderr
    assert "rank 1 is ill" in done.stderr
    assert "pdlcheck_mpi:" not in done.stderr


@pytest.mark.slow
def test_ranks_that_exit_with_code_0_wait_until_the_others_have_ended(tmp_path):
    program = tmp_path / "well.py"
    program.write_text(
        "import sys, threading, time, torch, torch.distributed as dist\n"
        "import pdlcheck.worlds.mpi\n"
        "dist.init_process_group('pdlcheck_mpi')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n"
        "    ends_itself_alone = threading.Thread(target=sys.exit, args=(3,))\n"
        "    ends_itself_alone.start()\n"
        "    ends_itself_alone.join()\n"
        "    sys.exit(0)\n"
        "if dist.get_rank() == 2:\n"
        "    sys.exit()\n"
        "if dist.get_rank() == 3:\n"
        "    raise SystemExit\n"
        "time.sleep(3)  # longer than the others of a rank that ends by an error have\n"
        "print('rank 0 has ended')\n"
    )
    done = mpiexec(4, tmp_path, str(program))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "rank 0 has ended\n"
    assert "pdlcheck_mpi:" not in done.stderr


def test_a_group_that_is_larger_than_the_job_is_refused_with_the_command(tmp_path):
    program = tmp_path / "alone.py"
    program.write_text(
        "import torch.distributed as dist\n"
        "import pdlcheck.worlds.mpi\n"
        "dist.init_process_group('pdlcheck_mpi', store=dist.HashStore(), rank=0, world_size=2)\n"
    )
    done = mpiexec(1, tmp_path, str(program))
    assert "the process group has 2 ranks, MPI has 1; start the program with mpiexec -n 2" in done.stderr


def test_a_second_start_of_mpi_or_of_the_group_is_refused_on_every_rank_and_the_group_goes_on(tmp_path):
    program = tmp_path / "twice.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "import pdlcheck.worlds.mpi\n"
        "from mpi4py import MPI\n"
        "def said(attempt, *arguments):\n"
        "    try:\n"
        "        attempt(*arguments)\n"
        "    except Exception as error:\n"
        "        print(f'rank {rank}: {error}')\n"
        "def total():\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    assert x.item() == 2\n"
        "dist.init_process_group('pdlcheck_mpi')\n"
        "rank = dist.get_rank()\n"
        "said(dist.init_process_group, 'pdlcheck_mpi')\n"
        "said(dist.monitored_barrier)\n"
        "said(MPI.Init)\n"
        "total()\n"
        "dist.destroy_process_group()\n"
        "dist.init_process_group('pdlcheck_mpi')\n"
        "total()\n"
        "MPI.Finalize()\n"
        "said(total)\n"
        "said(dist.new_group)\n"
    )
    done = mpiexec(2, tmp_path, str(program))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
        assert len(lines) == 5, done.stdout + done.stderr
        assert "trying to initialize the default process group twice" in lines[0]
        assert "monitored_barrier is only implemented for GLOO" in lines[1]
        assert "MPI.Init: MPI has started in this process, and starts only once; remove the call" in lines[2]
        assert "MPI has ended in this process (MPI.Finalize) before all_reduce" in lines[3]
        assert "MPI has ended in this process (MPI.Finalize), and cannot start a second time" in lines[4]
    assert "more than once" not in done.stderr  # MPI's own message, which does not name the cure


@pytest.mark.slow
@pytest.mark.parametrize(("level", "alone"), [("single", ()), ("funneled", ()), ("single", (1,))])
def test_an_mpi_that_was_started_for_a_single_thread_is_refused_with_the_cure(tmp_path, level, alone):
    program = tmp_path / "single.py"
    program.write_text(
        "import os, mpi4py\n"
        f"if not {alone} or int(os.environ['OMPI_COMM_WORLD_RANK']) in {alone}:\n"
        f"    mpi4py.rc.thread_level = '{level}'\n"
        "from mpi4py import MPI\n"
        "import torch.distributed as dist, pdlcheck.worlds.mpi\n"
        "dist.init_process_group('pdlcheck_mpi')\n"
    )
    done = mpiexec(2, tmp_path, str(program))
    refused = [line for line in done.stderr.splitlines() if line.startswith("pdlcheck.errors.WorldUnavailable")]
    assert done.returncode == 1, done.stderr
    ended_alone = "rank 1 ended by WorldUnavailable" in done.stderr or "rank 0 ended by WorldUnavailable" in done.stderr
    assert len(refused) == (1 if alone or ended_alone else 2), (
        done.stderr
    )  # a rank that starts late is ended by the job
    for line in refused:
        assert "MPI was initialised for a single thread before the process group" in line
        assert "start MPI with MPI.Init_thread(MPI.THREAD_MULTIPLE)" in line
    assert not alone or "rank 1 ended by WorldUnavailable" in done.stderr


@pytest.mark.slow
def test_a_program_that_starts_mpi_itself_for_threads_has_its_group(tmp_path):
    program = tmp_path / "serialized.py"
    program.write_text(
        "import mpi4py; mpi4py.rc.thread_level = 'serialized'\n"
        "from mpi4py import MPI\n"
        "import torch, torch.distributed as dist, pdlcheck.worlds.mpi\n"
        "dist.init_process_group('pdlcheck_mpi')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    done = mpiexec(2, tmp_path, str(program))
    assert done.returncode == 0, done.stderr


SIZES = (
    "import sys, torch, torch.distributed as dist\n"
    "import pdlcheck.worlds.mpi\n"
    "dist.init_process_group('pdlcheck_mpi')\n"
    "x = torch.ones(int(sys.argv[1 + dist.get_rank()]))\n"
    "dist.barrier()\n"
    "dist.all_reduce(x)\n"
    "assert x[0].item() == 2\n"
)


@pytest.mark.parametrize(("sizes", "fits"), [(("2", "100002"), False), (("5", "5"), True)])
def test_in_torchs_debug_mode_sizes_are_compared_before_data_moves(tmp_path, sizes, fits):
    program = tmp_path / "sizes.py"
    program.write_text(SIZES)
    done = mpiexec(2, tmp_path, str(program), *sizes, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert done.returncode == (0 if fits else 1), done.stderr
    if not fits:
        told = "CollectiveMismatch: ranks 0 and 1 met in collective 1 of the default group (ranks 0, 1) and differ in"
        assert done.stderr.count(f"{told} the shape: (2,) and (100002,)") == 2, done.stderr
        assert "Segmentation fault" not in done.stderr


def test_a_message_that_mpi_cut_off_names_the_likely_cause_and_the_switch(tmp_path):
    program = tmp_path / "sizes.py"
    program.write_text(SIZES)
    done = mpiexec(2, tmp_path, str(program), "2", "4")
    assert done.returncode == 1, done.stderr
    assert "in all_reduce(SUM) of float32 (2,), default group (ranks 0, 1), collective 1; likely another" in done.stderr
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL shows what each rank called" in done.stderr


def test_an_all_reduce_ends_while_every_rank_computes(under_mpiexec):
    """No rank waits for it or polls it; this lets DDP's buckets overlap with its backward pass."""
    assert under_mpiexec["reduces_while_every_rank_computes"] == [4.0 * (1 << 20)] * 4


def test_without_mpi4py_the_backend_names_the_command_that_brings_it():
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import torch.distributed as dist, pdlcheck.worlds.mpi\n"
        "dist.init_process_group('pdlcheck_mpi', store=dist.HashStore(), rank=0, world_size=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "WorldUnavailable: the backend pdlcheck_mpi needs mpi4py and an MPI library" in done.stderr
    assert "pip install 'pdlcheck[mpi]'" in done.stderr
