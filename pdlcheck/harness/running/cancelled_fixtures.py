"""Fixtures of wider scope whose set-up a rank did not finish, only because another rank had failed.

pytest keeps the error of such a fixture for all tests of its scope. Here the error is not the fixture's own. Therefore
the next test that requests the fixture sets it up again; otherwise its rank would end at once while the others wait for
it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

from pdlcheck.compat.pytest.fixtures import all_definitions
from pdlcheck.compat.pytest.items import request_of
from pdlcheck.errors import PeerFailed

__all__ = ["finish_stopped_fixtures", "is_stopped", "note_stop"]

_was_stopped = pytest.StashKey[bool]()


def note_stop(item: pytest.Item, error: BaseException) -> None:
    """Record, when a phase of the item has failed, whether a peer's failure stopped it."""
    if isinstance(error, PeerFailed):
        item.stash[_was_stopped] = True


def finish_stopped_fixtures(item: pytest.Function) -> None:
    """Finish the stopped fixtures, when the item is torn down."""
    if not item.stash.get(_was_stopped, False):
        return
    del item.stash[_was_stopped]
    with ExitStack() as stack:  # the stack finishes the last one first
        for definition in _stopped(item):
            stack.callback(definition.finish, request_of(item))


def is_stopped(definition: Any) -> bool:
    """Return whether pytest keeps such an error for the fixture: its rank was stopped in the set-up."""
    cached = definition.cached_result
    error = None if cached is None else cached[2]
    return isinstance(error[0] if isinstance(error, tuple) else error, PeerFailed)  # pytest < 8.3 has no tuple


def _stopped(item: pytest.Function) -> list[Any]:
    return [one for one in all_definitions(item.session) if is_stopped(one)]
