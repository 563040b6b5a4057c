"""Cores of this machine that are this process's to use."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

from pdlcheck.control_groups import control_groups

__all__ = ["cores_of_quota", "usable_cores"]


def usable_cores() -> int:
    """How many cores this process can keep busy, 1 or more: those it may run on, or its quota where that is less."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(there, _own_quota() or there)


def cores_of_quota(root: Path = Path("/")) -> int | None:
    """As many cores as the CPU time that this process's control groups are granted fills, rounded up; ``None``: all.

    Containers get such a quota (``docker run --cpus``, a Kubernetes limit) and see every core of their host all the
    same. ``root`` is where ``proc`` and ``sys`` are mounted.
    """
    found = [_granted(folder) for folder in control_groups("cpu", root)]
    limits = [cores for cores in found if cores is not None]
    return max(1, math.ceil(min(limits))) if limits else None


@cache
def _own_quota() -> int | None:
    return cores_of_quota()


def _granted(group: Path) -> float | None:
    """Seconds of CPU time per second."""
    try:
        both = (group / "cpu.max").read_text().split()
    except OSError:
        try:
            both = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    quota, period = both
    return int(quota) / int(period) if quota.isdecimal() else None  # "max", or "-1"
