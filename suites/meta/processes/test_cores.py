"""The number of cores of a process: those of its affinity, up to its container's quota of CPU time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlcheck import cores
from pdlcheck.cores import cores_of_quota, usable_cores

V1, V2 = "sys/fs/cgroup/cpu/a/b", "sys/fs/cgroup/a/b"
QUOTAS = {
    "of version 2": ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/cpu.max": "300000 100000\n"}, 3),
    "of part of a core": ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/cpu.max": "250000 100000\n"}, 3),
    "of less than a core": ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/cpu.max": "1000 100000\n"}, 1),
    "of a group around it": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{V2}/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/cpu.max": "500000 100000\n",
        },
        2,
    ),
    "of a container that sees itself as the top": (
        {"proc/self/cgroup": "0::/../x/y\n", "sys/fs/cgroup/cpu.max": "400000 200000\n"},
        2,
    ),
    "of version 1": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/a/b\n1:memory:/c\n0::/\n",
            f"{V1}/cpu.cfs_quota_us": "600000\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        6,
    ),
    "none of version 2": ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/cpu.max": "max 100000\n"}, None),
    "none of version 1": (
        {"proc/self/cgroup": "4:cpu:/a/b\n", f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "no files": ({"proc/self/cgroup": "0::/a/b\n"}, None),
    "no groups": ({}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_of_cpu_time_is_as_many_cores_as_it_fills(name, system):
    files, expected = QUOTAS[name]
    assert cores_of_quota(system(files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (2, 2), (64, 4)])
def test_the_lesser_of_affinity_and_quota_counts(quota, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(cores, "_own_quota", lambda: quota)
    assert usable_cores() == expected


@pytest.fixture
def group_of_one_core():
    """Yield the file of processes of a real control group with the CPU time of one core."""
    for top, limits in (
        (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}),
        (Path("/sys/fs/cgroup"), {"cpu.max": "100000 100000"}),
    ):
        group = top / f"pdlcheck-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            for name, limit in limits.items():
                (group / name).write_text(limit)
        except OSError:
            group.rmdir()
            continue
        yield group / "cgroup.procs"
        group.rmdir()
        return
    pytest.skip("needs the right to make a control group with a quota: root, outside of a container")


@pytest.mark.slow
def test_in_a_real_group_ranks_and_pagerank_have_the_threads_that_its_quota_fills(group_of_one_core):
    program = """
from contextlib import closing
import torch
from pdlcheck.primitives.pagerank.threads import Team
from pdlcheck.worlds import get_world
torch.set_num_threads(4)
with Team(8) as team, closing(get_world("gloo")) as world:
    print(team.size, *world.run(torch.get_num_threads, world_size=1))
"""
    enter = f"echo $$ > {group_of_one_core} && exec {sys.executable} -c '{program}'"
    done = subprocess.run(["/bin/sh", "-c", enter], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "1"], done.stderr
