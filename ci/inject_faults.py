"""Inject seeded random faults into the ranks of real pytest runs, and check the report of each.

Usage: python ci/inject_faults.py [--world gloo] [--count 500] [--seed 0] [--world-sizes 2,3,4] [--only N] [--load N]

At a random moment a rank is killed, crashes, is stopped, raises, exits, never answers, passes a wrong shape, runs out
of
memory, writes to descriptors that are not its own, or leaves modes, processes, ports and shared memory behind; or the
whole run gets a Ctrl-C. The runs use one machine, a launcher, or two hosts. Every fault must be reported with the right
rank and cause, in time. The next test must pass. No process, port, shared memory or file may remain. Exit code 1 if one
of these requirements does not hold.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fault_campaign.draw import KINDS, WORLDS, draw
from fault_campaign.faults import Fault
from fault_campaign.other_work import other_work
from fault_campaign.own_memory import can_enter
from fault_campaign.runs import run_faults
from fault_campaign.verdict import Verdict, judge
from rich.console import Console
from rich.table import Table

from pdlcheck.cores import usable_cores

_FAULTS_A_RUN = 20


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=WORLDS, default="gloo", help="default: %(default)s")
    parser.add_argument("--count", type=int, default=500, help="number of faults; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="the faults follow from it; default: %(default)s")
    parser.add_argument("--world-sizes", default="2,3,4", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--only", type=int, metavar="N", help="inject this one alone, and show the test and its report")
    parser.add_argument("--kinds", default="", metavar="KIND,KIND", help=f"only these of {', '.join(KINDS)}")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="pytest runs at a time; default: the cores")
    parser.add_argument("--slow", type=float, default=1.0, metavar="X", help="allow X times the time (busy machine)")
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE", help="pytest plugin for every run")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="beside N processes that compute for ever")
    options = parser.parse_args()
    sizes = [int(word) for word in options.world_sizes.split(",")]
    numbers = range(options.count) if options.only is None else [options.only]
    faults = [draw(options.seed, number, sizes, options.world) for number in numbers]
    if options.kinds:
        faults = [fault for fault in faults if fault.kind in options.kinds.split(",")]
    if not faults:
        parser.error(f"--count {options.count} draws no fault of --kinds {options.kinds!r}: draw more, or other kinds")
    can_enter()  # forks, so it must run before threads start
    start = time.monotonic()
    with other_work(options.load):
        verdicts = _campaign(faults, options) if options.only is None else [_alone(faults[0], options)]
    print(_table(verdicts))
    failed = [verdict for verdict in verdicts if not verdict.held]
    held, seconds = len(verdicts) - len(failed), time.monotonic() - start
    load = f"load {os.getloadavg()[0]:.0f} on {usable_cores()} cores"
    what = f"{held} of {len(verdicts)} faults held on {options.world}"
    print(f"{what}, {seconds:.0f} s, {load}, times allowed x {options.slow:g}")
    return 1 if failed else 0


def _campaign(faults: Sequence[Fault], options: argparse.Namespace) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(options.jobs) as threads:
        run = functools.partial(run_faults, world=options.world, plugins=options.plugin)
        runs = {threads.submit(run, chunk): chunk for chunk in _chunks(faults)}
        for future in as_completed(runs):
            new = [judge(fault, future.result(), slow=options.slow) for fault in runs[future]]
            verdicts += new
            for verdict in new:
                if not verdict.held:
                    _tell(verdict, options)
            bad = sum(not verdict.held for verdict in verdicts)
            print(f"[{len(verdicts)}/{len(faults)}] {_kinds(new)}; {bad} did not hold", flush=True)
    return verdicts


def _alone(fault: Fault, options: argparse.Namespace) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="pdlcheck-fault-") as folder:
        run = run_faults([fault], world=options.world, plugins=options.plugin, keep=Path(folder))
        print((Path(folder) / "test_faults.py").read_text())
    print(run.output)
    verdict = judge(fault, run, slow=options.slow)
    if not verdict.held:
        _tell(verdict, options)
    return verdict


def _chunks(faults: Sequence[Fault]) -> Iterator[list[Fault]]:
    """Yield groups of faults that can share a pytest run; a Ctrl-C cannot share one."""
    alone = [[fault] for fault in faults if fault.where == "run"]
    for watch in (True, False):
        group = [fault for fault in faults if fault.where != "run" and fault.watch is watch]
        yield from (group[start : start + _FAULTS_A_RUN] for start in range(0, len(group), _FAULTS_A_RUN))
    yield from alone


def _tell(verdict: Verdict, options: argparse.Namespace) -> None:
    fault = verdict.fault
    replay = ["python", "ci/inject_faults.py", *(["--world", options.world] if options.world != "gloo" else [])]
    replay += ["--seed", str(options.seed), "--world-sizes", options.world_sizes]
    replay += ["--only", str(fault.number), *(word for plugin in options.plugin for word in ("--plugin", plugin))]
    lines = "\n".join(verdict.trouble).splitlines()
    with _printing:
        print(f"\nDID NOT HOLD: fault {fault.number} of seed {options.seed}: {fault}")
        print("\n".join(f"    {line}" for line in lines))
        print(f"    replay: {shlex.join(replay)}\n", flush=True)


def _kinds(verdicts: Sequence[Verdict]) -> str:
    counts: dict[str, int] = {}
    for verdict in verdicts:
        counts[verdict.fault.kind] = counts.get(verdict.fault.kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def _table(verdicts: Sequence[Verdict]) -> str:
    table = Table(title="Faults injected into ranks of pytest runs")
    table.add_column("fault")
    for column in ("injected", "right rank and cause, in time", "next test passes", "nothing left", "slowest report"):
        table.add_column(column, justify="right")
    for kind in [*KINDS, "all"]:
        chosen = [verdict for verdict in verdicts if kind in ("all", verdict.fault.kind)]
        if not chosen:
            continue
        slowest = max((verdict.seconds for verdict in chosen if verdict.seconds is not None), default=None)
        counts = [len(chosen), *(sum(getattr(v, name) for v in chosen) for name in ("reported", "healed", "clean"))]
        seconds = "" if slowest is None else f"{slowest:.2f} s"
        table.add_row(kind, *map(str, counts), seconds, end_section=kind == list(KINDS)[-1])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


_printing = threading.Lock()

if __name__ == "__main__":
    sys.exit(main())
