"""The arguments of ``pdlcheck compare``, and its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, USAGE

__all__ = ["add_compare_command", "limit_of", "run_compare_command"]

DESCRIPTION = """\
Compare runs of benchmarks, machines or commits, with the first one:

  pdlcheck compare main.json branch.json             exit code 1 if a row became slower
  pdlcheck compare main.json branch.json --markdown  for a pull request
  pdlcheck compare epyc.json h100.json               two machines side by side

The files are those of `pdlcheck bench --json`, or of `pytest --benchmark-json`. A row that took
turns with another function in its run is judged by the ratio to it, any other by its time over
the shift that all rows have in common; with fewer than 8 rows, by its time alone.
"""

CODES = """\
exit code: 0 if no row of a later run is significantly slower, 1 if one is, 2 for wrong arguments.
"""


def add_compare_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "compare",
        help="compare runs of benchmarks, machines or commits",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("files", metavar="RUN", nargs="+", type=Path, help="JSON files, two or more")
    parser.add_argument(
        "--limit",
        metavar="RATIO",
        type=limit_of,
        default=1.1,
        help="how much more time makes a row slower; default: %(default)s",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON")


def run_compare_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from rich.console import Console

    from pdlcheck.comparison.pairs import compare
    from pdlcheck.comparison.runs import UnreadableRun, read_run
    from pdlcheck.comparison.tables import as_json, as_markdown, print_comparisons

    if len(arguments.files) < 2:
        print("pdlcheck compare: give two files or more, such as a.json b.json", file=sys.stderr)
        return USAGE
    try:
        base, *others = map(read_run, arguments.files)
    except UnreadableRun as error:
        print(f"pdlcheck compare: {error}", file=sys.stderr)
        return USAGE
    found = [compare(base, other, arguments.limit) for other in others]
    if arguments.json:
        print(as_json(found, arguments.limit))
    elif arguments.markdown:
        print(as_markdown(found, arguments.limit), end="")
    else:
        print_comparisons(Console(highlight=False), found, arguments.limit)
    apart = [one for one in found if not one.pairs]
    for one in apart:
        print(f"pdlcheck compare: {one.base.path} and {one.other.path} have no row in common", file=sys.stderr)
    return FAILED if apart or any(one.slower for one in found) else HELD


def limit_of(text: str) -> float:
    """Return the value of the argument of ``--limit``."""
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not 1 < limit < 1000:
        raise argparse.ArgumentTypeError(f"must be above 1, such as 1.1 for 10 % more time; got {text!r}")
    return limit
