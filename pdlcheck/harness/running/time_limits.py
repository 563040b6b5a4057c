"""The time limit of a test on ranks: pytest-timeout's marker, option and ini value, kept by the world.

A world's watchdog has more information than a timer: it reports in which call each rank waits, with the stacks, and it
replaces only the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from pdlcheck.harness.collection import cases, markers
from pdlcheck.harness.item_runner import runner_of
from pdlcheck.time_budgets import LEAST_LIMIT_S

__all__ = ["deadline", "not_counted", "read_marker", "seconds_left", "take_over"]

_until = pytest.StashKey[float]()


def take_over(item: pytest.Item, timeout_s: float) -> bool:
    """Keep the limit in this module from now on; return False if the item uses no ranks."""
    if cases.runs_in_a_rank(item.config):
        return True  # the controller keeps the limit
    world = cases.world_of(item)
    if world is None:
        return False
    with suppress(Exception):  # the item raises the error again, where it can be reported
        runner_of(world).load()  # before the clock starts: the first test must not pay for the import of torch
    item.stash[_until] = time.monotonic() + timeout_s
    return True


def read_marker(item: pytest.Item) -> None:
    """Read the marker if pytest-timeout, which would pass the limit on, is not installed."""
    marker = item.get_closest_marker("timeout")
    if marker is None or _until in item.stash or item.config.pluginmanager.hasplugin("timeout"):
        return
    given = (*marker.args, marker.kwargs.get("timeout"))[0]
    try:
        seconds = float(given or 0)
    except (TypeError, ValueError):
        words = f"timeout takes seconds, such as timeout(30); got {markers.given_to(marker)}"
        raise pytest.fail.Exception(f"{item.nodeid}: {words}", pytrace=False) from None
    if seconds > 0:
        take_over(item, seconds)


@contextmanager
def not_counted(item: pytest.Item) -> Iterator[None]:
    """Stop the clock of the item's limit, if it has one, while the block runs."""
    start, until = time.monotonic(), item.stash.get(_until, None)
    try:
        yield
    finally:
        if until is not None:
            item.stash[_until] = until + time.monotonic() - start


def deadline(item: pytest.Item) -> float | None:
    """Return the end of the item's time by the monotonic clock; None without a limit, or with ``--rank-pdb``."""
    return None if item.config.getoption("--pdl-rank-pdb") is not None else item.stash.get(_until, None)


def seconds_left(item: pytest.Item) -> float | None:
    """Return the seconds left for the next phase of the item; None if only the world's own limit applies."""
    if _until not in item.stash:
        return None
    return max(round(item.stash[_until] - time.monotonic(), 1), LEAST_LIMIT_S)
