"""A test session under torchrun, mpiexec or a launch by hand: the same file, the same verdicts, one report."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pdlcheck.launch.environment import INSIDE, Launch, is_loopback, launch_of
from pdlcheck.launch.traces import has_traces
from pdlcheck.worlds.agents.interfaces import outward_address

from ..needs_slurm import slurm_cluster

FILE = """
import os, signal
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st


@pytest.mark.world_size(2, 3, 5)
def test_sum(rank, world_size):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == world_size * (world_size + 1) / 2
    assert int(os.environ["RANK"]) == rank and int(os.environ["LOCAL_WORLD_SIZE"]) == world_size


@pytest.mark.world_size(3)
def test_one_rank_fails(rank):
    dist.barrier()
    assert rank != 2
    dist.barrier()


@pytest.mark.world_size(2)
def test_one_rank_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.world_size(2)
def test_the_next_one(rank):
    dist.barrier()


@pytest.mark.world_size(2)
def test_a_group_that_is_made_again(rank):
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()


def test_every_rank_has_its_own_process(world):
    places = world.run(lambda: (os.getppid(), os.environ["LOCAL_RANK"]), world_size=3)
    assert len({parent for parent, _ in places}) == 3  # each was forked by the launched process in its place
    assert [local for _, local in places] == ["0", "1", "2"]


def test_too_many_ranks_for_a_run(world):
    world.run(dist.get_rank, world_size=4)


@given(world_size=st.integers(6, 6))
def test_too_many_ranks_for_an_example(world, world_size):
    world.run(dist.get_rank, world_size=world_size)
"""
VERDICTS = {
    "test_sum[gloo-2]": "PASSED",
    "test_sum[gloo-3]": "PASSED",
    "test_one_rank_fails[gloo-3]": "FAILED",
    "test_one_rank_dies[gloo-2]": "FAILED",
    "test_the_next_one[gloo-2]": "PASSED",
    "test_a_group_that_is_made_again[gloo-2]": "PASSED",
    "test_every_rank_has_its_own_process[gloo]": "PASSED",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
PYTEST = ["-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no", "test_launched_ranks.py"]


def outside() -> dict[str, str]:
    """Return the environment without the variables of an outer launch or an outer test."""
    return {name: value for name, value in os.environ.items() if name not in (INSIDE, "PYTEST_ADDOPTS")}


def launched(command: list[str], folder: Path, **more: str) -> tuple[int, str]:
    (folder / "test_launched_ranks.py").write_text(FILE)
    done = subprocess.run(
        command,
        cwd=folder,
        env=outside() | {"TMPDIR": str(folder)} | more,  # torchrun leaves a folder there
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout + done.stderr


def verdicts(text: str) -> dict[str, str]:
    lines = re.findall(r"^(PASSED|FAILED|ERROR) test_launched_ranks\.py::(\S+)", text, re.M)
    return {name: verdict for verdict, name in lines}


def assert_one_true_report(code: int, text: str, launcher: str) -> None:
    assert verdicts(text) == VERDICTS, text
    assert code == 1
    assert text.count("2 failed, 5 passed, 3 skipped") == 1, text
    for needed, words in [(4, "needs 4"), (5, "needs 5"), (6, "an example needs 6")]:
        assert f": {words} ranks, {launcher} launched 3: launch {needed} processes, or ask for world_size=3" in text
    assert "or ask for world_size=3; others may need more" in text
    assert "rank 2 of 3 raised this" in text
    stopped = "ranks 0, 1 were stopped in barrier, default group (ranks 0-2), collective 1, at test_launched_ranks.py:"
    assert stopped in text
    assert "rank 1 was killed by SIGKILL" in text


@pytest.mark.slow
def test_torchrun(tmp_path):
    assert_one_true_report(*launched([*TORCHRUN, *PYTEST], tmp_path), "torchrun")


@pytest.mark.slow
def test_under_torchrun_every_process_ends_with_the_exit_code_of_rank_0(tmp_path):
    (tmp_path / "noting_the_code.py").write_text(  # torchrun itself would end the others after a failure
        """
