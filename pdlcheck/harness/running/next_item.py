"""The next item on the same ranks; until then, the ranks keep the fixtures that it shares with the current item."""

from __future__ import annotations

from typing import Literal

import pytest

from pdlcheck.harness.collection import cases

__all__ = ["Following", "next_of", "next_on_the_same_ranks", "remember_next"]

_next = pytest.StashKey[pytest.Item | None]()
_chain = pytest.StashKey[dict[pytest.Item, pytest.Item]]()

Following = tuple[str, str] | Literal["keep"] | None


def remember_next(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Record, before the teardown of ``item``, that pytest runs ``nextitem`` after it."""
    item.stash[_next] = nextitem


def next_of(item: pytest.Item) -> pytest.Item | None:
    """Return the item that pytest runs after ``item``, on whatever ranks."""
    return item.stash.get(_next, None)


def next_on_the_same_ranks(item: pytest.Item) -> Following:
    """Return the path and node id of the next item on these ranks.

    Return None if there is none, and "keep" if a scheduler decides later.
    """
    found = next_of(item)
    case = cases.case_of(item)
    if found is not None and cases.case_of(found) != case:
        if hasattr(item.config, "workerinput"):  # pytest-xdist sends a worker only one item ahead
            return "keep"
        found = _chain_of(item.session).get(item)
    return None if found is None else (str(found.path), found.nodeid)


def _chain_of(session: pytest.Session) -> dict[pytest.Item, pytest.Item]:
    if _chain not in session.stash:
        session.stash[_chain] = {}
        last: dict[cases.Case, pytest.Item] = {}
        for item in session.items:
            case = cases.case_of(item)
            if case is not None:
                if case in last:
                    session.stash[_chain][last[case]] = item
                last[case] = item
    return session.stash[_chain]
