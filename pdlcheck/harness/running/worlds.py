"""The worlds of the session: opened on first use, and set up for each test. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pdlcheck.errors import WorldUnavailable
from pdlcheck.harness.collection.cases import case_of, runs_in_a_rank, world_names, world_of
from pdlcheck.harness.collection.cuda_as_cpu import runs_cuda_as_cpu
from pdlcheck.harness.collection.markers import require_faults
from pdlcheck.harness.item_runner import runner_of
from pdlcheck.harness.running.open_worlds import worlds_by_name
from pdlcheck.harness.running.skips import skip_or_fail

if TYPE_CHECKING:
    from pdlcheck.worlds import World

__all__ = ["isolate", "look_after", "open_world", "with_faults"]


def open_world(config: pytest.Config, name: str | None, *, timed: bool = False) -> World:
    """Return the session's world of that name, opened on first use; raise a skip if this machine cannot run it.

    Args:
        config: configuration of the session.
        name: name of the world; None is the first world of ``--world``.
        timed: the ranks are measured: their operations are not watched, and a call may take ten minutes.
    """
    from pdlcheck.worlds import get_world

    name = name or world_names(config)[0]
    worlds = worlds_by_name(config)
    try:
        runner = runner_of(name)
        unwatched = runner.timed_options() if timed else {}
        key = f"{name}, timed" if unwatched else name
        if key not in worlds:
            device, seed = config.getoption("--pdl-rank-device"), config.getoption("--pdl-seed")
            cuda = {"cuda_as_cpu": True} if runs_cuda_as_cpu(config) else {}
            options = {"comm_wrappers": config.getini("pdlcheck_comm_wrappers"), **runner.options(config, name)}
            world = get_world(name, device=device, seed=seed, **cuda, **options, **unwatched)
            world.check()
            worlds[key] = world
    except WorldUnavailable as missing:
        raise skip_or_fail(config, str(missing)) from None
    return worlds[key]


def look_after(world: World) -> None:
    """Adapt a new world to pytest: skips rank below failures, and patches belong to the rank that makes them."""
    from unittest import SkipTest  # pytest treats it as a skip too

    from pdlcheck.worlds import outcome

    outcome.less_severe[:] = [pytest.xfail.Exception, pytest.skip.Exception, SkipTest]
    runner_of(world).adapt()


def isolate(item: pytest.Item) -> None:
    """Set how much the item's world shares between tests, from ``--isolation`` or the marker ``isolation``.

    Simulated ranks get the semantics of ``--semantics`` or of the marker ``semantics``. On other worlds, a test with
    the marker ``faults`` is skipped.
    """
    name = world_of(item)
    if name is None or runs_in_a_rank(item.config):
        return
    require_faults(item, name)
    case = case_of(item)
    world = open_world(item.config, name, timed=case is not None and case.timed)
    runner_of(world).prepare(item, world)


@contextmanager
def with_faults(item: pytest.Item) -> Iterator[None]:
    """Inject the faults of the marker into the runs of simulated ranks in the block; not into set-up and teardown."""
    __tracebackhide__ = True
    marker = item.get_closest_marker("faults")
    if marker is None or world_of(item) is None or runs_in_a_rank(item.config):
        yield
        return
    world = open_world(item.config, world_of(item))
    with runner_of(world).with_faults(world, marker.args):
        yield
