"""Tests without a rank of the number that ``--rank-pdb`` names: no debugger can stop in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pdlcheck.harness.collection import cases

__all__ = ["calls_without", "noting_world_sizes", "require_the_rank", "tests_without"]

_NAMED = 3  # the greatest number of tests that a line names
_sizes = pytest.StashKey[dict[str, int]]()  # by node id, the largest world size of a test's runs


def require_the_rank(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Raise a usage error if no test of the session can have the debugged rank."""
    rank, with_ranks = _debugged(config), _on_ranks(items)
    if rank is None or not with_ranks:
        return
    size, item = max(((_size(item), item) for item in with_ranks), key=lambda one: one[0])
    if size <= rank and not any(cases.world_of(item) and cases.case_of(item) is None for item in items):
        raise pytest.UsageError(
            f"--rank-pdb {rank}: no test has a rank {rank}; the largest world_size is {size}, that of {item.nodeid}: "
            f"take one of 0 to {size - 1}, or mark the test world_size({rank + 1})"
        )


def tests_without(config: pytest.Config, items: Sequence[pytest.Item]) -> str | None:
    """Return a line for the terminal about marked tests without the debugged rank; None if all have it."""
    rank = _debugged(config)
    return None if rank is None else _told(rank, {item.nodeid: _size(item) for item in _on_ranks(items)})


@contextmanager
def noting_world_sizes(item: pytest.Item, world: Any) -> Iterator[None]:
    """Record the world sizes of a test that calls ``world.run`` in the block."""
    rank, sizes, opened = item.config.getoption("--pdl-rank-pdb"), [], world.open
    if rank is None:
        yield
        return

    def noted(world_size: int, **kwargs: Any) -> Any:
        sizes.append(world_size)
        return opened(world_size, **kwargs)

    world.open = noted
    try:
        yield
    finally:
        del world.open
        if sizes:
            item.config.stash.setdefault(_sizes, {})[item.nodeid] = max(sizes)


def calls_without(config: pytest.Config) -> str | None:
    """Return such a line about the tests that called ``world.run``, after they have run."""
    rank, sizes = _debugged(config), config.stash.get(_sizes, {})
    return None if rank is None else _told(rank, sizes)


def _told(rank: int, sizes: Mapping[str, int]) -> str | None:
    without = [nodeid for nodeid, size in sizes.items() if size <= rank]
    if not without:
        return None
    more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
    return (
        f"--rank-pdb {rank}: {len(without)} of {len(sizes)} tests on ranks have no rank {rank}, "
        f"and no debugger: {', '.join(without[:_NAMED])}{more}"
    )


def _debugged(config: pytest.Config) -> int | None:
    rank: int | None = config.getoption("--pdl-rank-pdb")
    return None if config.getoption("collectonly") else rank


def _on_ranks(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if cases.case_of(item) is not None]


def _size(item: pytest.Item) -> int:
    case = cases.case_of(item)
    return 0 if case is None else case.world_size
