"""What pytest shows of a rank that could hardly tell."""

from __future__ import annotations

import pytest

HOARD = """
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_hoards(rank):
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**26, resource.RLIM_INFINITY))
        kept = []
        for nbytes in (2**22, 2**16, 2**10):
            try:
                while True:
                    kept.append(bytearray(nbytes))
            except MemoryError:
                if nbytes == 2**10:
                    raise
    dist.all_reduce(torch.ones(1))
"""


def test_a_test_that_hoards_memory_is_shown_with_its_line(pytester: pytest.Pytester):
    pytester.makepyfile(HOARD)
    result = pytester.runpytest_subprocess("--world", "gloo")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*kept.append(bytearray(nbytes))", "E *MemoryError", "rank 1 of 2 raised this"])
