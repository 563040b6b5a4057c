"""All ranks build their stages, and all raise what one of them could not do, or did otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.pipeline.building import Built, Request, build, make_schedule
from pdlcheck.primitives.pipeline.splitting import split_model

__all__ = ["build_together"]


def build_together(
    request: Request,
    n_ranks: int,
    place: int | None,
    devices: Sequence[torch.device | None],
    group: dist.ProcessGroup | None,
) -> Built:
    """Build on every rank, and raise on all of them what one could not do, or does otherwise."""
    built: Built | None = None
    error: Exception | None = None
    try:
        if request.split == "time":
            request = _measured(request, n_ranks, place, group)
        built = build(request, n_ranks, place, devices)
    except (TypeError, ValueError) as found:
        error = found
    told = exchange(() if built is None else built.fingerprint(), error, group)
    if told.first_error is not None:
        raise told.first_error from error
    assert built is not None  # else there was an error
    for rank, other in enumerate(told.values):
        if other != told.values[0]:
            lines = "".join(f"\n  rank {r}: {' '.join(map(str, told.values[r]))}" for r in (0, rank))
            raise ValueError(
                f"Pipeline was made otherwise on rank {rank} of its group than on rank 0; "
                f"give every rank the same model and arguments{lines}"
            )
    return built


def _measured(request: Request, n_ranks: int, place: int | None, group: dist.ProcessGroup | None) -> Request:
    """The positions of a split by time: one rank measures, because no two clocks agree."""
    found: list[Any] = [None]
    if not place:
        n_stages = make_schedule(request, n_ranks).n_stages
        try:
            names = split_model(request.model, n_stages, by="time", sample=request.sample)
            found = [[sum(map(len, names[:stage])) for stage in range(1, n_stages)]]
        except (TypeError, ValueError) as error:
            found = [error.args]
    if group is not None:
        dist.broadcast_object_list(found, group=group, group_src=0)
    if isinstance(found[0], tuple):
        raise ValueError(*found[0])
    return replace(request, split=found[0])
