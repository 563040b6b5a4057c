"""Tests and options under a launcher: the same as on ranks that are started here, or refused with the cure."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

from pdlcheck.launch.environment import Launch, is_loopback
from pdlcheck.worlds.agents.interfaces import addresses, outward_address
from pdlcheck.worlds.launched import meeting
from pdlcheck.worlds.mpi.job import find_mpiexec

from ..plugin import drawn_by_modules
from ..processes import test_late_reports
from .test_launched import outside

HEAD = """
import os
import pytest
import torch
import torch.distributed as dist
W = pytest.mark.world_size(2)
"""


@pytest.fixture
def launched(tmp_path):
    """Return a function that runs a file in two processes launched by hand, and returns exit codes and outputs.

    ``nodes``: the number of nodes that the processes claim to be on. ``more``: variables of each. ``before``: a command
    that starts the second one. ``others``: sources of more files, by name.
    """
    started = []

    def run(source, *options, nodes=1, more=({}, {}), before=(), **others):
        for name, text in {"test_inner": source, **others}.items():
            (tmp_path / f"{name}.py").write_text(HEAD + text)
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no"]
        command += ["--init-method", f"file://{tmp_path}/meeting", *options, "test_inner.py"]
        command += [f"{name}.py" for name in others]
        processes = []
        for rank in (0, 1):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank % (2 // nodes))}
            own |= {"LOCAL_WORLD_SIZE": str(2 // nodes), "MASTER_ADDR": "127.0.0.1"} | more[rank]
            processes.append(
                subprocess.Popen(
                    [*(before if rank else ()), *command],
                    cwd=tmp_path,
                    env={name: value for name, value in (outside() | own).items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        started.extend(processes)
        texts = [process.communicate(timeout=100)[0] for process in processes]
        assert not (tmp_path / "meeting").exists(), "the place where they met is left behind"
        return [process.returncode for process in processes], texts

    yield run
    for process in started:
        process.kill()


PLACES = """
@pytest.mark.world_size(1, 2)
def test_places(rank, world_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [rank, world_size, rank, world_size]
"""
HASHES = """
@W
def test_hashes(rank):
    values = [None, None]
    dist.all_gather_object(values, hash("weight"))
    assert values[0] != values[1]
"""


@pytest.mark.slow
def test_ranks_are_as_those_that_are_forked_here(launched):
    """One session covers variables, string hashes, values drawn at import, and an error that is slow to send."""
    files = {
        "test_hashes": HASHES,
        "test_drawn": drawn_by_modules.SOURCE,
        "test_slow": "import time\n" + test_late_reports.SLOW_TO_SEND,
    }
    codes, texts = launched(PLACES, more=[{"PYTHONHASHSEED": "random"}] * 2, **files)
    assert codes == [0, 0], texts
    assert f"{2 + 1 + drawn_by_modules.TESTS + 1} passed" in texts[0]


@pytest.mark.slow
def test_a_launcher_that_does_not_say_how_many_ranks_a_node_has(launched):
    address = outward_address()
    if address is None:
        pytest.skip("needs a network interface besides loopback")
    source = """
@W
def test_places(rank, world_size):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    print("place", *(os.environ[name] for name in names))
"""
    said = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    codes, texts = launched(source, more=[said, said])
    assert codes == [0, 0], texts
    assert f"place 0 2 0 2 {address}" in texts[0], texts[0]
    assert f"place 1 2 1 2 {address}" in texts[0], texts[0]


@pytest.mark.slow
def test_parameters_that_ranks_have_in_orders_of_their_own_are_told(launched):
    seeds = [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"}]
    codes, texts = launched(drawn_by_modules.IN_ORDERS_OF_THEIR_OWN, more=seeds)
    assert codes == [1, 1], texts
    for well in ("test_names", "test_list"):
        assert f"PASSED test_inner.py::{well}" in texts[0]
        assert f"FAILED test_inner.py::{well}" not in texts[0]
    assert "config is Config(name='" in texts[0]
    assert "parametrize over a list or sorted(...), not over a set, or set PYTHONHASHSEED" in texts[0]
    assert "AssertionError" not in texts[0], "no body runs with other parameters on each rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "broken"), [("pytest.exit('no device')", "1"), ("pytest.skip('no device', allow_module_level=True)", "0")]
)
def test_where_a_conftest_file_ends_one_session_the_others_hear_of_it_and_end(launched, tmp_path, way, broken):
    (tmp_path / "conftest.py").write_text(f'import os, pytest\nif os.environ["RANK"] == "{broken}": {way}\n')
    codes, texts = launched("@W\ndef test_it(rank): dist.barrier()\n")
    assert all(code > 0 for code in codes), texts
    if broken == "1":
        assert "launched processes could not start their session, rank 1 on " in texts[0]
        assert "no device" in texts[0]


@pytest.mark.slow
def test_a_debugger_is_not_lent_to_another_node(launched):
    codes, texts = launched("def test_it(): pass\n", "--rank-pdb", "1", nodes=2)
    assert codes == [pytest.ExitCode.USAGE_ERROR] * 2, texts
    assert "--rank-pdb 1: the terminal is that of rank 0, on whose node 1 of 2 ranks are" in texts[0]


@pytest.mark.parametrize(("master", "found"), [("head-node", "10.1.2.3"), ("127.0.0.1", "127.0.0.1")])
def test_on_several_nodes_rank_0_is_not_to_be_found_at_the_loopback_address_of_its_own_name(monkeypatch, master, found):
    launch = Launch("torchrun", 0, 4, 0, 2, "env://")
    monkeypatch.setenv("MASTER_ADDR", master)
    # /etc/hosts of many systems has a line such as 127.0.1.1 head-node
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1" if name == "head-node" else name)
    monkeypatch.setattr(meeting, "outward_address", lambda: "10.1.2.3")
    assert meeting._host_of(launch) == found


def test_the_address_by_which_others_see_this_machine_is_one_of_its_own():
    own = dict(addresses())
    assert "127.0.0.1" in own.values()
    outward = [address for address in own.values() if not is_loopback(address)]
    assert outward_address() in outward if outward else outward_address() is None


@pytest.mark.slow
def test_workers_that_an_ini_file_asks_for_can_be_left_out(launched, tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
    codes, texts = launched("@W\ndef test_it(rank): dist.barrier()\n")
    assert codes == [pytest.ExitCode.USAGE_ERROR] * 2, texts
    assert "leave -n away, or pass -n 0 after an -n in addopts" in texts[0]
    codes, texts = launched("@W\ndef test_it(rank): dist.barrier()\n", "-n", "0")
    assert codes == [0, 0], texts


@pytest.fixture
def another_disk(tmp_path):
    """Return a command that runs another one with its own disk for temporary files, as on another machine."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {temporary} && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs unshare, of util-linux, and the right to mount: run it as root")
    return command


