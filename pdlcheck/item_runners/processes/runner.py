"""Pytest items on rank processes; see :class:`pdlcheck.harness.item_runner.ItemRunner`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdlcheck.harness.collection.cases import Case
from pdlcheck.harness.collection.markers import isolation_of
from pdlcheck.harness.item_runner import RankedItem
from pdlcheck.harness.running.time_limits import read_marker, seconds_left
from pdlcheck.item_runners.launched import session as launched
from pdlcheck.time_budgets import TIMED_LIMIT_S
from pdlcheck.worlds.backends import BACKENDS

if TYPE_CHECKING:
    from pdlcheck.worlds import World
    from pdlcheck.worlds.processes import ProcessWorld

__all__ = [
    "adapt",
    "check_options",
    "finish",
    "limited",
    "load",
    "options",
    "prepare",
    "ranked_item",
    "suspend",
    "timed_options",
    "with_faults",
]


def load() -> None:
    """Do nothing: the ranks import torch, and their start is not counted."""


def check_options(config: pytest.Config) -> None:
    """Do nothing: ``--schedule`` concerns simulated ranks."""


def options(config: pytest.Config, name: str) -> Mapping[str, Any]:
    """Return the options of the world."""
    from pdlcheck.item_runners.processes.preparation import options_of_processes

    on_launch = name in BACKENDS and BACKENDS[name].uses_launched_processes
    place = launched.placement(config) if on_launch else None
    return options_of_processes(config) | ({} if place is None else {"placement": place})


def timed_options() -> Mapping[str, Any]:
    """Return the options of ranks that are measured: their operations are not watched, and a call may take long."""
    return {"watch": False, "take_turns": True, "timeout_s": TIMED_LIMIT_S}


def adapt() -> None:
    """Let patches of pytest travel to ranks."""
    from pdlcheck.item_runners.processes.rank.sent_patches import let_patches_travel

    let_patches_travel()


def prepare(item: pytest.Item, world: World) -> None:
    """Set how much the world shares between tests."""
    world.isolation = isolation_of(item)


def suspend(world: World) -> None:
    """Do nothing: ranks in processes exchange nothing in this one."""


@contextmanager
def limited(item: pytest.Item, world: World) -> Iterator[None]:
    """Limit the calls of the block to the time that the item has left."""
    read_marker(item)
    limit = seconds_left(item)
    if limit is None or item.config.getoption("--pdl-rank-pdb") is not None:
        yield
        return
    processes = cast("ProcessWorld", world)
    before, processes.timeout_s = processes.timeout_s, limit
    try:
        yield
    finally:
        processes.timeout_s = before


def with_faults(world: World, faults: Sequence[Any]) -> AbstractContextManager[None]:
    """Do nothing: tests with faults are skipped on processes."""
    return nullcontext()


def ranked_item(item: pytest.Function, case: Case, world: World) -> RankedItem:
    """Return the ranks' side of an item."""
    from pdlcheck.item_runners.processes.items import ProcessItem

    return ProcessItem(item, case, cast("ProcessWorld", world))


def finish(config: pytest.Config, world: World, exitstatus: int) -> None:
    """End the pytest sessions in the ranks."""
    from pdlcheck.item_runners.processes.items import finish

    finish(config, cast("ProcessWorld", world), exitstatus)
