"""Measure the cost of the plugin in a session that does not use it: trivial tests with the plugin and without, in turn.

    python benchmarks/comparisons/guest_overhead.py
    python benchmarks/comparisons/guest_overhead.py --tests 1000 --rounds 15

Prints processor seconds of whole pytest processes (user and system), because other load disturbs them less than wall
time: the median and the range of both sides, and the median of the ratios, round by round.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly")
SIDES = {"without": ("-p", "no:pdlcheck"), "with": ()}
# with the variable, Python would compile every import again and pytest would rewrite it again, on both sides
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_seconds(folder: Path, *options: str) -> float:
    """Return the processor seconds of one session."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *options],
        cwd=folder,
        env=ENVIRONMENT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=1000, help="trivial tests in the session; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = "".join(f"def test_{number}(): pass\n" for number in range(arguments.tests))
        (folder / "test_trivial.py").write_text(tests)
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(arguments.rounds + 1):  # the first round warms up
            for side in sorted(SIDES, reverse=number % 2 == 0):
                seconds = cpu_seconds(folder, *SIDES[side])
                if number:
                    times[side].append(seconds)
    for side, found in times.items():
        print(f"{side:8} {statistics.median(found):.3f} s  ({min(found):.3f} to {max(found):.3f})")
    ratios = [ours / theirs for ours, theirs in zip(times["with"], times["without"], strict=True)]
    print(f"ratio    {statistics.median(ratios):.3f}    ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"{arguments.tests} tests, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
