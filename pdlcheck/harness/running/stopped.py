"""Fixtures of wider scope that a rank did not finish setting up, only because another rank had failed.

pytest keeps what such a fixture raises for all tests of its scope. Here it is nothing of the fixture's: the next test
that asks for it sets it up again, or its rank would end at once while the others wait for it there.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from typing import Any

import pytest

from pdlcheck.errors import PeerFailed

__all__ = ["finish_stopped_fixtures", "is_stopped", "note_stop"]

_was_stopped = pytest.StashKey[bool]()


def note_stop(item: pytest.Item, error: BaseException) -> None:
    """When a phase of the item has failed."""
    if isinstance(error, PeerFailed):
        item.stash[_was_stopped] = True


def finish_stopped_fixtures(item: pytest.Function) -> None:
    """When the item is torn down."""
    if not item.stash.get(_was_stopped, False):
        return
    del item.stash[_was_stopped]
    with ExitStack() as stack:  # the last comes first
        for definition in _stopped(item):
            stack.callback(definition.finish, item._request)


def is_stopped(definition: Any) -> bool:
    """Whether this is kept of the fixture: its rank was stopped in it."""
    cached = definition.cached_result
    return cached is not None and cached[2] is not None and isinstance(cached[2][0], PeerFailed)


def _known_fixtures(item: pytest.Function) -> list[Any]:
    """The definitions of all fixtures of the session."""
    manager: Any = item.session._fixturemanager
    if hasattr(manager, "_get_all_fixture_defs"):
        return list(manager._get_all_fixture_defs())
    return list(chain.from_iterable(manager._arg2fixturedefs.values()))  # before pytest 9


def _stopped(item: pytest.Function) -> list[Any]:
    return [one for one in _known_fixtures(item) if is_stopped(one)]