def variables_of_nodes(folder):
    """Return the variables of two processes that do not share their folder for temporary files."""
    return [{"TMPDIR": str(folder / "temporary")}] * 2


SHARES = """
@W
def test_own(rank, tmp_path):
    (tmp_path / "own").write_text(str(rank))

@W
def test_shared(rank, shared_tmp_path):
    if rank == 0:
        (shared_tmp_path / "common").touch()
    dist.barrier()
    assert (shared_tmp_path / "common").exists()
"""


@pytest.mark.slow
def test_a_shared_folder_that_another_node_does_not_see_is_told_with_the_cure(launched, another_disk, tmp_path):
    codes, texts = launched(SHARES, nodes=2, more=variables_of_nodes(tmp_path), before=another_disk)
    assert codes == [1, 1], texts
    assert "1 passed, 1 error" in texts[0]
    assert "shared_tmp_path must be on a file system that all nodes share" in texts[0]
    assert "pass --basetemp" in texts[0]


@pytest.mark.slow
def test_a_shared_folder_that_every_node_sees_is_shared(launched, another_disk, tmp_path):
    options = [f"--basetemp={tmp_path}/seen"]
    more = variables_of_nodes(tmp_path)
    codes, texts = launched(SHARES, *options, nodes=2, more=more, before=another_disk)
    assert codes == [0, 0], texts


@pytest.mark.slow
def test_what_ran_on_another_node_is_covered_too(launched, another_disk, tmp_path):
    (tmp_path / "measured.py").write_text(
        """
def which(rank):
    if rank == 0:
        return "zero"
    return "one"
"""
    )
    source = """
import measured

@W
def test_it(rank):
    measured.which(rank)
"""
    more = variables_of_nodes(tmp_path)
    options = ["--cov=measured", "--cov-report=term-missing"]
    codes, texts = launched(source, *options, nodes=2, more=more, before=another_disk)
    assert codes == [0, 0], texts
    assert re.search(r"^measured\.py +4 +0 +100%", texts[0], re.M), texts[0]
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]


@pytest.mark.slow
def test_a_file_that_imports_mpi_is_no_member_of_the_run_of_mpiexec(tmp_path):
    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("needs MPI: pip install 'pdlcheck[mpi]'")
    (tmp_path / "test_inner.py").write_text(
        f"{HEAD}\nfrom mpi4py import MPI\n"  # its initialisation waits for every started process
        """
@pytest.mark.world_size(1, 2)
def test_it(world_size):
    assert MPI.COMM_WORLD.Get_size() == 1  # as on --world gloo
    assert dist.get_world_size() == world_size

def test_alone():
    assert MPI.COMM_WORLD.Get_size() == 1
"""
    )
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(tmp_path)}
    # A process of Open MPI without mpiexec leaves its shared memory behind, also without pdlcheck.
    root["OMPI_MCA_btl_sm_backing_directory"] = str(tmp_path)
    launch = [mpiexec, "-n", "2", "--oversubscribe"]
    done = subprocess.run(
        [*launch, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pdl-launch=join"],
        cwd=tmp_path,
        env=outside() | root,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert "tests that call MPI themselves need --world mpi" in done.stdout
