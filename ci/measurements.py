"""Make the tables of docs/measurements.md from benchmarks/measurements.toml and the runs in benchmarks/results.

    python ci/measurements.py            print what would change; exit code 1 if something does
    python ci/measurements.py --write    write the page

A row has a description, a figure and a command; without a command it has that of the row before. A figure may contain
``{time ROW}``, ``{ratio ROW / WAY}``, ``{fact NAME of ROW}`` and ``{busbw ROW of LIMIT}``. They are replaced by values
of the run that ``run`` names: the median, the ratio to a function that took turns, one of the facts, and the bus
bandwidth over a limit in GB/s. So these figures cannot differ from the run.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from pdlcheck.report.measured import seconds_text

ROOT = Path(__file__).resolve().parents[1]
PAGE, ROWS = ROOT / "docs" / "measurements.md", ROOT / "benchmarks" / "measurements.toml"
HEAD = "| what | figure | command |\n|---|---|---|\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    write = parser.parse_args().write
    before = PAGE.read_text()
    after = page(before, tomllib.loads(ROWS.read_text()))
    if write:
        PAGE.write_text(after)
        return 0
    changes = [*difflib.unified_diff(before.splitlines(), after.splitlines(), "the page", "its rows", lineterm="", n=0)]
    print("\n".join(changes) or "the page is what its rows say")
    return 1 if changes else 0


def page(text: str, tables: dict[str, list[dict[str, str]]]) -> str:
    """Return the page with each table between its two marks.

    Raises:
        ValueError: a table has no marks on the page.
    """
    for name, rows in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{PAGE.name} needs {begin.strip()} and {end.strip()} once each for the table {name!r}")
        before, rest = text.split(begin)
        lines = [f"| {row['what']} | {figure(row)} | {row.get('command', '')} |\n" for row in rows]
        text = before + begin + HEAD + "".join(lines).replace("|  |", "| |") + end + rest.split(end)[1]
    return text


def figure(row: dict[str, str]) -> str:
    """Return the figure with the placeholders replaced by values of a run."""
    return re.sub(r"\{(time|ratio|fact|busbw) ([^}]+)\}", lambda found: _value(found[1], found[2], row), row["figure"])


def _value(kind: str, words: str, row: dict[str, str]) -> str:
    rows = _run(row["run"])
    if kind == "time":
        return seconds_text(_of(rows, words)["median_s"])
    if kind == "ratio":
        name, _, way = words.rpartition(" / ")
        return f"{_of(rows, name)['over'][way][0]:.2f}"
    if kind == "busbw":
        name, _, limit = words.rpartition(" of ")
        return f"{_of(rows, name)['busbw_GBps'] / float(limit):.2f}"
    fact, _, name = words.partition(" of ")
    return f"{_of(rows, name)[fact]:.3g}"


def _of(rows: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in rows:
        near = difflib.get_close_matches(name, rows, 3)
        raise ValueError(f"the run has no row {name!r}; it has {', '.join(near) or 'none that is like it'}")
    found: dict[str, Any] = rows[name]
    return found


@functools.cache
def _run(file: str) -> dict[str, Any]:
    run = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    return {row["name"]: row["extra_info"] for row in run["benchmarks"]}


if __name__ == "__main__":
    sys.exit(main())
