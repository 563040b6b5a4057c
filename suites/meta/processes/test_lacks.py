"""If a machine lacks something that ranks need, the error names it with the cure, and nothing is left behind."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from pdlcheck.errors import WorldUnavailable
from pdlcheck.worlds.processes import ProcessWorld
from pdlcheck.worlds.processes.controller.machine_limits import full_shared_memory, lacks

from ..clone import ROOT
from ..needs_mpi import needs_mpi


@contextmanager
def few_descriptors(more: int):
    """Limit this process to this many further descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, more, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc, to count descriptors")
def test_too_many_open_files():
    world = ProcessWorld(timeout_s=20)
    try:
        world.run(dist.get_rank, world_size=1)
        words = r"processes cannot start: Too many open files: this process may have \d+, and 16 ranks take about 160"
        with few_descriptors(40), pytest.raises(WorldUnavailable, match=words) as caught:
            world.run(dist.get_rank, world_size=16)
        assert "raise the limit (ulimit -n), or use fewer ranks" in str(caught.value)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with few_descriptors(40), pytest.raises(WorldUnavailable):
                world.run(dist.get_rank, world_size=16)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert world.run(dist.get_rank, world_size=4) == [0, 1, 2, 3]
    finally:
        world.close()


def run_without(without, code):
    """Run Python in its own namespaces, in which something is missing."""
    if shutil.which("unshare") is None or subprocess.run([*without, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs unshare, of util-linux, and the right to it: run it as root")
    return subprocess.run(
        [*without, sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,  # less than the 120 s that ranks may take to meet
    )


def test_a_loopback_interface_that_is_down():
    code = "from pdlcheck.worlds.processes import ProcessWorld; ProcessWorld().run(print, world_size=2)"
    done = run_without(["unshare", "--net"], code)
    words = "ranks meet at 127.0.0.1, and there is no way to it (Network is unreachable): ip link set lo up"
    assert words in done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/tmp/a"), "No space left on device: /tmp/a; delete what"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; delete what is not needed there"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory; use fewer ranks"),
        (OSError("odd"), "odd"),
    ],
)
def test_other_lacks(error, words):
    assert lacks(error, 2).startswith(words)


def test_shared_memory_without_room(monkeypatch, tmp_path):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("pdlcheck.worlds.processes.controller.machine_limits._SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 0, 1 << 30))
    assert full_shared_memory() == ""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 4096))
    assert f"{tmp_path}, where ranks share memory, is full (4096 bytes free)" in full_shared_memory()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 20, 0, 1 << 20))
    assert f"{tmp_path}, where ranks share memory, has 1 MB in all: mount it with more" in full_shared_memory()


@needs_mpi
def test_mpi_without_proc():
    without = ["unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$@"', "sh"]
    done = run_without(without, "from pdlcheck.worlds.mpi.job import why_not; print(why_not())")
    assert "mpiexec needs /proc, which is not mounted (mount -t proc proc /proc)" in done.stdout, done.stderr
