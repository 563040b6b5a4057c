"""The function-scoped fixtures of one simulated rank: put aside where another rank has the turn, and put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pdlcheck.errors import Unsupported
from pdlcheck.harness.rank.benchmarks import name_benchmark
from pdlcheck.harness.reporting.properties import Properties
from pdlcheck.harness.reporting.rank_subtests import keep_reports
from pdlcheck.harness.running.begun import Begun, noting_of
from pdlcheck.harness.running.context import RankContext, leave_rank_context, set_rank_context
from pdlcheck.harness.running.own_fixtures import Captured, follow, follow_fixture, follow_late_log

if TYPE_CHECKING:
    from pdlcheck.harness.reporting.noted import Said

__all__ = ["ONCE_FOR_ALL", "FixturesAtHand", "RankFixtures", "put_aside", "put_back"]

# attributes of an item that pytest makes anew for whoever sets up its fixtures
_OWN_OF_ITEM = frozenset({"_instance", "_obj", "_request", "funcargs"})
ONCE_FOR_ALL = (
    "fixtures of wider than function scope are set up once for all simulated ranks: let ranks wait for one another in "
    "fixtures of function scope or in the body, or test this on processes, with --world gloo"
)


@dataclass
class RankFixtures:
    """One rank's share of the item: the body to call, its arguments, and the fixtures that were put aside."""

    body: Callable[..., Any] = field(default=lambda: None)
    arguments: dict[str, Any] = field(default_factory=dict)
    returned: Any = None
    request: Any = None
    is_at_hand: bool = True  # False while it waits for other ranks, also if they are given up then
    of_item: dict[str, Any] = field(default_factory=dict)  # attributes of the item that are the rank's own
    begun: Begun = field(default_factory=Begun)
    aside: list[tuple[Any, Any, list[Callable[[], object]]]] = field(default_factory=list)
    finalizers: list[Callable[[], object]] = field(default_factory=list)  # which the body has added
    captured: list[Captured] = field(default_factory=list)
    properties: Properties | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)  # of subtests
    said: list[Said] = field(default_factory=list)  # of the example under way


class FixturesAtHand:
    """Of a rank that sets up or tears down fixtures, or whose body may ask for some with ``request``: those it has."""

    def __init__(
        self, item: pytest.Function, rank: RankFixtures, context: RankContext, notes: dict[Any, Any] | None = None
    ) -> None:
        self._item = item
        self._rank = rank
        self._context = context
        self._notes = notes or {}  # of the item, such as a fixture's teardown takes away: each rank's teardown does
        self._noting = noting_of(item.config)
        rank.is_at_hand = False
        rank.begun.on_end = self._follow

    def arrive(self) -> None:
        self._rank.is_at_hand = True
        set_rank_context(self._context)
        put_back(self._rank)
        item = self._item
        vars(item).update(self._rank.of_item)
        if self._rank.request is not None:
            item._request = self._rank.request
        for key, value in self._notes.items():
            item.stash.setdefault(key, value)
        self._noting.present = self._rank.begun

    def leave(self) -> None:
        if self._rank.is_at_hand:  # else the ranks were given up while this one waited
            self._rank.is_at_hand = False
            self._noting.present = None
            item = self._item
            put_aside(item, self._rank)
            self._rank.of_item = {name: value for name, value in vars(item).items() if name in _OWN_OF_ITEM}
            leave_rank_context(self._context)

    def _follow(self, definition: Any) -> None:
        """A fixture is set up: what it does is the rank's own from now on."""
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
    for definition in _set_up(item, rank):
        rank.aside.append((definition, definition.cached_result, list(definition._finalizers)))
        definition.cached_result = None
        definition._finalizers.clear()
    for definition, request in rank.begun.under_way.items():
        if definition.scope != "function":  # whoever asks for it meanwhile is told
            rank.aside.append((definition, None, list(definition._finalizers)))
            waits = Unsupported(f"the fixture {definition.argname!r} waits for other ranks; {ONCE_FOR_ALL}")
            definition.cached_result = None, definition.cache_key(request), (waits, None)
            definition._finalizers.clear()


def put_back(rank: RankFixtures) -> list[Any]:
    aside, rank.aside = rank.aside, []
    for definition, cached, finalizers in aside:
        definition.cached_result = cached
        definition._finalizers[:] = finalizers
    return [definition for definition, _, _ in aside]


def _set_up(item: pytest.Function, rank: RankFixtures) -> list[Any]:
    """The function-scoped fixtures that are or have begun to be, in their order."""
    known = (rank.request or item._request)._fixture_defs.values()
    begun = rank.begun.in_order()
    used = [*(one for one in known if one not in begun), *begun]
    return [one for one in used if one.scope == "function" and (one.cached_result is not None or one._finalizers)]