import os, pathlib, subprocess, sys
code = subprocess.call([sys.executable, *sys.argv[1:]])
pathlib.Path("code" + os.environ["RANK"]).write_text(str(code))
"""
    )
    two = [*TORCHRUN[:-1], "2", "noting_the_code.py"]
    _, text = launched([*two, *PYTEST, "-k", "test_one_rank_dies"], tmp_path)
    assert [(tmp_path / f"code{rank}").read_text() for rank in range(2)] == ["1"] * 2, text


@pytest.mark.slow
def test_mpiexec(tmp_path):
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if mpiexec is None:
        pytest.skip("needs mpiexec: pip install 'pdlcheck[mpi]'")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    code, text = launched(
        [mpiexec, "-n", "3", "--oversubscribe", sys.executable, *PYTEST],
        tmp_path,
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        TMPDIR=str(temporary),
    )
    assert_one_true_report(code, text, "mpiexec")
    assert list(temporary.glob("pdlcheck-*")) == []


@pytest.mark.slow
def test_srun(tmp_path):
    with slurm_cluster(nodes=1) as variables:
        # pmi2 also sets the variables of an mpiexec
        code, text = launched(["srun", "-n", "3", "--mpi=pmi2", sys.executable, *PYTEST], tmp_path, **variables)
    assert_one_true_report(code, text, "srun")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def by_hand(folder: Path, rank: int, init_method: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start one of two processes, as if each were on its own node."""
    (folder / "test_launched_ranks.py").write_text(FILE)
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, *PYTEST, "--init-method", init_method, "-k", "test_the_next_one", *arguments],
        cwd=folder,
        env=outside() | own | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def address() -> str:
    """Return an address by which other machines reach this one: processes that meet there may be on several nodes."""
    found = outward_address()
    if found is None or is_loopback(found):
        pytest.skip("needs a network interface besides loopback")
    return found


@pytest.mark.slow
def test_two_nodes_meet_by_tcp(tmp_path, address):
    """Most other tests meet by a shared file."""
    meeting_place = f"tcp://{address}:{free_port()}"
    processes = [by_hand(tmp_path, rank, meeting_place, PDLCHECK_LAUNCH_KEY="k" * 32) for rank in (0, 1)]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "2 ranks launched by torchrun, 1 of them on this node" in texts[0]
    assert "1 passed" in texts[0]
    assert not texts[1].strip()  # only rank 0 reports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "exitcode"),
    [(["--markers"], pytest.ExitCode.OK), (["--world", "mars"], pytest.ExitCode.USAGE_ERROR)],
    ids=["markers", "usage"],
)
def test_a_command_that_never_comes_to_tests_ends_on_every_rank(tmp_path, arguments, exitcode):
    processes = [by_hand(tmp_path, rank, f"file://{tmp_path}/meeting", *arguments) for rank in (0, 1)]
    try:
        texts = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        processes[1].kill()
    assert [process.returncode for process in processes] == [exitcode] * 2, texts
    assert texts[0].strip()
    assert not texts[1].strip()


def test_a_port_that_somebody_else_has_is_told_with_the_cure(tmp_path, address):
    with socket.create_server((address, 0)) as somebody:
        place = f"tcp://{address}:{somebody.getsockname()[1]}"
        process = by_hand(tmp_path, 0, place, PDLCHECK_LAUNCH_KEY="k" * 32)
        text = process.communicate(timeout=120)[0]
    assert process.returncode == pytest.ExitCode.USAGE_ERROR, text
    assert f"rank 0 cannot wait for the others at {place}: " in text
    assert "must name rank 0's host and a port that is free there" in text


def test_a_launched_process_that_is_killed_fails_its_tests_and_nothing_hangs(tmp_path):
    place = f"file://{tmp_path}/meeting"
    (tmp_path / "conftest.py").write_text(
        """
import os, pathlib, signal, time
import pdlcheck.worlds.agents.handle as handle
handle.LAUNCHED_ANSWER_S = 1000.0  # who has gone is not waited for
def pytest_pyfunc_call(pyfuncitem):
    if pyfuncitem.funcargs["rank"] == 1:
        os.kill(int(pathlib.Path("agent").read_text()), signal.SIGKILL)
        time.sleep(60)  # the end of the agent ends this process
"""
    )
    two = "test_the_next_one or test_a_group_that_is_made_again"
    second = by_hand(tmp_path, 1, place, "-k", two)
    (tmp_path / "agent").write_text(str(second.pid))
    first = by_hand(tmp_path, 0, place, "-k", two)
    text = first.communicate(timeout=150)[0]  # longer than a test's time limit, whose report shows the hang
    second.communicate(timeout=10)
    assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
    assert "RankDied: rank 1 went down with the process that had forked it" in text
    assert re.search(r"WorldUnavailable: launched process 1 on \S+ does not answer: it has ended, or ", text)
    assert "1 failed" in text
    assert "1 error" in text


