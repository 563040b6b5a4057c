"""Run the check of every bug in the zoo at its defaults, and print what it finds.

Usage: python ci/zoo.py [--seeds 20] [--only PART] [--messages] [--page docs/zoo.md]

For each bug: whether the check that docs/checks.md names finds it, whether its cause is right, and the seconds. The
correct twins run under several schedules and must pass. Exit code 1 if a verdict differs from the stated one, or if a
twin fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from pdlcheck.worlds import get_world
from suites.zoo import ENTRIES, Entry, Verdict, judge
from suites.zoo.entry import explains


def main() -> int:
    """Run the zoo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="schedules of each correct twin; default: %(default)s")
    parser.add_argument("--only", default="", metavar="PART", help="only bugs with this in their names")
    parser.add_argument("--messages", action="store_true", help="print every message")
    parser.add_argument("--page", type=Path, help="write the page with all messages there")
    options = parser.parse_args()
    chosen = [one for one in ENTRIES if options.only in one.bug]
    judge(chosen[0], get_world("sim"), broken=False)  # imports take seconds, and belong to no check
    verdicts = [(one, judge(one, get_world("sim"), broken=True)) for one in chosen]
    if options.messages:
        for one, verdict in verdicts:
            print(f"== {one.bug} ({one.check}, {one.judged})\n{verdict.error}\n")
    Console(width=140).print(_table(verdicts))
    alarms = [(one, seed, error) for one in chosen for seed in range(options.seeds) if (error := _alarm(one, seed))]
    for one, seed, error in alarms:
        print(f"ALARM on the twin of {one.bug}, seed {seed}: {error}")
    print(_summary(verdicts, len(alarms), options.seeds))
    if options.page:
        options.page.write_text(_page(verdicts))
    return 0 if not alarms and all(explains(one, verdict) for one, verdict in verdicts) else 1


def _alarm(one: Entry, seed: int) -> BaseException | None:
    return judge(one, get_world("sim", seed=seed), broken=False).error


def _table(verdicts: list[tuple[Entry, Verdict]]) -> Any:
    table = Table("bug", "check", "found", "cause", "s")
    for one, verdict in verdicts:
        stated = one.judged if explains(one, verdict) else f"{one.judged} is stated, but the verdict differs"
        found = "yes" if verdict.error is not None else "no"
        table.add_row(one.bug, one.check, found, stated, f"{verdict.seconds:.2f}")
    return table


def _summary(verdicts: list[tuple[Entry, Verdict]], alarms: int, seeds: int) -> str:
    found = sum(verdict.error is not None for _, verdict in verdicts)
    causes = Counter(one.judged for one, _ in verdicts)
    seconds = [verdict.seconds for _, verdict in verdicts]
    said = ", ".join(f"{causes[name]} {name}" for name in ("right", "partial", "none", "wrong", "missed"))
    return (
        f"{found} of {len(verdicts)} found by the documented check at its defaults; causes: {said}; "
        f"{alarms} alarms on twins under {seeds} schedules; median {statistics.median(seconds):.2f} s, "
        f"longest {max(seconds):.2f} s"
    )


def _page(verdicts: list[tuple[Entry, Verdict]]) -> str:
    lines = [
        "# The zoo of real bugs",
        "",
        "Each entry is a bug of a public project as a small program in `suites/zoo`, with a correct twin. The check is",
        "the one that [checks.md](checks.md) names for such code, at its defaults. Each message stands beside a",
        "judgement of its cause, so that you can disagree. `python ci/zoo.py --page docs/zoo.md` writes this page.",
        "",
    ]
    for one, verdict in verdicts:
        lines += [f"## {one.bug}", "", f"{one.what} Source: {one.source}. Program: `suites/zoo/{one.topic}.py`.", ""]
        lines += [f"`{one.check}`; cause: **{one.judged}**{f', because {one.why}' if one.why else ''}.", ""]
        if verdict.error is not None:
            lines += ["```text", *(line.rstrip() for line in str(verdict.error).splitlines()), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
