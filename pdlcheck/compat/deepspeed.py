"""The private methods of DeepSpeed's ``DistributedTest``, which is in its test suite.

They are not in the table of private names: the suite is no installed package, and other projects have such classes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["give_arguments", "makes_group", "run_rank", "set_current_test"]


def set_current_test(launched: Any, test: Any) -> None:
    """Set the method that the class calls on each rank."""
    launched._current_test = test


def give_arguments(launched: Any, arguments: Mapping[str, Any]) -> None:
    """Set the values of the fixtures that the method takes."""
    launched._fixture_kwargs = arguments


def makes_group(launched: Any) -> bool:
    """Return whether the class creates the process group of its ranks."""
    return hasattr(launched, "_dist_run")


def run_rank(launched: Any, rank: int, world_size: int, port: str, meeting: str) -> object:
    """Run the method on a rank, with the group that the class creates, and destroy the group."""
    __tracebackhide__ = True
    try:
        return launched._dist_run(rank, world_size, port, meeting)
    finally:
        if sys.exc_info()[0] is None and hasattr(launched, "_dist_destroy"):
            launched._dist_destroy()
