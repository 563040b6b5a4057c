"""The runs of an item under the schedules of its marker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdlcheck.compat.pytest.fixtures import argument_names
from pdlcheck.harness.collection import cases
from pdlcheck.harness.collection.schedules import FOUND, wanted_schedules
from pdlcheck.harness.running import worlds
from pdlcheck.harness.running.folders import Folders
from pdlcheck.worlds.exceptions import add_note

__all__ = ["call_under_schedules", "search_schedules"]


def search_schedules(item: pytest.Item, run: Callable[[Any], BaseException | None]) -> None:
    """Raise the failure of the first schedule that fails, reduced to few switches; a note names the schedule."""
    __tracebackhide__ = True
    from pdlcheck.worlds.simulated.schedules.search import search, search_all

    count, at_most = wanted_schedules(item)
    failure = search_all(run, at_most) if count is None else search(run, count)
    if failure is None:
        return
    item.stash[FOUND] = str(failure.replay)
    number, of = failure.runs, "all" if count is None else count
    add_note(
        failure.error,
        f"schedule {number} of {of} fails first ({failure.found}, {failure.switches} switches); "
        f"{len(failure.replay.switches)} of them are enough: {failure.replay}",
    )
    raise failure.error


def call_under_schedules(item: pytest.Function) -> None:
    """Call a test with the fixture ``world`` under each schedule; all runs of one call have the same schedule.

    Fixtures are those of the first call. Temporary folders are restored, because otherwise a call would find files of
    the previous one.
    """
    __tracebackhide__ = True
    from pdlcheck.worlds.simulated.schedules import Recorder
    from pdlcheck.worlds.simulated.schedules.search import variety

    count, _ = wanted_schedules(item)
    if count is None:
        pytest.fail('schedules("all") needs the ranks of one run: mark the test world_size', pytrace=False)
    world: Any = worlds.open_world(item.config, cases.world_of(item))
    arguments = {name: item.funcargs[name] for name in argument_names(item)}
    before, steps = world.schedule, 1
    folders = Folders(item)
    try:
        for number in range(count):
            folders.restore()
            world.schedule = recorder = Recorder(variety(number, steps))
            try:
                item.obj(**arguments)
            except Exception as error:
                item.stash[FOUND] = str(recorder)
                add_note(error, f"schedule {number + 1} of {count} fails first ({recorder})")
                raise
            steps = max(steps, recorder.steps)
    finally:
        world.schedule = before
