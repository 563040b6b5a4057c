"""Run every feature of torch.distributed on simulated ranks under every semantics, against a single process.

    python ci/matrix.py [-k WORD] [--write]

Prints a row for each feature, with a column for each semantics. ``--write`` makes ``docs/coverage.md`` from them. Fails
if a cell fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's messages about the CPU are irrelevant here

from suites.meta import coverage  # noqa: E402  # needs the path above
from suites.meta.coverage.page import Row, counts, page, tables  # noqa: E402

PAGE = ROOT / "docs" / "coverage.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", metavar="WORD", help="features whose name or area contains WORD")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.write and options.k:
        parser.error("the page is written of all features: leave -k out")
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    chosen = {
        area: [each for each in features if options.k.lower() in f"{area} {each.name}".lower()]
        for area, features in coverage.AREAS.items()
    }
    if not any(chosen.values()):
        parser.error(f"no feature has {options.k!r} in its name or area")
    rows = {area: [measure_row(each) for each in features] for area, features in chosen.items() if features}
    for line in tables(rows):
        print(line)
    for line in counts(rows):
        print(line)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.write:
        PAGE.write_text(page(rows))
    return 1 if any(row.failed for of_area in rows.values() for row in of_area) else 0


def measure_row(feature: coverage.Feature) -> Row:
    print(f"{feature.name} ...", file=sys.stderr, flush=True)
    cells = [coverage.measure(feature, column) for column in coverage.SEMANTICS]
    return Row(feature.name, cells, coarse=feature.rtol is not None)


if __name__ == "__main__":
    sys.exit(main())
