"""The rank that the fixtures ``rank``, ``world_size``, ``device`` and ``group`` describe. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["RankContext", "default_group", "leave_rank_context", "rank_context", "set_rank_context", "sets_up_for_all"]

_context: RankContext | None = None


@dataclass(frozen=True)
class RankContext:
    """The values of the fixtures ``rank``, ``world_size``, ``device`` and ``group`` while one rank is being set up."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None  # None if the ranks begin without a group
    in_body: bool = False  # the body of the test runs; it may request fixtures
    for_all: Callable[[], bool] = lambda: True  # whether all ranks share the fixture that is being set up


def set_rank_context(context: RankContext | None) -> None:
    """Set the rank that the rank fixtures describe."""
    global _context
    _context = context


def leave_rank_context(context: RankContext) -> None:
    """Clear the context, unless it belongs to another rank by now: an abandoned rank may end late."""
    if _context is context:
        set_rank_context(None)


def sets_up_for_all() -> bool:
    """Return whether a fixture that all simulated ranks share is being set up or torn down."""
    return _context is not None and not _context.in_body and _context.for_all()


def rank_context(fixture: str) -> RankContext:
    """Return the present values of the rank fixtures; only items whose body runs on ranks have them."""
    __tracebackhide__ = True
    if _context is None:
        raise pytest.UsageError(
            f"fixture {fixture!r} belongs to a rank: mark the test with @pytest.mark.world_size(2), "
            "or use the fixture 'world' and its run()"
        )
    return _context


def default_group() -> dist.ProcessGroup:
    """Return the present value of the fixture ``group``."""
    __tracebackhide__ = True
    group = rank_context("group").group
    if group is None:
        raise pytest.UsageError(
            "the ranks of this test begin without a process group, so the fixture 'group' has none: call "
            "torch.distributed.init_process_group() and take torch.distributed.group.WORLD"
        )
    return group
