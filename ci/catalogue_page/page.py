"""The page ``docs/catalogue.md``: the observed behaviour, with one table for each kind of fault."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from catalogue_page.shown import Shown, in_words
from suites.meta.catalogue import KINDS, Fault

__all__ = ["NOT_ON_GLOO", "NO_FAULT", "Seen", "counts", "page"]

NO_FAULT = "no fault"
POLLED = "a receive of gloo is not complete before it is waited for, so who polls it asks for ever"
NOT_ON_GLOO = {
    "tokens_in_lists": "gloo's all_to_all takes lists of equal tensors only",
    "polls_a_message_that_nobody_sends": POLLED,
    "both_poll_and_neither_sends": POLLED,
}
COLUMNS = ("program", "what is wrong", "source", "sim", "lines", "schedule", "gloo shows", "watched gloo")

INTRO = """# The catalogue of hangs and races

{total} faulty programs with the verdict on each, and what gloo itself shows of them. They lie in
`suites/meta/catalogue/`, each with its right twin; `test_catalogue.py` there holds the verdicts. This page is made by

```
python ci/catalogue.py --write
```

and was last written with torch {torch} on {cores} cores.

{sums}

| column | says |
|---|---|
| sim | the verdict of the simulated world, semantics `rendezvous`; `no fault`: what the program does is none there |
| lines | how many of the lines that are to blame it names |
| schedule | the first schedule that shows it; 1 is the one that every test runs |
| gloo shows | the same program on processes with gloo alone, {repeat} times; `hangs`: not done after {timeout_s:g} s; \
`wrong values silently`: the ranks return, and not what those of the twin do; `silent`: nothing is to be seen |
| watched gloo | what pdlcheck says when it watches those processes, once |

A rank that has returned stays alive, as in a test of a suite. Where its process ends instead, gloo tells the ranks
that wait for it of a closed connection. An error may also be the program's own: the harness stops the other ranks
then, which would wait. A warning of torch is not counted. A few runs show what a race does often, not what it can do.

The right twins pass on gloo, but for these, so what gloo shows of the three says nothing:

{exceptions}
"""


@dataclass(frozen=True)
class Seen:
    """The outcomes of one program in all worlds; ``twin`` is the failure of its correct twin on gloo, or empty."""

    fault: Fault
    sim: str
    lines: str
    schedule: str
    plain: Sequence[Shown]
    watched: Shown
    twin: str

    @property
    def on_gloo(self) -> str:
        return in_words(self.plain)


def counts(seen: Iterable[Seen]) -> list[str]:
    """Return the totals, one line each."""
    seen = list(seen)
    found = [each for each in seen if each.sim != NO_FAULT]
    later = sum(each.schedule != "1" for each in found)
    kinds = Counter(next(iter(kinds)) if len(kinds) == 1 else "" for kinds in ({s.kind for s in e.plain} for e in seen))
    same = sum(each.sim in each.watched.text for each in found)
    quiet = sum(each.watched.kind in ("silent", "wrong values silently", "hangs") for each in seen)
    other = len(seen) - same - quiet
    return [
        f"sim: {len(found)} of {len(seen)} found, {later} of them in a later schedule than the first",
        f"gloo: {kinds['hangs']} hang, {kinds['silent']} are silent, {kinds['wrong values silently']} return wrong "
        f"values silently, {kinds['error']} raise an error, {kinds['dies']} die, {kinds['']} differ from run to run",
        f"watched gloo: {same} get the verdict of sim, {quiet} hang or are silent, {other} get another",
    ]


def page(seen: Sequence[Seen], *, repeat: int, timeout_s: float) -> str:
    by_module: Mapping[str, list[Seen]] = {module.__name__: [] for module in KINDS}
    for each in seen:
        by_module[each.fault.program.__module__].append(each)
    version, cores = torch.__version__.partition("+")[0], len(os.sched_getaffinity(0))
    told = {
        "sums": "\n".join(f"- {line}" for line in counts(seen)),
        "exceptions": "\n".join(f"- `{name}`: {why}" for name, why in NOT_ON_GLOO.items()),
    }
    parts = [INTRO.format(total=len(seen), torch=version, cores=cores, repeat=repeat, timeout_s=timeout_s, **told)]
    for module, kind in KINDS.items():
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, by_module[module.__name__])]
        parts.append(f"## {kind[0].upper()}{kind[1:]}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(parts)


def _row(each: Seen) -> tuple[str, ...]:
    fault = each.fault
    told = (fault.what, fault.source, each.sim, each.lines, each.schedule, each.on_gloo, each.watched.text)
    return (f"`{fault.name}`", *(text.replace("|", "\\|") for text in told))
