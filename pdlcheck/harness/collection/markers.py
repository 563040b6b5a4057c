"""What the markers ``isolation``, ``semantics`` and ``faults`` are given. Does not import torch."""

from __future__ import annotations

import pytest

from pdlcheck.faults import Slow
from pdlcheck.harness.collection.cases import case_of
from pdlcheck.harness.collection.distributed_tests import is_distributed_test
from pdlcheck.worlds.arguments import check_faults
from pdlcheck.worlds.choices import ISOLATIONS
from pdlcheck.worlds.semantics import Semantics, make_semantics

__all__ = ["given_to", "isolation_of", "require_faults", "semantics_of"]


def isolation_of(item: pytest.Item) -> str:
    """Of the marker, the class of a ``DistributedTest``, or else the option; fails the item whose marker is wrong."""
    marker = item.get_closest_marker("isolation")
    if marker is None:
        if is_distributed_test(getattr(item, "cls", None)):
            return "fresh"  # as the class does: frameworks keep groups in globals, which are invalid in the next test
        return str(item.config.getoption("--pdl-isolation"))
    if len(marker.args) == 1 and not marker.kwargs and marker.args[0] in ISOLATIONS:
        return str(marker.args[0])
    words = f"isolation takes one of {', '.join(ISOLATIONS)}, such as isolation('fresh'); got {given_to(marker)}"
    pytest.fail(f"{item.nodeid}: {words}", pytrace=False)


def semantics_of(item: pytest.Item) -> Semantics:
    """Of the marker, or else of the option; fails the item whose marker is wrong."""
    marker, profile = item.get_closest_marker("semantics"), item.config.getoption("--pdl-semantics")
    try:
        arguments = (marker.args or (profile,), marker.kwargs) if marker else ((profile,), {})
        return make_semantics(*arguments[0], **arguments[1])
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def require_faults(item: pytest.Item, world_name: str) -> None:
    """Fail the item whose marker is wrong; skip it on a world on which no fault happens."""
    marker, case = item.get_closest_marker("faults"), case_of(item)
    if marker is None:
        return
    try:
        if marker.kwargs or not marker.args:
            raise ValueError(f"faults takes faults by position, such as Kill(1, 3); got {given_to(marker)}")
        check_faults(marker.args, None if case is None else case.world_size)
        for slow in (fault for fault in marker.args if isinstance(fault, Slow)):
            raise ValueError(
                f"{slow} shows in times alone, which pytest's worlds do not keep; in the test, run "
                f'get_world("sim", topology=Topology(intra=Link(...)), faults=[{slow}]) and look at its timeline'
            )
    except ValueError as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None
    if world_name != "sim":
        reason = f"faults are injected on the world sim alone, not on {world_name}"
        raise pytest.skip.Exception(reason, _use_item_location=True)


def given_to(marker: pytest.Mark) -> str:
    """In words: the arguments of a marker."""
    arguments = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return ", ".join(arguments) or "none"
