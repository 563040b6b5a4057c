"""Which world and world size a test runs on. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from pdlcheck.harness.collection.marker_ownership import claims_world_size
from pdlcheck.harness.collection.plugin_fixtures import is_ours
from pdlcheck.worlds.launched.traces import has_traces

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

CASE = "pdlcheck_case"  # the hidden argument by which a test is repeated
IN_RANK = pytest.StashKey[bool]()


class Case(NamedTuple):
    """One world and one number of ranks. ``timed``: the test measures, so nothing watches what its ranks post."""

    world: str
    world_size: int
    timed: bool = False

    def __str__(self) -> str:
        return f"{self.world}-{self.world_size}"


def world_names(config: pytest.Config) -> list[str]:
    """The worlds of ``--world``, in order; by default the simulated one, under a launcher the launched processes."""
    names = config.getoption("--pdl-world")
    if names is None:
        names = "gloo" if _is_launched(config) else "sim"
    return [name.strip() for name in names.split(",") if name.strip()]


def _is_launched(config: pytest.Config) -> bool:
    if not has_traces(os.environ):
        return False
    from pdlcheck.harness.running import launched

    return launched.candidate(config) is not None


def names_worlds(config: pytest.Config) -> bool:
    """Whether the user has named worlds for this session, as an option or in an ini file."""
    return bool(config.option.pdl_world_was_given)


def case_of(item: pytest.Item) -> Case | None:
    """The world and world size on whose ranks the body of this item runs, if it does."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(CASE)


def begins_with_group(item: pytest.Item) -> bool:
    """Return False where the marker says that the ranks of this item begin without a default process group.

    They have the environment of a launcher then, as a script has under torchrun. A marker of the item's parameters
    counts more than one of the whole test.
    """
    marks = [*getattr(getattr(item, "callspec", None), "marks", ()), item.get_closest_marker("world_size")]
    marker = next((mark for mark in marks if mark is not None and mark.name == "world_size"), None)
    return marker is None or bool(getattr(marker, "mark", marker).kwargs.get("process_group", True))


def world_of(item: pytest.Item) -> str | None:
    """The name of the world that this item runs on; None where it runs on none."""
    case, callspec = case_of(item), getattr(item, "callspec", None)
    if case is not None:
        return case.world
    info: Any = getattr(item, "_fixtureinfo", None)
    name: str | None = None if callspec is None else callspec.params.get("world")
    return name if name is not None and is_our_world(info.name2fixturedefs) else None


def is_our_world(definitions: Mapping[str, Sequence[Any]]) -> bool:
    """Is ``world``, as those who ask get it, the plugin's fixture, and no parameter or fixture of the user's?"""
    found = definitions.get("world") or ()
    return bool(found) and is_ours(found[-1])


def may_name_ranks(definition: pytest.Item, fixturenames: Sequence[str]) -> bool:
    """A quick look at a test that is not repeated yet: could it, or one of its parameters, name numbers of ranks?"""
    return "world" in fixturenames or any(
        mark.name in ("world_size", "parametrize") for mark in definition.iter_markers()
    )


def require_ranks(item: pytest.Item) -> None:
    """Fail a marked test that pytest does not let us repeat: it would pass without ever having had ranks.

    Doctests cannot be marked: a marker of their module is about its test functions.
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
    """True in the pytest session that a rank process keeps."""
    return config.stash.get(IN_RANK, False)
