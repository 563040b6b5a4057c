"""The measurements of ranks: plain data, which ranks send as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LoadReading", "RankRecord", "RankTimes"]


@dataclass(frozen=True)
class RankTimes:
    """One function on one rank.

    Args:
        name: name of the function among the compared ones.
        iterations: calls in one sample.
        seconds: seconds of a call, for each round.
        device_seconds: the same, measured by the events of a CUDA device; None on other devices.
        host_peak_bytes: the largest resident memory of the process during one call; None if Linux does not report it.
        device_peak_bytes: the most device memory that one call allocates, above the amount allocated before.
    """

    name: str
    iterations: int
    seconds: list[float]
    device_seconds: list[float] | None
    host_peak_bytes: int | None
    device_peak_bytes: int | None


@dataclass(frozen=True)
class LoadReading:
    """The CPU time while the rounds ran.

    Args:
        elapsed_s: seconds of the clock.
        own_s: CPU seconds of this process.
        machine_s: CPU seconds of all programs on the machine; None if unknown.
        node: the machine's name.
    """

    elapsed_s: float
    own_s: float
    machine_s: float | None
    node: str = ""


@dataclass(frozen=True)
class RankRecord:
    """All functions on one rank.

    Args:
        times: the times of each function, in the order of the rows.
        warm_up_rounds: the rounds before those that count.
        threads: the threads of torch's operations.
        device: the device on which the functions computed.
        load: the load of the CPUs.
    """

    times: tuple[RankTimes, ...]
    warm_up_rounds: int
    threads: int
    device: str
    load: LoadReading

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankRecord:
        """Return the record from the result of :meth:`as_json`."""
        times = tuple(RankTimes(**one) for one in record["times"])
        return cls(**(dict(record) | {"times": times, "load": LoadReading(**record["load"])}))
