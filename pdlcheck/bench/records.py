"""What ranks measured: plain data, which travels from the ranks as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LoadReading", "RankRecord", "RankTimes"]


@dataclass(frozen=True)
class RankTimes:
    """One function on one rank.

    Args:
        name: of the function among those that are compared.
        iterations: calls in one sample.
        seconds: of a call, for each round.
        device_seconds: the same by the events of a CUDA device; None elsewhere.
        host_peak_bytes: the largest resident memory of the process during one call; None where Linux does not say.
        device_peak_bytes: memory of the device that one call allocates at most, above what was allocated before.
    """

    name: str
    iterations: int
    seconds: list[float]
    device_seconds: list[float] | None
    host_peak_bytes: int | None
    device_peak_bytes: int | None


@dataclass(frozen=True)
class LoadReading:
    """CPU time while the rounds ran, in seconds: of this process, and of everything on the machine (None: unknown).

    ``node`` is the machine's name.
    """

    elapsed_s: float
    own_s: float
    machine_s: float | None
    node: str = ""


@dataclass(frozen=True)
class RankRecord:
    """All functions on one rank.

    Args:
        times: of each function, in the order of the rows.
        warm_up_rounds: before those that count.
        threads: of torch's operations.
        device: where the functions computed.
        load: of the CPUs.
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
        """Read what :meth:`as_json` returned."""
        times = tuple(RankTimes(**one) for one in record["times"])
        return cls(**(dict(record) | {"times": times, "load": LoadReading(**record["load"])}))
