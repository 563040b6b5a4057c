"""Checks for contradictory markers and arguments, before the body runs and perhaps passes without testing anything."""

from __future__ import annotations

from typing import Any, NoReturn, TypeGuard

import pytest

from pdlcheck.harness.collection import cases, markers
from pdlcheck.harness.collection.marker_ownership import is_registered_by_others, skips_without_cuda
from pdlcheck.harness.collection.plugin_fixtures import uses_fixture
from pdlcheck.harness.rank_context import rank_context

__all__ = ["require_own_values", "require_sense"]

_NO_RANKS = "has no effect on a test without ranks: mark the test world_size, too, or use the fixture world"
_WITHOUT_EFFECT = {name: f"the marker {name} {_NO_RANKS}" for name in ("faults", "isolation", "schedules", "semantics")}
_GPU = "the marker gpu skips tests with ranks; for this one too, set the ini value pdlcheck_markers = gpu"
_TORCHS = "torch.testing._internal.common_distributed"
_OURS = ("device", "group", "rank")


def require_sense(item: pytest.Item) -> None:
    """Check, in the controller at set-up, that the markers and parameters of an item fit its ranks."""
    case, parameters = cases.case_of(item), getattr(getattr(item, "callspec", None), "params", {})
    size = parameters.get("world_size")
    if case is not None:
        if _is_number(size) and size != case.world_size:
            _refuse_size(item, size, case.world_size)
        if case.world_size > 1 and _may_be_a_rank(parameters.get("rank"), case.world_size):
            _refuse_rank(item, parameters["rank"], "every rank")
        _refuse_harnesses(item)
    elif _is_number(size) and uses_fixture(item, *_OURS):
        _fail(
            item,
            f"parametrize gives its argument 'world_size' the value {size} and the test no ranks: write "
            f"@pytest.mark.world_size({size}) in its place, which takes several sizes",
        )
    if cases.world_of(item) is not None:
        _check_markers(item)
    else:
        _warn_of_markers(item)


def _warn_of_markers(item: pytest.Item) -> None:
    """Warn about markers without effect on a test without ranks, unless they have a meaning of the project's own.

    Without our registration, pytest would warn about them as unknown.
    """
    for marker in item.own_markers:
        words = _WITHOUT_EFFECT.get(marker.name)
        if marker.name == "gpu" and not skips_without_cuda(item, on_ranks=False):
            words = _GPU
        if words is not None and not is_registered_by_others(item.config, marker.name):
            item.warn(pytest.PytestUnknownMarkWarning(f"{item.nodeid}: {words}"))


def _check_markers(item: pytest.Item) -> None:
    """Check the arguments of markers, even if the world ignores them, as processes do."""
    markers.semantics_of(item)
    if item.get_closest_marker("schedules") is not None:
        from pdlcheck.harness.collection.schedules import wanted_schedules

        wanted_schedules(item)


def require_own_values(item: pytest.Item) -> None:
    """Check, on a rank at set-up, that fixtures of the user's that replace ours return the same values."""
    here, arguments = rank_context("rank"), getattr(item, "funcargs", {})
    size, rank = arguments.get("world_size"), arguments.get("rank")
    if _is_number(size) and size != here.world_size:
        _refuse_size(item, size, here.world_size)
    if _may_be_a_rank(rank, here.world_size) and rank != here.rank:
        _refuse_rank(item, rank, f"rank {here.rank}")


def _refuse_harnesses(item: pytest.Item) -> None:
    for base in getattr(getattr(item, "cls", None), "__mro__", ()):
        if base.__module__ == _TORCHS and base.__name__.startswith("Multi"):
            _fail(
                item,
                f"{base.__name__} of torch starts ranks of its own, and says with self.rank which of them runs: leave "
                "world_size away, or derive from torch.testing._internal.common_utils.TestCase and take the fixture "
                "'rank' for self.rank",
            )


def _refuse_size(item: pytest.Item, size: int, ranks: int) -> NoReturn:
    _fail(
        item,
        f"its argument 'world_size' is {size} and it runs on {ranks} {'ranks' if ranks > 1 else 'rank'}: how many is "
        f"for the marker to say, such as @pytest.mark.world_size({size}); give an argument of your own another name",
    )


def _refuse_rank(item: pytest.Item, rank: Any, where: str) -> NoReturn:
    _fail(
        item,
        f"its argument 'rank' is {rank!r} on {where}: each rank runs the test, and the fixture 'rank' of pdlcheck says "
        "which it is; take that one, or give an argument of your own another name",
    )


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _may_be_a_rank(value: object, world_size: int) -> bool:
    """Return whether the value may be a rank; a larger number means something else, such as the rank of a matrix."""
    return _is_number(value) and 0 <= value < world_size


def _fail(item: pytest.Item, words: str) -> NoReturn:
    pytest.fail(f"{item.nodeid}: {words}", pytrace=False)
