"""Tests of a distributed backend from torch's wheel, to be called on existing ranks.

They are methods of ``DistributedTest._DistTestBase``; torch starts four processes for each test.
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["call", "names"]


def names(backend: str) -> list[str]:
    """Return torch's names of its tests."""
    base = _theirs(backend).DistributedTest._DistTestBase
    tests = {name: getattr(base, name) for name in dir(base) if name.startswith("test_")}
    return [name for name, test in tests.items() if callable(test) and not hasattr(test, "__unittest_skip__")]


def call(name: str, backend: str, folder: str) -> None:
    """Run the test of this name on this rank, without the profilers that it may start.

    Raises:
        pytest.skip.Exception: the test does not apply; the text is torch's.
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    skips = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKEND", backend)
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setenv("TEMP_DIR", folder)
        for module in torch.autograd.profiler, torch.profiler:
            patch.setattr(module, "profile", _NoProfile)
        for name_of_list in "PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS":
            patch.setattr(_theirs(backend), name_of_list, [])
        try:
            _case(backend)(name).debug()
        except SystemExit as left:  # a process of torch skips by its exit code
            if left.code not in skips:
                raise
            pytest.skip(skips[left.code])


class _NoProfile:
    """A stand-in for a profiler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _NoProfile:
        return self

    def __exit__(self, *error: object) -> None: ...


@cache
def _theirs(backend: str) -> ModuleType:
    """Import torch's tests for one backend, whose name decides which tests skip, as does a world size below 4."""
    from torch.testing._internal import common_distributed

    for feature in ("ddp", "subgroup"):  # torch declares these features only for the backends that it builds
        common_distributed.DistTestCases.backend_feature[feature].add("mpi")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setenv("BACKEND", backend)
        patch.setenv("WORLD_SIZE", "4")
        from torch.testing._internal.distributed import distributed_test

    assert backend == distributed_test.BACKEND, "torch's tests are of the first backend that they were imported for"
    return distributed_test


@cache
def _case(backend: str) -> Any:
    from torch.testing._internal import common_utils

    class Case(_theirs(backend).DistributedTest._DistTestBase, common_utils.TestCase):  # type: ignore[misc]
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())

        def debug(self) -> None:
            self.apart = dist.new_group()
            super().debug()

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            dist.barrier(self.apart)  # torch's own barrier needs processes and files

    return Case
