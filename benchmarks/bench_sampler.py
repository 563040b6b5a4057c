"""The indices of an epoch and the digest of the loaded data, on one rank: ours beside torch's sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from pdlcheck.primitives import ShardSampler, shard_digest

SAMPLES, REPLICAS = 1_000_000, 4

pytestmark = pytest.mark.world_size(1)


@pytest.mark.benchmark(group="samplers")
def test_sampler(rank_benchmark: Any) -> None:
    """Time a rank's quarter of a million shuffled indices."""
    data = range(SAMPLES)
    ours = ShardSampler(data, num_replicas=REPLICAS, rank=1)
    theirs = DistributedSampler(data, num_replicas=REPLICAS, rank=1)  # type: ignore[arg-type]  # it has a length
    rank_benchmark(lambda: list(ours), against={"torch": lambda: list(theirs)})


@pytest.mark.benchmark(group="samplers")
def test_shard_digest(rank_benchmark: Any) -> None:
    loaded = torch.randn(SAMPLES // REPLICAS, 16)
    rank_benchmark(shard_digest, loaded, nbytes=loaded.nbytes)
