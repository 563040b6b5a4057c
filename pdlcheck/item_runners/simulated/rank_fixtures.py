"""The function-scoped fixtures of one simulated rank: put aside while another rank has the turn, and put back after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.compat.pytest.fixtures import has_finalizers, known_to, put_finalizers, take_finalizers
from pdlcheck.compat.pytest.items import attributes_of_set_up, request_of, set_request
from pdlcheck.errors import Unsupported
from pdlcheck.harness.rank_context import RankContext, leave_rank_context, set_rank_context
from pdlcheck.harness.reporting.properties import Properties
from pdlcheck.harness.reporting.rank_benchmarks import name_benchmark
from pdlcheck.harness.reporting.rank_subtests import keep_reports
from pdlcheck.item_runners.simulated.fixture_tracker import Begun, noting_of
from pdlcheck.item_runners.simulated.own_fixtures import Captured, follow, follow_fixture, follow_late_log

if TYPE_CHECKING:
    from pdlcheck.harness.reporting.hypothesis_notes import Said

__all__ = ["ONCE_FOR_ALL", "FixturesAtHand", "RankFixtures", "put_aside", "put_back"]

ONCE_FOR_ALL = (
    "fixtures of wider than function scope are set up once for all simulated ranks: let ranks wait for one another in "
    "fixtures of function scope or in the body, or test this on processes, with --world gloo"
)


@dataclass
class RankFixtures:
    """The part of an item that belongs to one rank: the body, its arguments, and the fixtures that were put aside."""

    body: Callable[..., Any] = field(default=lambda: None)
    arguments: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    request: Any = None
    is_at_hand: bool = True  # False while the rank waits for others, and after that run was abandoned
    of_item: dict[str, Any] = field(default_factory=dict)  # attributes of the item that belong to the rank
    begun: Begun = field(default_factory=Begun)
    aside: list[tuple[Any, Any, list[Callable[[], object]]]] = field(default_factory=list)
    finalizers: list[Callable[[], object]] = field(default_factory=list)  # finalizers that the body has added
    captured: list[Captured] = field(default_factory=list)
    properties: Properties | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)  # reports of subtests
    said: list[Said] = field(default_factory=list)  # of the current example


class FixturesAtHand:
    """The fixtures of a rank that sets up or tears down fixtures, or whose body may request some with ``request``."""

    def __init__(
        self, item: pytest.Function, rank: RankFixtures, context: RankContext, notes: dict[Any, Any] | None = None
    ) -> None:
        self._item = item
        self._rank = rank
        self._context = context
        # A fixture's teardown may remove notes of the item, and each rank's teardown needs them.
        self._notes = notes or {}
        self._noting = noting_of(item.config)
        rank.is_at_hand = False
        rank.begun.on_end = self._follow

    def arrive(self) -> None:
        """Put this rank's fixtures back, when the rank gets the turn."""
        self._rank.is_at_hand = True
        set_rank_context(self._context)
        put_back(self._rank)
        item = self._item
        vars(item).update(self._rank.of_item)
        if self._rank.request is not None:
            set_request(item, self._rank.request)
        for key, value in self._notes.items():
            item.stash.setdefault(key, value)
        self._noting.present = self._rank.begun

    def leave(self) -> None:
        """Put this rank's fixtures aside, when the rank passes the turn."""
        if self._rank.is_at_hand:  # otherwise the run was abandoned while this rank waited
            self._rank.is_at_hand = False
            self._noting.present = None
            item = self._item
            put_aside(item, self._rank)
            self._rank.of_item = attributes_of_set_up(item)
            leave_rank_context(self._context)

    def _follow(self, definition: Any) -> None:
        """Separate the effects of a fixture for this rank, from the end of its set-up on."""
        item, rank, cached = self._item, self._rank, definition.cached_result
        if cached is None or cached[2] is not None or definition.scope != "function":
            return
        own = follow_fixture(cached[0])
        if isinstance(own, Captured):
            rank.captured.append(own)
        keep_reports(cached[0], rank.reports)
        name_benchmark(cached[0], self._context.rank)
        if definition.argname not in item.fixturenames:
            if definition.argname == "caplog":
                follow_late_log(item)
            elif definition.argname == "record_property" and rank.properties is None:
                rank.properties = follow(Properties(item))


def put_aside(item: pytest.Function, rank: RankFixtures) -> None:
    """Put a rank's fixtures aside, so that their definitions look unused to the next rank."""
    for definition in _set_up(item, rank):
        rank.aside.append((definition, definition.cached_result, take_finalizers(definition)))
        definition.cached_result = None
    for definition, request in rank.begun.under_way.items():
        if definition.scope != "function":  # a rank that requests it meanwhile gets this error
            rank.aside.append((definition, None, take_finalizers(definition)))
            waits = Unsupported(f"the fixture {definition.argname!r} waits for other ranks; {ONCE_FOR_ALL}")
            definition.cached_result = None, definition.cache_key(request), (waits, None)


def put_back(rank: RankFixtures) -> list[Any]:
    """Put a rank's fixtures back; return their definitions."""
    aside, rank.aside = rank.aside, []
    for definition, cached, finalizers in aside:
        definition.cached_result = cached
        put_finalizers(definition, finalizers)
    return [definition for definition, _, _ in aside]


def _set_up(item: pytest.Function, rank: RankFixtures) -> list[Any]:
    """Return the function-scoped fixtures that are set up or being set up, in their order."""
    known = known_to(rank.request or request_of(item))
    begun = rank.begun.in_order()
    used = [*(one for one in known if one not in begun), *begun]
    return [one for one in used if one.scope == "function" and (one.cached_result is not None or has_finalizers(one))]
