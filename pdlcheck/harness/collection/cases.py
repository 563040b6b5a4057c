"""The world and the world size of a test. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pdlcheck.compat.pytest.fixtures import definitions_of
from pdlcheck.harness.collection.marker_ownership import claims_world_size
from pdlcheck.harness.collection.plugin_fixtures import is_ours
from pdlcheck.launch.traces import has_traces

__all__ = [
    "Case",
    "begins_with_group",
    "case_of",
    "is_our_world",
    "may_name_ranks",
    "names_worlds",
    "require_ranks",
    "runs_in_a_rank",
    "world_names",
    "world_of",
]

CASE = "pdlcheck_case"  # the hidden parameter that repeats a test
IN_RANK = pytest.StashKey[bool]()


class Case(NamedTuple):
    """One world and one world size; ``timed``: the test measures, so the ranks' operations are not watched."""

    world: str
    world_size: int
    timed: bool = False

    def __str__(self) -> str:
        return f"{self.world}-{self.world_size}"


def world_names(config: pytest.Config) -> list[str]:
    """Return the worlds of ``--world``, in order; by default ``sim``, or ``gloo`` under a launcher."""
    names = config.getoption("--pdl-world")
    if names is None:
        names = "gloo" if _is_launched(config) else "sim"
    return [name.strip() for name in names.split(",") if name.strip()]


def _is_launched(config: pytest.Config) -> bool:
    if not has_traces(os.environ):
        return False
    from pdlcheck.harness.collection import launch

    return launch.candidate(config) is not None


def names_worlds(config: pytest.Config) -> bool:
    """Return whether the user has named worlds for this session, with an option or in an ini file."""
    return bool(config.option.pdl_world_was_given)


def case_of(item: pytest.Item) -> Case | None:
    """Return the world and world size of an item whose body runs on ranks; None for other items."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(CASE)


def begins_with_group(item: pytest.Item) -> bool:
    """Return False if the marker sets ``process_group=False``: the ranks begin without a default process group.

    They then have a launcher's environment, like a script under torchrun. A marker of the item's parameters takes
    precedence over one of the whole test.
    """
    marks = [*getattr(getattr(item, "callspec", None), "marks", ()), item.get_closest_marker("world_size")]
    marker = next((mark for mark in marks if mark is not None and mark.name == "world_size"), None)
    return marker is None or bool(getattr(marker, "mark", marker).kwargs.get("process_group", True))


def world_of(item: pytest.Item) -> str | None:
    """Return the name of the world that this item runs on; None if it runs on none."""
    case, callspec = case_of(item), getattr(item, "callspec", None)
    if case is not None:
        return case.world
    name: str | None = None if callspec is None else callspec.params.get("world")
    return name if name is not None and is_our_world(definitions_of(item)) else None


def is_our_world(definitions: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether the fixture ``world`` of a test is the plugin's, not a parameter or fixture of the user's."""
    found = definitions.get("world") or ()
    return bool(found) and is_ours(found[-1])


def may_name_ranks(definition: pytest.Item, fixturenames: Sequence[str]) -> bool:
    """Return quickly whether a test, before it is repeated, or one of its parameters could name world sizes."""
    return "world" in fixturenames or any(
        mark.name in ("world_size", "parametrize") for mark in definition.iter_markers()
    )


def require_ranks(item: pytest.Item) -> None:
    """Fail a marked test that pytest does not repeat, because it would pass without ranks.

    Doctests cannot be marked: a marker of their module applies to its test functions.
    """
    if isinstance(item, pytest.DoctestItem):
        return
    from pdlcheck.harness.collection.distributed_tests import is_distributed_test

    of_class = is_distributed_test(getattr(item, "cls", None))
    marked = item.get_closest_marker("world_size") is not None and claims_world_size(item)
    if marked and case_of(item) is None and not of_class:
        pytest.fail(
            "world_size marks test functions, methods and single parameters of these, before they are collected",
            pytrace=False,
        )
    marker = item.get_closest_marker("faults")
    if marker and _has_our_faults(marker) and world_of(item) is None and not runs_in_a_rank(item.config):
        pytest.fail("faults happen to ranks: mark the test world_size, or let it use the fixture world", pytrace=False)


def _has_our_faults(marker: pytest.Mark) -> bool:
    return any(type(fault).__module__ == "pdlcheck.faults" for fault in marker.args)


def runs_in_a_rank(config: pytest.Config) -> bool:
    """Return whether this is the pytest session of a rank process."""
    return config.stash.get(IN_RANK, False)
