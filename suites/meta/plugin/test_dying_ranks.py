"""The report of a rank that could hardly send one."""

from __future__ import annotations

from inspect import getsource

import pytest

from ..processes.hoarding import hoard, limit_memory

HOARD = f"""
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

{getsource(limit_memory)}

{getsource(hoard)}

@pytest.mark.world_size(2)
def test_hoards(rank):
    if rank == 1:
        limit_memory(2**26)
        hoard()
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
def test_a_test_that_hoards_memory_is_shown_with_its_line(pytester: pytest.Pytester):
    pytester.makepyfile(HOARD)
    result = pytester.runpytest_subprocess("--world", "gloo")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*kept.append(bytearray(nbytes))", "E *MemoryError", "rank 1 of 2 raised this"])


@pytest.mark.slow
def test_a_crash_is_shown_with_the_users_frames_and_not_with_those_of_the_harness(pytester: pytest.Pytester):
    pytester.makepyfile(
        test_crash="""
        import ctypes
        import os

        import pytest
        import torch

        def crash():
            os.write(2, b"from C++: bad pointer\\n")
            ctypes.string_at(0)

        class Layer(torch.nn.Module):
            def forward(self):
                crash()

        @pytest.mark.world_size(2)
        def test_crashes(rank):
            if rank == 1:
                Layer()()
        """
    )
    result = pytester.runpytest_subprocess("--world", "gloo", "-p", "no:cacheprovider", "--show-capture=no")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E   RankDied: rank 1 was killed by SIGSEGV",
            "E     stderr          from C++: bad pointer",
            "E *(most recent call first):",
            "E *string_at",
            "E *test_crash.py*, line 9 in crash",
            "E *test_crash.py*, line 13 in forward",
            "E *module.py*in _call_impl",
            "E *test_crash.py*, line 18 in test_crashes",
        ]
    )
    text = "\n".join(line for line in result.outlines if line.startswith("E"))
    for machinery in ("_pytest", "pluggy", "rank_session.py", "server.py", "<string>", "Extension modules"):
        assert machinery not in text, machinery


@pytest.mark.slow
def test_a_rank_that_dies_after_its_set_up_fails_the_call_at_once(pytester: pytest.Pytester):
    pytester.makepyfile(
        test_dies="""
        import os
        import signal
        import threading
        import time

        import pytest
        import torch.distributed as dist

        @pytest.fixture
        def lifetime(rank):
            if rank == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                time.sleep(1.0)  # the other rank reports its set-up and dies meanwhile

        @pytest.mark.timeout(20)
        @pytest.mark.world_size(2)
        def test_dies(lifetime):
            dist.barrier()

        @pytest.mark.world_size(2)
        def test_next_one(rank):
            dist.barrier()
        """
    )
    result = pytester.runpytest_subprocess("--world", "gloo")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E   RankDied: rank 1 was killed by SIGKILL"])
