"""Run the suites in every world and under torchrun, and print a row for each system that the project contains.

Usage: python ci/systems.py [--world sim,gloo,mpi] [--ranks 5] [--write]

A row shows the primitives, the tests that verify them, the number of passed tests in each world, and the saved
benchmarks. ``--write`` makes docs/systems.md from the rows. Exit code 1 if a test failed, or a system has no tests.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from systems_table.systems import SYSTEMS, System

from pdlcheck.report.measured import seconds_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "systems.md"
RESULTS = ROOT / "benchmarks" / "results"
Tests = dict[str, dict[str, Any]]  # node id -> world, verified primitives, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="sim,gloo,mpi", help="worlds of the suites; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=5, help="that torchrun starts; default: %(default)s")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    start = time.perf_counter()
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "suites").rglob("test_*.py"))
    suites = [str(file) for file in files if file.parts[1] != "meta"]
    others = sorted({test.partition("::")[0] for system in SYSTEMS for test in system.tests})
    pytest = ["-m", "pytest", "-q", "-m", "", "-p", "systems_table.outcomes", "-p", "no:cacheprovider"]
    here = _run([*pytest, "--world", options.world, *suites, *others], "here")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    launched = _run([*torchrun, *pytest, *suites], "under torchrun")
    for test in launched.values():
        test["world"] = "torchrun" if test["world"] else ""
    rows = [_row(system, here, launched) for system in SYSTEMS]
    head = ["", "system", "primitives", "verified by", "tests passed", "measured"]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(5)]
    for row in [head, *rows]:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    failed = sorted(node for tests in (here, launched) for node, test in tests.items() if test["outcome"] == "failed")
    print(f"\n{len(here) + len(launched)} tests, {len(failed)} failed, {time.perf_counter() - start:.0f} s")
    print("\n".join(failed))
    if options.write:
        PAGE.write_text(_page(head, rows))
    return 1 if failed or any(not row[4] for row in rows) else 0


def _run(arguments: list[str], where: str) -> Tests:
    """Return the outcome of each test of one session."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        print(f"the suites {where}", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, *arguments, "--outcomes", str(file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "ci")])},
            stdout=sys.stderr,
            check=False,  # the file lists the failures
        )
        found: Tests = json.loads(file.read_text())
        return found


def _row(system: System, here: Tests, launched: Tests) -> list[str]:
    files, passed = [], Counter[str]()
    for tests in (here, launched):
        for node, test in tests.items():
            if set(test["verifies"]) & set(system.primitives) or node.startswith(system.tests or ("-",)):
                if test["outcome"] == "passed":
                    passed[test["world"] or "in no world"] += 1
                files.append(node.partition("::")[0])
    worlds = ", ".join(f"{world} {count}" for world, count in sorted(passed.items()))
    return [
        system.number,
        system.title,
        ", ".join(system.primitives),
        ", ".join(dict.fromkeys(files)),
        worlds,
        "; ".join(_measured(system.benchmarks)),
    ]


def _measured(names: Iterable[str]) -> list[str]:
    return [row for name in names for bench, row in _saved_rows().items() if bench.startswith(name)]


@functools.cache
def _saved_rows() -> dict[str, str]:
    """Return the comparison that each benchmark saved last, by the name of the benchmark."""
    runs = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    saved = sorted((run for run in runs if "benchmarks" in run), key=lambda run: run["datetime"])
    found = {}
    for run in saved:
        for bench in run["benchmarks"]:
            name, facts = bench["name"], bench["extra_info"]
            if "row" in facts:
                found[name] = facts["row"]
            elif "over" in facts:
                ratios = ", ".join(f"{ratio:.2f} times {way}" for way, (ratio, *_) in facts["over"].items())
                found[name] = f"{name.removeprefix('test_')} {seconds_text(facts['median_s'])}: {ratios}"
    return found


def _page(head: list[str], rows: list[list[str]]) -> str:
    lines = ["# The systems, and what shows that they work", "", "Written by `python ci/systems.py --write`.", ""]
    lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for *cells, measured in rows:
        cells.append("<br>".join(" ".join(line.split()) for line in measured.split("; ")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
