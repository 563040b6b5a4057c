"""The table of measurements: times, bandwidths and ratios, with the column names of nccl-tests where they exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from pdlcheck.bench.roofs import shares_of_roof

__all__ = ["Cell", "bytes_text", "machine_text", "measured_cells", "measured_table", "seconds_text"]

Row = tuple[str, Mapping[str, Any]]  # name and facts
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "ns"))


class Cell(NamedTuple):
    """The text of a table cell, and the number to sort it by, if there is one."""

    text: str
    value: float | None = None


def measured_table(rows: Sequence[Row]) -> Table:
    """Return a table of rows: their names, and the facts of :func:`pdlcheck.bench.measurement.combine`.

    The row of a function is followed by the rows of the functions that it is compared with.
    """
    title = "rank benchmarks: median over rounds of the slowest rank"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    titles, lines = measured_cells(rows)
    for place, column in enumerate(titles):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell.text) for cell in line))
    return table


def measured_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[Cell]]]:
    """Return the titles and the lines of that table, without columns that are empty in all rows."""
    shares = shares_of_roof(rows)
    lines, over = [], dict[str, Sequence[float]]()
    for name, facts in rows:
        over = over if "way" in facts else facts.get("over", {})
        share = shares.get(name)
        lines.append(
            [
                Cell(name),
                Cell(seconds_text(facts["median_s"]), facts["median_s"]),
                _spread(facts),
                _ratio(over.get(facts.get("way", ""))),
                *(column(facts) for _, column in _COLUMNS),
                Cell("") if share is None else Cell(f"{share.value:.0%} {share.roof}", share.value),
            ]
        )
    titles = ["benchmark", "time", "95 %", "first row / this one", *(title for title, _ in _COLUMNS), "of the roof"]
    shown = [place for place in range(len(titles)) if place < 4 or any(line[place].text for line in lines)]
    return [titles[place] for place in shown], [[line[place] for place in shown] for line in lines]


def seconds_text(seconds: float) -> str:
    """Return a time with its unit.

    Example:
        >>> seconds_text(0.00123)
        '1.23 ms'
    """
    factor, unit = next((factor, unit) for factor, unit in _UNITS if seconds >= factor)
    return f"{seconds / (factor or 1e-9):.3g} {unit}"


def bytes_text(nbytes: int | None) -> str:
    """Return a number of bytes with its unit; empty for None.

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


def _spread(facts: Mapping[str, Any]) -> Cell:
    if facts["median_low_s"] == facts["median_high_s"]:
        return Cell("")  # a single round
    low, high = (facts[key] / facts["median_s"] - 1 for key in ("median_low_s", "median_high_s"))
    return Cell(f"{low:+.0%} {high:+.0%}", high - low)


def _ratio(found: Sequence[float] | None) -> Cell:
    return Cell("") if found is None else Cell(f"{found[0]:.2f} ({found[1]:.2f} .. {found[2]:.2f})", found[0])


def _number(key: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda facts: Cell(f"{facts[key]:.3g}", facts[key]) if facts.get(key) is not None else Cell("")


def _bytes(key: str) -> Callable[[Mapping[str, Any]], Cell]:
    return lambda facts: Cell(bytes_text(facts.get(key)), facts.get(key))


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], Cell]], ...] = (
    ("bytes", _bytes("nbytes")),
    ("algbw GB/s", _number("algbw_GBps")),
    ("busbw GB/s", _number("busbw_GBps")),
    ("#wrong", _number("wrong")),
    ("device memory", _bytes("device_peak_bytes")),
    ("host memory", _bytes("host_peak_bytes")),
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
