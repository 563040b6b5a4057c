"""Launched processes lose their fork server, or stop: a test reports it, and no launch waits for ever."""

from __future__ import annotations

import re

import pytest

from .test_launched import by_hand

CONFTEST = """
import os, pathlib, signal, pytest

def parent_of(pid):
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

@pytest.fixture
def server():
    return os.getppid()

@pytest.fixture
def launched_process(server):
    return parent_of(server)
"""
FILE = """
import os, signal, pytest, torch, torch.distributed as dist
W = pytest.mark.world_size(2)

@W
@pytest.mark.parametrize("of", [1, 0])
def test_kills_its_server(rank, server, of):
    if rank == of:
        os.kill(server, signal.SIGKILL)
        signal.pause()
    dist.barrier()

@W
@pytest.mark.parametrize("of", [1, 0])
def test_next(rank, of):
    dist.barrier()

@W
def test_stops_the_launched_process(rank, launched_process):
    if rank == 1:
        os.kill(launched_process, signal.SIGSTOP)
    dist.barrier()

@W
@pytest.mark.parametrize("number", range(9))
def test_then(rank, number):
    dist.barrier()
"""
ORDER = [f"{name}[gloo-2-{of}]" for of in (1, 0) for name in ("test_kills_its_server", "test_next")]
ORDER += ["test_stops_the_launched_process", *[f"test_then[gloo-2-{number}]" for number in range(9)]]


@pytest.mark.slow
def test_what_becomes_of_a_launch_that_loses_its_servers_and_then_a_process(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_agents.py").write_text(FILE)
    own = ["-k", "test", "--deselect=test_launched_ranks.py", *[f"test_agents.py::{name}" for name in ORDER]]
    second, first = [by_hand(tmp_path, rank, f"file://{tmp_path}/meeting", *own) for rank in (1, 0)]
    try:
        text = first.communicate(timeout=120)[0]
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    lines = re.findall(r"^(PASSED|FAILED|ERROR) test_agents\.py::(\S+)", text, re.M)
    verdicts = {name: verdict for verdict, name in lines}
    assert [verdicts.get(name) for name in ORDER[:4]] == ["FAILED", "PASSED"] * 2, text
    for rank in (1, 0):
        why = "went down with the process that had forked it, which was killed by SIGKILL"
        assert f"RankDied: rank {rank} {why}" in text
    lost = r"^E .*launched process 1 on \S+ does not answer: it has ended, or a signal \(SIGSTOP\) has stopped it"
    assert re.search(lost, text, re.M), text
    assert verdicts[ORDER[-1]] == "ERROR", text
