"""Run the check of every bug in the zoo at its defaults, and print what it finds.

Usage: python ci/zoo.py [--seeds 20] [--only PART] [--messages] [--page docs/zoo.md]

For each bug: whether the check that docs/checks.md names finds it, whether its cause is right, and the seconds. The
correct twins, and the programs of the catalogue that only look faulty, run under several schedules and must pass.
Exit code 1 if a verdict differs from the stated one, or if a correct program fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from pdlcheck.cores import usable_cores
from pdlcheck.worlds import get_world
from suites.meta.catalogue import INNOCENT
from suites.zoo import ENTRIES, Entry, Verdict, judge
from suites.zoo.entry import explains, judge_also, verdict_on

Verdicts = list[tuple[Entry, Verdict]]


def main() -> int:
    """Run the zoo; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="schedules of each correct program; default: %(default)s")
    parser.add_argument("--only", default="", metavar="PART", help="only bugs with this in their names, and no traps")
    parser.add_argument("--messages", action="store_true", help="print every message")
    parser.add_argument("--page", type=Path, help="write the page with all messages there")
    options = parser.parse_args()
    chosen = [one for one in ENTRIES if options.only in one.bug]
    if not chosen:
        parser.error(f"no bug has {options.only!r} in its name")
    judge(chosen[0], get_world("sim"), broken=False)  # imports take seconds, and belong to no check
    verdicts = [(one, judge(one, get_world("sim"), broken=True)) for one in chosen]
    if options.messages:
        for one, verdict in verdicts:
            print(f"== {one.bug} ({one.check}, {one.judged})\n{verdict.error}\n")
    console = Console(width=140)
    console.print(_table(verdicts))
    alarms = _alarms(options.only, options.seeds)
    for alarm in alarms:
        print(alarm)
    tried = {"twin": len(chosen), "trap": 0 if options.only else len(INNOCENT)}
    counted = {
        f"alarms on {count} {kind}s, {options.seeds} schedules each": sum(f" the {kind} " in one for one in alarms)
        for kind, count in tried.items()
    }
    console.print(_summary(verdicts, counted))
    if options.page:
        options.page.write_text(_page(verdicts))
    return 0 if not alarms and all(explains(one, verdict) for one, verdict in verdicts) else 1


def _correct(only: str, seeds: int) -> list[tuple[str, int, Callable[[Any], Verdict]]]:
    """Return the correct programs, each with its name and its number of schedules."""
    chosen = [one for one in ENTRIES if only in one.bug]
    twins = [(f"the twin {one.bug}", seeds, partial(judge, one, broken=False)) for one in chosen]
    others = [(f"the twin {one.bug}", 1, partial(judge_also, one, broken=False)) for one in chosen if one.also]
    traps = [] if only else [(f"the trap {program.__name__}", seeds, _trap(program, end)) for program, end in INNOCENT]
    return [*others, *twins, *traps]  # others first, because one of them starts processes


def _trap(program: Callable[[], object], expected: object) -> Callable[[Any], Verdict]:
    def run(world: Any) -> None:
        if (found := world.run(program, world_size=2)) != [expected] * 2:
            raise ValueError(f"{program.__name__} returns {found}, not {expected} on both ranks")

    return lambda world: verdict_on(lambda: run(world))


def _alarms(only: str, seeds: int) -> list[str]:
    """Run the correct programs under each schedule, in a process for each core; return a line for each failure."""
    count = len(_correct(only, seeds))
    with ProcessPoolExecutor(min(count, usable_cores()), get_context("spawn")) as processes:
        found = processes.map(partial(_alarms_of, only, seeds), range(count))
        return [alarm for alarms in found for alarm in alarms]


def _alarms_of(only: str, seeds: int, place: int) -> list[str]:
    name, schedules, run = _correct(only, seeds)[place]
    errors = [(seed, run(get_world("sim", seed=seed)).error) for seed in range(schedules)]
    return [f"ALARM on {name}, seed {seed}: {error}" for seed, error in errors if error is not None]


def _table(verdicts: Verdicts) -> Table:
    table = Table("bug", "check", "found", "cause", "s")
    for one, verdict in verdicts:
        stated = one.judged if explains(one, verdict) else f"{one.judged} is stated, but the verdict differs"
        found = "yes" if verdict.error is not None else "no"
        table.add_row(one.bug, one.check, found, stated, f"{verdict.seconds:.2f}")
    return table


def _summary(verdicts: Verdicts, alarms: dict[str, int]) -> Table:
    missed = [one for one, verdict in verdicts if verdict.error is None]
    elsewhere = sum(judge_also(one, get_world("sim"), broken=True).error is not None for one in missed)
    found = len(verdicts) - len(missed)
    causes = Counter(one.judged for one, _ in verdicts)
    seconds = [verdict.seconds for _, verdict in verdicts]
    table = Table("the whole zoo", "")
    table.add_row("found by the documented check at its defaults", f"{found} of {len(verdicts)}")
    table.add_row("found by any check, at any arguments", f"{found + elsewhere} of {len(verdicts)}")
    for name in ("right", "partial", "wrong", "none"):
        table.add_row(f"cause {name}", str(causes[name]))
    for name, count in alarms.items():
        table.add_row(name, str(count))
    table.add_row("seconds of a broken program: median", f"{statistics.median(seconds):.2f}")
    table.add_row("seconds of a broken program: longest", f"{max(seconds):.2f}")
    table.add_row("seconds of all broken programs", f"{sum(seconds):.1f}")
    return table


def _page(verdicts: Verdicts) -> str:
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
