"""The matrix as text: a table for each area, the sentences below it, the totals; and ``docs/coverage.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdlcheck.worlds.semantics import PROFILES, Semantics

from .cell import FAIL, ROUNDINGS, Cell
from .columns import DEFAULT, SEMANTICS

__all__ = ["Row", "counts", "page", "tables"]

INTRO = """# Coverage: features of torch.distributed under each semantics

Each feature is a program of `suites/meta/coverage/` on four simulated ranks, two for some messages, compared with what
a single process without a process group computes. A cell is one run, of seed 1. This page is written by

```
python ci/matrix.py --write
```

and was last written with torch {torch}. `suites/meta/coverage/test_coverage.py` holds the columns `rendezvous`,
`nccl` and `gloo`.

| cell | says |
|---|---|
| `=` | every bit on every rank is that of the single process |
| `1e-16` | the largest error, relative to the largest element of its tensor; allowed are {roundings} roundings of the \
dtype, for the hooks in half precision 1e-2 |
| `runs` | there is nothing to compute; what the program asserts holds, and the ranks return what they must |
| `refused` | simulated ranks cannot do it, or must not; the sentence below the tables says why |
| `Deadlock` | the right verdict under these semantics |
| `{fail}` | anything else |

| column | semantics (`pdlcheck.worlds.semantics.Semantics`) |
|---|---|
{columns}

Training, pipelines and checkpoints are in float64, most collectives in float32 on random numbers, so that the order of
adding shows.

{counts}
"""


@dataclass(frozen=True)
class Row:
    """One feature under every semantics."""

    name: str
    cells: Sequence[Cell]
    coarse: bool = False  # the feature itself rounds coarsely

    @property
    def failed(self) -> bool:
        return any(cell.failed for cell in self.cells)


Rows = Mapping[str, Sequence[Row]]  # by area


def tables(rows: Rows) -> list[str]:
    """Return the lines of all tables, then the sentences that their cells refer to."""
    notes: dict[str, int] = {}
    lines = []
    for area, of_area in rows.items():
        cells = [["feature", *SEMANTICS], ["---"] * (len(SEMANTICS) + 1)]
        cells += [[row.name, *(_text(cell, notes) for cell in row.cells)] for row in of_area]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += [f"## {area[0].upper()}{area[1:]}", ""]
        lines += [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in cells]
        lines.append("")
    lines += [f"{number}. {note}" for note, number in notes.items()]
    return [*lines, ""] if notes else lines


def _text(cell: Cell, notes: dict[str, int]) -> str:
    return f"{cell.says} [{notes.setdefault(cell.note, len(notes) + 1)}]" if cell.note else cell.says


def counts(rows: Rows) -> list[str]:
    """Return the totals."""
    features = [row for of_area in rows.values() for row in of_area]
    cells = [cell for row in features for cell in row.cells]
    said = Counter(cell.says for cell in cells)
    told = [f"{said['=']} equal in every bit"]
    for coarse, where in ((False, ""), (True, " in half precision")):
        errors = [float(c.says) for row in features if row.coarse is coarse for c in row.cells if c.says[0].isdigit()]
        if errors:
            told.append(f"{len(errors)} up to rounding{where}, off by {max(errors):.0e} at most")
    told += [f"{said[word]} {word}" for word in sorted(said) if word not in ("=", FAIL) and not word[0].isdigit()]
    told.append(f"{said[FAIL]} {FAIL}")
    return [f"{len(features)} features, {len(SEMANTICS)} semantics, {len(cells)} cells: {', '.join(told)}"]


def _what(column: str) -> str:
    """Return the values that differ from the default."""
    semantics, default = SEMANTICS[column], PROFILES[DEFAULT]
    values = {name: getattr(semantics, name) for name in Semantics.__dataclass_fields__}
    changed = [f"`{name}={value!r}`" for name, value in values.items() if value != getattr(default, name)]
    profile = f"profile `{column}`" if column in PROFILES else ""
    return ": ".join(filter(None, [profile, ", ".join(changed)])) or "the default"


def page(rows: Rows) -> str:
    told = {
        "torch": torch.__version__.partition("+")[0],
        "roundings": ROUNDINGS,
        "columns": "\n".join(f"| {column} | {_what(column)} |" for column in SEMANTICS),
        "counts": "\n".join(counts(rows)),
        "fail": FAIL,
    }
    return "\n".join([INTRO.format(**told), *tables(rows)])
