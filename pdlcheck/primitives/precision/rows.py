"""Rows of numbers that every rank shares, so that all ranks decide alike and none is left waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import exchange, raise_first
from pdlcheck.primitives.arguments import Members, wire_device

__all__ = ["Rows", "gather_rows", "raise_everywhere"]

Rows = list[list[float]]


def gather_rows(row: Sequence[float], who: Members) -> Rows:
    """Return the rows of all ranks, in the order of the group; all are equally long. One all_gather, in float64."""
    own = torch.tensor(list(row), dtype=torch.float64, device=wire_device(who.group))
    everyone = [torch.empty_like(own) for _ in who.ranks]
    dist.all_gather(everyone, own, group=who.group)
    return [[float(value) for value in one.tolist()] for one in everyone]


def raise_everywhere(caller: str, problem: Exception | None, rows: Rows, who: Members) -> None:
    """Raise the error of the first rank with a problem on every rank. If no rank has one, send nothing.

    Args:
        caller: the name of the calling function, for the error text.
        problem: the error of this rank, or None.
        rows: the gathered rows; the first value of a row is not 0 on a rank that has a problem.
        who: the ranks of ``rows``.
    """
    if any(row[0] for row in rows):
        raise_first(exchange(None, problem, who.group), problem, who, caller)
