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
    """Return the median over calls of the slowest rank's seconds.

    Args:
        ranks: for each rank, the seconds of every call, in the same order on all of them.

    Example:
        >>> slowest_s([[1.0, 2.0, 9.0], [3.0, 1.0, 1.0]])
        3.0
    """
    return float(statistics.median(max(call) for call in zip(*ranks, strict=True)))


def algbw_GBps(nbytes: int, *, seconds: float) -> float:
    """Return ``nbytes / seconds``, the speed at which the caller's data is processed.

    Example:
        >>> algbw_GBps(2_000_000_000, seconds=1.0)
        2.0
    """
    return nbytes / seconds / 1e9


# the share of an operation's bytes, as nccl-tests counts them, that the busiest link carries at least
BUSBW_FACTORS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,  # share of the bytes that a rank receives, including its own part
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "gather": lambda n: (n - 1) / n,
    "reduce": lambda n: 1.0,
    "reduce_scatter": lambda n: (n - 1) / n,  # share of the bytes that a rank passes in
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}


def busbw_GBps(operation: str, nbytes: int, world_size: int, *, seconds: float) -> float | None:
    """Return ``algbw`` times the factor of the operation: the load of each link, to compare with the link's speed.

    Args:
        operation: a key of :data:`BUSBW_FACTORS`.
        nbytes: bytes of the larger one of a rank's input and output.
        world_size: number of ranks.
        seconds: seconds of one call.

    Returns:
        The bus bandwidth in GB/s; None at world_size 1, where no link carries data.

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
    """Return the seconds of an epoch of synchronous SGD: ``N / (R B) * (T_comp + T_sync)``.

    Args:
        num_samples: N, the number of samples in the data set.
        world_size: R, the number of ranks.
        local_batch: B, the samples of one rank in a step.
        compute_s: T_comp, the seconds of one step on one rank.
        sync_s: T_sync, the seconds of one synchronisation.

    Example:
        >>> epoch_s(80_000, 4, 1_000, compute_s=0.25, sync_s=0.25)
        10.0

    Source: "Distributed training with PyTorch and MPI" (2018).
    """
    return num_samples / (world_size * local_batch) * (compute_s + sync_s)


def speed_up_pays(world_size: int, *, compute_s: float, sync_s: float) -> bool:
    """Return whether R ranks are faster than one: ``T_sync / T_comp < R - 1``.

    Example:
        >>> speed_up_pays(2, compute_s=0.1, sync_s=0.2)
        False

    Source: as for :func:`epoch_s`.
    """
    return sync_s / compute_s < world_size - 1


def local_sgd_step_s(sync_every: int, *, compute_s: float, sync_s: float) -> float:
    """Return the mean seconds of a step if every k-th step synchronises: ``T_comp + T_sync / k``.

    Example:
        >>> local_sgd_step_s(4, compute_s=0.1, sync_s=0.2)
        0.15000000000000002
    """
    return compute_s + sync_s / sync_every


def fit_local_sgd(seconds: Mapping[int | None, float]) -> tuple[float, float]:
    """Return ``(T0, Ts)`` of ``T(k) = T0 + Ts / k``, fitted by least squares.

    Args:
        seconds: by k, the seconds of a step or of an epoch in which every k-th step synchronises, for two different k
            or more; the key ``None`` means never, k = infinity.

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
