"""Which rank the fixtures ``rank``, ``world_size``, ``device`` and ``group`` speak of. Does not import torch."""

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
    """What the fixtures ``rank``, ``world_size``, ``device`` and ``group`` return while one rank is being set up."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None  # None where the ranks begin without
    in_body: bool = False  # of the test, which may ask for fixtures
    for_all: Callable[[], bool] = lambda: True  # whether the fixture that is set up is one that all ranks share


def set_rank_context(context: RankContext | None) -> None:
    """Say which rank the rank fixtures speak of."""
    global _context
    _context = context


def leave_rank_context(context: RankContext) -> None:
    """Say that no rank is meant, unless another one is by now: a rank that was left behind may end late."""
    if _context is context:
        set_rank_context(None)


def sets_up_for_all() -> bool:
    """True while a fixture that all simulated ranks share is set up or torn down."""
    return _context is not None and not _context.in_body and _context.for_all()


def rank_context(fixture: str) -> RankContext:
    """What the rank fixtures return now; only the items whose body runs on ranks have one."""
    __tracebackhide__ = True
    if _context is None:
        raise pytest.UsageError(
            f"fixture {fixture!r} belongs to a rank: mark the test with @pytest.mark.world_size(2), "
            "or use the fixture 'world' and its run()"
        )
    return _context


def default_group() -> dist.ProcessGroup:
    """What the fixture ``group`` returns now."""
    __tracebackhide__ = True
    group = rank_context("group").group
    if group is None:
        raise pytest.UsageError(
            "the ranks of this test begin without a process group, so the fixture 'group' has none: call "
            "torch.distributed.init_process_group() and take torch.distributed.group.WORLD"
        )
    return group
