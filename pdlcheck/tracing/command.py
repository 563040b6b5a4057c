"""The arguments of ``pdlcheck compare-traces``, and its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pdlcheck.exit_codes import FAILED, HELD, USAGE

__all__ = ["add_compare_traces_command", "run_compare_traces_command"]

DESCRIPTION = """\
Compare the trace of a parallel run with that of a trusted one, and print the first module and
direction in which they part by more than rounding explains:

  pdlcheck compare-traces trusted parallel
  pdlcheck compare-traces trusted parallel --perturbed noisy   thresholds from a perturbed run

The directories are those that `with pdlcheck.trace(model, optimizer, DIRECTORY):` wrote.
"""

CODES = """\
exit code: 0 if the traces agree, 1 if they part, 2 for wrong arguments and traces that cannot
be compared.
"""


def add_compare_traces_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "compare-traces",
        help="find the first module in which a parallel run parts from a trusted one",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("trusted", metavar="TRUSTED", type=Path, help="directory of the trace of a run that is right")
    parser.add_argument("parallel", metavar="PARALLEL", type=Path, help="directory of the trace of the parallel run")
    parser.add_argument(
        "--perturbed",
        metavar="DIRECTORY",
        type=Path,
        action="append",
        default=[],
        help="trace of the trusted run with perturb=; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_compare_traces_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from pdlcheck.tracing.comparison import compare_traces
    from pdlcheck.tracing.errors import TraceError
    from pdlcheck.tracing.report import as_json, as_text

    try:
        found = compare_traces(arguments.trusted, arguments.parallel, perturbed=arguments.perturbed)
    except TraceError as error:
        print(f"pdlcheck compare-traces: {error}", file=sys.stderr)
        return USAGE
    print(as_json(found) if arguments.json else as_text(found))
    return HELD if found.first is None else FAILED
