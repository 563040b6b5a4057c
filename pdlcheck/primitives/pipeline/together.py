"""The building of stages on all ranks; all ranks raise if one of them fails or differs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from pdlcheck.primitives.agreement import exchange
from pdlcheck.primitives.pipeline.building import Built, Request, build, make_schedule
from pdlcheck.primitives.pipeline.fingerprint import Facts, Fingerprint, differences
from pdlcheck.primitives.pipeline.splitting import split_model

__all__ = ["Peers", "build_together"]

T = TypeVar("T")
SPLIT = "split"


@dataclass(frozen=True)
class Peers:
    """The ranks with which a process builds its pipeline.

    Args:
        group: the ranks of the pipeline; None if there is only this process.
        data_group: the ranks of other pipelines with the same stages; None if there are none.
    """

    group: dist.ProcessGroup | None
    data_group: dist.ProcessGroup | None

    def require_apart(self) -> None:
        """Raise ValueError if ``data_group`` does not contain this rank, or contains others of its own pipeline."""
        if self.data_group is None:
            return
        if dist.get_rank(self.data_group) < 0:
            raise ValueError(
                f"Pipeline got a data_group that rank {dist.get_rank()} is not in; give each rank the group of the "
                "ranks that have the same stages in other pipelines"
            )
        both = sorted(set(self._ranks) & set(dist.get_process_group_ranks(self.data_group)))
        if len(both) > 1:
            raise ValueError(
                f"Pipeline got ranks {both} in group and in data_group; a data_group has one rank of each pipeline"
            )

    @property
    def is_first(self) -> bool:
        """Return whether this is the first rank of the first pipeline. That rank decides for all."""
        return all(group is None or not dist.get_rank(group) for group in (self.group, self.data_group))

    def agree(self, fingerprint: Fingerprint, decided: T, error: Exception | None) -> T:
        """Return the decision of the first rank.

        Raise on all ranks the same error if one of them has an error or a different fingerprint.

        Args:
            fingerprint: the facts of this rank.
            decided: the decision of this rank; only that of the first rank counts.
            error: the error of this rank, or None.
        """
        siblings = None if self.data_group is None else dist.get_process_group_ranks(self.data_group)
        known = {"data_group": "not given" if siblings is None else f"of {len(siblings)} ranks", **fingerprint.whole}
        own = exchange((replace(fingerprint, whole=known), decided, siblings), error, self.group)
        problem = own.first_error
        if problem is None:
            problem = _data_groups([found.whole for found, _, _ in own.values])
        data_groups = [siblings for _, _, siblings in own.values]
        if self._are_all(data_groups):
            # A rank without a data_group cannot report a problem in one, so the exchange is over all ranks.
            problem = exchange(None, problem, dist.group.WORLD).first_error
            if problem is not None:
                raise problem from error
        pipelines = exchange((own.values, self._ranks), problem, self.data_group)
        if pipelines.first_error is not None:
            raise pipelines.first_error from error
        first, _ = pipelines.values[0]
        for pipeline, (ranks, _) in enumerate(pipelines.values):
            for rank, (other, _, _) in enumerate(ranks):
                if other.whole != first[0][0].whole:
                    raise _otherwise(first[0][0].whole, other.whole, 0, rank, pipeline)
                if other.stages != first[rank][0].stages:
                    raise _otherwise(first[rank][0].stages, other.stages, rank, rank, pipeline)
        places = [sorted(ranks) for ranks in zip(*(ranks for _, ranks in pipelines.values), strict=True)]
        for here in sorted(sorted(siblings) for siblings in data_groups if siblings is not None):
            if here not in places:
                right = next(ranks for ranks in places if here[0] in ranks)
                raise ValueError(
                    f"Pipeline got the data_group of ranks {here}, where ranks {right} have the same stages; give each "
                    "rank the group of those that are at its place in the group of their pipeline"
                )
        return first[0][1]

    @property
    def _ranks(self) -> list[int]:
        """Return the global ranks of the pipeline, in the order of its group."""
        if self.group is not None:
            return dist.get_process_group_ranks(self.group)
        return [dist.get_rank() if dist.is_initialized() else 0]

    def _are_all(self, data_groups: list[list[int] | None]) -> bool:
        """Return whether the pipelines side by side contain all ranks.

        Only a rank with a ``data_group`` can detect it.
        """
        sizes = [len(siblings) * len(data_groups) for siblings in data_groups if siblings is not None]
        return self.group is not None and dist.get_world_size() in sizes


def build_together(
    request: Request,
    n_ranks: int,
    place: int | None,
    devices: Sequence[torch.device | str | None],
    peers: Peers,
) -> Built:
    """Build on every rank of all pipelines. Raise on all of them if one rank fails or builds something different."""
    _, misfit = _attempt(peers.require_apart)
    if misfit is not None:
        peers = replace(peers, data_group=None)
    if request.split == "time":
        request = _measured(request, n_ranks, peers, misfit)
    built, error = _attempt(lambda: build(request, n_ranks, place, devices))
    found = Fingerprint() if built is None else built.fingerprint
    positions = "'layers', 'parameters' or positions"
    whole = {SPLIT: positions, **found.whole}
    token = peers.agree(replace(found, whole=whole), uuid.uuid4().hex, misfit or error)
    assert built is not None  # agree() raises if there was an error
    return replace(built, token=token)


def _measured(request: Request, n_ranks: int, peers: Peers, misfit: Exception | None) -> Request:
    """Return the request with the positions of a split by time. One rank measures, because no two clocks agree."""

    def measure() -> list[int]:
        n_stages = make_schedule(request, n_ranks).n_stages
        names = split_model(request.model, n_stages, by="time", sample=request.sample)
        return [sum(map(len, names[:stage])) for stage in range(1, n_stages)]

    found, error = _attempt(measure) if peers.is_first else (None, None)
    positions = peers.agree(Fingerprint({SPLIT: "'time'"}), found, misfit or error)
    assert positions is not None  # agree() raises if there was an error
    return replace(request, split=positions)


def _attempt(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:  # any kind of error, because the other ranks wait for this rank's result
        return None, error


def _data_groups(ranks: list[Facts]) -> ValueError | None:
    """Return an error if only some ranks have a data_group.

    Call it before the groups are used, because a rank without one would not join.
    """
    for rank, facts in enumerate(ranks):
        if facts["data_group"] != ranks[0]["data_group"]:
            return _otherwise(ranks[0], facts, 0, rank, 0)
    return None


def _otherwise(expected: Facts, found: Facts, first: int, rank: int, pipeline: int) -> ValueError:
    than, where = f"rank {first}", f"rank {rank}"
    if pipeline:
        than, where = f"{than} in pipeline 0", f"{where} in pipeline {pipeline}"
    place = f"rank {rank} of its group" + (f" in pipeline {pipeline} of its data_group" if pipeline else "")
    lines = "".join(f"\n  {line}" for line in differences(expected, found, than, where))
    return ValueError(
        f"Pipeline was made otherwise on {place} than on {than}; give every rank the same model and arguments{lines}"
    )
