"""Kill workers of a training under torchrun, damage checkpoints, and check that the training recovers.

Usage: python ci/inject_training_faults.py [--kills 100] [--torn 200] [--seed 0] [--world-sizes 2,3] [--jobs 2]

A worker of examples/elastic.py is killed by SIGKILL at a drawn moment, also in the middle of writing a checkpoint, and
torchrun restarts the workers. They must resume from the last checkpoint. After every step and at the end they must hold
bit for bit the weights of an undisturbed run, and they must leave no process and no temporary file. Several kills share
a job. A damaged checkpoint must be refused with the same message on every rank. Nothing of it may be loaded, and the
previous checkpoint must be offered and intact. Exit code 1 if one of these requirements does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.table import Table
from training_faults.files import DAMAGES, Torn, tear
from training_faults.jobs import Job, Verdict, judge, run_job
from training_faults.kills import KINDS, Kill, draw

from pdlcheck.cores import usable_cores
from pdlcheck.worlds import get_world


def main() -> int:
    """Run the campaign; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--torn", type=int, default=200, help="damaged checkpoints; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it; default: %(default)s")
    parser.add_argument("--world-sizes", default="2,3", metavar="N,N", help="default: %(default)s")
    parser.add_argument(
        "--kills-a-job", type=int, default=9, metavar="N", help="restarts of a job; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=30, help="of a training; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="trainings at a time; default: the cores")
    parser.add_argument("--world", default="sim", help="where damaged checkpoints are loaded; default: %(default)s")
    options = parser.parse_args()
    sizes = [int(word) for word in options.world_sizes.split(",")]
    start = time.monotonic()
    torn = _tear(options, sizes)
    verdicts = _kill(options, sizes) if options.kills else []
    console = Console(width=120)
    if torn:
        console.print(_torn_table(torn))
    if verdicts:
        console.print(_kills_table(verdicts))
    held = sum(one.held for one in torn), sum(one.held for one in verdicts)
    load = f"load {os.getloadavg()[0]:.0f} on {usable_cores()} cores"
    print(f"{held[0]} of {len(torn)} damaged checkpoints refused, none loaded, the previous one intact")
    print(f"{held[1]} of {len(verdicts)} kills: training went on and ended with the same bits, {load}")
    print(f"{time.monotonic() - start:.0f} s")
    return 0 if held == (options.torn, options.kills) else 1


def _tear(options: argparse.Namespace, sizes: Sequence[int]) -> list[Torn]:
    world, found = get_world(options.world), []
    for number in range(options.torn):
        found.append(tear(number, options.seed, world, sizes[number // len(DAMAGES) % len(sizes)]))
        if not found[-1].held:
            print(f"DID NOT HOLD: {found[-1]}", flush=True)
        if (number + 1) % 50 == 0 or number + 1 == options.torn:
            bad = sum(not one.held for one in found)
            print(f"[{number + 1}/{options.torn}] damaged checkpoints; {bad} did not hold", flush=True)
    return found


def _kill(options: argparse.Namespace, sizes: Sequence[int]) -> list[Verdict]:
    references = {size: run_job([], size, options.steps) for size in sizes}
    for size, job in references.items():
        if job.exit != 0 or len(set(job.attempts[0].trained.values())) != 1:
            raise SystemExit(f"the training does not run undisturbed on {size} workers:\n{job.output}")
    verdicts: list[Verdict] = []
    chunks = list(range(0, options.kills, options.kills_a_job))
    with ThreadPoolExecutor(options.jobs) as threads:
        runs = {}
        for place, first in enumerate(chunks):
            size = sizes[place % len(sizes)]
            numbers = range(first, min(first + options.kills_a_job, options.kills))
            kills = [draw(options.seed, number, size) for number in numbers]
            runs[threads.submit(_until_all_struck, kills, size, options.steps, references[size])] = size
        for future in as_completed(runs):
            new = future.result()
            verdicts += new
            for verdict in new:
                if not verdict.held:
                    print(f"DID NOT HOLD on {runs[future]} workers: {verdict.kill}: {verdict.trouble}", flush=True)
            bad = sum(not verdict.held for verdict in verdicts)
            with _printing:
                print(
                    f"[{len(verdicts)}/{options.kills}] kills of {runs[future]} workers; {bad} did not hold", flush=True
                )
    return verdicts


def _until_all_struck(kills: list[Kill], world_size: int, steps: int, reference: Job) -> list[Verdict]:
    """Run jobs until each kill was delivered, because a training may end before the moment of a kill."""
    verdicts: list[Verdict] = []
    for _ in range(4):
        job = run_job(kills, world_size, steps)
        verdicts += judge(job, reference)
        kills = [kill for kill in kills if kill not in job.struck]
        if not kills or job.exit != 0:
            break
    lost = [Verdict(kill, False, False, False, f"its moment did not come: {job.output[-2000:]}") for kill in kills]
    return verdicts + lost


def _kills_table(verdicts: Sequence[Verdict]) -> Table:
    table = Table(title="SIGKILL of a worker under torchrun")
    table.add_column("moment")
    for column in ("kills", "training goes on", "same bits", "nothing left"):
        table.add_column(column, justify="right")
    for kind, words in [*KINDS.items(), ("all", "all")]:
        chosen = [verdict for verdict in verdicts if kind in ("all", verdict.kill.kind)]
        counts = [len(chosen), *(sum(getattr(v, name) for v in chosen) for name in ("goes_on", "same_bits", "clean"))]
        table.add_row(words, *map(str, counts), end_section=kind == list(KINDS)[-1])
    return table


def _torn_table(torn: Sequence[Torn]) -> Table:
    table = Table(title="Damaged checkpoints")
    table.add_column("damage")
    for column in ("files", "refused, same words", "nothing loaded", "previous intact and offered"):
        table.add_column(column, justify="right")
    for kind, words in [*DAMAGES.items(), ("all", "all")]:
        chosen = [one for one in torn if kind in ("all", one.kind)]
        counts = [
            len(chosen),
            *(sum(getattr(v, name) for v in chosen) for name in ("refused", "untouched", "previous")),
        ]
        table.add_row(words, *map(str, counts), end_section=kind == list(DAMAGES)[-1])
    return table


_printing = threading.Lock()

if __name__ == "__main__":
    sys.exit(main())
