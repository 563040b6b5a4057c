"""The load of the CPUs during a measurement: a busy machine explains a slow round."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

from pdlcheck.bench.records import LoadReading

__all__ = ["CpuLoad"]

_IDLE = (3, 4)  # the columns idle and iowait of /proc/stat


class CpuLoad:
    """The CPU time of this process and of the whole machine, from the start of a ``with`` block to its end."""

    reading: LoadReading

    def __enter__(self) -> CpuLoad:
        self._begin = _now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (wall, own, machine), (to_wall, to_own, to_machine) = self._begin, _now()
        busy = None if machine is None or to_machine is None else to_machine - machine
        self.reading = LoadReading(to_wall - wall, to_own - own, busy, os.uname().nodename)


def _now() -> tuple[float, float, float | None]:
    return time.perf_counter(), time.process_time(), _machine_s()


def _machine_s() -> float | None:
    try:
        columns = [int(column) for column in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(value for place, value in enumerate(columns) if place not in _IDLE) / os.sysconf("SC_CLK_TCK")
