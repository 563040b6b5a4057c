"""The code of one rank leaves nothing in its process that affects the next test."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, sys, tempfile

@W
def test_its_folder_is_gone(rank):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

@W
def test_innocent(rank):
    dist.all_reduce(torch.ones(1))

@W
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_silent(rank, stream):
    if rank == 1:
        setattr(sys, stream, None)
    dist.all_reduce(torch.ones(1))

@W
def test_prints(rank, capsys):
    print("out", rank)
    print("err", rank, file=sys.stderr)
    assert capsys.readouterr() == (f"out {rank}\\n", f"err {rank}\\n")

def closes():
    if dist.get_rank() == 1:
        class Closed:
            def write(self, text): raise ValueError("closed")
            def flush(self): raise ValueError("closed")
        sys.stdout = Closed()
    return dist.get_rank()

def test_closes(world):
    assert world.run(closes, world_size=2) == [0, 1]

@W
def test_fails(rank):
    print("said", rank)
    assert rank == 0
"""


@pytest.mark.parametrize("world", ["sim", "gloo"])
def test_what_a_test_leaves_behind(run, world):
    result = run(PROGRAM, world=world)
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["*said 1*"])
