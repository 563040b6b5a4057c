"""The table of what ranks measured: times, bandwidths and ratios, in the columns of nccl-tests where there are any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["bytes_text", "machine_text", "measured_table", "seconds_text"]

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))


def measured_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return a table of rows: their names, and the facts of :func:`pdlcheck.bench.measurement.combine`.

    The row of a function is followed by those of the functions that it is compared with.
    """
    title = "rank benchmarks: median over rounds of the slowest rank"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    shown = [column for column in _COLUMNS if any(column[1](facts) for _, facts in rows)]
    for title in ("time", "95 %", "first row / this one", *(title for title, _ in shown)):
        table.add_column(title, justify="right", no_wrap=True)
    over: Mapping[str, Sequence[float]] = {}
    for name, facts in rows:
        over = over if "way" in facts else facts.get("over", {})
        ratio = _ratio(over.get(facts.get("way", "")))
        times = (seconds_text(facts["median_s"]), _spread(facts), ratio)
        table.add_row(Text(name), *times, *(text(facts) for _, text in shown))
    return table


def seconds_text(seconds: float) -> str:
    """Return a time with its unit.

    Example:
        >>> seconds_text(0.00123)
        '1.23 ms'
    """
    factor, unit = next((factor, unit) for factor, unit in _UNITS if seconds >= factor)
    return f"{seconds / (factor or 1e-9):.3g} {unit}"


def bytes_text(nbytes: int | None) -> str:
    """Return a number of bytes with its unit; nothing for None.

    Example:
        >>> bytes_text(3 * 2**20)
        '3 MiB'
    """
    if nbytes is None:
        return ""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def _spread(facts: Mapping[str, Any]) -> str:
    if facts["median_low_s"] == facts["median_high_s"]:
        return ""  # of a single round
    low, high = (facts[key] / facts["median_s"] - 1 for key in ("median_low_s", "median_high_s"))
    return f"{low:+.0%} {high:+.0%}"


def _ratio(found: Sequence[float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} ({found[1]:.2f} .. {found[2]:.2f})"


def _number(facts: Mapping[str, Any], key: str) -> str:
    return f"{facts[key]:.3g}" if facts.get(key) is not None else ""


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("bytes", lambda facts: bytes_text(facts.get("nbytes"))),
    ("algbw GB/s", lambda facts: _number(facts, "algbw_GBps")),
    ("busbw GB/s", lambda facts: _number(facts, "busbw_GBps")),
    ("#wrong", lambda facts: str(facts.get("wrong", ""))),
    ("device memory", lambda facts: bytes_text(facts.get("device_peak_bytes"))),
    ("host memory", lambda facts: bytes_text(facts.get("host_peak_bytes"))),
)


def machine_text() -> str:
    """Return a line about this machine: processor, cores, devices, versions."""
    from pdlcheck.bench.hardware import describe_machine

    found = describe_machine()
    gpus = [gpu["name"] for gpu in found.get("gpus", [])]
    parts = [f"{found['cpu']}, {found['usable_cores']} of {found['cores']} cores"]
    parts += [f"{number} x {name}" for name, number in Counter(gpus).items()]
    parts += [f"{name} {version}" for name, version in found["packages"].items() if name in ("torch", "pdlcheck")]
    return f"{', '.join(parts)}, load {found.get('load_average', 0):.1f}"
