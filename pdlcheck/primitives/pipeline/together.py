"""All ranks build their stages, and all raise what one of them could not do, or did otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.pipeline.building import Built, Request, build, make_schedule
from pdlcheck.primitives.pipeline.splitting import split_model

__all__ = ["Peers", "build_together"]

T = TypeVar("T")
Fingerprint = tuple[object, ...]


@dataclass(frozen=True)
class Peers:
    """Whom a process builds with.

    Args:
        group: the ranks of the pipeline; None where there is only this process.
        data_group: the ranks of other pipelines with the same stages; None where there are none.
    """

    group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        """The first rank of the first pipeline: it decides what only one can."""
        return all(group is None or not dist.get_rank(group) for group in (self.group, self.data_group))

    def agree(self, fingerprint: Fingerprint, decided: T, error: Exception | None) -> T:
        """What the first rank has decided; raises, the same on all ranks, what is wrong or different on one of them."""
        own = exchange((fingerprint, decided), error, self.group)
        pipelines = exchange(own.values, own.first_error, self.data_group)
        if pipelines.first_error is not None:
            raise pipelines.first_error from error
        first = pipelines.values[0][0]
        for pipeline, ranks in enumerate(pipelines.values):
            for rank, (other, _) in enumerate(ranks):
                if other != first[0]:
                    _refuse(first[0], other, rank, pipeline)
        return first[1]


def build_together(
    request: Request,
    n_ranks: int,
    place: int | None,
    devices: Sequence[torch.device | str | None],
    peers: Peers,
) -> Built:
    """Build on every rank of all pipelines, and raise on all of them what one could not do, or does otherwise."""
    if request.split == "time":
        request = _measured(request, n_ranks, peers)
    built, error = _attempt(lambda: build(request, n_ranks, place, devices))
    peers.agree(() if built is None else built.fingerprint(), None, error)
    assert built is not None  # else there was an error
    return built


def _measured(request: Request, n_ranks: int, peers: Peers) -> Request:
    """The positions of a split by time: one rank measures, because no two clocks agree."""

    def measure() -> list[int]:
        n_stages = make_schedule(request, n_ranks).n_stages
        names = split_model(request.model, n_stages, by="time", sample=request.sample)
        return [sum(map(len, names[:stage])) for stage in range(1, n_stages)]

    found, error = _attempt(measure) if peers.is_first else (None, None)
    positions = peers.agree(("split='time'",), found, error)
    assert positions is not None  # else there was an error
    return replace(request, split=positions)


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # of any kind: others wait for what this rank says
        return None, error


def _refuse(expected: Fingerprint, found: Fingerprint, rank: int, pipeline: int) -> None:
    where = f"rank {rank} of its group" + (f" in pipeline {pipeline} of its data_group" if pipeline else "")
    than = "rank 0" + (" in pipeline 0" if pipeline else "")
    lines = "".join(f"\n  {who}: {' '.join(map(str, one))}" for who, one in ((than, expected), (f"rank {rank}", found)))
    raise ValueError(
        f"Pipeline was made otherwise on {where} than on {than}; give every rank the same model and arguments{lines}"
    )
