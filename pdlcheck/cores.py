"""The cores of this machine that this process may use."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

from pdlcheck.control_groups import control_groups

__all__ = ["cores_of_quota", "usable_cores"]


def usable_cores() -> int:
    """Return how many cores this process can keep busy: all it may run on, or its quota if that is less; at least 1."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(there, _own_quota() or there)


def cores_of_quota(root: Path = Path("/")) -> int | None:
    """Return the CPU quota of this process's control groups in cores, rounded up; ``None`` if there is no quota.

    Containers get such a quota (``docker run --cpus``, a Kubernetes limit), although they see every core of their host.

    Args:
        root: the folder in which ``proc`` and ``sys`` are mounted.
    """
    found = [_granted(folder) for folder in control_groups("cpu", root)]
    limits = [cores for cores in found if cores is not None]
    return max(1, math.ceil(min(limits))) if limits else None


@cache
def _own_quota() -> int | None:
    return cores_of_quota()


def _granted(group: Path) -> float | None:
    """Return the seconds of CPU time that the group may use in one second; None if it has no limit."""
    try:
        both = (group / "cpu.max").read_text().split()
    except OSError:
        try:
            both = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    quota, period = both
    return int(quota) / int(period) if quota.isdecimal() else None  # without a limit: "max" or "-1"
