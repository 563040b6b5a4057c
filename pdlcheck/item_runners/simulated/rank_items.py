"""The item of one simulated rank: a copy of the collected one, with function-scoped fixtures of its own.

Fixtures of wider scope are the same for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from pdlcheck.compat.pytest.fixtures import (
    copy_definition,
    definitions_of,
    drop_dependents,
    drop_finalizers,
    find_definitions,
)
from pdlcheck.compat.pytest.item_copies import copy_of, release_copy
from pdlcheck.compat.pytest.items import request_of
from pdlcheck.errors import Unsupported
from pdlcheck.harness.running.cancelled_fixtures import is_stopped
from pdlcheck.item_runners.simulated.own_fixtures import Captured

if TYPE_CHECKING:
    from pdlcheck.harness.reporting.hypothesis_notes import Said

__all__ = ["ONCE_FOR_ALL", "RankItem", "SharedSetUps", "release"]

ONCE_FOR_ALL = (
    "fixtures of wider than function scope are set up once for all simulated ranks: let ranks wait for one another in "
    "fixtures of function scope or in the body, or test this on processes, with --world gloo"
)

# the definitions of fixtures that are being set up for all ranks, each with the rank that does it
SharedSetUps: TypeAlias = dict[Any, "RankItem"]


class RankItem:
    """The item of one rank, with what the rank has reported.

    Attributes:
        item: a copy of the collected item.
        body: the function to call; a method belongs to the rank's own instance.
        arguments: the arguments of the body.
        returned: what the body has returned.
        captured: fixtures like ``capsys``, whose unread output is shown after each phase.
        reports: the reports of subtests.
        said: the notes of the current example.
    """

    def __init__(self, item: pytest.Function, shared_set_ups: SharedSetUps) -> None:
        self._shared_set_ups = shared_set_ups
        self._definitions = _Definitions(item, self, shared_set_ups)
        self._at_set_up = 0
        self.item: Any = copy_of(item, self._definitions)
        self.body: Callable[..., Any] = _nothing
        self.arguments: dict[str, Any] = {}
        self.returned: Any = None
        self.captured: list[Captured] = []
        self.reports: list[dict[str, Any]] = []
        self.said: list[Said] = []

    @contextmanager
    def set_up_for_all(self, definition: Any) -> Iterator[None]:
        """Record that this rank sets up a fixture for all ranks."""
        self._shared_set_ups[definition] = self
        try:
            yield
        finally:
            del self._shared_set_ups[definition]

    def is_for_all(self) -> bool:
        """Return whether this rank is setting up a fixture for all ranks."""
        return any(rank is self for rank in self._shared_set_ups.values())

    def definitions(self) -> Iterable[Any]:
        """Return the definitions that the rank has requested."""
        return chain.from_iterable(self._definitions.values())

    def note_set_up(self) -> None:
        """Record that all fixtures that the test names are set up."""
        self._at_set_up = len(self.item.finalizers)

    def has_more(self) -> bool:
        """Return whether the body has added finalizers, or has requested fixtures that the test does not name."""
        return len(self.item.finalizers) > self._at_set_up

    def take_properties(self) -> list[tuple[str, object]]:
        """Return what ``record_property`` has recorded in the phase that has ended, and forget it."""
        pairs: list[tuple[str, object]] = self.item.user_properties
        self.item.user_properties = []
        return pairs

    def finish(self) -> None:
        """Run the finalizers, the last one first. Each one runs, even after one of them has failed."""
        with ExitStack() as stack:
            stack.callback(self._finish_others)
            stack.callback(_run, self.item.finalizers)

    def _finish_others(self) -> None:
        """Finish fixtures that pytest would finish later, in the controller, or would not set up again."""
        request = request_of(self.item)
        with ExitStack() as stack:
            for definition in self.definitions():
                if definition.cached_result is None:
                    drop_finalizers(definition)  # those of an abandoned set-up
                # A copy may be set up for a wider scope, which ``parametrize`` names.
                elif definition.scope == "function" or is_stopped(definition):
                    stack.callback(definition.finish, request)


def release(ranks: Sequence[RankItem]) -> None:
    """Drop the fixtures of ranks that have ended; fixtures of wider scope, which stay, must not keep them alive."""
    definitions = list(chain.from_iterable(rank.definitions() for rank in ranks))
    own = {one for one in definitions if one.scope == "function"}
    for one in definitions:
        if one not in own:
            drop_dependents(one, own)
    for rank in ranks:
        rank.body, rank.arguments, rank.returned = _nothing, {}, None
        release_copy(rank.item)


class _Definitions(dict[str, list[Any]]):
    """The definitions that one rank uses, by name; pytest reads them with ``get`` when a fixture is first requested."""

    def __init__(self, item: pytest.Function, rank: RankItem, shared_set_ups: SharedSetUps) -> None:
        super().__init__()
        self._item = item
        self._rank = rank
        self._shared_set_ups = shared_set_ups

    def copy(self) -> _Definitions:
        """Return the same object, because requests read it; pytest 8.2 makes them of a copy."""
        return self

    def get(self, name: str, default: Any = None) -> Any:
        """Return the definitions of a fixture, including one that the test does not name.

        Raises:
            Unsupported: another rank is setting up the fixture, for all ranks, and waits for this one.
        """
        if name not in self:
            known = definitions_of(self._item).get(name) or find_definitions(self._item, name)
            if not known:
                return default
            self[name] = [copy_definition(one) if one.scope == "function" else one for one in known]
        definitions = self[name]
        if any(self._shared_set_ups.get(one, self._rank) is not self._rank for one in definitions):
            raise Unsupported(f"the fixture {name!r} waits for other ranks; {ONCE_FOR_ALL}")
        return definitions


def _nothing() -> None:
    pass


def _run(finalizers: list[Callable[[], object]]) -> None:
    """Run finalizers, and those that they add."""
    try:
        while finalizers:
            finalizers.pop()()
    finally:
        if finalizers:
            _run(finalizers)
