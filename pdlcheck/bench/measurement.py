"""The combined times of all ranks: in each round, the slowest rank counts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdlcheck.bench.formulas import algbw_GBps, busbw_GBps
from pdlcheck.bench.intervals import Interval, median_interval, paired_ratio
from pdlcheck.bench.records import RankRecord, RankTimes

__all__ = ["Measurement", "Subject", "combine"]


@dataclass(frozen=True)
class Subject:
    """The facts about the functions that are known before the timing.

    Args:
        nbytes: data of one rank in one call; for bandwidths.
        operation: name of a collective, such as ``all_reduce``; for the bus bandwidth.
        wrong: for each function, the number of wrong elements of its checked result.
        facts: further columns of the subject's row.
    """

    nbytes: int | None = None
    operation: str | None = None
    wrong: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One function on all ranks.

    Args:
        name: name of the function.
        iterations: calls in one sample.
        seconds: seconds of a call on the slowest rank, for each round.
        facts: columns besides the times; see :func:`combine`.
    """

    name: str
    iterations: int
    seconds: list[float]
    facts: dict[str, Any]


def combine(records: Sequence[RankRecord], subject: Subject) -> list[Measurement]:
    """Return a measurement for each function; the first function is the subject.

    Args:
        records: the records of all ranks, in rank order.
        subject: the known facts about the functions.

    Returns:
        Measurements with these facts: ``world_size``, ``threads_per_rank``, ``device``, ``warm_up_rounds``;
        ``median_s`` with its interval ``median_low_s``, ``median_high_s``; ``fastest_rank_s``, the smallest median of
        a rank; ``device_s``, measured by CUDA events; ``nbytes``, ``algbw_GBps``, ``busbw_GBps``; ``wrong``;
        ``host_peak_bytes`` and ``device_peak_bytes`` of the rank that needs most; ``foreign_load``, the number of cores
        that other programs kept busy, on the node where it is largest. The first row has ``over``: for each other
        function ``[ratio, low, high]`` of the medians. The other rows have ``way``: the name of the function.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("combine needs the record of at least one rank, got none")
    found = []
    for place in range(len(records[0].times)):
        ranks = [record.times[place] for record in records]
        slowest = [max(seconds) for seconds in zip(*(one.seconds for one in ranks), strict=True)]
        facts = {
            "world_size": len(records),
            "threads_per_rank": records[0].threads,
            "device": records[0].device.partition(":")[0],
            "warm_up_rounds": records[0].warm_up_rounds,
            **_times(slowest, ranks),
            **_bandwidths(statistics.median(slowest), len(records), subject),
            "wrong": subject.wrong.get(ranks[0].name),
            "host_peak_bytes": _largest([one.host_peak_bytes for one in ranks]),
            "device_peak_bytes": _largest([one.device_peak_bytes for one in ranks]),
            "foreign_load": _foreign_load(records),
        }
        facts = {name: value for name, value in facts.items() if value is not None}
        found.append(Measurement(ranks[0].name, ranks[0].iterations, slowest, facts))
    first, *others = found
    first.facts.update(subject.facts)
    for other in others:
        other.facts["way"] = other.name
        first.facts.setdefault("over", {})[other.name] = [*paired_ratio(first.seconds, other.seconds)]
    return found


def _times(slowest: Sequence[float], ranks: Sequence[RankTimes]) -> dict[str, float | None]:
    median: Interval = median_interval(slowest)
    on_device = [statistics.median(one.device_seconds) for one in ranks if one.device_seconds]
    return {
        "median_s": median.value,
        "median_low_s": median.low,
        "median_high_s": median.high,
        "fastest_rank_s": min(statistics.median(one.seconds) for one in ranks),
        "device_s": max(on_device) if on_device else None,
    }


def _bandwidths(seconds: float, world_size: int, subject: Subject) -> dict[str, float | None]:
    if subject.nbytes is None:
        return {}
    algbw = algbw_GBps(subject.nbytes, seconds=seconds)
    found: dict[str, float | None] = {"nbytes": subject.nbytes, "algbw_GBps": algbw}
    if subject.operation is not None:
        found["busbw_GBps"] = busbw_GBps(subject.operation, subject.nbytes, world_size, seconds=seconds)
    return found


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _foreign_load(records: Sequence[RankRecord]) -> float | None:
    """Return the cores that other programs kept busy, on the node where it is largest; None if it is unknown."""
    found = []
    for node in {record.load.node for record in records}:
        loads = [record.load for record in records if record.load.node == node]
        first = loads[0]
        if first.machine_s is None or first.elapsed_s <= 0:
            return None
        found.append(max(first.machine_s - sum(load.own_s for load in loads), 0.0) / first.elapsed_s)
    return max(found)
