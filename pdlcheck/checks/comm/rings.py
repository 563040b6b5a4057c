"""The results of a ring all-reduce that stops one step early."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlcheck.checks.comm.reductions import Reduction
from pdlcheck.checks.rank_results import Table

__all__ = ["short_rings"]


def short_rings(reduction: Reduction, inputs: Sequence[Tensor], rank: int, found: Tensor) -> Table:
    """Yield a text and ``found`` for each ring that is one step short and explains all of ``found`` on ``rank``.

    The rings of both directions are tried, with any first part. Rings with empty parts are left out, because they
    explain too many results.
    """
    count, whole = len(inputs), len(inputs) - 1
    flat = [x.reshape(-1) for x in inputs]
    splits = [[x.tensor_split(count) for x in flat], [x.chunk(count) for x in flat]]
    splits = [parts for parts in splits if len(parts[0]) == count and all(len(part) for part in parts[0])]
    phases: tuple[tuple[str, int, int], ...] = (
        ("the ring's gather phase is one step short: a part of the {noun} did not arrive", whole, whole - 1),
        ("the ring's reduce phase is one step short: each part lacks what the last step brings", whole - 1, whole),
        ("both phases of the ring are one step short", whole - 1, whole - 1),
    )
    for text, n_reduce, n_gather in phases:
        if n_reduce < 0 or n_reduce == n_gather == 0:
            continue  # nothing is sent
        held = _held(count, n_reduce, n_gather)
        for way in (1, -1):
            own = held[way * rank % count]
            for first in range(count):
                for parts in splits:
                    # ranks[p]: the ranks whose terms are in part p of the result
                    ranks = {(way * place + first) % count: sorted(own[place]) for place in range(count)}
                    terms = [[parts[way * r % count][p] for r in ranks[p]] for p in range(count)]
                    if torch.equal(torch.cat([reduction.of(some, count) for some in terms]), found.reshape(-1)):
                        yield text.format(noun=reduction.noun), found


def _held(count: int, n_reduce: int, n_gather: int) -> list[list[set[int]]]:
    """Return which ranks have contributed to each part, on each rank, after the given steps to the right."""
    held = [[{rank} for _ in range(count)] for rank in range(count)]
    for step in range(n_reduce):
        sent = [held[rank][(rank - step) % count] for rank in range(count)]
        for rank in range(count):
            place = (rank - step - 1) % count
            held[rank][place] = held[rank][place] | sent[rank - 1]
    for step in range(n_gather):
        sent = [held[rank][(rank + 1 - step) % count] for rank in range(count)]
        for rank in range(count):
            held[rank][(rank - step) % count] = sent[rank - 1]
    return held
