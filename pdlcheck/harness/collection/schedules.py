"""The marker ``schedules`` and the option ``--schedule``."""

from __future__ import annotations

import pytest

from pdlcheck.harness.collection import cases, markers
from pdlcheck.worlds.registry import is_simulated

__all__ = ["FOUND", "runs_under_schedules", "wanted_schedules"]

FOUND = pytest.StashKey[str]()  # the schedule under which an item failed
_MANY = 10_000


def runs_under_schedules(item: pytest.Item) -> bool:
    """Return whether an item has the marker, runs on simulated ranks, and no option names the one schedule to run."""
    if item.get_closest_marker("schedules") is None or item.config.getoption("--pdl-schedule") is not None:
        return False
    return is_simulated(cases.world_of(item))


def wanted_schedules(item: pytest.Item) -> tuple[int | None, int]:
    """Return the number of schedules (None: all), and the limit for all of them."""
    marker = item.get_closest_marker("schedules")
    assert marker is not None
    if marker.args == ("all",) and marker.kwargs.keys() <= {"at_most"}:
        return None, marker.kwargs.get("at_most", _MANY)
    count = marker.args[0] if len(marker.args) == 1 and not marker.kwargs else None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        pytest.fail(
            f'{item.nodeid}: schedules takes a number of schedules, such as schedules(50), or "all" with at_most=N; '
            f"got {markers.given_to(marker)}",
            pytrace=False,
        )
    return count, _MANY
