"""The arguments of ``pdlcheck report``, and its exit code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from pdlcheck.comparison.command import limit_of
from pdlcheck.exit_codes import HELD, USAGE

__all__ = ["add_report_command", "run_report_command"]

DESCRIPTION = """\
Make a report of runs and verifications: a sentence for each experiment, plots with the lines of
models, all rows, the hardware, and every failure of `pdlcheck verify`:

  pdlcheck report run.json                         report.html, one page that needs no network
  pdlcheck report epyc.json h100.json verify.json  the second run compared with the first one
  pdlcheck report run.json --output report.md      the same as Markdown
  pdlcheck report run.json --output -              the same in the terminal

The files are those of `pdlcheck bench --json`, of `pytest --benchmark-json`, and of
`pdlcheck verify --json`.
"""

CODES = """\
exit code: 0 if the report was made, 2 for wrong arguments. What failed is in the report; the
exit codes of `pdlcheck bench`, `compare` and `verify` tell it to a script.
"""


def add_report_command(commands: Any, formatter: type[argparse.HelpFormatter]) -> None:
    """Add the parser to ``commands``, the result of ``add_subparsers``."""
    parser = commands.add_parser(
        "report",
        help="make a page of runs and verifications",
        description=DESCRIPTION,
        epilog=CODES,
        formatter_class=formatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="JSON files of runs and verifications")
    parser.add_argument(
        "--output",
        metavar="FILE",
        default="report.html",
        help="a file that ends in .html or .md, or - for the terminal; default: %(default)s",
    )
    parser.add_argument(
        "--limit",
        metavar="RATIO",
        type=limit_of,
        default=1.1,
        help="how much more time makes a row slower than in the first run; default: %(default)s",
    )


def run_report_command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from rich.console import Console

    from pdlcheck.comparison.runs import UnreadableRun
    from pdlcheck.presentation.build import build
    from pdlcheck.presentation.html import as_html
    from pdlcheck.presentation.text import as_markdown, print_document
    from pdlcheck.report.files import why_not_writable

    output = None if arguments.output == "-" else Path(arguments.output)
    forms = {".html": as_html, ".md": as_markdown}
    if output is not None and output.suffix not in forms:
        return _refuse(f"--output must end in .html or .md, or be -; got {arguments.output!r}")
    if output is not None and (why := why_not_writable(output)):
        return _refuse(f"--output {output} cannot be written: {why}")
    try:
        runs, verifications = _read(arguments.files)
        document = build(runs, verifications, arguments.limit)
        if output is None:
            print_document(Console(highlight=False), document)
        else:
            output.write_text(forms[output.suffix](document), encoding="utf-8")
            print(output)
    except UnreadableRun as error:
        return _refuse(str(error))
    return HELD


def _read(paths: list[Path]) -> tuple[list[Any], list[Any]]:
    from pdlcheck.comparison.runs import UnreadableRun, read_json, run_of
    from pdlcheck.verification.saved import is_verification, read_verification

    runs, verifications = [], []
    for path in paths:
        found = read_json(path)
        if not is_verification(found):
            runs.append(run_of(path, found))
            continue
        try:
            verifications.append(read_verification(found))
        except (AttributeError, KeyError, TypeError) as error:
            raise UnreadableRun(
                f"{path} is of another version of pdlcheck ({type(error).__name__}: {error}); "
                "write it again with `pdlcheck verify --json FILE`"
            ) from None
    return runs, verifications


def _refuse(why: str) -> int:
    print(f"pdlcheck report: {why}", file=sys.stderr)
    return USAGE
