"""Hypothesis on ranks: the controller draws and shrinks, the ranks receive the example."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = [
    "RANK_FIXTURES",
    "accept_rank_fixtures",
    "draw_schedule",
    "is_property",
    "note_schedule",
    "ranks_receive_examples",
]

RANK_FIXTURES = frozenset({"device", "group", "rank", "subject", "world_size"})


def is_property(item: pytest.Item) -> bool:
    """True for a test with ``@given``."""
    return "hypothesis" in sys.modules and hasattr(getattr(item, "obj", None), "hypothesis")


def accept_rank_fixtures(item: pytest.Item) -> None:
    """Keep Hypothesis from refusing our function-scoped fixtures, which are the same for every example.

    The test's own function-scoped fixtures are still refused.
    """
    if not is_property(item):
        return
    from hypothesis import HealthCheck, Phase, settings

    assert isinstance(item, pytest.Function)
    requested = item._fixtureinfo.name2fixturedefs
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    suspects = {
        name
        for name in item._fixtureinfo.argnames
        if name in requested and name not in parameters and requested[name][-1].scope == "function"
    }
    if suspects <= RANK_FIXTURES:
        function = getattr(item.obj, "__func__", item.obj)
        own: settings = getattr(function, "_hypothesis_internal_use_settings", None) or settings()
        function._hypothesis_internal_use_settings = settings(
            parent=own,
            suppress_health_check={
                HealthCheck.function_scoped_fixture,
                HealthCheck.differing_executors,  # or Hypothesis would look up the ranks' fixtures in the controller
                *own.suppress_health_check,
            },
            phases=[phase for phase in own.phases if phase is not Phase.explain],  # it would explain the harness
        )


@contextmanager
def ranks_receive_examples(item: pytest.Function, run: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """While the block runs, each example of the test is given to ``run(arguments)`` instead of the test's body."""
    handle = item.obj.hypothesis
    body = handle.inner_test

    @functools.wraps(body)
    def on_ranks(*args: Any, **arguments: Any) -> None:
        __tracebackhide__ = True
        run(arguments)

    handle.inner_test = on_ranks
    try:
        yield
    finally:
        handle.inner_test = body


def draw_schedule() -> Any:
    """A schedule as a part of the example under way, so that both shrink together."""
    from hypothesis.control import current_build_context

    from pdlcheck.strategies import schedules

    return current_build_context().data.draw(schedules())


def note_schedule(schedule: Any) -> None:
    """Show a failing example's schedule beside its arguments."""
    from hypothesis import note

    note(f"schedule: {schedule}")
