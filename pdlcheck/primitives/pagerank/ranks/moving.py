"""The transfer of edges to the ranks that work on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pdlcheck.primitives.arguments import Members, wire_device

__all__ = ["send_to"]


def send_to(owner: NDArray[np.int16], columns: Sequence[NDArray[Any]], who: Members) -> list[tuple[NDArray[Any], ...]]:
    """Send row i of a table to the place ``owner[i]``: one all_to_all of counts, and one for each column.

    Args:
        owner: a place in the group for each row.
        columns: the columns of the table, with the same dtypes in the same order on every rank.
        who: the ranks of the group.

    Returns:
        For each place, the columns of the rows that it sent to this rank, in its order.
    """
    if who.world_size == 1:
        return [tuple(columns)]
    device = wire_device(who.group)
    order = np.argsort(owner, kind="stable")
    counts = torch.from_numpy(np.bincount(owner, minlength=who.world_size)).to(device)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=who.group)
    sent, taken = counts.tolist(), arriving.tolist()
    pieces = []
    for column in columns:
        values = torch.from_numpy(column[order]).to(device)
        room = torch.empty(sum(taken), dtype=values.dtype, device=device)
        dist.all_to_all_single(room, values, taken, sent, group=who.group)
        pieces.append(np.split(room.cpu().numpy(), np.cumsum(taken)[:-1]))
    return list(zip(*pieces, strict=True))