@pytest.mark.slow
def test_when_rank_0_is_killed_the_others_end(tmp_path):
    place = f"file://{tmp_path}/meeting"
    started = tmp_path / "started"
    (tmp_path / "conftest.py").write_text(
        f"""
import pathlib, pytest, time
@pytest.fixture(autouse=True)
def slow(rank):
    pathlib.Path({str(started)!r} + str(rank)).touch()
    time.sleep(60)
"""
    )
    processes = [by_hand(tmp_path, rank, place) for rank in (0, 1)]
    until = time.monotonic() + 60
    while not all(Path(f"{started}{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < until
        time.sleep(0.05)
    processes[0].kill()
    texts = [process.communicate(timeout=20)[0] for process in processes]
    assert processes[1].returncode == 1
    assert "pdlcheck: rank 1 ends, as rank 0 has gone" in texts[1]


@pytest.mark.slow
def test_ctrl_c_on_one_node_alone_ends_its_processes_and_the_test_says_so(tmp_path):
    place = f"file://{tmp_path}/meeting"
    (tmp_path / "conftest.py").write_text(
        """
import os, pathlib, signal, pytest, torch.distributed as dist
@pytest.fixture(autouse=True)
def interrupted(rank):
    if rank == 1:
        os.kill(int(pathlib.Path("agent").read_text()), signal.SIGINT)
        signal.pause()
"""
    )
    second = by_hand(tmp_path, 1, place)
    (tmp_path / "agent").write_text(str(second.pid))
    first = by_hand(tmp_path, 0, place)
    texts = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (1, 2), texts
    assert "RankDied: rank 1 went down with the process that had forked it" in texts[0]
    assert "pdlcheck: rank 1 ends, as it was interrupted, and rank 0 was not" in texts[1]


def test_workers_of_xdist_and_a_launch_exclude_each_other(tmp_path):
    process = by_hand(tmp_path, 0, f"file://{tmp_path}/meeting", "-n", "2")
    text = process.communicate(timeout=120)[0]
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "-n divides one machine among workers, torchrun has divided it already" in text


BY_TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
BY_SCRIPT = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}  # a user's launcher: node 1 of 2, 4 a node
MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
KEY = {"PDLCHECK_LAUNCH_KEY": "0123456789abcdef"}
SECRET = b"0123456789abcdef"
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_PORT": "host:1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77",
}
UNEVEN = {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "1"}
ONE_NODE = {"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_ID": "5"}
TEMPORARY = f"file://{tempfile.gettempdir()}/pdlcheck-{os.getuid()}-"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (BY_TORCHRUN | MASTER | KEY, Launch("torchrun", 5, 8, 1, 4, "env://", SECRET)),
        (OPEN_MPI, Launch("mpiexec", 1, 2, 1, 2, f"{TEMPORARY}prterun-host-7-1")),
        (OPEN_MPI | MASTER, Launch("mpiexec", 1, 2, 1, 2, f"{TEMPORARY}prterun-host-7-1")),
        (MPICH, Launch("mpiexec", 1, 2, 1, 2, f"{TEMPORARY}host-1")),
        (SLURM | MASTER | KEY, Launch("srun", 3, 4, 1, 2, "env://", SECRET)),
        (SLURM | MASTER | KEY | UNEVEN, Launch("srun", 3, 4, 0, 1, "env://", SECRET)),
        (
            SLURM | MASTER | KEY | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "13"},
            Launch("srun", 3, 4, 1, 2, "env://", SECRET),
        ),
        (SLURM | ONE_NODE, Launch("srun", 3, 4, 3, 4, f"{TEMPORARY}77-5")),
        (SLURM | MPICH, Launch("mpiexec", 1, 2, 1, 2, f"{TEMPORARY}host-1")),
        (SLURM | OPEN_MPI, Launch("mpiexec", 1, 2, 1, 2, f"{TEMPORARY}prterun-host-7-1")),
        (
            SLURM | OPEN_MPI | BY_TORCHRUN | MASTER | KEY,
            Launch("torchrun", 5, 8, 1, 4, "env://", SECRET),
        ),
        (BY_SCRIPT | MASTER | KEY, Launch("torchrun", 5, 8, 1, None, "env://", SECRET)),
        (BY_SCRIPT | MASTER | {"MASTER_ADDR": "localhost"}, Launch("torchrun", 5, 8, 1, None, f"{TEMPORARY}29500")),
        (
            BY_SCRIPT | MASTER | {"RANK": "1", "MASTER_ADDR": "localhost"},
            Launch("torchrun", 1, 8, 1, 8, f"{TEMPORARY}29500"),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8"} | MASTER | KEY,
            Launch("torchrun", 5, 8, None, None, "env://", SECRET),
        ),
        (BY_TORCHRUN | MASTER | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (BY_TORCHRUN | MASTER | {INSIDE: "1"}, None),
        ({"SLURM_PROCID": "0"}, None),
        (MASTER, None),
        ({}, None),
    ],
)
def test_the_place_in_a_launch_is_found_from_the_environment(environment, expected):
    assert launch_of(environment) == expected
    assert has_traces(environment) or expected is None  # the quick check misses no launch


