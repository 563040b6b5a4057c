"""Measure an example on simulated ranks, beside torch's group of threads and gloo processes that run already.

Usage: python benchmarks/comparisons/simulated_peers.py [--rounds N] [--json]

Prints milliseconds for each example, with the world set up and taken down in each. (gloo keeps its processes, and
simulated its threads, see pdlcheck/worlds/simulated/rank_pool.py.) "alone" is the program once for each
rank, in groups of one: torch's own work. "own_globals" has a module with sixty groups, and each rank has its own.

Every side has its own process; in each round all of them take turns, so a busy moment affects each of them. A figure is
the median over rounds of the median of a round, with its spread over rounds beside it. The exit code is 1 if a target
is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from peers.machine import this_machine
from peers.table import Figure

HERE = Path(__file__).resolve().parent
CASES = {  # program, world size -> sides, examples a round
    ("all_reduce", 2): (("simulated", "threaded", "gloo"), 60),
    ("all_reduce", 4): (("simulated", "threaded", "gloo"), 60),
    ("all_reduce", 8): (("simulated", "threaded"), 30),
    ("all_reduce", 64): (("simulated", "threaded"), 10),
    ("all_reduce", 256): (("simulated",), 3),
    ("async_all_reduces", 4): (("simulated", "unwatched"), 20),
    ("ddp", 2): (("simulated", "threaded", "gloo", "alone"), 20),
    ("ddp", 4): (("simulated", "own_globals", "threaded", "gloo", "alone"), 20),
    ("ddp", 8): (("simulated", "threaded", "alone"), 10),
}
Case = tuple[str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=HERE.parent / "results" / "simulated-peers.json",
        help="save all rounds; default file: %(const)s",
    )
    options = parser.parse_args()
    rounds: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    loads = []
    for number in range(options.rounds):
        loads.append(os.getloadavg()[0])
        print(f"round {number + 1} of {options.rounds}; load of the machine {loads[-1]:.1f}", file=sys.stderr)
        for (program, size), (sides, examples) in CASES.items():
            for side in sides:
                rounds[program, size][side].append(_measure(side, program, size, examples))
    _print_table(rounds)
    held = _print_targets(rounds)
    told = ", ".join(f"{load:.1f}" for load in loads)
    print(f"\n{options.rounds} rounds on {os.cpu_count()} cores; load before each: {told}")
    if options.json:
        cases = [{"program": program, "world_size": size, "ms": sides} for (program, size), sides in rounds.items()]
        record = {"machine": this_machine(), "load_before_rounds": loads, "cases": cases}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved in {options.json}")
    return 0 if held else 1


def _measure(side: str, program: str, size: int, examples: int) -> float:
    """Return the median of one process's examples."""
    done = subprocess.run(
        [sys.executable, "-m", "peers.examples", side, program, str(size), str(examples)],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    )
    return median(map(float, done.stdout.split()))


def _print_table(rounds: dict[Case, dict[str, list[float]]]) -> None:
    print(f"{'ms an example':24}{'ranks':>6}  side and median (spread over rounds), ratio to simulated")
    for (program, size), sides in rounds.items():
        ours = Figure(sides["simulated"])
        told = [f"simulated {ours}"]
        others = {side: ms for side, ms in sides.items() if side != "simulated"}
        told += [f"{side} {Figure(ms)}, {_ratio(ms, sides['simulated']):.1f}x" for side, ms in others.items()]
        print(f"{program:24}{size:>6}  {'; '.join(told)}")


def _print_targets(rounds: dict[Case, dict[str, list[float]]]) -> bool:
    """Print each target beside its measured value; return whether all are met."""
    four, ddp, many = rounds["all_reduce", 4], rounds["ddp", 4], rounds["all_reduce", 64]
    watch = rounds["async_all_reduces", 4]
    targets = [
        ("all_reduce, 4 ranks, ms", "<=", 1.0, median(four["simulated"])),
        ("threaded / simulated, the same", ">=", 2.0, _ratio(four["threaded"], four["simulated"])),
        ("DDP, 3 steps, 4 ranks, ms", "<=", 13.0, median(ddp["simulated"])),
        ("gloo / simulated, the same", ">=", 3.0, _ratio(ddp["gloo"], ddp["simulated"])),
        ("all_reduce, 64 ranks, ms", "<=", 14.0, median(many["simulated"])),
        ("watched / unwatched, async all_reduces", "<=", 2.5, _ratio(watch["simulated"], watch["unwatched"])),
    ]
    print(f"\n{'target':44}{'measured':>10}  verdict")
    verdicts = []
    for text, sign, wanted, measured in targets:
        verdicts.append(measured <= wanted if sign == "<=" else measured >= wanted)
        print(f"{f'{text} {sign} {wanted:g}':44}{measured:>10.2f}  {'held' if verdicts[-1] else 'NOT HELD'}")
    return all(verdicts)


def _ratio(one: list[float], other: list[float]) -> float:
    """Return the median of the rounds' ratios, because both sides of one round had the same machine."""
    return median(a / b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
