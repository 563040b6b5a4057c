"""The indices of an epoch and the digest of what was loaded, on one rank: ours beside torch's sampler.

The ways take turns; a row states medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from pdlcheck.primitives import ShardSampler, shard_digest

SAMPLES, REPLICAS = 1_000_000, 4


@pytest.mark.benchmark(group="samplers")
def test_sampler(benchmark: Any, full: bool) -> None:
    data = range(SAMPLES)
    ours = ShardSampler(data, num_replicas=REPLICAS, rank=1)
    theirs = DistributedSampler(data, num_replicas=REPLICAS, rank=1)  # type: ignore[arg-type]  # it has a length
    loaded = torch.randn(SAMPLES // REPLICAS, 16)
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: list(ours),
        "torch": lambda: list(theirs),
        "digest": lambda: shard_digest(loaded),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}

    def turn() -> None:
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)

    benchmark.pedantic(turn, rounds=9 if full else 5, warmup_rounds=1)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    benchmark.extra_info |= {f"{name}_s": value for name, value in middle.items()} | {"samples": SAMPLES}
    benchmark.extra_info["row"] = (
        f"a rank's quarter of 1 M shuffled indices, ms: ShardSampler {middle['ours'] * 1e3:.0f}, torch's "
        f"{middle['torch'] * 1e3:.0f}, ratio {middle['ours'] / middle['torch']:.2f}; "
        f"digest of its 16 MB {middle['digest'] * 1e3:.0f}"
    )
