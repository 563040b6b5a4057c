"""The formulas of the benchmarks, in seconds, bytes and GB/s (1e9 bytes)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BUSBW_FACTORS",
    "algbw_GBps",
    "busbw_GBps",
    "epoch_s",
    "fit_local_sgd",
    "local_sgd_step_s",
    "slowest_s",
    "speed_up_pays",
]


def slowest_s(ranks: Sequence[Sequence[float]]) -> float:
    """The median over calls of the slowest rank's seconds.

    Args:
        ranks: for each rank, the seconds of every call, in the same order on all of them.

    Example:
        >>> slowest_s([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]])
        3.0
    """
    return float(statistics.median(max(call) for call in zip(*ranks, strict=True)))


def algbw_GBps(nbytes: int, *, seconds: float) -> float:
    """``nbytes / seconds``: how fast the caller's data is dealt with.

    Example:
        >>> algbw_GBps(2_000_000_000, seconds=1.0)
        2.0
    """
    return nbytes / seconds / 1e9


# of the bytes that nccl-tests counts for the operation, the part that the busiest link must carry at least
BUSBW_FACTORS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,  # of what a rank receives, its own part included
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "reduce": lambda n: 1.0,
    "reduce_scatter": lambda n: (n - 1) / n,  # of what a rank gives
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}


def busbw_GBps(operation: str, nbytes: int, world_size: int, *, seconds: float) -> float | None:
    """``algbw`` times the factor of the operation: what each link carries, to be set beside the speed of the link.

    None at world_size 1, where no link carries anything.

    Args:
        operation: a key of :data:`BUSBW_FACTORS`.
        nbytes: of the larger one of a rank's input and output.
        world_size: number of ranks.
        seconds: of one call.

    Example:
        >>> busbw_GBps("all_gather", 2_000_000_000, 4, seconds=1.0)
        1.5

    Raises:
        ValueError: the operation is unknown.

    Source: "Performance reported by NCCL tests", the documentation of nccl-tests.
    """
    if operation not in BUSBW_FACTORS:
        raise ValueError(f"operation must be one of {', '.join(BUSBW_FACTORS)}; got {operation!r}")
    if world_size == 1:
        return None
    return algbw_GBps(nbytes, seconds=seconds) * BUSBW_FACTORS[operation](world_size)


def epoch_s(num_samples: int, world_size: int, local_batch: int, *, compute_s: float, sync_s: float) -> float:
    """Seconds of an epoch of synchronous SGD: ``N / (R B) * (T_comp + T_sync)``.

    Args:
        num_samples: N, in the data set.
        world_size: R.
        local_batch: B, samples of one rank in a step.
        compute_s: of one step on one rank.
        sync_s: of one synchronisation.

    Example:
        >>> epoch_s(80_000, 4, 1_000, compute_s=0.25, sync_s=0.25)
        10.0

    Source: "Distributed training with PyTorch and MPI" (2018).
    """
    return num_samples / (world_size * local_batch) * (compute_s + sync_s)


def speed_up_pays(world_size: int, *, compute_s: float, sync_s: float) -> bool:
    """R ranks beat one where ``T_sync / T_comp < R - 1``.

    Example:
        >>> speed_up_pays(2, compute_s=0.1, sync_s=0.2)
        False

    Source: as :func:`epoch_s`.
    """
    return sync_s / compute_s < world_size - 1


def local_sgd_step_s(sync_every: int, *, compute_s: float, sync_s: float) -> float:
    """Mean seconds of a step that synchronises every k-th time: ``T_comp + T_sync / k``.

    Example:
        >>> local_sgd_step_s(4, compute_s=0.1, sync_s=0.2)
        0.15000000000000002
    """
    return compute_s + sync_s / sync_every


def fit_local_sgd(seconds: Mapping[int | None, float]) -> tuple[float, float]:
    """``(T0, Ts)`` of ``T(k) = T0 + Ts / k``, by least squares; ``None`` is never, k = infinity.

    Args:
        seconds: of a step, or of an epoch, that synchronises every k-th time, for two different k or more.

    Example:
        >>> t0, ts = fit_local_sgd({1: 0.3, 2: 0.2, None: 0.1})
        >>> round(t0, 3), round(ts, 3)
        (0.1, 0.2)

    Raises:
        ValueError: fewer than two different k.
    """
    if len(seconds) < 2:
        raise ValueError(f"fit_local_sgd draws a line through two k or more, got {list(seconds)}")
    rates = [0.0 if k is None else 1 / k for k in seconds]
    times = list(seconds.values())
    mean_rate, mean_time = statistics.fmean(rates), statistics.fmean(times)
    slope = sum((x - mean_rate) * (t - mean_time) for x, t in zip(rates, times, strict=True)) / sum(
        (x - mean_rate) ** 2 for x in rates
    )
    return mean_time - slope * mean_rate, slope
