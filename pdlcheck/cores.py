"""Cores of this machine that are this process's to use."""

from __future__ import annotations

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """How many cores this process may run on, 1 or more: those of its affinity where the system has one, else all.

    A quota of CPU time, as a container may have, is not known here.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
