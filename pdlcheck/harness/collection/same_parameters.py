"""Ranks that hash strings each in its own way may have a test's parameters in orders of their own.

``parametrize`` over a set is one in the order of hashes, and where the ids of the values are
numbered (``config0``, ``config1``) one id means another value on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

__all__ = ["note_differing", "require_same_parameters"]

_differing: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def note_differing(config: pytest.Config, ranks: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
    """Remember the tests whose parameters are those of other tests on other ranks.

    A value that rank 0 has nowhere, such as numbers that each process draws, is in no other order.

    Args:
        config: of the session.
        ranks: node id -> name -> value, of each rank.
    """
    noted = config.stash.setdefault(_differing, {})
    everywhere = {(name, value) for ours in ranks[0].values() for name, value in ours.items()} if ranks else set()
    for nodeid, ours in ranks[0].items() if ranks else ():
        for rank, theirs in enumerate(ranks):
            for name, value in theirs.get(nodeid, {}).items():
                if ours.get(name) != value and (name, value) in everywhere:
                    noted[nodeid] = (
                        f"{nodeid}: {name} is {ours.get(name)} on rank 0 and {value} on rank {rank}; parametrize over "
                        "a list or sorted(...), not over a set, or set PYTHONHASHSEED for every process"
                    )


def require_same_parameters(item: pytest.Item) -> None:
    """Fail a test whose parameters differ between its ranks."""
    if why := item.config.stash.get(_differing, {}).get(item.nodeid):
        pytest.fail(why, pytrace=False)
