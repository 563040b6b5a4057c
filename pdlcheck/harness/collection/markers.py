"""The arguments of the markers ``isolation``, ``semantics`` and ``faults``. Does not import torch."""

from __future__ import annotations

import pytest

from pdlcheck.faults import Slow
from pdlcheck.harness.collection.cases import case_of
from pdlcheck.harness.collection.distributed_tests import is_distributed_test
from pdlcheck.worlds.arguments import check_faults
from pdlcheck.worlds.choices import ISOLATIONS
from pdlcheck.worlds.registry import is_simulated
from pdlcheck.worlds.semantics import Semantics, make_semantics

__all__ = ["given_to", "isolation_of", "require_faults", "semantics_of"]


def isolation_of(item: pytest.Item) -> str:
    """Return the isolation of the marker, the class of a ``DistributedTest``, or the option; fail an invalid marker."""
    marker = item.get_closest_marker("isolation")
    if marker is None:
        if is_distributed_test(getattr(item, "cls", None)):
            # The class does so, because frameworks keep groups in globals that are invalid in the next test.
            return "fresh"
        return str(item.config.getoption("--pdl-isolation"))
    if len(marker.args) == 1 and not marker.kwargs and marker.args[0] in ISOLATIONS:
        return str(marker.args[0])
    words = f"isolation takes one of {', '.join(ISOLATIONS)}, such as isolation('fresh'); got {given_to(marker)}"
    pytest.fail(f"{item.nodeid}: {words}", pytrace=False)


def semantics_of(item: pytest.Item) -> Semantics:
    """Return the semantics from the marker, or otherwise from the option; fail the item if the marker is invalid."""
    marker, profile = item.get_closest_marker("semantics"), item.config.getoption("--pdl-semantics")
    try:
        arguments = (marker.args or (profile,), marker.kwargs) if marker else ((profile,), {})
        return make_semantics(*arguments[0], **arguments[1])
    except (TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def require_faults(item: pytest.Item, world_name: str) -> None:
    """Fail the item if its marker is invalid; skip it on a world that injects no faults."""
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
    if not is_simulated(world_name):
        reason = f"faults are injected on the world sim alone, not on {world_name}"
        raise pytest.skip.Exception(reason, _use_item_location=True)


def given_to(marker: pytest.Mark) -> str:
    """Return the arguments of a marker as text."""
    arguments = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return ", ".join(arguments) or "none"
