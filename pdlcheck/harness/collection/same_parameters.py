"""Parameters of a test whose order differs between rank processes, because each process hashes strings differently.

``parametrize`` over a set follows the order of hashes. If the ids of the values are numbered (``config0``,
``config1``), one id means different values on different ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

__all__ = ["note_differing", "require_same_parameters"]

_differing: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def note_differing(config: pytest.Config, ranks: Sequence[Mapping[str, Mapping[str, str]]]) -> None:
    """Record the tests whose parameters are, on other ranks, those of other tests.

    A value that occurs nowhere on rank 0, such as numbers that each process draws, is not a difference in order.

    Args:
        config: configuration of the session.
        ranks: for each rank, node id -> name -> value.
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
