"""What pytest shows of a rank that could hardly tell."""

from __future__ import annotations

from inspect import getsource

import pytest

from .hoarding import hoard, limit_memory

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


def test_a_test_that_hoards_memory_is_shown_with_its_line(pytester: pytest.Pytester):
    pytester.makepyfile(HOARD)
    result = pytester.runpytest_subprocess("--world", "gloo")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*kept.append(bytearray(nbytes))", "E *MemoryError", "rank 1 of 2 raised this"])