def test_several_nodes_need_a_place_to_meet():
    with pytest.raises(ValueError, match=r"4 processes on several nodes .* set MASTER_ADDR and MASTER_PORT"):
        launch_of(SLURM)
    assert launch_of(SLURM, "file:///shared/run1") == Launch("srun", 3, 4, 1, 2, "file:///shared/run1")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "need a key, as they run what they send to one another"),
        ({"PDLCHECK_LAUNCH_KEY": "key"}, "has 3 characters"),
    ],
)
def test_several_nodes_need_a_key_that_their_meeting_place_does_not_tell(given, words):
    ways = r"set PDLCHECK_LAUNCH_KEY .* \(openssl rand -hex 16\), or pass --init-method file:///PATH"
    for place in (None, "tcp://10.0.0.1:29500"):
        with pytest.raises(ValueError, match=f"{words}.*{ways}"):
            launch_of(BY_TORCHRUN | MASTER | given, place)
    assert launch_of(BY_TORCHRUN | MASTER | given, "file:///shared/run1").init_method == "file:///shared/run1"


def test_on_one_machine_the_place_is_a_file_of_this_user_whatever_is_given():
    """The rendezvous of torch gives its contents to every user of the machine."""
    one_node = BY_TORCHRUN | MASTER | {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "a/b"}
    assert launch_of(one_node).init_method == f"{TEMPORARY}a-b-29500"
    assert launch_of(one_node, "env://").init_method == f"{TEMPORARY}a-b-29500"
    assert launch_of(one_node, "tcp://node-1:3000").init_method == f"{TEMPORARY}node-1-3000"
    assert launch_of(BY_TORCHRUN, "tcp://127.0.0.1:3000").init_method == f"{TEMPORARY}127-0-0-1-3000"


@pytest.mark.parametrize("place", ["tcp://host", "tcp://:29500", "file://run1", "env://", "/shared/run1", "mpi://"])
def test_an_init_method_that_names_no_place_is_refused_on_every_rank(place):
    with pytest.raises(ValueError, match=f"--init-method must be tcp://HOST:PORT, .*; got '{place}'"):
        launch_of(BY_TORCHRUN, place)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number, got 'two'"):
        launch_of(BY_TORCHRUN | {"WORLD_SIZE": "two"})
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE must be numbers .* for node 2 .* got '2\(x2\)'"):
        launch_of(SLURM | MASTER | {"SLURM_NODEID": "2"})
    with pytest.raises(ValueError, match=r"as 4\(x2\),1, .* got 'many'"):
        launch_of(SLURM | MASTER | {"SLURM_STEP_TASKS_PER_NODE": "many"})


def test_versions_that_differ_are_named():
    from pdlcheck.errors import WorldUnavailable
    from pdlcheck.worlds.agents.agent import software
    from pdlcheck.worlds.agents.handle import require_same_software
    from pdlcheck.worlds.agents.messages import Hello

    require_same_software(Hello(1, software(), {}, 2, "node1", "10.0.0.2"), "launched")
    with pytest.raises(WorldUnavailable, match=r"rank 1 on node1 has torch 0\.1, rank 0 has \d"):
        require_same_software(Hello(1, software() | {"torch": "0.1"}, {}, 2, "node1", "10.0.0.2"), "launched")
