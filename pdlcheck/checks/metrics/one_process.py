"""The report of a program in one process without a process group, as it is run without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from pdlcheck.checks.message import name_of
from pdlcheck.checks.metrics.values import values_of
from pdlcheck.compat.torch.c10d import world_state

__all__ = ["report_without_group"]

Report = Callable[..., Any]


def report_without_group(evaluate: Report, samples: tuple[Tensor, ...], world: Any) -> Report | None:
    """Return ``evaluate`` as a function that runs in one process without a process group.

    Return None if it needs a group: it raises without one, or does not report the numbers that one rank reports.
    """

    def report(*samples: Tensor) -> Any:
        return world.run(_on_rank, evaluate, *samples, world_size=1)[0]

    report.__name__ = name_of(evaluate)
    try:
        found = values_of(report(*samples))
    except Exception:
        return None
    of_rank = values_of(world.run(evaluate, *samples, world_size=1)[0])
    are_there = [{place for place, value in values.items() if value is not None} for values in (found, of_rank)]
    return report if are_there[0] and are_there[0] == are_there[1] else None


def _on_rank(evaluate: Report, *samples: Tensor) -> Any:
    with _no_group():
        return evaluate(*samples)


@contextmanager
def _no_group() -> Iterator[None]:
    """Hide the default group of this rank during the block, in which no other one can be made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this call runs without a process group")

    state, name = world_state(), "init_process_group"
    group = state.default_pg
    with patch.object(dist, name, refuse), patch.object(distributed_c10d, name, refuse):
        state.default_pg = None
        try:
            yield
        finally:
            state.default_pg = group
