"""A launch of tests without ranks is left alone; a launch of tests on ranks becomes one session."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.launch.environment import Launch
from pdlcheck.worlds.launched import meeting
from pdlcheck.worlds.mpi.job import find_mpiexec

from ..launched.test_launched import outside

PYTEST = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no"]
OF_MEGATRON = """
import os, torch, torch.distributed as dist

def test_all_reduce():
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == int(os.environ["WORLD_SIZE"])
"""
OURS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.world_size(2)
def test_sum(rank):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2

def test_without_ranks(): pass
"""


def run(command, folder, **variables):
    done = subprocess.run(
        command,
        cwd=folder,
        env=outside() | {"TMPDIR": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def by_torchrun(folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *PYTEST[1:], *arguments]
    return run(command, folder)


def by_mpiexec(folder, *arguments):
    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs MPI: pip install 'pdlcheck[mpi]'")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return run([mpiexec, "-n", "2", "--oversubscribe", *PYTEST, *arguments], folder, **root)


@pytest.mark.slow
def test_under_torchrun_tests_that_make_their_own_group_run_in_every_process(tmp_path):
    (tmp_path / "test_a.py").write_text(OF_MEGATRON)
    code, text = by_torchrun(tmp_path)
    assert code == 0, text
    assert text.count("1 passed") == 2
    assert "ranks launched by" not in text


def test_under_mpiexec_tests_of_mpi4py_have_all_its_processes(tmp_path):
    (tmp_path / "test_a.py").write_text("from mpi4py import MPI\ndef test_size(): assert MPI.COMM_WORLD.size == 2\n")
    code, text = by_mpiexec(tmp_path)
    assert code == 0, text
    assert text.count("1 passed") == 2


@pytest.mark.slow
def test_tests_of_mpi4py_beside_tests_on_ranks_are_refused_with_the_three_ways_out(tmp_path):
    (tmp_path / "test_a.py").write_text("from mpi4py import MPI\ndef test_size(): assert MPI.COMM_WORLD.size == 1\n")
    (tmp_path / "test_b.py").write_text(OURS)
    code, text = by_mpiexec(tmp_path)
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert "whose MPI 1 tests without ranks use, such as test_a.py::test_size; other tests need ranks" in text
    code, text = by_mpiexec(tmp_path, "--pdl-launch=join")
    assert code == 0, text
    assert text.count("3 passed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launch", [pytest.param(by_torchrun, id="torchrun"), pytest.param(by_mpiexec, id="mpiexec")])
def test_a_launch_of_tests_on_ranks_is_one_session(tmp_path, launch):
    (tmp_path / "test_a.py").write_text(OURS)
    (tmp_path / "conftest.py").write_text(
        "import os, pathlib\n"
        "def pytest_sessionfinish(): pathlib.Path('finished' + str(os.getpid())).touch()\n"  # in each process
    )
    code, text = launch(tmp_path, "--junitxml=report.xml")
    assert code == 0, text
    assert text.count("2 passed") == 1
    assert text.count("test session starts") == 1
    assert "2 ranks launched by" in text
    assert 'tests="2"' in (tmp_path / "report.xml").read_text()  # no other process has overwritten it
    assert len(list(tmp_path.glob("finished*"))) == 2 + 2  # plus the sessions of two ranks


@pytest.mark.slow
def test_ranks_are_left_alone_where_an_option_says_so(tmp_path):
    (tmp_path / "test_a.py").write_text(OURS)
    code, text = by_torchrun(tmp_path, "--pdl-launch=ignore")
    assert code == 0, text
    assert text.count("PASSED test_a.py::test_sum[sim-2]") == 2


@pytest.mark.slow
def test_rank_0_prints_for_whom_it_waits_and_the_cure(tmp_path):
    (tmp_path / "test_a.py").write_text(OURS)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(PYTEST, cwd=tmp_path, env=outside() | variables, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
    finally:
        process.kill()
        process.communicate()
    assert re.match(r"pdlcheck: rank 0 of 2 \(torchrun\) waits for ranks \[1\] at .* since \d+ s; to run", line), line
    assert "pytest --pdl-launch=ignore" in line


def test_another_rank_prints_that_it_waits_for_rank_0(monkeypatch, capfd):
    monkeypatch.setattr(meeting, "MEETING_NOTICE_S", 0.01)
    monkeypatch.setattr(meeting, "MEETING_S", 0.5)
    with pytest.raises(WorldUnavailable, match="rank 1 cannot reach rank 0"):
        next(meeting.reach(Launch("srun", 1, 2, 1, 2, "tcp://127.0.0.1:1")))
    assert "pdlcheck: rank 1 of 2 (srun) waits for rank 0 at tcp://127.0.0.1:1 since 0 s" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--pdl-launch=join"]])
def test_a_conftest_that_sets_the_variables_of_a_launcher_is_none(tmp_path, options):
    (tmp_path / "test_a.py").write_text(OURS)
    (tmp_path / "conftest.py").write_text("import os\nos.environ.update(RANK='0', WORLD_SIZE='2')\n")
    code, text = run([*PYTEST, *options], tmp_path)
    assert code == 0, text
    assert "PASSED test_a.py::test_sum[sim-2]" in text
    assert "launched by" not in text


@pytest.mark.parametrize(
    ("rank", "words"), [("5", "RANK=5 is no rank of WORLD_SIZE=2"), ("x", "RANK must be a number")]
)
def test_variables_that_make_no_sense_are_refused_where_tests_need_ranks(tmp_path, rank, words):
    (tmp_path / "test_a.py").write_text(OURS)
    code, text = run(PYTEST, tmp_path, RANK=rank, WORLD_SIZE="2")
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert words in text
    assert "pytest --pdl-launch=ignore" in text


def test_the_environment_of_a_launch_that_is_not_ours_stays_as_it_is(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import os\ndef test_a(): assert os.environ['PMIX_RANK'] == '0' and 'PDLCHECK_INSIDE' not in os.environ\n"
    )
    code, text = run(PYTEST, tmp_path, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2", PMIX_RANK="0")
    assert code == 0, text
    assert os.environ.get("PMIX_RANK") is None
